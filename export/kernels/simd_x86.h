// What AVX2 and AVX-512 share. See simd_plain.h for what each function does.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace KERNEL_VARIANT {

static inline int32_t four_bytes(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return four;
}

static inline __m128i load_16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

static inline void split_bytes(const int8_t* p, int8_t* even, int8_t* odd) {
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  const __m128i x = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), order);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(even), x);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(odd), _mm_unpackhi_epi64(x, x));
}

// What is left of `sum` and `sum4` when lanes i, i + 4, i + 8 and i + 12 have become one.
static inline float sum_of_lanes(__m128 x) {
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
static inline void sums_of_lanes(__m128 a, __m128 b, __m128 c, __m128 d, float* out) {
  const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));  // a02 b02 a13 b13
  const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
  _mm_storeu_ps(out, _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
}

// Four bytes of each of four rows next to each other, four times.
static inline void store_across(__m128i a, __m128i b, __m128i c, __m128i d, uint8_t* to) {
  const __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
  const __m128i ab_high = _mm_unpackhi_epi32(a, b), cd_high = _mm_unpackhi_epi32(c, d);
  const __m128i out[4] = {_mm_unpacklo_epi64(ab, cd), _mm_unpackhi_epi64(ab, cd), _mm_unpacklo_epi64(ab_high, cd_high),
                          _mm_unpackhi_epi64(ab_high, cd_high)};
  for (int j = 0; j < 4; ++j) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 64 * j), out[j]);
}

template <int BITS>
static inline void tile_rows(const uint8_t* const* rows, uint8_t* tile, int64_t first) {
  uint8_t* to = tile + 4 * first;
  const __m128i mask = _mm_set1_epi8(15);
  __m128i x[4];
  for (int r = 0; r < 4; ++r) x[r] = load_16(rows[r]);
  if (BITS == 8) {
    store_across(x[0], x[1], x[2], x[3], to);
    return;
  }
  __m128i low[4], high[4];
  for (int r = 0; r < 4; ++r) low[r] = _mm_and_si128(x[r], mask), high[r] = _mm_and_si128(_mm_srli_epi16(x[r], 4), mask);
  store_across(low[0], low[1], low[2], low[3], to);
  store_across(high[0], high[1], high[2], high[3], to + 256);
}

}  // namespace KERNEL_VARIANT
