// The feed-forward half of a layer behind its norm: one part that all tokens read, or experts, of which each token is sent
// to a few. A part is SwiGLU, or silu between two matrices.
//
// Shapes: M tokens, D hidden size, I inner size of a part, N experts, K of them for a token.
#pragma once

#include <vector>

#include "layer.h"

namespace sportsllm {

struct Part {
  Matrix up;    // (2 I, D), the gate above; without a gate (I, D)
  Matrix down;  // (D, I)
};

struct FeedForwardWeights {
  int64_t hidden = 0, active = 0;  // D, K
  bool gated = true;
  std::vector<Part> experts, shared;  // N, and those that every token is sent to; one of the two may be empty
};

struct FeedForwardInputs {
  int64_t tokens = 0;
  const float* x = nullptr;         // (M, D)
  const int64_t* chosen = nullptr;  // (M, K), each below N
  const float* weights = nullptr;   // (M, K)
  float* out = nullptr;             // (M, D)
};

// What experts make of a token is added in their order, times its weight, then what shared parts make.
void run_feed_forward(const FeedForwardWeights& weights, const FeedForwardInputs& inputs, Scratch* scratch,
                      RunParallel parallel, void* context);

}  // namespace sportsllm
