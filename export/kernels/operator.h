// What the library says of an operator, and what the kernels of all share.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"
#include "ort_api.h"
#include "scratch.h"

namespace sportsllm {

// An operator's description; `base` is first, so that the runtime's pointer to it is one to this.
struct Operator {
  ort::CustomOp base;
  std::string name;
  CacheType cache = CacheType::kFloat;
  bool attention_alone = false, general = false;
  std::vector<ort::ElementType> inputs, outputs;
  std::vector<ort::Presence> presence;
};

inline ort::ElementType element_of(CacheType cache) {
  return cache == CacheType::kInt8 ? ort::kInt8 : cache == CacheType::kHalf ? ort::kHalf : ort::kFloat;
}

inline Scratch& scratch_of_thread() {
  thread_local Scratch scratch;
  return scratch;
}

}  // namespace sportsllm
