// Sixteen lanes in plain C++: the oracle of the others, which compute the same numbers bit for bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace KERNEL_VARIANT {

struct F {  // sixteen floats
  float lane[16];
};
struct I {  // sixteen whole numbers
  int32_t lane[16];
};
struct U {  // sixty-four bytes; four belong to each lane
  uint8_t byte[64];
};

constexpr int kTileHalves = 1;        // of a tile's rows, served by a load of a token
constexpr int64_t kFewestOfTile = 8;  // tokens, from which on unpacking a matrix for all of them is faster
constexpr int kRowTokens = 2;          // tokens that a packed row is multiplied with at once: as many sums as registers hold

template <typename Function>
static inline F each(Function function) {
  F out;
  for (int i = 0; i < 16; ++i) out.lane[i] = function(i);
  return out;
}

static inline F set1(float x) { return each([=](int) { return x; }); }
static inline F zero() { return set1(0); }
static inline F load(const float* p) { return each([=](int i) { return p[i]; }); }
// The first n lanes, the others 0; n may be 0 to 16.
static inline F load_part(const float* p, int64_t n) { return each([=](int i) { return i < n ? p[i] : 0.0f; }); }
static inline void store(float* p, F x) { std::memcpy(p, x.lane, sizeof x.lane); }
static inline void store_part(float* p, F x, int64_t n) { std::memcpy(p, x.lane, sizeof(float) * std::max<int64_t>(n, 0)); }
static inline F add(F a, F b) { return each([&](int i) { return a.lane[i] + b.lane[i]; }); }
static inline F sub(F a, F b) { return each([&](int i) { return a.lane[i] - b.lane[i]; }); }
static inline F mul(F a, F b) { return each([&](int i) { return a.lane[i] * b.lane[i]; }); }
static inline F div(F a, F b) { return each([&](int i) { return a.lane[i] / b.lane[i]; }); }
static inline F fma(F a, F b, F c) { return each([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); }); }
static inline F max(F a, F b) { return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; }); }
static inline F min(F a, F b) { return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; }); }
static inline F abs(F a) { return each([&](int i) { return std::fabs(a.lane[i]); }); }
static inline F nearest(F x) { return each([&](int i) { return std::nearbyint(x.lane[i]); }); }  // halves to even

static inline I to_int(F x) {  // nearest, halves to even
  I out;
  for (int i = 0; i < 16; ++i) out.lane[i] = static_cast<int32_t>(std::nearbyint(x.lane[i]));
  return out;
}
static inline F to_float(I x) { return each([&](int i) { return static_cast<float>(x.lane[i]); }); }

// 2 to a whole power from -126 to 127.
static inline F power_of_two(F n) { return each([&](int i) { return std::ldexp(1.0f, static_cast<int>(n.lane[i])); }); }

// Four numbers in each quarter of the lanes: the same in all, or in two the first four and in two the next.
static inline F one_quarter(const float* p) { return each([=](int i) { return p[i % 4]; }); }
static inline F two_quarters(const float* p) { return each([=](int i) { return p[i / 8 * 4 + i % 4]; }); }

// The sum of all lanes: i and i + 8 first, then i + 4, i + 2, i + 1.
static inline float sum(F x) {
  for (int step = 8; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) x.lane[i] += x.lane[i + step];
  }
  return x.lane[0];
}
// The sums of the quarters' first lanes, of the second and so on, in the same order.
static inline void add_quarters(F x, float* out) {
  for (int i = 0; i < 4; ++i) out[i] = (x.lane[i] + x.lane[i + 8]) + (x.lane[i + 4] + x.lane[i + 12]);
}
// In each quarter the sums of that quarter of all x.
static inline F sums_of_quarters(const F (&x)[4]) {
  return each([&](int i) {
    const float* p = x[i % 4].lane + i / 4 * 4;
    return (p[0] + p[2]) + (p[1] + p[3]);
  });
}
static inline I sums_of_quarters(const I (&x)[4]) {
  I out;
  for (int i = 0; i < 16; ++i) {
    const int32_t* p = x[i % 4].lane + i / 4 * 4;
    out.lane[i] = p[0] + p[1] + p[2] + p[3];
  }
  return out;
}
static inline float max_lane(F x) { return *std::max_element(x.lane, x.lane + 16); }

static inline U load_bytes_part(const uint8_t* p, int64_t n) {
  U out = {};
  std::memcpy(out.byte, p, std::min<int64_t>(n, 64));
  return out;
}
static inline U load_bytes(const uint8_t* p) { return load_bytes_part(p, 64); }
static inline void store_bytes(uint8_t* p, U x) { std::memcpy(p, x.byte, 64); }
// Sixteen bytes from each of four places.
static inline U load_quarters(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) {
  U out;
  std::memcpy(out.byte, a, 16), std::memcpy(out.byte + 16, b, 16), std::memcpy(out.byte + 32, c, 16), std::memcpy(out.byte + 48, d, 16);
  return out;
}
static inline U low_nibbles(U x) {
  for (uint8_t& byte : x.byte) byte &= 15;
  return x;
}
static inline U high_nibbles(U x) {
  for (uint8_t& byte : x.byte) byte >>= 4;
  return x;
}
// In each quarter: the first four bytes of all x, then the second four, and so on.
static inline void transpose4(const U* x, U* out) {
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < 64; ++i) out[j].byte[i] = x[i % 16 / 4].byte[i / 16 * 16 + 4 * j + i % 4];
  }
}
static inline I load_ints(const int32_t* p) {
  I out;
  std::memcpy(out.lane, p, sizeof out.lane);
  return out;
}
// Lane by lane start + the sum of w * x over the lane's eight numbers, lower halves of bytes with the first 64 of x; and
// over four whole bytes, where `start` is -128 times the sum of x.
static inline I dot_nibbles(I start, U w, const int8_t* x) {
  for (int i = 0; i < 64; ++i) start.lane[i / 4] += (w.byte[i] & 15) * x[i] + (w.byte[i] >> 4) * x[64 + i];
  return start;
}
static inline I dot_bytes(I start, U w, const int8_t* x) {
  for (int i = 0; i < 64; ++i) start.lane[i / 4] += w.byte[i] * x[i];
  return start;
}

// A sum, lane by lane, of products of four numbers at a time: of a matrix (16 lanes, 4 bytes), x the same for all lanes.
// `middle` is what the middle of the matrix's numbers takes away; it is added at the begin or at the end.
template <int BITS>
static inline I begin_dot(int32_t middle) {
  I out;
  for (int32_t& lane : out.lane) lane = middle;
  return out;
}
template <int BITS>
static inline I add_four(I so_far, U w, const int8_t* x) {
  for (int i = 0; i < 64; ++i) so_far.lane[i / 4] += w.byte[i] * x[i % 4];
  return so_far;
}
template <int BITS>
static inline I end_dot(I so_far, int32_t) {
  return so_far;
}
static inline void store_int8(int8_t* p, I x) {  // numbers from -128 to 127
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(std::min(127, std::max(-128, x.lane[i])));
}
// Of sixteen bytes the even ones and the odd ones.
static inline void split_bytes(const int8_t* p, int8_t* even, int8_t* odd) {
  for (int i = 0; i < 8; ++i) even[i] = p[2 * i], odd[i] = p[2 * i + 1];
}
static inline F load_int8(const int8_t* p) { return each([=](int i) { return static_cast<float>(p[i]); }); }
static inline F load_int8_part(const int8_t* p, int64_t n) {
  return each([=](int i) { return i < n ? static_cast<float>(p[i]) : 0.0f; });
}
// float16 as its bits: the nearest, halves to even.
static inline uint16_t half_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
  if (size > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00 | (size >> 13 & 0x3FF));  // no number
  if (size >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);
  if (size < 0x38800000) return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(std::fabs(x) * 16777216.0f)));
  return static_cast<uint16_t>(sign | (size + 0xFFF + (size >> 13 & 1) - 0x38000000) >> 13);
}
static inline float of_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, size = half & 0x7FFF;
  uint32_t bits;
  if (size < 0x400) {
    const float small = static_cast<float>(size) * (1.0f / 16777216.0f);
    std::memcpy(&bits, &small, 4);
  } else {
    bits = size < 0x7C00 ? (size << 13) + 0x38000000 : 0x7F800000 | size << 13 | (size > 0x7C00 ? 0x400000 : 0);
  }
  bits |= sign;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
static inline void store_half(uint16_t* p, F x) {
  for (int i = 0; i < 16; ++i) p[i] = half_of(x.lane[i]);
}
static inline F load_half(const uint16_t* p) { return each([=](int i) { return of_half(p[i]); }); }
// In each quarter a column of four rows.
static inline F load_half_columns(const uint16_t* p, int64_t row) {
  return each([=](int i) { return of_half(p[i % 4 * row + i / 4]); });
}
static inline F load_half_part(const uint16_t* p, int64_t n) { return each([=](int i) { return i < n ? of_half(p[i]) : 0.0f; }); }
static inline F load_uint8(const uint8_t* p) { return each([=](int i) { return static_cast<float>(p[i]); }); }
static inline F load_nibbles(const uint8_t* p) {  // eight bytes, lower halves first
  return each([=](int i) { return static_cast<float>((p[i / 2] >> (4 * (i % 2))) & 15); });
}

}  // namespace KERNEL_VARIANT
