// Multi-head latent attention: what becomes of new tokens' products before it, and attention of a few new tokens to the
// cached vectors themselves, in which the new ones are; the up-projections are folded into queries and outputs.
//
// Shapes: B sequences, T new tokens of each, H heads, R rank, E rotated channels, N unrotated ones, V value channels,
// C = R + E, P tokens that the cache has room for.
#pragma once

#include "layer.h"

namespace sportsllm {

struct LatentShape {
  int64_t heads = 0, rank = 0, rotated = 0, unrotated = 0, value = 0;
  CacheType type = CacheType::kFloat;
};

// New tokens' queries, split, turned and scaled, and their latent vectors and turned keys, written into the cache.
struct LatentTokens {
  int64_t batch = 0, tokens = 0, room = 0;
  const float *query = nullptr, *latent = nullptr;  // (B, T, H * (N + E)) and (B, T, C), as products give them
  const float *cosine = nullptr, *sine = nullptr;   // (B, T, E / 2)
  const int32_t* last = nullptr;                    // (B), each sequence's length less 1, the new tokens with it
  const float *norm = nullptr, *scale = nullptr;    // (R); (C), of an INT8 cache
  float epsilon = 0, factor = 0;                    // of the norm; of queries
  const void* past = nullptr;                       // (B, P, C)
  void* present = nullptr;                          // the same; may be `past` itself
  float *unrotated = nullptr, *rotated = nullptr;   // (B, H, T, N) and (B, H, T, E)
};

void run_latent_tokens(const LatentShape& shape, const LatentTokens& tokens, Scratch* scratch, RunParallel parallel,
                       void* context);

struct LatentInputs {
  int64_t batch = 0, tokens = 0, room = 0;
  const float *unrotated = nullptr, *rotated = nullptr;  // queries, (B, H, T, N) and (B, H, T, E), scaled
  const int32_t* last = nullptr;                         // (B), each sequence's length less 1, the new tokens with it
  const void* state = nullptr;                           // (B, P, C)
  const float *keys = nullptr, *values = nullptr;        // rows of kv_b_proj by head, (H, N, R) and (H, V, R)
  const float* scale = nullptr;                          // (C), of an INT8 cache
  float* out = nullptr;                                  // (B, H, T, V)
};

void run_latent(const LatentShape& shape, const LatentInputs& inputs, Scratch* scratch, RunParallel parallel,
                void* context);

}  // namespace sportsllm
