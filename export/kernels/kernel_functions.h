// The functions of a variant, written over sixteen lanes. Included by each variant's file after its simd_*.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"

namespace KERNEL_VARIANT {

using sportsllm::cache_bytes;
using sportsllm::Cached;
using sportsllm::CacheType;
using sportsllm::prefetch_tlb;
using sportsllm::kAttendAtOnce;
using sportsllm::kPageGroup;
using sportsllm::Matrix;
using sportsllm::part_columns;
using sportsllm::Rounded;

static inline F load_up_to(const float* p, int64_t n) { return n >= 16 ? load(p) : load_part(p, n); }
static inline void store_up_to(float* p, F x, int64_t n) { n >= 16 ? store(p, x) : store_part(p, x, n); }

// exp within 2 units in the last place; 0 below -87. NaN stays NaN: max and min give the second of two if either is.
static inline F exponential(F x) {
  const F bounded = max(set1(-87.3f), min(set1(88.0f), x));
  const F n = nearest(mul(bounded, set1(1.44269504f)));
  F r = fma(n, set1(-0.693145752f), bounded);
  r = fma(n, set1(-1.42860677e-6f), r);
  F y = set1(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = fma(y, r, set1(c));
  return mul(y, power_of_two(n));
}

static void rms_norm(const float* x, const float* weight, int64_t size, float epsilon, float* out) {
  F squares = zero();
  for (int64_t i = 0; i < size; i += 16) {
    const F v = load_up_to(x + i, size - i);
    squares = fma(v, v, squares);
  }
  const F factor = set1(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + epsilon));
  for (int64_t i = 0; i < size; i += 16) {
    const int64_t n = size - i;
    store_up_to(out + i, mul(mul(load_up_to(x + i, n), factor), load_up_to(weight + i, n)), n);
  }
}

static void layer_norm(const float* x, const float* weight, const float* bias, int64_t size, float epsilon, float* out) {
  F total = zero(), squares = zero();
  for (int64_t i = 0; i < size; i += 16) total = add(total, load_up_to(x + i, size - i));
  const F mean = set1(sum(total) / static_cast<float>(size));
  for (int64_t i = 0; i < size; i += 16) {
    alignas(64) float centred[16];
    store(centred, sub(load_up_to(x + i, size - i), mean));
    const F v = load_up_to(centred, size - i);  // zeros behind the last
    squares = fma(v, v, squares);
  }
  const F factor = set1(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + epsilon));
  for (int64_t i = 0; i < size; i += 16) {
    const int64_t n = size - i;
    const F scaled = mul(sub(load_up_to(x + i, n), mean), factor);
    store_up_to(out + i, fma(scaled, load_up_to(weight + i, n), load_up_to(bias + i, n)), n);
  }
}

static inline int32_t sum_of_8(const int8_t* q) {
  uint64_t eight;
  std::memcpy(&eight, q, 8);
  eight ^= 0x8080808080808080u;  // each 128 more, so that none is below 0
  const uint64_t every_other = 0x00FF00FF00FF00FFu, pairs = (eight & every_other) + (eight >> 8 & every_other);
  return static_cast<int32_t>(pairs * 0x0001000100010001u >> 48) - 8 * 128;
}

template <int BITS>
static void round_parts(const float* x, int64_t m, int64_t start, int64_t end, Rounded* out) {
  constexpr int kPart = part_columns(BITS);
  const int64_t last = end == out->columns ? out->chunks * 4 * kPart : end;  // the rest of the last chunk is zeros
  for (int64_t i = start; i < last; i += kPart) {
    const int64_t at = m * out->chunks * 4 + i / kPart;
    F v[kPart / 16], largest_of = zero(), not_finite = zero();
    for (int h = 0; h < kPart / 16; ++h) {
      const int64_t left = out->columns - i - h * 16;
      v[h] = left > 0 ? load_up_to(x + i + h * 16, left) : zero();
      largest_of = max(largest_of, abs(v[h]));
      not_finite = fma(v[h], zero(), not_finite);  // NaN, which whole numbers and max lose, must reach the scale
    }
    const float largest = max_lane(largest_of);
    const F by = set1(127.0f / (largest > 1e-30f ? largest : 1e-30f));
    alignas(16) int8_t q[kPart];
    for (int h = 0; h < kPart / 16; ++h) store_int8(q + h * 16, to_int(mul(v[h], by)));
    int8_t* to = out->numbers + at / 4 * 4 * kPart + at % 4 * 16;
    if (BITS == 4) {
      for (int h = 0; h < kPart / 16; ++h) split_bytes(q + h * 16, to + h * 8, to + 64 + h * 8);
    } else {
      std::memcpy(to, q, kPart);
    }
    int32_t total = 0;
    for (int j = 0; j < kPart; j += 8) total += sum_of_8(q + j);
    const float scale = largest * (1.0f / 127) + sum(not_finite);
    std::fill_n(out->scales + at * 4, 4, scale);
    const int32_t correction[4] = {(BITS == 4 ? -8 : -128) * total};
    std::memcpy(out->zero_correction + at * 4, correction, sizeof correction);
    std::fill_n(out->sums + at * 4, 4, scale * static_cast<float>(total));
  }
}

static void round(const float* x, int64_t m, int64_t start, int64_t end, Rounded* out) {
  out->bits == 4 ? round_parts<4>(x, m, start, end, out) : round_parts<8>(x, m, start, end, out);
}

// Up to sixteen float16 numbers, zeros behind the last.
static inline F load_halves(const uint16_t* p, int64_t n) { return n >= 16 ? load_half(p) : load_half_part(p, n); }

// The sum of the lanes of each of four vectors.
static inline void sum4(const F (&x)[4], float* out) { add_quarters(sums_of_quarters(x), out); }

// The scales of four rows' blocks that a chunk touches, quarter by quarter; LANES of a row's lanes share a block.
template <int LANES>
static inline F chunk_scales(const float* scales, int64_t chunk) {
  if (LANES == 4) return load(scales + chunk * 16);
  if (LANES == 8) return two_quarters(scales + chunk * 8);
  return one_quarter(scales + chunk / std::max(1, LANES / 16) * 4);
}

// How far ahead of a product its matrix is fetched: its rows are short, and the processor finds no pattern in them.
// Measured on a Zen 4: 768 columns at 4 bits come at 10 GB/s without, 19 with 3 to 6 kB.
constexpr int64_t kFetchAhead = 6144;

#if !KERNEL_OWN_DOT_ROWS
// Sums of the products of a chunk of each of four rows of the matrix with TOKENS tokens: of a quarter of the chunk, all four
// rows', then of the next.
template <int BITS, int TOKENS>
static inline void dot_rows(const U (&w)[4], const Rounded& x, int64_t at, I (&sums)[TOKENS]) {
  I dot[TOKENS][4];
  for (int r = 0; r < 4; ++r) {
    for (int i = 0; i < TOKENS; ++i) {
      const I middle = load_ints(x.zero_correction + (at + i * x.chunks) * 16);
      const int8_t* numbers = x.numbers + (at + i * x.chunks) * 4 * part_columns(BITS);
      dot[i][r] = BITS == 4 ? dot_nibbles(middle, w[r], numbers) : dot_bytes(middle, w[r], numbers);
    }
  }
  for (int i = 0; i < TOKENS; ++i) sums[i] = sums_of_quarters(dot[i]);
}
#endif

// Adds the products of a chunk of each of four rows of the matrix, `left` bytes of it, to `total`. `below` is null without
// zero points.
template <int BITS, int LANES, int TOKENS>
static inline void multiply(const uint8_t* bytes, int64_t row_bytes, const float* scales, const float* below, int64_t chunk,
                            int64_t left, const Rounded& x, int64_t m, F (&total)[TOKENS]) {
  bytes += chunk * 64;
  U w[4];
  for (int r = 0; r < 4; ++r) w[r] = left >= 64 ? load_bytes(bytes + r * row_bytes) : load_bytes_part(bytes + r * row_bytes, left);
  I sums[TOKENS];
  dot_rows<BITS, TOKENS>(w, x, m * x.chunks + chunk, sums);
  for (int i = 0; i < TOKENS; ++i) {
    const int64_t at = ((m + i) * x.chunks + chunk) * 16;
    const F scale = mul(chunk_scales<LANES>(scales, chunk), load(x.scales + at));
    total[i] = fma(to_float(sums[i]), scale, total[i]);
    if (below != nullptr) total[i] = fma(chunk_scales<LANES>(below, chunk), load(x.sums + at), total[i]);
  }
}

// Sixteen zero points of a row, from an even block on; those behind the row's last are whatever follows.
template <int BITS>
static inline F zero_points(const Matrix& w, int64_t zero_bytes, int64_t row, int64_t block) {
  const int64_t at = row * zero_bytes + block * BITS / 8, left = w.rows * zero_bytes - at;
  const uint8_t* from = w.zeros + at;
  uint8_t few[16] = {};
  if (left < 2 * BITS) {  // the end of the tensor
    for (int64_t i = 0; i < left; ++i) few[i] = from[i];
    from = few;
  }
  return BITS == 4 ? load_nibbles(from) : load_uint8(from);
}

template <int BITS, int LANES, int TOKENS>
static void product_rows(const Matrix& w, int64_t first, int64_t last, const Rounded& x, int64_t m, float* out,
                         int64_t stride) {
  const int64_t row_bytes = w.row_bytes(), zero_bytes = w.zero_bytes(), blocks = w.blocks();
  const int64_t whole = row_bytes / 64, left = row_bytes - whole * 64;
  alignas(64) float scales[4 * (Matrix::kMostBlocks + 16)];  // of a block all four rows', then of the next
  alignas(64) float all_below[4 * (Matrix::kMostBlocks + 16)];
  const F middle = set1(BITS == 4 ? 8.0f : 128.0f);
  float* const below = w.zeros == nullptr ? nullptr : all_below;
  const int64_t together = w.rows < 4 ? 1 : 4, step = w.rows < 4 ? 0 : 1;
  for (int64_t n = first; n < last; n += together) {
    const int64_t n0 = std::min(n, w.rows - together);  // at the end of the matrix, rows before are computed again
    const uint8_t* bytes = w.packed + n0 * row_bytes;
    F total[TOKENS];
    for (F& sum : total) sum = zero();
    const uint16_t* scales_of_w = w.scales + n0 * blocks;
    const int64_t row = step * blocks;
    int64_t g = 0;
    for (; g + 4 <= blocks; g += 4) store(scales + 4 * g, load_half_columns(scales_of_w + g, row));
    if (g < blocks) {
      uint16_t few[4][4] = {};  // nothing behind a row's last
      for (int r = 0; r < 4; ++r) std::copy(scales_of_w + r * row + g, scales_of_w + r * row + blocks, few[r]);
      store(scales + 4 * g, load_half_columns(few[0], 4));
    }
    for (g = 0; below != nullptr && g < blocks; g += 16) {
      alignas(32) uint16_t zeros[4][16];
      for (int r = 0; r < 4; ++r) store_half(zeros[r], sub(middle, zero_points<BITS>(w, zero_bytes, n0 + r * step, g)));
      for (int64_t i = 0; i < 16; i += 4) {
        store(below + 4 * (g + i), mul(load(scales + 4 * (g + i)), load_half_columns(zeros[0] + i, 16)));
      }
    }
    for (int64_t chunk = 0; chunk < whole; ++chunk) {
      // The rows lie one behind the other.
      for (int r = 0; r < 4; ++r) __builtin_prefetch(bytes + kFetchAhead + (chunk * 4 + r) * 64, 0, 2);
      multiply<BITS, LANES, TOKENS>(bytes, row_bytes * step, scales, below, chunk, 64, x, m, total);
    }
    if (left > 0) multiply<BITS, LANES, TOKENS>(bytes, row_bytes * step, scales, below, whole, left, x, m, total);
    for (int i = 0; i < TOKENS; ++i) {
      float sums[4];
      add_quarters(total[i], sums);
      float* to = out + (m + i) * stride + n - first;
      const float* from = sums + n - n0;
      for (int64_t r = 0; r < std::min(together, last - n); ++r) {
        to[r] = w.bias == nullptr ? from[r] : from[r] + w.bias[n + r];
      }
    }
  }
}

constexpr int64_t kTileRows = 32, kTileColumns = 512;  // of a matrix: two times sixteen rows

// Sixteen bytes of each of sixteen rows: four bytes of every row, then the next four.
static inline void transpose_rows(const uint8_t* const* rows, int64_t from, uint8_t* out) {
  U x[4], y[4];
  for (int i = 0; i < 4; ++i) {
    x[i] = load_quarters(rows[i] + from, rows[i + 4] + from, rows[i + 8] + from, rows[i + 12] + from);
  }
  transpose4(x, y);
  for (int i = 0; i < 4; ++i) store_bytes(out + 64 * i, y[i]);
}

// A part of sixteen rows as `add_four` reads it; at 4 bits even columns before odd ones.
template <int BITS>
static inline void tile_rows(const uint8_t* const* rows, int64_t from, uint8_t* tile) {
  if constexpr (BITS == 8) {
    transpose_rows(rows, from, tile);
  } else {
    uint8_t* high = tile + 256;
    transpose_rows(rows, from, tile);
    for (int i = 0; i < 256; i += 64) {
      const U x = load_bytes(tile + i);
      store_bytes(tile + i, low_nibbles(x)), store_bytes(high + i, high_nibbles(x));
    }
  }
}

// A piece of a matrix as `dot_part` reads it, with its rows' scales in each block and what zero points add.
template <int BITS>
struct Tile {
  static constexpr int64_t kParts = kTileColumns / part_columns(BITS), kBlocks = 16;
  alignas(64) uint8_t numbers[kParts][2][16 * part_columns(BITS)];
  alignas(64) float scales[2][kBlocks][16];
  alignas(64) float below[2][kBlocks][16];  // scale * (middle - zero point)
  int64_t block_of[kParts];                 // a division takes as long as many products
};

template <int BITS>
static void fill_tile(const Matrix& w, int64_t first, int64_t last, int64_t part, int64_t parts, Tile<BITS>* tile) {
  const int64_t row_bytes = w.row_bytes(), zero_bytes = w.zero_bytes(), blocks = w.blocks();
  const int64_t part_bytes = part_columns(BITS) * BITS / 8, start = part * part_columns(BITS) / w.block;
  for (int64_t p = 0; p < parts; ++p) tile->block_of[p] = (part + p) * part_columns(BITS) / w.block - start;
  for (int h = 0; h < 2; ++h) {
    alignas(64) float scales[16][16], below[16][16];
    const uint8_t *rows[16], *scale_rows[16], *below_rows[16];
    for (int i = 0; i < 16; ++i) {
      const int64_t row = std::min(first + 16 * h + i, last - 1);
      rows[i] = w.packed + row * row_bytes + part * part_bytes;
      scale_rows[i] = reinterpret_cast<uint8_t*>(scales[i]), below_rows[i] = reinterpret_cast<uint8_t*>(below[i]);
      const F scale = load_halves(w.scales + row * blocks + start, blocks - start);
      store(scales[i], scale);
      if (w.zeros == nullptr) continue;
      const F zero_point = zero_points<BITS>(w, zero_bytes, row, start);
      store(below[i], mul(scale, sub(set1(BITS == 4 ? 8.0f : 128.0f), zero_point)));
    }
    for (int64_t g = 0; g < 16; g += 4) {
      transpose_rows(scale_rows, 4 * g, reinterpret_cast<uint8_t*>(tile->scales[h][g]));
      if (w.zeros != nullptr) transpose_rows(below_rows, 4 * g, reinterpret_cast<uint8_t*>(tile->below[h][g]));
    }
    for (int64_t p = 0; p < parts; ++p) {
#if KERNEL_I8MM
      tile_pairs<BITS>(rows, p * part_bytes, tile->numbers[p][h]);
#else
      tile_rows<BITS>(rows, p * part_bytes, tile->numbers[p][h]);
#endif
    }
  }
}

#if !KERNEL_I8MM
// Sums of a part's products of HALVES times sixteen rows with each of TOKENS tokens, less what the middle takes away.
template <int BITS, int HALVES, int TOKENS>
static inline void dot_part(const uint8_t (*tile)[16 * part_columns(BITS)], const Rounded& x, int64_t at, I (&dot)[HALVES][TOKENS]) {
  const int64_t row = x.chunks * 4;
  const int8_t* numbers = x.numbers + at / 4 * 4 * part_columns(BITS) + at % 4 * 16;
  for (int h = 0; h < HALVES; ++h) {
    for (int i = 0; i < TOKENS; ++i) dot[h][i] = begin_dot<BITS>(x.zero_correction[(at + i * row) * 4]);
  }
  for (int j = 0; j < part_columns(BITS) / 4; ++j) {  // a load of the matrix serves all tokens
    U w[HALVES];
    for (int h = 0; h < HALVES; ++h) w[h] = load_bytes(tile[h] + 64 * j);
    for (int i = 0; i < TOKENS; ++i) {
      const int8_t* four = numbers + i * row * part_columns(BITS) + j / 4 * 64 + j % 4 * 4;
      for (int h = 0; h < HALVES; ++h) dot[h][i] = add_four<BITS>(dot[h][i], w[h], four);
    }
  }
  for (int h = 0; h < HALVES; ++h) {
    for (int i = 0; i < TOKENS; ++i) dot[h][i] = end_dot<BITS>(dot[h][i], x.zero_correction[(at + i * row) * 4]);
  }
}
#endif

// Adds a tile's part to what `product_rows` adds up in each quarter, in its order and so with its bits: `sums` are
// (TOKENS, quarters, kTileRows). Meanwhile fetches as much of the rows behind the tile's, from `next` on.
template <int BITS, bool ZEROS, int TOKENS>
static inline void multiply_tile(const Tile<BITS>& tile, int64_t parts, const Rounded& x, int64_t m, int64_t part,
                                 const uint8_t* next, float* sums) {
  const int64_t row = x.chunks * 4, part_bytes = kTileRows * part_columns(BITS) * BITS / 8;
  for (int first = 0; first < 2; first += kTileHalves) {
    for (int64_t p = 0; p < parts; ++p) {
      const int64_t at = m * row + part + p, g = tile.block_of[p];
      for (int64_t i = first * part_bytes; next != nullptr && i < part_bytes; i += 64) {
        __builtin_prefetch(next + (part + p) * part_bytes + i, 0, 2);
      }
      I dot[kTileHalves][TOKENS];
      dot_part<BITS, kTileHalves, TOKENS>(tile.numbers[p] + first, x, at, dot);
      for (int h = 0; h < kTileHalves; ++h) {
        const F scale = load(tile.scales[first + h][g]), below = ZEROS ? load(tile.below[first + h][g]) : zero();
        for (int i = 0; i < TOKENS; ++i) {
          float* sum = sums + (i * 4 + p % 4) * kTileRows + (first + h) * 16;
          F total = fma(to_float(dot[h][i]), mul(scale, set1(x.scales[(at + i * row) * 4])), load(sum));
          if (ZEROS) total = fma(below, set1(x.sums[(at + i * row) * 4]), total);
          store(sum, total);
        }
      }
    }
  }
}

template <int BITS, bool ZEROS>
static void product_tiles(const Matrix& w, int64_t first, int64_t last, const Rounded& x, int64_t m0, int64_t m1, float* out,
                          int64_t stride) {
  constexpr int64_t kTokens = 128;
  Tile<BITS> tile;
  alignas(64) float sums[kTokens][4][kTileRows];
  const int64_t all_parts = w.blocks() * w.block / part_columns(BITS);
  for (int64_t n = first; n < last; n += kTileRows) {
    for (int64_t m = m0; m < m1; m += kTokens) {
      const int64_t count = std::min(kTokens, m1 - m);
      std::fill(sums[0][0], sums[0][0] + count * 4 * kTileRows, 0.0f);
      for (int64_t part = 0; part < all_parts; part += tile.kParts) {
        const int64_t parts = std::min(tile.kParts, all_parts - part);
        fill_tile<BITS>(w, n, last, part, parts, &tile);
        const uint8_t* next = w.packed + (n + kTileRows) * w.row_bytes();
        int64_t i = 0;
        for (; i + 4 <= count; i += 4, next = nullptr) multiply_tile<BITS, ZEROS, 4>(tile, parts, x, m + i, part, next, sums[i][0]);
        for (; i + 2 <= count; i += 2, next = nullptr) multiply_tile<BITS, ZEROS, 2>(tile, parts, x, m + i, part, next, sums[i][0]);
        if (i < count) multiply_tile<BITS, ZEROS, 1>(tile, parts, x, m + i, part, next, sums[i][0]);
      }
      for (int64_t i = 0; i < count; ++i) {
        float* to = out + (m + i) * stride + n - first;
        for (int64_t r = 0; r < std::min(kTileRows, last - n); ++r) {
          const float sum = (sums[i][0][r] + sums[i][2][r]) + (sums[i][1][r] + sums[i][3][r]);
          to[r] = w.bias == nullptr ? sum : sum + w.bias[n + r];
        }
      }
    }
  }
}

template <int BITS, int LANES>
static void product_lanes(const Matrix& w, int64_t first, int64_t last, const Rounded& x, int64_t m0, int64_t m1, float* out,
                          int64_t stride) {
  if (m1 - m0 >= kFewestOfTile) {
    const auto tiles = w.zeros != nullptr ? product_tiles<BITS, true> : product_tiles<BITS, false>;
    return tiles(w, first, last, x, m0, m1, out, stride);
  }
  int64_t m = m0;
  if constexpr (kRowTokens == 4) {
    if (m + 4 <= m1) product_rows<BITS, LANES, 4>(w, first, last, x, m, out, stride), m += 4;
    if (m + 3 <= m1) product_rows<BITS, LANES, 3>(w, first, last, x, m, out, stride), m += 3;
  }
  for (; m + 2 <= m1; m += 2) product_rows<BITS, LANES, 2>(w, first, last, x, m, out, stride);
  if (m < m1) product_rows<BITS, LANES, 1>(w, first, last, x, m, out, stride);
}

static void product(const Matrix& w, int64_t first, int64_t last, const Rounded& x, int64_t m0, int64_t m1, float* out,
                    int64_t stride) {
  const int64_t row_bytes = w.row_bytes(), group = first * row_bytes / kPageGroup, after = last * row_bytes / kPageGroup;
  if (group != after) prefetch_tlb(w.packed + (after + 1) * kPageGroup, (after - group) * kPageGroup);
  const int lanes = w.block * w.bits / 32;
  const auto function = w.bits == 4 ? (lanes == 4    ? product_lanes<4, 4>
                                       : lanes == 8  ? product_lanes<4, 8>
                                       : lanes == 16 ? product_lanes<4, 16>
                                                     : product_lanes<4, 32>)
                                    : (lanes == 8    ? product_lanes<8, 8>
                                       : lanes == 16 ? product_lanes<8, 16>
                                       : lanes == 32 ? product_lanes<8, 32>
                                                     : product_lanes<8, 64>);
  function(w, first, last, x, m0, m1, out, stride);
}

static void rotate(float* x, const float* cosine, const float* sine, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t n = half - i;
    const F a = load_up_to(x + i, n), b = load_up_to(x + half + i, n);
    const F c = load_up_to(cosine + i, n), s = load_up_to(sine + i, n);
    store_up_to(x + i, sub(mul(a, c), mul(b, s)), n);
    store_up_to(x + half + i, add(mul(b, c), mul(a, s)), n);
  }
}

static void swiglu(float* gate, const float* up, int64_t size) {
  for (int64_t i = 0; i < size; i += 16) {
    const int64_t n = size - i;
    const F g = load_up_to(gate + i, n);
    const F silu = div(g, add(set1(1.0f), exponential(sub(zero(), g))));
    store_up_to(gate + i, mul(silu, load_up_to(up + i, n)), n);
  }
}

// x * (1 + tanh(u)) / 2 = x * sigmoid(2 u), where u = sqrt(2 / pi) * (x + 0.044715 x^3).
static void geglu(float* gate, const float* up, int64_t size) {
  for (int64_t i = 0; i < size; i += 16) {
    const int64_t n = size - i;
    const F g = load_up_to(gate + i, n);
    const F bent = mul(mul(g, set1(-1.5957691216f)), fma(mul(g, g), set1(0.044715f), set1(1.0f)));
    const F gelu = div(g, add(set1(1.0f), exponential(bent)));
    store_up_to(gate + i, mul(gelu, load_up_to(up + i, n)), n);
  }
}

static void add(const float* a, const float* b, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += 16) {
    store_up_to(out + i, add(load_up_to(a + i, size - i), load_up_to(b + i, size - i)), size - i);
  }
}

static void scale(const float* a, const float* b, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += 16) {
    store_up_to(out + i, mul(load_up_to(a + i, size - i), load_up_to(b + i, size - i)), size - i);
  }
}

static void to_int8(const float* x, const float* scale, int64_t size, int8_t* out) {
  for (int64_t i = 0; i < size; i += 16) {
    const int64_t n = std::min<int64_t>(16, size - i);
    const F divisor = max(load_up_to(scale + i, n), set1(1e-30f));
    const F bounded = max(min(div(load_up_to(x + i, n), divisor), set1(127.0f)), set1(-128.0f));
    alignas(16) int8_t q[16];
    store_int8(q, to_int(bounded));
    for (int64_t j = 0; j < n; ++j) out[i + j] = q[j];
  }
}

static void to_half(const float* x, int64_t size, uint16_t* out) {
  for (int64_t i = 0; i < size; i += 16) {
    const int64_t n = std::min<int64_t>(16, size - i);
    alignas(32) uint16_t q[16];
    store_half(q, load_up_to(x + i, n));
    std::memcpy(out + i, q, n * sizeof(uint16_t));
  }
}

// Sixteen numbers of a cached row, from column e on.
template <CacheType TYPE>
static inline F cached_numbers(const void* rows, int64_t row, int64_t size, int64_t e) {
  const int64_t at = row * size + e, n = size - e;
  if (TYPE == CacheType::kInt8) {
    const int8_t* p = static_cast<const int8_t*>(rows) + at;
    return n >= 16 ? load_int8(p) : load_int8_part(p, n);
  }
  if (TYPE == CacheType::kHalf) {
    const uint16_t* p = static_cast<const uint16_t*>(rows) + at;
    return n >= 16 ? load_half(p) : load_half_part(p, n);
  }
  return load_up_to(static_cast<const float*>(rows) + at, n);
}

// Scores of four cached rows for QUERIES queries.
template <CacheType TYPE, int QUERIES>
static inline void four_scores(const float* const* queries, const void* keys, int64_t row, int64_t last, int64_t size,
                               float* out) {
  F t[QUERIES][4];
  for (int i = 0; i < QUERIES; ++i) t[i][0] = t[i][1] = t[i][2] = t[i][3] = zero();
  for (int64_t e = 0; e < size; e += 16) {
    F q[QUERIES];
    for (int i = 0; i < QUERIES; ++i) q[i] = load_up_to(queries[i] + e, size - e);
    for (int j = 0; j < 4; ++j) {
      const F k = cached_numbers<TYPE>(keys, std::min(row + j, last), size, e);
      for (int i = 0; i < QUERIES; ++i) t[i][j] = fma(q[i], k, t[i][j]);
    }
  }
  for (int i = 0; i < QUERIES; ++i) sum4(t[i], out + i * kAttendAtOnce);
}

// Adds up values of cached rows for QUERIES queries, SLICES times sixteen columns from e on.
template <CacheType TYPE, int QUERIES, int SLICES>
static inline void weighted_values(const float* weights, const void* values, int64_t begin, int64_t count, int64_t size,
                                   int64_t e, float* out) {
  F t[SLICES][QUERIES];
  for (int c = 0; c < SLICES; ++c) {
    for (int j = 0; j < QUERIES; ++j) t[c][j] = zero();
  }
  for (int64_t s = 0; s < count; ++s) {
    F v[SLICES];
    for (int c = 0; c < SLICES; ++c) v[c] = cached_numbers<TYPE>(values, begin + s, size, e + c * 16);
    for (int j = 0; j < QUERIES; ++j) {
      const F weight = set1(weights[j * kAttendAtOnce + s]);
      for (int c = 0; c < SLICES; ++c) t[c][j] = fma(weight, v[c], t[c][j]);
    }
  }
  for (int j = 0; j < QUERIES; ++j) {
    for (int c = 0; c < SLICES; ++c) store_up_to(out + j * size + e + c * 16, t[c][j], size - e - c * 16);
  }
}

template <CacheType TYPE, int QUERIES>
static inline void all_values(const float* weights, const void* values, int64_t begin, int64_t count, int64_t size,
                              float* out) {
  int64_t e = 0;
  if (QUERIES < 4) {
    for (; e + 64 <= size; e += 64) weighted_values<TYPE, QUERIES, 4>(weights, values, begin, count, size, e, out);
  }
  for (; e + 32 <= size; e += 32) weighted_values<TYPE, QUERIES, 2>(weights, values, begin, count, size, e, out);
  for (; e < size; e += 16) weighted_values<TYPE, QUERIES, 1>(weights, values, begin, count, size, e, out);
}

template <CacheType TYPE>
static void attend_part(const float* const* queries, const int64_t* limits, int64_t n, const Cached& cached,
                        int64_t begin, int64_t end, int64_t size, float* scores, float* out, float* largest,
                        float* total) {
  const int64_t count = end - begin, padded = (count + 15) / 16 * 16, row_bytes = size * cache_bytes(TYPE);
  prefetch_tlb(static_cast<const char*>(cached.keys) + begin * row_bytes, count * row_bytes);
  prefetch_tlb(static_cast<const char*>(cached.values) + begin * row_bytes, count * row_bytes);
  for (int64_t s = 0; s < count; s += 4) {
    int64_t i = 0;
    for (; i + 2 <= n; i += 2) {
      four_scores<TYPE, 2>(queries + i, cached.keys, begin + s, end - 1, size, scores + i * kAttendAtOnce + s);
    }
    if (i < n) four_scores<TYPE, 1>(queries + i, cached.keys, begin + s, end - 1, size, scores + i * kAttendAtOnce + s);
  }
  for (int64_t i = 0; i < n; ++i) {
    float* row = scores + i * kAttendAtOnce;
    const int64_t seen = std::max<int64_t>(0, std::min(count, limits[i] - begin));
    const int64_t hidden = cached.window > 0 ? std::max<int64_t>(0, std::min(seen, limits[i] - cached.window - begin)) : 0;
    for (int64_t s = 0; s < hidden; ++s) row[s] = -INFINITY;
    for (int64_t s = seen; s < padded; ++s) row[s] = -INFINITY;
    F top = set1(-INFINITY);
    for (int64_t s = 0; s < padded; s += 16) top = max(top, load(row + s));
    largest[i] = max_lane(top);
    const F shift = set1(seen > hidden ? largest[i] : 0.0f);
    for (int64_t s = 0; s < padded; s += 16) store(row + s, exponential(sub(load(row + s), shift)));
    F weights = zero();
    for (int64_t s = 0; s < hidden; ++s) row[s] = 0;
    for (int64_t s = seen; s < padded; ++s) row[s] = 0;
    for (int64_t s = 0; s < padded; s += 16) weights = add(weights, load(row + s));
    total[i] = sum(weights);
  }
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    all_values<TYPE, 4>(scores + i * kAttendAtOnce, cached.values, begin, count, size, out + i * size);
  }
  for (; i + 2 <= n; i += 2) {
    all_values<TYPE, 2>(scores + i * kAttendAtOnce, cached.values, begin, count, size, out + i * size);
  }
  for (; i < n; ++i) all_values<TYPE, 1>(scores + i * kAttendAtOnce, cached.values, begin, count, size, out + i * size);
}

static void attend(const float* const* queries, const int64_t* limits, int64_t n, const Cached& cached, int64_t begin,
                   int64_t end, int64_t size, float* scores, float* out, float* largest, float* total) {
  const auto function = cached.type == CacheType::kInt8   ? attend_part<CacheType::kInt8>
                        : cached.type == CacheType::kHalf ? attend_part<CacheType::kHalf>
                                                          : attend_part<CacheType::kFloat>;
  function(queries, limits, n, cached, begin, end, size, scores, out, largest, total);
}

// Scores of sixteen heads, one a lane, for each of KEYS keys.
template <int KEYS>
static inline void lane_scores(const float* queries, const float* keys, int64_t size, float* out) {
  F t[KEYS];
  for (int i = 0; i < KEYS; ++i) t[i] = zero();
  for (int64_t e = 0; e < size; ++e) {
    const F q = load(queries + e * 16);
    for (int i = 0; i < KEYS; ++i) t[i] = fma(set1(keys[i * size + e]), q, t[i]);
  }
  for (int i = 0; i < KEYS; ++i) store(out + i * 16, t[i]);
}

static void index_part(const float* queries, const float* keys, int64_t begin, int64_t end, int64_t size, int64_t block,
                       float* scores, float* sums, float* largest, float* total) {
  const int64_t count = end - begin;
  const float* first = keys + begin * size;
  int64_t s = 0;
  for (; s + 4 <= count; s += 4) lane_scores<4>(queries, first + s * size, size, scores + s * 16);
  for (; s < count; ++s) lane_scores<1>(queries, first + s * size, size, scores + s * 16);
  F top = load(scores), all = zero();
  for (s = 1; s < count; ++s) top = max(top, load(scores + s * 16));
  for (int64_t start = 0, b = 0; start < count; start += block, ++b) {
    F of_block = zero();
    for (s = start; s < std::min(count, start + block); ++s) of_block = add(of_block, exponential(sub(load(scores + s * 16), top)));
    store(sums + b * 16, of_block);
    all = add(all, of_block);
  }
  store(largest, top);
  store(total, all);
}

static void add_shares(const float* sums, const float* largest, const float* total, int64_t parts, int64_t step,
                       int64_t blocks, int64_t heads, float* shares) {
  F top = load(largest), all = zero();
  for (int64_t p = 1; p < parts; ++p) top = max(top, load(largest + p * 16));
  for (int64_t p = 0; p < parts; ++p) all = fma(exponential(sub(load(largest + p * 16), top)), load(total + p * 16), all);
  for (int64_t p = 0; p < parts; ++p) {
    alignas(64) float factor[16];
    store(factor, div(exponential(sub(load(largest + p * 16), top)), all));
    for (int64_t h = heads; h < 16; ++h) factor[h] = 0;
    const F of_part = load(factor);
    for (int64_t b = p * step; b < std::min(blocks, (p + 1) * step); ++b) shares[b] += sum(mul(of_part, load(sums + b * 16)));
  }
}

static void weighted_sum(const float* weights, const float* rows, int64_t count, int64_t size, float* out) {
  all_values<CacheType::kFloat, 1>(weights, rows, 0, count, size, out);
}

static void dots(const float* x, const float* rows, int64_t count, int64_t size, float* out) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) four_scores<CacheType::kFloat, 1>(&x, rows, i, count - 1, size, out + i);
  if (i == count) return;
  float last[4];
  four_scores<CacheType::kFloat, 1>(&x, rows, i, count - 1, size, last);
  std::copy(last, last + (count - i), out + i);
}

static void merge_softmax(const float* part, const float* part_largest, const float* part_total, int64_t n, int64_t size,
                    float* rows, float* largest, float* total) {
  for (int64_t i = 0; i < n; ++i) {
    if (part_largest[i] == -INFINITY) continue;
    const float top = std::max(largest[i], part_largest[i]);
    alignas(64) float before[16], now[16];
    store(before, exponential(set1(largest[i] - top))), store(now, exponential(set1(part_largest[i] - top)));
    float* row = rows + i * size;
    for (int64_t e = 0; e < size; e += 16) {
      const F kept = mul(load_up_to(row + e, size - e), set1(before[0]));
      store_up_to(row + e, fma(set1(now[0]), load_up_to(part + i * size + e, size - e), kept), size - e);
    }
    total[i] = std::fma(now[0], part_total[i], before[0] * total[i]), largest[i] = top;
  }
}

static void join(const float* parts, const float* largest, const float* total, int64_t count, int64_t size,
                 float* out) {
  float top = -INFINITY;
  for (int64_t p = 0; p < count; ++p) top = std::max(top, largest[p]);
  float sum_of_all = 0;
  for (int64_t e = 0; e < size; e += 16) store_up_to(out + e, zero(), size - e);
  for (int64_t p = 0; p < count; ++p) {
    if (largest[p] == -INFINITY) continue;
    alignas(64) float factor[16];
    store(factor, exponential(set1(largest[p] - top)));
    sum_of_all = std::fma(factor[0], total[p], sum_of_all);
    for (int64_t e = 0; e < size; e += 16) {
      const F so_far = load_up_to(out + e, size - e);
      store_up_to(out + e, fma(set1(factor[0]), load_up_to(parts + p * size + e, size - e), so_far), size - e);
    }
  }
  const F share = set1(1.0f / sum_of_all);
  for (int64_t e = 0; e < size; e += 16) store_up_to(out + e, mul(load_up_to(out + e, size - e), share), size - e);
}

static const sportsllm::Variant& functions(const char* name) {
  static const sportsllm::Variant all = {name,   rms_norm, layer_norm, round, product, rotate,
                                         swiglu, geglu,    add,   scale,      to_int8, to_half,      attend,         index_part,
                                         add_shares, weighted_sum, dots, merge_softmax, join};
  return all;
}

}  // namespace KERNEL_VARIANT
