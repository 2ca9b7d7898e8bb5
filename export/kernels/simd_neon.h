// Sixteen lanes as four registers of NEON, with or without dot products. See simd_plain.h for what each function does.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace KERNEL_VARIANT {

struct F {
  float32x4_t v[4];
};
struct I {
  int32x4_t v[4];
};
struct U {
  uint8x16_t v[4];
};

constexpr int kTileHalves = 1;
constexpr int64_t kFewestOfTile = 8;
constexpr int kRowTokens = 2;

template <typename Function>
static inline F each(Function function) {
  return {{function(0), function(1), function(2), function(3)}};
}

static inline F set1(float x) { return each([=](int) { return vdupq_n_f32(x); }); }
static inline F zero() { return set1(0); }
static inline F load(const float* p) { return each([=](int i) { return vld1q_f32(p + 4 * i); }); }
static inline F load_part(const float* p, int64_t n) {
  float copy[16] = {};
  for (int64_t i = 0; i < n; ++i) copy[i] = p[i];
  return load(copy);
}
static inline void store(float* p, F x) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]);
}
static inline void store_part(float* p, F x, int64_t n) {
  float copy[16];
  store(copy, x);
  for (int64_t i = 0; i < n; ++i) p[i] = copy[i];
}
static inline F add(F a, F b) { return each([&](int i) { return vaddq_f32(a.v[i], b.v[i]); }); }
static inline F sub(F a, F b) { return each([&](int i) { return vsubq_f32(a.v[i], b.v[i]); }); }
static inline F mul(F a, F b) { return each([&](int i) { return vmulq_f32(a.v[i], b.v[i]); }); }
static inline F div(F a, F b) { return each([&](int i) { return vdivq_f32(a.v[i], b.v[i]); }); }
static inline F fma(F a, F b, F c) { return each([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); }); }
// The second where one is not a number, as on other processors; NEON's own give neither.
static inline float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline F max(F a, F b) { return each([&](int i) { return larger(a.v[i], b.v[i]); }); }
static inline F min(F a, F b) { return each([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); }); }
static inline F abs(F a) { return each([&](int i) { return vabsq_f32(a.v[i]); }); }
static inline F nearest(F x) { return each([&](int i) { return vrndnq_f32(x.v[i]); }); }

static inline I to_int(F x) {
  return {{vcvtnq_s32_f32(x.v[0]), vcvtnq_s32_f32(x.v[1]), vcvtnq_s32_f32(x.v[2]), vcvtnq_s32_f32(x.v[3])}};
}
static inline F to_float(I x) { return each([&](int i) { return vcvtq_f32_s32(x.v[i]); }); }
static inline F power_of_two(F n) {
  const int32x4_t bias = vdupq_n_s32(127);
  return each([&](int i) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v[i]), bias), 23)); });
}

static inline F one_quarter(const float* p) { return each([=](int) { return vld1q_f32(p); }); }
static inline F two_quarters(const float* p) { return each([=](int i) { return vld1q_f32(p + i / 2 * 4); }); }

static inline float32x4_t max_of_4(float32x4_t x) {
  x = larger(x, vrev64q_f32(x));
  return larger(x, vextq_f32(x, x, 2));
}

// Lanes i and i + 8 first, then i + 4, i + 2, i + 1.
static inline float32x4_t quarter(F x) {
  return vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
}
static inline float sum(F x) {
  const float32x4_t four = quarter(x);
  return vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
}
static inline void add_quarters(F x, float* out) { vst1q_f32(out, quarter(x)); }
static inline F sums_of_quarters(const F (&x)[4]) {
  return each([&](int i) {
    const float32x4_t a = x[0].v[i], b = x[1].v[i], c = x[2].v[i], d = x[3].v[i];
    const float32x4_t ab = vaddq_f32(vzip1q_f32(a, b), vzip2q_f32(a, b)), cd = vaddq_f32(vzip1q_f32(c, d), vzip2q_f32(c, d));
    return vaddq_f32(vcombine_f32(vget_low_f32(ab), vget_low_f32(cd)), vcombine_f32(vget_high_f32(ab), vget_high_f32(cd)));
  });
}
static inline I sums_of_quarters(const I (&x)[4]) {
  I out;
  for (int i = 0; i < 4; ++i) out.v[i] = vpaddq_s32(vpaddq_s32(x[0].v[i], x[1].v[i]), vpaddq_s32(x[2].v[i], x[3].v[i]));
  return out;
}
static inline float max_lane(F x) {
  return vgetq_lane_f32(max_of_4(larger(larger(x.v[0], x.v[1]), larger(x.v[2], x.v[3]))), 0);
}

static inline U load_bytes(const uint8_t* p) { return {{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}}; }
static inline U load_bytes_part(const uint8_t* p, int64_t n) {
  uint8_t copy[64] = {};
  for (int64_t i = 0; i < n && i < 64; ++i) copy[i] = p[i];
  return load_bytes(copy);
}
static inline U load_quarters(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) {
  return {{vld1q_u8(a), vld1q_u8(b), vld1q_u8(c), vld1q_u8(d)}};
}
static inline void store_bytes(uint8_t* p, U x) {
  for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, x.v[i]);
}
static inline U low_nibbles(U x) {
  for (uint8x16_t& v : x.v) v = vandq_u8(v, vdupq_n_u8(15));
  return x;
}
static inline U high_nibbles(U x) {
  for (uint8x16_t& v : x.v) v = vshrq_n_u8(v, 4);
  return x;
}
static inline void transpose4(const U* x, U* out) {
  const auto join = [](uint32x4_t a, uint32x4_t b, bool high) {
    const uint64x2_t p = vreinterpretq_u64_u32(a), q = vreinterpretq_u64_u32(b);
    return vreinterpretq_u8_u64(high ? vtrn2q_u64(p, q) : vtrn1q_u64(p, q));
  };
  for (int i = 0; i < 4; ++i) {
    uint32x4_t r[4];
    for (int j = 0; j < 4; ++j) r[j] = vreinterpretq_u32_u8(x[j].v[i]);
    const uint32x4_t a = vtrn1q_u32(r[0], r[1]), b = vtrn2q_u32(r[0], r[1]), c = vtrn1q_u32(r[2], r[3]), d = vtrn2q_u32(r[2], r[3]);
    out[0].v[i] = join(a, c, false), out[1].v[i] = join(b, d, false), out[2].v[i] = join(a, c, true), out[3].v[i] = join(b, d, true);
  }
}
static inline I load_ints(const int32_t* p) { return {{vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}}; }

#if KERNEL_DOT
static inline int32x4_t add_products(int32x4_t start, int8x16_t w, int8x16_t x) { return vdotq_s32(start, w, x); }
#else
// Sums of two products fit 16 bits: 2 * 128 * 127.
static inline int32x4_t add_products(int32x4_t start, int8x16_t w, int8x16_t x) {
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
  return vpadalq_s16(start, vpaddq_s16(low, high));
}
#endif

static inline I dot_nibbles(I start, U w, const int8_t* x) {
  for (int i = 0; i < 4; ++i) {
    const int8x16_t low = vreinterpretq_s8_u8(vandq_u8(w.v[i], vdupq_n_u8(15)));
    const int8x16_t high = vreinterpretq_s8_u8(vshrq_n_u8(w.v[i], 4));
    const int8x16_t even = vld1q_s8(x + 16 * i), odd = vld1q_s8(x + 64 + 16 * i);
#if KERNEL_DOT
    start.v[i] = add_products(add_products(start.v[i], low, even), high, odd);
#else
    // Sums of four products fit 16 bits: 4 * 15 * 127.
    const int16x8_t a = vmlal_s8(vmull_s8(vget_low_s8(low), vget_low_s8(even)), vget_low_s8(high), vget_low_s8(odd));
    const int16x8_t b = vmlal_high_s8(vmull_high_s8(low, even), high, odd);
    start.v[i] = vpadalq_s16(start.v[i], vpaddq_s16(a, b));
#endif
  }
  return start;
}
// (w - 128) * x, so that nothing is left for the start.
static inline int8x16_t less_128(uint8x16_t w) { return vreinterpretq_s8_u8(veorq_u8(w, vdupq_n_u8(128))); }
static inline I dot_bytes(I, U w, const int8_t* x) {
  I out;
  for (int i = 0; i < 4; ++i) out.v[i] = add_products(vdupq_n_s32(0), less_128(w.v[i]), vld1q_s8(x + 16 * i));
  return out;
}

template <int BITS>
static inline I begin_dot(int32_t middle) {
  const int32x4_t start = vdupq_n_s32(BITS == 4 ? middle : 0);
  return {{start, start, start, start}};
}
template <int BITS>
static inline I add_four(I so_far, U w, const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  const int8x16_t y = vreinterpretq_s8_s32(vdupq_n_s32(four));
  for (int i = 0; i < 4; ++i) {
    so_far.v[i] = add_products(so_far.v[i], BITS == 4 ? vreinterpretq_s8_u8(w.v[i]) : less_128(w.v[i]), y);
  }
  return so_far;
}
template <int>
static inline I end_dot(I so_far, int32_t) {
  return so_far;
}

static inline void store_int8(int8_t* p, I x) {
  const int16x8_t low = vcombine_s16(vqmovn_s32(x.v[0]), vqmovn_s32(x.v[1]));
  const int16x8_t high = vcombine_s16(vqmovn_s32(x.v[2]), vqmovn_s32(x.v[3]));
  vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}
static inline void split_bytes(const int8_t* p, int8_t* even, int8_t* odd) {
  const int8x8x2_t x = vld2_s8(p);
  vst1_s8(even, x.val[0]);
  vst1_s8(odd, x.val[1]);
}
static inline F words_to_float(int16x8_t low, int16x8_t high) {
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))}};
}
static inline F load_int8(const int8_t* p) {
  const int8x16_t x = vld1q_s8(p);
  return words_to_float(vmovl_s8(vget_low_s8(x)), vmovl_high_s8(x));
}
static inline F load_int8_part(const int8_t* p, int64_t n) {
  int8_t copy[16] = {};
  for (int64_t i = 0; i < n; ++i) copy[i] = p[i];
  return load_int8(copy);
}
static inline void store_half(uint16_t* p, F x) {
  for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.v[i])));
}
static inline F load_half(const uint16_t* p) {
  F out;
  for (int i = 0; i < 4; ++i) out.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
  return out;
}
static inline F load_half_columns(const uint16_t* p, int64_t row) {
  const uint16x4_t a = vld1_u16(p), b = vld1_u16(p + row), c = vld1_u16(p + 2 * row), d = vld1_u16(p + 3 * row);
  const uint32x2_t ab = vreinterpret_u32_u16(vzip1_u16(a, b)), cd = vreinterpret_u32_u16(vzip1_u16(c, d));
  const uint32x2_t ab_high = vreinterpret_u32_u16(vzip2_u16(a, b)), cd_high = vreinterpret_u32_u16(vzip2_u16(c, d));
  const uint32x2_t columns[4] = {vzip1_u32(ab, cd), vzip2_u32(ab, cd), vzip1_u32(ab_high, cd_high), vzip2_u32(ab_high, cd_high)};
  return each([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u32(columns[i])); });
}
static inline F load_half_part(const uint16_t* p, int64_t n) {
  uint16_t copy[16] = {};
  for (int64_t i = 0; i < n; ++i) copy[i] = p[i];
  return load_half(copy);
}
static inline F bytes_to_float(uint8x16_t x) {
  return words_to_float(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(x))), vreinterpretq_s16_u16(vmovl_high_u8(x)));
}
static inline F load_uint8(const uint8_t* p) { return bytes_to_float(vld1q_u8(p)); }
static inline F load_nibbles(const uint8_t* p) {
  const uint8x8_t x = vld1_u8(p), low = vand_u8(x, vdup_n_u8(15)), high = vshr_n_u8(x, 4);
  return bytes_to_float(vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high)));
}

}  // namespace KERNEL_VARIANT
