// One decoder layer: attention over a cache and a gated feed-forward, each after a norm, and before one if there is any, and
// added to what came in; or its attention.
//
// Shapes: B sequences, T new tokens of each, M = B * T, D hidden size, H query heads, K key/value heads, E head size,
// P and S tokens that the cache has room for before and after.
#pragma once

#include <memory>

#include "kernels.h"
#include "rotary.h"
#include "scratch.h"

namespace sportsllm {

struct LayerWeights {
  int64_t hidden = 0, heads = 0, kv_heads = 0, head_size = 0;
  int64_t inner = 0;  // 0 without the second half
  float epsilon = 0, scale = 0;  // of scores
  int64_t window = 0;            // tokens that one sees, itself included; 0 for all
  bool gelu = false, gated = true;  // gelu instead of silu; whether gate_up has a gate, above
  CacheType cache = CacheType::kFloat;
  const float *norm = nullptr, *second_norm = nullptr;        // (D)
  const float *norm_bias = nullptr, *second_norm_bias = nullptr;  // (D), then they are LayerNorm, or none
  const float *attention_output_norm = nullptr, *feed_forward_output_norm = nullptr;  // (D), or none
  const float *query_norm = nullptr, *key_norm = nullptr;     // (E), or none
  std::shared_ptr<const RotaryTable> rotary;                  // of E / 2 pairs, or none
  const float *key_scale = nullptr, *value_scale = nullptr;   // (K, E) of an INT8 cache, or none
  Matrix qkv, output, gate_up, down;
};

struct LayerInputs {
  int64_t batch = 0, tokens = 0, keep = 0;  // last tokens whose outputs are wanted; all of them for 0
  const float *x = nullptr, *residual = nullptr;  // (B, T, D); residual may be missing
  const int32_t* last = nullptr;                  // (B), each sequence's length less 1, the new tokens with it
  const void *past_key = nullptr, *past_value = nullptr;
  int64_t past_room = 0, room = 0;                // P, S
  void *key = nullptr, *value = nullptr;          // (B, K, S, E), the same memory as past or other
  // (B, kept, D): what the second half adds, without one what it reads; and what it is added to.
  float *out = nullptr, *residual_out = nullptr;

  int64_t kept() const { return keep > 0 && keep < tokens ? keep : tokens; }
  // Position of a sequence's first new token.
  int64_t start(int64_t b) const { return last[b] + 1 > tokens ? last[b] + 1 - tokens : 0; }
};

using RunParallel = void (*)(void* context, void (*work)(void*, size_t), void* team);

// Copies one head's cached keys or values from past to present and clears what lies behind the new tokens; does nothing
// if past and present are one buffer.
void copy_past(const LayerWeights& weights, const LayerInputs& inputs, int64_t b, int64_t kv, bool key);

// Runs the layer; `parallel` calls work(team) once or more, from as many threads as it likes.
void run_layer(const LayerWeights& weights, const LayerInputs& inputs, Scratch* scratch, RunParallel parallel,
               void* context);

struct HeadWeights {
  int64_t hidden = 0;
  float epsilon = 0;
  const float *norm = nullptr, *norm_bias = nullptr;  // LayerNorm with a bias
  Matrix table;
};

// Logits (M, V) of the normed sum of x and residual, (M, D).
void run_head(const HeadWeights& weights, const float* x, const float* residual, int64_t rows, float* logits,
              Scratch* scratch, RunParallel parallel, void* context);

}  // namespace sportsllm
