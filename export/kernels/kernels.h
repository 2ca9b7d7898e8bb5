// What a processor's variant computes: products with packed matrices, norms, attention. All variants give the same bits.
//
// Shapes: M rows of activations (tokens), N rows and K columns of a matrix, G blocks in one of its rows, E head size.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sportsllm {

// A fetch of memory holds its thread up until the page's address is found; those of many pages are found at once. Of a
// matrix they are found for so many bytes together, before any of them is fetched: a step of two threads is 1.1 times as
// fast, of one 1.2 times.
constexpr int64_t kPageGroup = 128 << 10;
static inline void prefetch_tlb(const void* start, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 4096) __builtin_prefetch(static_cast<const char*>(start) + at, 0, 2);
}

// A packed matrix as MatMulNBits publishes it: (N, G) blocks of `block` whole numbers of 4 or 8 bits, (N, G) float16 scales,
// and zero points, (N, G) of the same width, where there are any; without them the middle, 8 or 128, is zero.
struct Matrix {
  const uint8_t* packed = nullptr;
  const uint16_t* scales = nullptr;
  const uint8_t* zeros = nullptr;
  const float* bias = nullptr;
  int64_t rows = 0, columns = 0;
  int bits = 0, block = 0;
  bool wide = false;  // whether its inputs are rounded to 16 bits instead of 8

  static constexpr int64_t kMostBlocks = 1024;  // in a row

  int64_t blocks() const { return (columns + block - 1) / block; }
  int64_t row_bytes() const { return blocks() * block * bits / 8; }
  int64_t zero_bytes() const { return (blocks() * bits + 7) / 8; }
};

// Columns that whole numbers add up over: they share the scale of their activations. Matrices of 8 bits lose so little that
// a scale for 32 would lose more than they do.
constexpr int part_columns(int bits) { return bits == 4 ? 32 : 16; }

// Activations rounded to 8 bits for matrices of one format, with a scale for each part. A chunk of four parts serves 64 bytes
// of a matrix: 128 numbers at 4 bits, even ones before odd ones, 64 at 8.
struct Rounded {
  int bits = 0;                        // of the matrix
  int64_t columns = 0, chunks = 0;     // of one row
  int8_t* numbers = nullptr;           // (M, chunks, 128 or 64)
  float* scales = nullptr;             // (M, chunks, 4, 4), four times each
  int32_t* zero_correction = nullptr;  // (M, chunks, 4, 4): -8 or -128 times the sum of a part's numbers, and three zeros
  float* sums = nullptr;               // (M, chunks, 4, 4), of the rounded values, four times each
};

// What keys and values are cached in; INT8 with a scale for each column.
enum class CacheType { kFloat, kHalf, kInt8 };
constexpr int64_t cache_bytes(CacheType type) { return type == CacheType::kFloat ? 4 : type == CacheType::kHalf ? 2 : 1; }

// Keys and values of one key/value head of one sequence, (S, E).
struct Cached {
  const void* keys = nullptr;
  const void* values = nullptr;
  CacheType type = CacheType::kFloat;
  int64_t window = 0;  // how many tokens before its limit a query sees; 0 for all
};

struct Variant {
  const char* name;
  // Norm of x: x / sqrt(mean(x ** 2) + epsilon) * weight.
  void (*rms_norm)(const float* x, const float* weight, int64_t size, float epsilon, float* out);
  // (x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, int64_t size, float epsilon, float* out);
  // Rounds columns [start, end) of row m; start is a multiple of 32, and so is end unless it is the row's.
  void (*round)(const float* x, int64_t m, int64_t start, int64_t end, Rounded* out);
  // out[m * stride + n - first] = row m of x times row n of the matrix, plus its bias, for n in [first, last).
  void (*product)(const Matrix& w, int64_t first, int64_t last, const Rounded& x, int64_t m0, int64_t m1, float* out,
                  int64_t stride);
  // Turns pairs (i, i + E / 2) by cos and sin, (E / 2) each.
  void (*rotate)(float* x, const float* cosine, const float* sine, int64_t size);
  // gate * sigmoid(gate) * up, in place of gate.
  void (*swiglu)(float* gate, const float* up, int64_t size);
  // The same with gelu by its tanh form.
  void (*geglu)(float* gate, const float* up, int64_t size);
  void (*add)(const float* a, const float* b, int64_t size, float* out);
  void (*scale)(const float* a, const float* b, int64_t size, float* out);  // a * b
  // round(x / scale) between -128 and 127.
  void (*to_int8)(const float* x, const float* scale, int64_t size, int8_t* out);
  // The nearest float16, halves to even; infinite from 65,520 on.
  void (*to_half)(const float* x, int64_t size, uint16_t* out);
  // Attention of n queries over cached tokens [begin, end), of which query i sees those before limits[i].
  // out (n, E) is divided by nothing: the weights are exp(score - largest[i]) and total[i] is their sum.
  void (*attend)(const float* const* queries, const int64_t* limits, int64_t n, const Cached& cached, int64_t begin,
                 int64_t end, int64_t size, float* scores, float* out, float* largest, float* total);
  // Of sixteen heads, whose queries lie as (size, 16), and keys [begin, end) of `size` numbers: exp(score - largest), as
  // sums over each block of the keys and over all, (blocks, 16) and (16). Scores hold sixteen for each key.
  void (*index_part)(const float* queries, const float* keys, int64_t begin, int64_t end, int64_t size, int64_t block,
                     float* scores, float* sums, float* largest, float* total);
  // Joins such parts, each of `step` blocks but the last: adds each block's share of attention, the sum over the first
  // `heads`, to shares.
  void (*add_shares)(const float* sums, const float* largest, const float* total, int64_t parts, int64_t step,
                     int64_t blocks, int64_t heads, float* shares);
  // The sum of `count` rows of `size` numbers, weighted.
  void (*weighted_sum)(const float* weights, const float* rows, int64_t count, int64_t size, float* out);
  // The product of x with each of `count` rows of `size` numbers.
  void (*dots)(const float* x, const float* rows, int64_t count, int64_t size, float* out);
  // Takes another part of attention into what parts before it made: rows (n, E), each with its largest score and total.
  void (*merge_softmax)(const float* part, const float* part_largest, const float* part_total, int64_t n, int64_t size,
                  float* rows, float* largest, float* total);
  // Joins parts of attention over parts of the cache: (parts, E), each with its largest score and total.
  void (*join)(const float* parts, const float* largest, const float* total, int64_t count, int64_t size, float* out);
};

constexpr int64_t kAttendAtOnce = 256;  // tokens; scores holds n times as many

const Variant* variant_plain();
#if defined(__x86_64__)
const Variant* variant_avx2();
const Variant* variant_avx_vnni();
const Variant* variant_avx512();
#elif defined(__aarch64__)
const Variant* variant_neon();
const Variant* variant_dotprod();
const Variant* variant_i8mm();
#endif

// The fastest for this processor, or the one that the environment's SPORTSLLM_KERNELS names; see `wanted_runs_here`.
const Variant& chosen_variant();

// Whether this processor runs the variant that SPORTSLLM_KERNELS names, if it names one.
bool wanted_runs_here();

}  // namespace sportsllm
