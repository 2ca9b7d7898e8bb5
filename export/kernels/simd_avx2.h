// Sixteen lanes as two registers of AVX2, with or without AVX-VNNI. See simd_plain.h for what each function does.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <initializer_list>

#include "kernels.h"
#include "simd_x86.h"

namespace KERNEL_VARIANT {

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
using U = I;

constexpr int kTileHalves = 1;
constexpr int64_t kFewestOfTile = 5;
#if KERNEL_AVX_VNNI
constexpr int kRowTokens = 2;
#else
constexpr int kRowTokens = 4;
#endif

static inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline __m256i first(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline F load_part(const float* p, int64_t n) {
  return {_mm256_maskload_ps(p, first(n)), _mm256_maskload_ps(p + 8, first(n - 8))};
}
static inline void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline void store_part(float* p, F x, int64_t n) {
  _mm256_maskstore_ps(p, first(n), x.a);
  _mm256_maskstore_ps(p + 8, first(n - 8), x.b);
}
static inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline F abs(F x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
static inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
static inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline F nearest(F x) { return {_mm256_round_ps(x.a, 0), _mm256_round_ps(x.b, 0)}; }

static inline __m256 power_of_two_8(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline F power_of_two(F n) { return {power_of_two_8(n.a), power_of_two_8(n.b)}; }

static inline __m256 twice(const float* p) { return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)); }
static inline F one_quarter(const float* p) { return {twice(p), twice(p)}; }
static inline F two_quarters(const float* p) { return {twice(p), twice(p + 4)}; }

static inline __m256 max_in_8(__m256 x) {
  x = _mm256_max_ps(x, _mm256_shuffle_ps(x, x, 0xB1));
  x = _mm256_max_ps(x, _mm256_shuffle_ps(x, x, 0x4E));
  return _mm256_max_ps(x, _mm256_permute2f128_ps(x, x, 1));
}

static inline __m128 quarter(F x) {
  const __m256 half = _mm256_add_ps(x.a, x.b);
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
static inline float sum(F x) { return sum_of_lanes(quarter(x)); }
static inline void add_quarters(F x, float* out) { _mm_storeu_ps(out, quarter(x)); }
static inline __m256 sums_of_two(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));  // a02 b02 a13 b13
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  return _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
}
static inline F sums_of_quarters(const F (&x)[4]) {
  return {sums_of_two(x[0].a, x[1].a, x[2].a, x[3].a), sums_of_two(x[0].b, x[1].b, x[2].b, x[3].b)};
}
#if KERNEL_AVX_VNNI
static inline __m256i sums_of_two(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  const __m256i cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
  return _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
}
static inline I sums_of_quarters(const I (&x)[4]) {
  return {sums_of_two(x[0].a, x[1].a, x[2].a, x[3].a), sums_of_two(x[0].b, x[1].b, x[2].b, x[3].b)};
}
#endif
static inline float max_lane(F x) {
  const __m256 eight = max_in_8(_mm256_max_ps(x.a, x.b));
  return _mm256_cvtss_f32(eight);
}

static inline U load_bytes(const uint8_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
static inline U load_bytes_part(const uint8_t* p, int64_t n) {
  alignas(32) uint8_t copy[64] = {};
  for (int64_t i = 0; i < n; ++i) copy[i] = p[i];
  return load_bytes(copy);
}
static inline __m256i load_two(const uint8_t* a, const uint8_t* b) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load_16(a)), load_16(b), 1);
}
static inline U load_quarters(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) {
  return {load_two(a, b), load_two(c, d)};
}
static inline void store_bytes(uint8_t* p, U x) {
  __m256i* q = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a), _mm256_storeu_si256(q + 1, x.b);
}
static inline __m256i low_nibbles(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
static inline __m256i high_nibbles(__m256i x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
static inline U low_nibbles(U x) { return {low_nibbles(x.a), low_nibbles(x.b)}; }
static inline U high_nibbles(U x) { return {high_nibbles(x.a), high_nibbles(x.b)}; }
static inline void transpose4(const U* x, U* out) {
  for (__m256i U::*half : {&U::a, &U::b}) {
    const __m256i ab = _mm256_unpacklo_epi32(x[0].*half, x[1].*half), cd = _mm256_unpacklo_epi32(x[2].*half, x[3].*half);
    const __m256i ab_high = _mm256_unpackhi_epi32(x[0].*half, x[1].*half), cd_high = _mm256_unpackhi_epi32(x[2].*half, x[3].*half);
    out[0].*half = _mm256_unpacklo_epi64(ab, cd), out[1].*half = _mm256_unpackhi_epi64(ab, cd);
    out[2].*half = _mm256_unpacklo_epi64(ab_high, cd_high), out[3].*half = _mm256_unpackhi_epi64(ab_high, cd_high);
  }
}
static inline I load_ints(const int32_t* p) { return load_bytes(reinterpret_cast<const uint8_t*>(p)); }

static inline __m256i load_32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
static inline __m256i load_32(const int8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

#if KERNEL_AVX_VNNI
static inline __m256i add_products(__m256i start, __m256i w, __m256i x) { return _mm256_dpbusd_avx_epi32(start, w, x); }
static inline __m256i dot_nibbles_8(__m256i start, __m256i w, const int8_t* x) {
  return add_products(add_products(start, low_nibbles(w), load_32(x)), high_nibbles(w), load_32(x + 64));
}
static inline I dot_nibbles(I start, U w, const int8_t* x) {
  return {dot_nibbles_8(start.a, w.a, x), dot_nibbles_8(start.b, w.b, x + 32)};
}
static inline I dot_bytes(I start, U w, const int8_t* x) {
  return {add_products(start.a, w.a, load_32(x)), add_products(start.b, w.b, load_32(x + 32))};
}
#else
// Sums of two products of numbers from -128 to 127, given one's sizes and signs, so that they fit 16 bits: 2 * 128 * 127.
static inline __m256i pairs_signed(__m256i size, __m256i sign, __m256i x) {
  return _mm256_maddubs_epi16(size, _mm256_sign_epi8(x, sign));
}
static inline __m256i less_128(__m256i w) { return _mm256_xor_si256(w, _mm256_set1_epi8(-128)); }
static inline __m256i add_pairs(__m256i x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }
static inline __m256i dot_signed(__m256i w, __m256i x) {
  return add_pairs(pairs_signed(_mm256_abs_epi8(less_128(w)), less_128(w), x));
}
#endif

#if KERNEL_AVX_VNNI
template <int>
static inline I begin_dot(int32_t middle) {
  return {_mm256_set1_epi32(middle), _mm256_set1_epi32(middle)};
}
template <int>
static inline I add_four(I so_far, U w, const int8_t* x) {
  const __m256i y = _mm256_set1_epi32(four_bytes(x));
  return {add_products(so_far.a, w.a, y), add_products(so_far.b, w.b, y)};
}
template <int>
static inline I end_dot(I so_far, int32_t) {
  return so_far;
}
#else
template <int>
static inline I begin_dot(int32_t) {
  return {_mm256_setzero_si256(), _mm256_setzero_si256()};
}
template <int BITS>
static inline __m256i add_four_8(__m256i so_far, __m256i w, __m256i x) {
  // At 4 bits sums of sixteen products fit 16 bits: 16 * 15 * 127.
  so_far = BITS == 4 ? _mm256_add_epi16(so_far, _mm256_maddubs_epi16(w, x)) : _mm256_add_epi32(so_far, dot_signed(w, x));
  asm("" : "+x"(so_far));  // otherwise GCC adds in another order, for which there are not enough registers
  return so_far;
}
template <int BITS>
static inline I add_four(I so_far, U w, const int8_t* x) {
  const __m256i y = _mm256_set1_epi32(four_bytes(x));
  return {add_four_8<BITS>(so_far.a, w.a, y), add_four_8<BITS>(so_far.b, w.b, y)};
}
template <int BITS>
static inline I end_dot(I so_far, int32_t middle) {
  if (BITS == 8) return so_far;
  const __m256i start = _mm256_set1_epi32(middle);
  return {_mm256_add_epi32(start, add_pairs(so_far.a)), _mm256_add_epi32(start, add_pairs(so_far.b))};
}

#define KERNEL_OWN_DOT_ROWS 1  // instead of those of kernel_functions.h
template <int BITS>
static inline __m256i add_dots(__m256i x, __m256i y) {
  return BITS == 4 ? _mm256_add_epi16(x, y) : _mm256_add_epi32(x, y);
}
// A half of four rows' chunk, unpacked for all tokens. At 4 bits all sums of a quarter's products fit 16 bits,
// 16 * 15 * 127, and the zero correction follows; at 8 bits the products contain it.
template <int BITS, int TOKENS>
static inline void dot_rows_8(const __m256i (&w)[4], const sportsllm::Rounded& x, int64_t at, int half, __m256i (&sums)[TOKENS]) {
  __m256i p[4], q[4];
  for (int r = 0; r < 4; ++r) {
    p[r] = BITS == 4 ? low_nibbles(w[r]) : _mm256_abs_epi8(less_128(w[r]));
    q[r] = BITS == 4 ? high_nibbles(w[r]) : less_128(w[r]);
  }
  for (int i = 0; i < TOKENS; ++i) {
    const int64_t chunk = at + i * x.chunks;
    const int8_t* numbers = x.numbers + chunk * 4 * sportsllm::part_columns(BITS) + half * 32;
    __m256i dot[4];
    for (int r = 0; r < 4; ++r) {
      dot[r] = BITS == 4 ? _mm256_add_epi16(_mm256_maddubs_epi16(p[r], load_32(numbers)),
                                            _mm256_maddubs_epi16(q[r], load_32(numbers + 64)))
                         : add_pairs(pairs_signed(p[r], q[r], load_32(numbers)));
    }
    const __m256i ab = add_dots<BITS>(_mm256_unpacklo_epi32(dot[0], dot[1]), _mm256_unpackhi_epi32(dot[0], dot[1]));
    const __m256i cd = add_dots<BITS>(_mm256_unpacklo_epi32(dot[2], dot[3]), _mm256_unpackhi_epi32(dot[2], dot[3]));
    sums[i] = add_dots<BITS>(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
    if (BITS == 8) continue;
    const __m256i correction = load_32(reinterpret_cast<const uint8_t*>(x.zero_correction + chunk * 16 + half * 8));
    sums[i] = _mm256_add_epi32(add_pairs(sums[i]), _mm256_shuffle_epi32(correction, 0));
  }
}
// See kernel_functions.h.
template <int BITS, int TOKENS>
static inline void dot_rows(const U (&w)[4], const sportsllm::Rounded& x, int64_t at, I (&sums)[TOKENS]) {
  __m256i a[TOKENS], b[TOKENS];
  dot_rows_8<BITS, TOKENS>({w[0].a, w[1].a, w[2].a, w[3].a}, x, at, 0, a);
  dot_rows_8<BITS, TOKENS>({w[0].b, w[1].b, w[2].b, w[3].b}, x, at, 1, b);
  for (int i = 0; i < TOKENS; ++i) sums[i] = {a[i], b[i]};
}
#endif

static inline void store_int8(int8_t* p, I x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(words, words), 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(bytes));
}
static inline F int8_to_float(__m128i x) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
static inline F load_int8(const int8_t* p) { return int8_to_float(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
static inline F load_int8_part(const int8_t* p, int64_t n) {
  alignas(16) int8_t copy[16] = {};
  for (int64_t i = 0; i < n; ++i) copy[i] = p[i];
  return load_int8(copy);
}
static inline void store_half(uint16_t* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, 0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, 0));
}
static inline F load_half(const uint16_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
static inline F load_half_columns(const uint16_t* p, int64_t row) {
  const __m256i x = half_columns(p, row);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
static inline F load_half_part(const uint16_t* p, int64_t n) {
  alignas(16) uint16_t copy[16] = {};
  for (int64_t i = 0; i < n; ++i) copy[i] = p[i];
  return load_half(copy);
}
static inline F bytes_to_float(__m128i x) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
static inline F load_uint8(const uint8_t* p) { return bytes_to_float(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
static inline F load_nibbles(const uint8_t* p) {
  const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), mask = _mm_set1_epi8(15);
  return bytes_to_float(_mm_unpacklo_epi8(_mm_and_si128(x, mask), _mm_and_si128(_mm_srli_epi16(x, 4), mask)));
}

}  // namespace KERNEL_VARIANT
