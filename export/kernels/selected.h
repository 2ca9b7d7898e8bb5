// Attention of new tokens to a few chosen blocks of a float32 cache, in which they are, and the indexer that chooses.
//
// Shapes: B sequences, T new tokens of each, H query heads, K key/value heads, E head size, J index heads, I their size,
// P tokens that the cache has room for.
#pragma once

#include "layer.h"

namespace sportsllm {

struct SelectedShape {
  int64_t heads = 0, kv_heads = 0, head_size = 0, index_heads = 0, index_size = 0;
  int64_t block = 0, blocks = 0, newest = 0;  // tokens of a block; blocks that are chosen, and newest ones among them
  float scale = 0;
};

struct SelectedInputs {
  int64_t batch = 0, tokens = 0, room = 0;
  const float *query = nullptr, *index_query = nullptr;  // (B, T, H * E) and (B, T, J * I), rotated
  const int32_t* last = nullptr;                         // (B), each sequence's length less 1, the new tokens with it
  const float *key = nullptr, *value = nullptr, *index_key = nullptr;  // (B, K, P, E) and (B, P, I), the new with them
  float* out = nullptr;                                                // (B, T, H * E)
};

void run_selected(const SelectedShape& shape, const SelectedInputs& inputs, Scratch* scratch, RunParallel parallel,
                  void* context);

}  // namespace sportsllm
