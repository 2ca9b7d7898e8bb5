// NEON with products of matrices, two rows by two tokens by eight numbers: a prompt's products take half as many
// instructions as with dot products. All else is simd_neon.h.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "simd_neon.h"

namespace KERNEL_VARIANT {

// A prompt's tile holds eight numbers of each of its sixteen rows, then the next eight; at 8 bits less 128.
template <int BITS>
static inline void tile_pairs(const uint8_t* const* rows, int64_t from, uint8_t* tile) {
  for (int r = 0; r < 16; r += 2) {
    uint8_t* to = tile + 8 * r;
    const auto store_pair = [](uint8x16_t a, uint8x16_t b, uint8_t* at) {
      const uint64x2_t p = vreinterpretq_u64_u8(a), q = vreinterpretq_u64_u8(b);
      vst1q_u8(at, vreinterpretq_u8_u64(vzip1q_u64(p, q)));
      vst1q_u8(at + 128, vreinterpretq_u8_u64(vzip2q_u64(p, q)));
    };
    const uint8x16_t a = vld1q_u8(rows[r] + from), b = vld1q_u8(rows[r + 1] + from);
    if (BITS == 8) {
      store_pair(vreinterpretq_u8_s8(less_128(a)), vreinterpretq_u8_s8(less_128(b)), to);
    } else {
      store_pair(vandq_u8(a, vdupq_n_u8(15)), vandq_u8(b, vdupq_n_u8(15)), to);
      store_pair(vshrq_n_u8(a, 4), vshrq_n_u8(b, 4), to + 256);
    }
  }
}

// See kernel_functions.h. Where the number of tokens is odd, the last one is computed twice.
template <int BITS, int HALVES, int TOKENS>
static inline void dot_part(const uint8_t (*tile)[16 * sportsllm::part_columns(BITS)], const sportsllm::Rounded& x, int64_t at,
                            I (&dot)[HALVES][TOKENS]) {
  static_assert(HALVES == 1, "a half at a time");
  constexpr int kPart = sportsllm::part_columns(BITS), kPairs = (TOKENS + 1) / 2;
  const int8_t* numbers[2 * kPairs];
  int32x4_t sums[kPairs][8];  // of two rows each: by the first token and the second, then of the next row
  for (int p = 0; p < kPairs; ++p) {
    int32_t zero_correction[4];
    for (int i = 0; i < 2; ++i) {
      const int64_t part = at + std::min(2 * p + i, TOKENS - 1) * x.chunks * 4;
      numbers[2 * p + i] = x.numbers + part / 4 * 4 * kPart + part % 4 * 16;
      zero_correction[i] = zero_correction[i + 2] = BITS == 4 ? x.zero_correction[part * 4] : 0;
    }
    for (int r = 0; r < 8; ++r) sums[p][r] = vld1q_s32(zero_correction);
  }
  for (int c = 0; c < kPart; c += 8) {
    int8x16_t y[kPairs];
    const int column = c / 16 * 64 + c % 16;
    for (int p = 0; p < kPairs; ++p) y[p] = vcombine_s8(vld1_s8(numbers[2 * p] + column), vld1_s8(numbers[2 * p + 1] + column));
    for (int r = 0; r < 8; ++r) {
      const int8x16_t w = vreinterpretq_s8_u8(vld1q_u8(tile[0] + 16 * (c + r)));
      for (int p = 0; p < kPairs; ++p) sums[p][r] = vmmlaq_s32(sums[p][r], w, y[p]);
    }
  }
  for (int i = 0; i < TOKENS; ++i) {
    for (int r = 0; r < 4; ++r) {
      const int32x4_t a = sums[i / 2][2 * r], b = sums[i / 2][2 * r + 1];
      dot[0][i].v[r] = i % 2 == 0 ? vuzp1q_s32(a, b) : vuzp2q_s32(a, b);
    }
  }
}

}  // namespace KERNEL_VARIANT
