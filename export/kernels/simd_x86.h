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

// What is left of `sum` when lanes i, i + 4, i + 8 and i + 12 have become one.
static inline float sum_of_lanes(__m128 x) {
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}

// The first of four float16 numbers in each row, then the second, and so on: two columns in each half.
static inline __m256i half_columns(const uint16_t* p, int64_t row) {
  const auto four = [=](int r) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + r * row)); };
  const __m128i ab = _mm_unpacklo_epi16(four(0), four(1)), cd = _mm_unpacklo_epi16(four(2), four(3));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi32(ab, cd)), _mm_unpackhi_epi32(ab, cd), 1);
}

}  // namespace KERNEL_VARIANT
