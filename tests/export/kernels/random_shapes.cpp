// Random shapes through the functions of a variant and through whole layers: `random_shapes SEED CASES [hash]`.
//
// The variant is the one that SPORTSLLM_KERNELS names. Functions are compared with float64 here; layers are run by one, two
// and three threads. The line printed holds, for each case, a hash of every number found until then, which must be the same
// for all variants. With `hash` nothing is compared with float64, and layers are run by one to three threads in turn: another
// run did the rest with the numbers of this hash.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "feed_forward.h"
#include "latent.h"
#include "layer.h"
#include "selected.h"

using namespace sportsllm;

namespace {

uint64_t state, hash = 14695981039346656037u;
bool compared = true;

uint64_t random_bits() {  // xorshift64*
  state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
  return state * 2685821657736338717u;
}
int64_t between(int64_t low, int64_t high) { return low + static_cast<int64_t>((random_bits() >> 11) % (high - low + 1)); }
float uniform(float low, float high) { return low + (high - low) * static_cast<float>(random_bits() >> 40) / (1 << 24); }
template <typename T>
T one_of(std::initializer_list<T> choices) { return choices.begin()[between(0, static_cast<int64_t>(choices.size()) - 1)]; }

// On the heap with no byte to spare, so that the address sanitizer sees a read behind the end.
template <typename T>
using Numbers = std::vector<T>;

Numbers<float> floats(int64_t count, float size) {
  Numbers<float> out(count);
  const float by = one_of({size, size, size, size, 0.0f, 1e-39f, size * 1e12f});
  for (float& x : out) x = uniform(-by, by);
  return out;
}
Numbers<float> ordinary(int64_t count, float low, float high) {
  Numbers<float> out(count);
  for (float& x : out) x = uniform(low, high);
  return out;
}
Numbers<uint8_t> bytes(int64_t count) {
  Numbers<uint8_t> out(count);
  const int64_t kind = between(0, 5);
  for (uint8_t& x : out) x = static_cast<uint8_t>(kind == 0 ? 0 : kind == 1 ? 255 : random_bits() >> 20);
  return out;
}

template <typename T>
void keep(const T* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint64_t bits = 0;
    std::memcpy(&bits, x + i, sizeof(T));
    hash = (hash ^ bits) * 1099511628211u;
  }
}

void check(bool holds, const char* what, double found, double wanted) {
  if (holds) return;
  std::printf("%s: found %g, wanted %g\n", what, found, wanted);
  std::exit(1);
}
void near(const char* what, double found, double wanted, double size) {
  check(std::fabs(found - wanted) <= 1e-5 * size + 1e-30, what, found, wanted);
}

// What the bits of a float16 say, by the format's definition.
double value_of_half(uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  const double size = exponent == 31 ? (fraction ? NAN : INFINITY)
                                     : std::ldexp(exponent ? 1024 + fraction : fraction, std::max(exponent, 1) - 25);
  return half & 0x8000 ? -size : size;
}

// A float16 just below an ordinary number, as its bits.
uint16_t half_below(float x) {
  int exponent;
  const float fraction = std::frexp(x, &exponent);
  return static_cast<uint16_t>((exponent + 14) << 10 | (static_cast<int>(fraction * 2048) & 1023));
}

struct Owned : Matrix {
  Numbers<uint8_t> all_packed, all_zeros;
  Numbers<uint16_t> all_scales;
  Numbers<float> all_bias;

  Owned(int64_t n, int64_t k, float size) {
    rows = n, columns = k, bits = one_of({4, 8}), block = one_of({32, 64, 128, 256});
    all_packed = bytes(rows * row_bytes()), packed = all_packed.data();
    for (const float scale : ordinary(rows * blocks(), 0.1f * size, size)) all_scales.push_back(half_below(scale));
    scales = all_scales.data();
    if (between(0, 1)) all_zeros = bytes(rows * zero_bytes()), zeros = all_zeros.data();
    if (between(0, 1)) all_bias = ordinary(rows, -1, 1), bias = all_bias.data();
  }

  double at(int64_t n, int64_t k) const {
    const int64_t g = k / block;
    const uint8_t byte = packed[n * row_bytes() + k * bits / 8];
    const int number = bits == 8 ? byte : byte >> (k % 2 * 4) & 15;
    int zero = 1 << (bits - 1);
    if (zeros != nullptr) {
      const uint8_t of = zeros[n * zero_bytes() + g * bits / 8];
      zero = bits == 8 ? of : of >> (g % 2 * 4) & 15;
    }
    return value_of_half(scales[n * blocks() + g]) * (number - zero);
  }
};

// The rounded value of column k, found where kernels.h says it lies.
double rounded_at(const Rounded& x, int64_t m, int64_t k) {
  const int64_t size = part_columns(x.bits), part = m * x.chunks * 4 + k / size, i = k % size;
  const int8_t* chunk = x.numbers + part / 4 * 4 * size + part % 4 * 16;
  return static_cast<double>(x.scales[part * 4]) * chunk[x.bits == 4 ? i / 2 + i % 2 * 64 : i];
}

// `rounded`, `weights` and `sizes`: the values of all inputs and weights, and the largest that the weights could have.
void compare_product(const Owned& w, const double* rounded, const double* weights, const double* sizes, const float* inputs,
                     const float* found) {
  const int64_t group = part_columns(w.bits);  // numbers that share a scale
  double largest = 0;
  for (int64_t k = 0; k < w.columns; ++k) {
    if (k % group == 0) {
      largest = 0;
      for (int64_t i = k; i < std::min(w.columns, k + group); ++i) largest = std::max(largest, std::fabs(double{inputs[i]}));
    }
    check(std::fabs(rounded[k] - inputs[k]) <= largest / 253 + 1e-30, "rounding", rounded[k], inputs[k]);
  }
  for (int64_t n = 0; n < w.rows; ++n) {
    double wanted = w.bias == nullptr ? 0 : w.bias[n], size = std::fabs(wanted);
    for (int64_t k = 0; k < w.columns; ++k) {
      wanted += *weights++ * rounded[k];
      size += *sizes++ * std::fabs(rounded[k]);
    }
    near("product", found[n], wanted, size);
  }
}

void product_case(const Variant& v) {
  const int64_t rows = between(1, 70), columns = between(1, 600);
  const Owned w(rows, columns, 0.1f);
  const int64_t m = one_of({1, 2, 3, 5, 8, 9, 17, 40, 129});
  const Numbers<float> x = floats(m * w.columns, 1);
  Numbers<float> found(m * w.rows);
  const int64_t middle = between(0, w.rows);
  Scratch scratch;
  scratch.begin_counting(), scratch.take_rounded(m, w), scratch.begin();
  Rounded rounded = scratch.take_rounded(m, w);
  for (int64_t i = 0; i < m; ++i) {
    const int64_t cut = between(0, w.columns / 32) * 32;
    if (cut > 0) v.round(x.data() + i * w.columns, i, 0, cut, &rounded);
    if (cut < w.columns) v.round(x.data() + i * w.columns, i, cut, w.columns, &rounded);
  }
  if (middle > 0) v.product(w, 0, middle, rounded, 0, m, found.data(), w.rows);
  if (middle < w.rows) v.product(w, middle, w.rows, rounded, 0, m, found.data() + middle, w.rows);
  Numbers<double> values(m * columns), weights(rows * columns), sizes(rows * columns);
  for (int64_t i = 0; i < m * columns; ++i) values[i] = rounded_at(rounded, i / columns, i % columns);
  keep(values.data(), m * columns);
  for (int64_t i = 0; compared && i < rows * columns; ++i) {
    weights[i] = w.at(i / columns, i % columns);
    sizes[i] = value_of_half(w.scales[i / columns * w.blocks() + i % columns / w.block]) * (w.bits == 4 ? 15 : 255);
  }
  for (int64_t i = 0; compared && i < m; ++i) {
    compare_product(w, &values[i * columns], weights.data(), sizes.data(), &x[i * columns], &found[i * rows]);
  }
  const int64_t one = between(0, m - 1);
  Numbers<float> alone(w.rows);
  v.product(w, 0, w.rows, rounded, one, one + 1, alone.data() - one * w.rows, w.rows);
  check(std::memcmp(alone.data(), &found[one * w.rows], w.rows * sizeof(float)) == 0, "a row alone, of rows", m, m);
  keep(found.data(), m * w.rows);
}

CacheType cache_type() { return static_cast<CacheType>(between(0, 2)); }

void half_case(const Variant& v) {
  const int64_t size = between(1, 70);
  Numbers<float> x = floats(size, 6);
  for (int64_t i = 0; i < size; ++i) {
    const int kind = static_cast<int>(between(0, 3));
    if (kind == 1) x[i] = static_cast<float>(between(-4096, 4096));  // ties
    if (kind < 2) x[i] = std::ldexp(x[i], static_cast<int>(kind == 0 ? between(-30, 10) : between(-28, 6)));
  }
  Numbers<uint16_t> found(size);
  v.to_half(x.data(), size, found.data());
  keep(found.data(), size);
  for (int64_t i = 0; compared && i < size; ++i) {
    const double wide = x[i];
    const double step = std::ldexp(1.0, std::max(wide == 0 ? -14 : std::ilogb(wide), -14) - 10);
    const double wanted = std::fabs(wide) >= 65520 ? std::copysign(INFINITY, wide) : std::nearbyint(wide / step) * step;
    check(value_of_half(found[i]) == wanted, "float16", value_of_half(found[i]), wanted);
  }
}

void attention_case(const Variant& v) {
  const int64_t e = 2 * between(1, 70), n = between(1, 9), seen = between(1, 2 * kAttendAtOnce);
  const CacheType type = cache_type();
  const Numbers<float> keys = ordinary(seen * e, -1, 1), values = ordinary(seen * e, -1, 1);
  Numbers<int8_t> rounded_keys(seen * e), rounded_values(seen * e);
  Numbers<uint16_t> half_keys(seen * e), half_values(seen * e);
  const Numbers<float> steps(e, 1.0f / 64);
  for (int64_t s = 0; s < seen; ++s) {
    v.to_int8(keys.data() + s * e, steps.data(), e, rounded_keys.data() + s * e);
    v.to_int8(values.data() + s * e, steps.data(), e, rounded_values.data() + s * e);
    v.to_half(keys.data() + s * e, e, half_keys.data() + s * e);
    v.to_half(values.data() + s * e, e, half_values.data() + s * e);
  }
  const Numbers<float> queries = ordinary(n * e, -0.3f, 0.3f);
  std::vector<const float*> pointers;
  std::vector<int64_t> limits;
  for (int64_t i = 0; i < n; ++i) pointers.push_back(queries.data() + i * e), limits.push_back(between(1, seen));
  Cached cached = {keys.data(), values.data(), type, between(0, 1) * between(1, seen)};
  if (type == CacheType::kInt8) cached.keys = rounded_keys.data(), cached.values = rounded_values.data();
  if (type == CacheType::kHalf) cached.keys = half_keys.data(), cached.values = half_values.data();
  const auto number = [&](const float* x, const int8_t* whole, const uint16_t* half, int64_t at) {
    return type == CacheType::kInt8 ? whole[at] : type == CacheType::kHalf ? value_of_half(half[at]) : double{x[at]};
  };
  const int64_t parts = (seen + kAttendAtOnce - 1) / kAttendAtOnce;
  Numbers<float> scores(n * kAttendAtOnce), out(n * parts * e), largest(n * parts), total(n * parts);
  Numbers<float> part(n * e), most(n), sums(n), joined(n * e), rows(n * e), row_most(n), row_sums(n), taken_in(n * e);
  for (int64_t p = 0; p < parts; ++p) {
    const int64_t begin = p * kAttendAtOnce;
    v.attend(pointers.data(), limits.data(), n, cached, begin, std::min(seen, begin + kAttendAtOnce), e, scores.data(),
             part.data(), most.data(), sums.data());
    if (p == 0) {
      rows = part, row_most = most, row_sums = sums;
    } else {
      v.merge_softmax(part.data(), most.data(), sums.data(), n, e, rows.data(), row_most.data(), row_sums.data());
    }
    for (int64_t i = 0; i < n; ++i) {
      std::memcpy(&out[(i * parts + p) * e], &part[i * e], e * sizeof(float));
      largest[i * parts + p] = most[i], total[i * parts + p] = sums[i];
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    v.join(&out[i * parts * e], &largest[i * parts], &total[i * parts], parts, e, &joined[i * e]);
    v.join(&rows[i * e], &row_most[i], &row_sums[i], 1, e, &taken_in[i * e]);
  }
  keep(joined.data(), n * e), keep(taken_in.data(), n * e);
  for (int64_t i = 0; compared && i < n; ++i) {
    std::vector<double> wanted(e);
    double all = 0;
    for (int64_t s = cached.window > 0 ? std::max<int64_t>(0, limits[i] - cached.window) : 0; s < limits[i]; ++s) {
      double score = 0;
      for (int64_t c = 0; c < e; ++c) {
        score += queries[i * e + c] * number(keys.data(), rounded_keys.data(), half_keys.data(), s * e + c);
      }
      const double weight = std::exp(score);
      all += weight;
      for (int64_t c = 0; c < e; ++c) {
        wanted[c] += weight * number(values.data(), rounded_values.data(), half_values.data(), s * e + c);
      }
    }
    for (int64_t c = 0; c < e; ++c) {
      near("attention", joined[i * e + c], wanted[c] / all, type == CacheType::kInt8 ? 640 : 10);
      near("attention, taken in", taken_in[i * e + c], wanted[c] / all, type == CacheType::kInt8 ? 640 : 10);
    }
  }
}

void small_case(const Variant& v) {
  const int64_t size = 2 * between(1, 60);
  const Numbers<float> x = floats(size, 3), y = floats(size, 3), angles = ordinary(size, -3, 3);
  Numbers<float> found(size), turned = x, gate = x, cosine(size / 2), sine(size / 2);
  double squares = 0;
  for (float one : x) squares += static_cast<double>(one) * one;
  v.rms_norm(x.data(), y.data(), size, 1e-5f, found.data());
  keep(found.data(), size);
  for (int64_t i = 0; i < size; ++i) {
    const double wanted = x[i] / std::sqrt(squares / size + 1e-5) * y[i];
    near("norm", found[i], wanted, std::fabs(wanted));
  }
  double mean = 0, variance = 0, largest = 0;
  for (float one : x) mean += static_cast<double>(one) / size, largest = std::max<double>(largest, std::fabs(one));
  for (float one : x) variance += (one - mean) * (one - mean) / size;
  v.layer_norm(x.data(), y.data(), angles.data(), size, 1e-5f, found.data());
  keep(found.data(), size);
  for (int64_t i = 0; i < size; ++i) {
    const double factor = y[i] / std::sqrt(variance + 1e-5), wanted = (x[i] - mean) * factor + angles[i];
    near("layer norm", found[i], wanted, std::fabs(wanted) + std::fabs(angles[i]) + largest * std::fabs(factor));
  }
  for (int64_t i = 0; i < size / 2; ++i) cosine[i] = std::round(std::cos(angles[i]) * 64) / 64, sine[i] = std::round(std::sin(angles[i]) * 64) / 64;
  v.rotate(turned.data(), cosine.data(), sine.data(), size);
  Numbers<float> geglu = gate;
  v.swiglu(gate.data(), y.data(), size);
  v.geglu(geglu.data(), y.data(), size);
  for (int64_t i = 0; i < size / 2; ++i) {
    const double a = x[i], b = x[size / 2 + i], c = cosine[i], s = sine[i];
    near("rotation", turned[i], a * c - b * s, std::fabs(a) + std::fabs(b));
    near("rotation", turned[size / 2 + i], b * c + a * s, std::fabs(a) + std::fabs(b));
  }
  for (int64_t i = 0; i < size; ++i) {
    const double wanted = x[i] < -80 ? 0 : x[i] / (1 + std::exp(-static_cast<double>(x[i]))) * y[i];
    const double wide = x[i], gelu = wide / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (wide + 0.044715 * wide * wide * wide))) * y[i];
    near("geglu", geglu[i], gelu, std::fabs(wide * y[i]) * 1e-1);
    near("swiglu", gate[i], wanted, std::fabs(wanted) + (x[i] < -80 ? std::fabs(static_cast<double>(x[i]) * y[i]) : 0));
  }
  keep(turned.data(), size), keep(gate.data(), size), keep(geglu.data(), size);
}

int threads_of_run, fewest_threads = 1, most_threads = 3;

void parallel(void*, void (*work)(void*, size_t), void* team) {
  std::vector<std::thread> others;
  for (int i = 1; i < threads_of_run; ++i) others.emplace_back(work, team, 0);
  work(team, 0);
  for (std::thread& other : others) other.join();
}

void layer_case() {
  LayerWeights w;
  w.kv_heads = between(1, 3), w.heads = w.kv_heads * between(1, 4), w.head_size = 2 * between(1, 20);
  w.hidden = between(1, 100), w.inner = between(1, 150), w.epsilon = 1e-5f;
  const int64_t e = w.head_size, batch = between(1, 3);
  const Numbers<float> norm = ordinary(w.hidden, 0.5f, 1.5f), head_norm = ordinary(e, 0.5f, 1.5f);
  const Numbers<float> frequencies = ordinary(e / 2, 0, 1);
  const Numbers<float> steps = ordinary(w.kv_heads * e, 0.02f, 0.1f);
  w.norm = w.second_norm = norm.data();
  if (between(0, 1)) w.query_norm = w.key_norm = head_norm.data();
  w.cache = cache_type();
  if (w.cache == CacheType::kInt8) w.key_scale = w.value_scale = steps.data();
  const Owned qkv((w.heads + 2 * w.kv_heads) * e, w.hidden, 0.02f), output(w.hidden, w.heads * e, 0.02f);
  const Owned gate_up(2 * w.inner, w.hidden, 0.02f), down(w.hidden, w.inner, 0.02f);
  w.qkv = qkv, w.output = output, w.gate_up = gate_up, w.down = down;
  for (Matrix* matrix : {&w.qkv, &w.output, &w.gate_up, &w.down}) matrix->wide = between(0, 3) == 0;
  w.scale = 1 / std::sqrt(static_cast<float>(e)), w.gelu = between(0, 1) != 0;
  if (between(0, 1)) w.window = between(1, 350);
  if (between(0, 3) != 0) w.rotary = RotaryTable::shared(frequencies.data(), e / 2, 1.25f);
  if (between(0, 1)) w.attention_output_norm = norm.data();
  if (between(0, 1)) w.feed_forward_output_norm = norm.data();
  if (between(0, 2) == 0) w.norm_bias = w.second_norm_bias = norm.data();
  if (between(0, 2) == 0 && w.inner > 0) w.gated = false, w.gate_up.rows = w.inner;
  if (between(0, 2) == 0) w.inner = 0;  // attention alone
  std::vector<int64_t> calls = {one_of({1, 3, 20, 300}), 1, between(1, 8), 1};
  std::vector<Numbers<float>> inputs;
  int64_t room = between(0, 9);
  for (int64_t tokens : calls) inputs.push_back(ordinary(batch * tokens * w.hidden, -2, 2)), room += tokens;
  const int64_t keep_last = between(0, 2), row = w.kv_heads * room * e * cache_bytes(w.cache);
  Numbers<float> first;
  for (threads_of_run = fewest_threads; threads_of_run <= most_threads; ++threads_of_run) {
    Numbers<uint8_t> keys(batch * row), values(batch * row);
    Numbers<float> all;
    Scratch scratch;
    std::vector<int32_t> last(batch, -1);
    for (size_t call = 0; call < calls.size(); ++call) {
      LayerInputs in;
      in.batch = batch, in.tokens = calls[call], in.keep = keep_last, in.x = inputs[call].data();
      if (call % 2 == 1) in.residual = inputs[call].data();
      for (int32_t& end : last) end += static_cast<int32_t>(in.tokens);
      in.last = last.data(), in.past_key = in.key = keys.data(), in.past_value = in.value = values.data();
      in.past_room = in.room = room;
      Numbers<float> out(batch * in.kept() * w.hidden), residual(out.size());
      in.out = out.data(), in.residual_out = residual.data();
      run_layer(w, in, &scratch, parallel, nullptr);
      all.insert(all.end(), out.begin(), out.end()), all.insert(all.end(), residual.begin(), residual.end());
    }
    if (threads_of_run == fewest_threads) {
      first = all;
      keep(all.data(), static_cast<int64_t>(all.size()));
      for (float x : all) check(std::isfinite(x), "a layer's number", x, 0);
    } else {
      check(std::memcmp(first.data(), all.data(), all.size() * sizeof(float)) == 0, "threads", threads_of_run, 1);
    }
  }
}

// Against float64: shares by softmax over all that a query sees, the best blocks, attention to their tokens.
void selected_case() {
  SelectedShape w;
  w.kv_heads = between(1, 3), w.heads = w.kv_heads * between(1, 3), w.head_size = 2 * between(1, 20);
  w.index_heads = between(1, 35), w.index_size = between(1, 40), w.block = between(1, 40), w.newest = between(1, 3);
  w.blocks = w.newest + between(2, 6), w.scale = 0.3f;
  SelectedInputs in;
  in.batch = between(1, 3), in.tokens = one_of({1, 3, 20});
  const int64_t e = w.head_size, size = w.index_size, group = w.heads / w.kv_heads;
  in.room = in.tokens + between(0, 3 * w.blocks * w.block);
  std::vector<int32_t> last(in.batch);
  for (int32_t& end : last) end = static_cast<int32_t>(between(in.tokens - 1, in.room - 1));
  const Numbers<float> query = ordinary(in.batch * in.tokens * w.heads * e, -1, 1);
  const Numbers<float> index_query = ordinary(in.batch * in.tokens * w.index_heads * size, -1, 1);
  const Numbers<float> keys = ordinary(in.batch * w.kv_heads * in.room * e, -1, 1), values = ordinary(keys.size(), -1, 1);
  const Numbers<float> index = ordinary(in.batch * in.room * size, -1, 1);
  in.query = query.data(), in.index_query = index_query.data(), in.last = last.data();
  in.key = keys.data(), in.value = values.data(), in.index_key = index.data();
  Numbers<float> first;
  for (threads_of_run = fewest_threads; threads_of_run <= most_threads; ++threads_of_run) {
    Numbers<float> out(query.size());
    in.out = out.data();
    Scratch scratch;
    scratch.workers = threads_of_run;
    run_selected(w, in, &scratch, parallel, nullptr);
    if (threads_of_run == fewest_threads) {
      first = out;
    } else {
      check(std::memcmp(first.data(), out.data(), out.size() * sizeof(float)) == 0, "threads", threads_of_run, 1);
    }
  }
  keep(first.data(), static_cast<int64_t>(first.size()));
  for (int64_t row = 0; compared && row < in.batch * in.tokens; ++row) {
    const int64_t b = row / in.tokens, seen = last[b] + 1 - in.tokens + row % in.tokens + 1, own = (seen - 1) / w.block;
    std::vector<double> shares(own + 1);
    for (int64_t j = 0; j < w.index_heads; ++j) {
      std::vector<double> weights(seen);
      double all = 0;
      for (int64_t s = 0; s < seen; ++s) {
        double score = 0;
        for (int64_t c = 0; c < size; ++c) {
          score += static_cast<double>(index_query[(row * w.index_heads + j) * size + c]) * index[(b * in.room + s) * size + c];
        }
        all += weights[s] = std::exp(score * w.scale);
      }
      for (int64_t s = 0; s < seen; ++s) shares[s / w.block] += weights[s] / all;
    }
    std::vector<int64_t> others;
    for (int64_t block = 1; block <= own - w.newest; ++block) others.push_back(block);
    std::sort(others.begin(), others.end(), [&](int64_t x, int64_t y) { return shares[x] > shares[y]; });
    const int64_t wanted = w.blocks - w.newest - 1;
    if (own >= w.blocks) {
      // Level shares go either way.
      if (shares[others[wanted - 1]] - shares[others[wanted]] < 1e-4 * shares[others[wanted]]) continue;
      others.resize(wanted);
    }
    std::vector<bool> open(own + 1);
    open[0] = true;
    for (int64_t block : others) open[block] = true;
    for (int64_t block = std::max<int64_t>(0, own - w.newest + 1); block <= own; ++block) open[block] = true;
    for (int64_t h = 0; h < w.heads; ++h) {
      std::vector<double> found(e);
      double all = 0;
      for (int64_t s = 0; s < seen; ++s) {
        if (!open[s / w.block]) continue;
        const int64_t at = ((b * w.kv_heads + h / group) * in.room + s) * e;
        double score = 0;
        for (int64_t c = 0; c < e; ++c) score += static_cast<double>(query[(row * w.heads + h) * e + c]) * keys[at + c];
        const double weight = std::exp(score * w.scale);
        all += weight;
        for (int64_t c = 0; c < e; ++c) found[c] += weight * values[at + c];
      }
      for (int64_t c = 0; c < e; ++c) near("selected", first[(row * w.heads + h) * e + c], found[c] / all, 10);
    }
  }
}

// Written by `run_latent_tokens`, read by `run_latent`; that against float64 in the form that makes keys and values.
void latent_case() {
  LatentShape w;
  w.heads = between(1, 13), w.rank = between(1, 70), w.rotated = 2 * between(1, 20), w.unrotated = between(1, 40);
  w.value = between(1, 40), w.type = between(0, 1) != 0 ? CacheType::kInt8 : CacheType::kFloat;
  LatentTokens made;
  made.batch = between(1, 3), made.tokens = one_of({1, 3, 20}), made.room = made.tokens + between(0, 600);
  made.epsilon = 1e-5f, made.factor = 0.2f;
  const int64_t width = w.rank + w.rotated, rows = made.batch * made.tokens, numbers = made.batch * made.room * width;
  std::vector<int32_t> last(made.batch);
  for (int32_t& end : last) end = static_cast<int32_t>(between(made.tokens - 1, made.room - 1));
  const Numbers<float> query = ordinary(rows * w.heads * (w.unrotated + w.rotated), -1, 1);
  const Numbers<float> latent = ordinary(rows * width, -1, 1), turns = ordinary(rows * w.rotated, -1, 1);
  const Numbers<float> norm = ordinary(w.rank, 0.5, 1), scale = ordinary(width, 0.005, 0.02), past = ordinary(numbers, -1, 1);
  const Numbers<float> keys = ordinary(w.heads * w.unrotated * w.rank, -0.3, 0.3);
  const Numbers<float> values = ordinary(w.heads * w.value * w.rank, -1, 1);
  Numbers<int8_t> rounded(numbers);
  for (int64_t i = 0; i < numbers; ++i) rounded[i] = static_cast<int8_t>(100 * past[i]);
  const bool int8 = w.type == CacheType::kInt8, in_place = between(0, 1) != 0;
  made.query = query.data(), made.latent = latent.data(), made.last = last.data(), made.norm = norm.data();
  made.cosine = turns.data(), made.sine = turns.data() + rows * (w.rotated / 2), made.scale = scale.data();
  Numbers<float> first;
  Numbers<uint8_t> state;
  for (threads_of_run = fewest_threads; threads_of_run <= most_threads; ++threads_of_run) {
    const char* from = int8 ? reinterpret_cast<const char*>(rounded.data()) : reinterpret_cast<const char*>(past.data());
    Numbers<uint8_t> before(numbers * cache_bytes(w.type)), after(before.size());
    std::memcpy(before.data(), from, before.size());
    Numbers<float> unrotated(rows * w.heads * w.unrotated), rotated(rows * w.heads * w.rotated), out(rows * w.heads * w.value);
    made.past = before.data(), made.present = in_place ? before.data() : after.data();
    made.unrotated = unrotated.data(), made.rotated = rotated.data();
    Scratch scratch;
    scratch.workers = threads_of_run;
    run_latent_tokens(w, made, &scratch, parallel, nullptr);
    LatentInputs in;
    in.batch = made.batch, in.tokens = made.tokens, in.room = made.room, in.last = last.data(), in.state = made.present;
    in.unrotated = unrotated.data(), in.rotated = rotated.data(), in.keys = keys.data(), in.values = values.data();
    in.scale = scale.data(), in.out = out.data();
    run_latent(w, in, &scratch, parallel, nullptr);
    Numbers<float> all = unrotated;
    all.insert(all.end(), rotated.begin(), rotated.end()), all.insert(all.end(), out.begin(), out.end());
    if (threads_of_run == fewest_threads) {
      first = all, state = in_place ? before : after;
    } else {
      check(std::memcmp(first.data(), all.data(), all.size() * sizeof(float)) == 0, "threads", threads_of_run, 1);
      check(std::memcmp(state.data(), made.present, state.size()) == 0, "a cache of threads", threads_of_run, 1);
    }
  }
  keep(first.data(), static_cast<int64_t>(first.size())), keep(state.data(), static_cast<int64_t>(state.size()));
  const float *unrotated = first.data(), *rotated = unrotated + rows * w.heads * w.unrotated;
  const float* out = rotated + rows * w.heads * w.rotated;
  const auto cached = [&](int64_t at, int64_t c) {
    return int8 ? static_cast<double>(reinterpret_cast<const int8_t*>(state.data())[at * width + c]) * scale[c]
                : static_cast<double>(reinterpret_cast<const float*>(state.data())[at * width + c]);
  };
  for (int64_t row = 0; compared && row < rows; row += 7) {
    const int64_t b = row / made.tokens, t = row % made.tokens, seen = last[b] + 1 - made.tokens + t + 1;
    const int64_t h = row % w.heads, at = (b * w.heads + h) * made.tokens + t;
    std::vector<double> mixed(w.rank);
    double all = 0;
    for (int64_t s = 0; s < seen; ++s) {
      const int64_t place = b * made.room + s;
      double score = 0;
      for (int64_t n = 0; n < w.unrotated; ++n) {
        double key = 0;
        for (int64_t r = 0; r < w.rank; ++r) key += keys[(h * w.unrotated + n) * w.rank + r] * cached(place, r);
        score += unrotated[at * w.unrotated + n] * key;
      }
      for (int64_t e = 0; e < w.rotated; ++e) score += rotated[at * w.rotated + e] * cached(place, w.rank + e);
      const double weight = std::exp(score);
      all += weight;
      for (int64_t r = 0; r < w.rank; ++r) mixed[r] += weight * cached(place, r);
    }
    for (int64_t v = 0; v < w.value; ++v) {
      double found = 0;
      for (int64_t r = 0; r < w.rank; ++r) found += values[(h * w.value + v) * w.rank + r] * mixed[r] / all;
      near("latent", out[at * w.value + v], found, 20);
    }
  }
}

void feed_forward_case() {
  FeedForwardWeights w;
  w.hidden = between(1, 100), w.gated = between(0, 1) != 0;
  const int64_t experts = between(0, 6), shared = between(experts > 0 ? 0 : 1, 2), inner = between(1, 90);
  std::vector<Owned> owned;
  owned.reserve(2 * (experts + shared));
  for (int64_t n = 0; n < experts + shared; ++n) {
    const int64_t size = n < experts ? inner : between(1, 150);
    const Owned &up = owned.emplace_back(w.gated ? 2 * size : size, w.hidden, 0.02f), &down = owned.emplace_back(w.hidden, size, 0.02f);
    (n < experts ? w.experts : w.shared).push_back({up, down});
  }
  w.active = experts > 0 ? between(1, experts) : 0;
  FeedForwardInputs in;
  in.tokens = one_of({1, 2, 8, 9, 40});
  const Numbers<float> x = ordinary(in.tokens * w.hidden, -2, 2), weights = ordinary(in.tokens * w.active, 0, 1);
  Numbers<int64_t> chosen(in.tokens * w.active);
  for (int64_t& expert : chosen) expert = between(0, experts - 1);
  in.x = x.data(), in.weights = weights.data(), in.chosen = chosen.data();
  Numbers<float> first;
  for (threads_of_run = fewest_threads; threads_of_run <= most_threads; ++threads_of_run) {
    Numbers<float> out(in.tokens * w.hidden);
    in.out = out.data();
    Scratch scratch;
    scratch.workers = threads_of_run;
    run_feed_forward(w, in, &scratch, parallel, nullptr);
    if (threads_of_run == fewest_threads) {
      first = out;
      keep(out.data(), static_cast<int64_t>(out.size()));
      for (float y : out) check(std::isfinite(y), "a feed-forward's number", y, 0);
    } else {
      check(std::memcmp(first.data(), out.data(), out.size() * sizeof(float)) == 0, "threads", threads_of_run, 1);
    }
  }
}

}  // namespace

int main(int count, char** words) {
  if (count != 3 && count != 4) return 2;
  compared = count == 3;
  state = 2 * std::strtoull(words[1], nullptr, 10) + 1;
  const int64_t cases = std::atoll(words[2]);
  if (!wanted_runs_here()) return 3;
  const Variant& v = chosen_variant();
  std::printf("%s", v.name);
  for (int64_t i = 0; i < cases; ++i) {
    if (!compared) fewest_threads = most_threads = static_cast<int>(3 - i % 3);
    if (i % 4 == 0) layer_case();
    if (i % 4 == 2) selected_case();
    if (i % 4 == 3) latent_case();
    feed_forward_case();
    product_case(v);
    attention_case(v);
    half_case(v);
    small_case(v);
    std::printf(" %016llx", static_cast<unsigned long long>(hash));
  }
}
