// Sixteen lanes on AVX-512 with VNNI. See simd_plain.h for what each function does.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd_x86.h"

namespace KERNEL_VARIANT {

using F = __m512;
using I = __m512i;
using U = __m512i;

constexpr int kTileHalves = 2;
constexpr int64_t kFewestOfTile = 5;
constexpr int kRowTokens = 4;

static inline F zero() { return _mm512_setzero_ps(); }
static inline F set1(float x) { return _mm512_set1_ps(x); }
static inline F load(const float* p) { return _mm512_loadu_ps(p); }
static inline __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
static inline F load_part(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
static inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
static inline void store_part(float* p, F x, int64_t n) { _mm512_mask_storeu_ps(p, first(n), x); }
static inline F add(F a, F b) { return _mm512_add_ps(a, b); }
static inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
static inline F div(F a, F b) { return _mm512_div_ps(a, b); }
static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
static inline F max(F a, F b) { return _mm512_max_ps(a, b); }
static inline F min(F a, F b) { return _mm512_min_ps(a, b); }
static inline F abs(F a) { return _mm512_abs_ps(a); }
static inline I to_int(F x) { return _mm512_cvtps_epi32(x); }
static inline F to_float(I x) { return _mm512_cvtepi32_ps(x); }
static inline F nearest(F x) { return _mm512_roundscale_ps(x, 0); }

static inline F power_of_two(F n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}

static inline F one_quarter(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }
static inline F two_quarters(const float* p) {
  const F x = _mm512_castps256_ps512(_mm256_loadu_ps(p));
  return _mm512_shuffle_f32x4(x, x, 0x50);
}

// Lanes i and i + 8 first, then i + 4, i + 2, i + 1.
static inline __m128 quarter(F x) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
static inline float sum(F x) { return sum_of_lanes(quarter(x)); }
static inline void add_quarters(F x, float* out) { _mm_storeu_ps(out, quarter(x)); }
static inline F sums_of_quarters(const F (&x)[4]) {
  const F ab = add(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));  // a02 b02 a13 b13
  const F cd = add(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  return add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
}
static inline I sums_of_quarters(const I (&x)[4]) {
  const I ab = _mm512_add_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
  const I cd = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}
static inline float max_lane(F x) { return _mm512_reduce_max_ps(x); }

static inline U load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline U load_bytes_part(const uint8_t* p, int64_t n) {
  return _mm512_maskz_loadu_epi8(n >= 64 ? ~0ull : (1ull << n) - 1, p);
}
static inline U load_quarters(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) {
  const __m512i ab = _mm512_inserti32x4(_mm512_castsi128_si512(load_16(a)), load_16(b), 1);
  return _mm512_inserti32x4(_mm512_inserti32x4(ab, load_16(c), 2), load_16(d), 3);
}
static inline void store_bytes(uint8_t* p, U x) { _mm512_storeu_si512(p, x); }
static inline U low_nibbles(U x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
static inline U high_nibbles(U x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
static inline void transpose4(const U* x, U* out) {
  const U ab = _mm512_unpacklo_epi32(x[0], x[1]), cd = _mm512_unpacklo_epi32(x[2], x[3]);
  const U ab_high = _mm512_unpackhi_epi32(x[0], x[1]), cd_high = _mm512_unpackhi_epi32(x[2], x[3]);
  out[0] = _mm512_unpacklo_epi64(ab, cd), out[1] = _mm512_unpackhi_epi64(ab, cd);
  out[2] = _mm512_unpacklo_epi64(ab_high, cd_high), out[3] = _mm512_unpackhi_epi64(ab_high, cd_high);
}
static inline I load_ints(const int32_t* p) { return _mm512_loadu_si512(p); }
static inline I dot_nibbles(I start, U w, const int8_t* x) {
  start = _mm512_dpbusd_epi32(start, low_nibbles(w), _mm512_loadu_si512(x));
  return _mm512_dpbusd_epi32(start, high_nibbles(w), _mm512_loadu_si512(x + 64));
}
static inline I dot_bytes(I start, U w, const int8_t* x) { return _mm512_dpbusd_epi32(start, w, _mm512_loadu_si512(x)); }

template <int>
static inline I begin_dot(int32_t middle) {
  return _mm512_set1_epi32(middle);
}
template <int>
static inline I add_four(I so_far, U w, const int8_t* x) {
  return _mm512_dpbusd_epi32(so_far, w, _mm512_set1_epi32(four_bytes(x)));
}
template <int>
static inline I end_dot(I so_far, int32_t) {
  return so_far;
}

static inline void store_int8(int8_t* p, I x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x));
}
static inline F load_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
static inline F load_int8_part(const int8_t* p, int64_t n) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first(n), p)));
}
static inline void store_half(uint16_t* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, 0));
}
static inline F load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline F load_half_columns(const uint16_t* p, int64_t row) { return _mm512_cvtph_ps(half_columns(p, row)); }
static inline F load_half_part(const uint16_t* p, int64_t n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
}
static inline F bytes_to_float(__m128i x) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(x)); }
static inline F load_uint8(const uint8_t* p) { return bytes_to_float(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
static inline F load_nibbles(const uint8_t* p) {
  const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), mask = _mm_set1_epi8(15);
  return bytes_to_float(_mm_unpacklo_epi8(_mm_and_si128(x, mask), _mm_and_si128(_mm_srli_epi16(x, 4), mask)));
}

}  // namespace KERNEL_VARIANT
