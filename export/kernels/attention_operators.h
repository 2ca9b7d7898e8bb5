// Operators of attention over a written cache, with all shapes checked at each call.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "latent.h"
#include "operator.h"
#include "runtime.h"
#include "selected.h"

namespace sportsllm {

inline const float* floats_of(const Tensor& found, const std::vector<int64_t>& expected) {
  require(found.type == ort::kFloat && found.shape == expected, "an input has shape " + text(found.shape) + ", or another type");
  return static_cast<const float*>(found.data);
}

// Each sequence's length less 1, once all of them fit into the cache with the new tokens.
inline const int32_t* lengths_of(const Tensor& last, int64_t batch, int64_t tokens, int64_t room) {
  require(last.type == ort::kInt32 && last.shape == std::vector<int64_t>{batch}, "lengths have shape " + text(last.shape));
  const int32_t* lengths = static_cast<const int32_t*>(last.data);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t end = std::max<int64_t>(tokens, int64_t{lengths[b]} + 1);
    require(lengths[b] >= 0 && end <= room,
            "a sequence of " + std::to_string(end) + " tokens; the cache has room for " + std::to_string(room));
  }
  return lengths;
}

// Inputs of `SelectedAttention`: those of the enum; behind them come what the portable body reads, which is not used here.
class Selected {
 public:
  Selected(ort::Table table, const ort::KernelInfo* info, const Operator&) : runtime_(table) {
    SelectedShape& s = shape_;
    s.heads = runtime_.size(info, "num_heads"), s.kv_heads = runtime_.size(info, "kv_num_heads");
    s.head_size = runtime_.size(info, "head_size"), s.index_heads = runtime_.size(info, "index_heads");
    s.index_size = runtime_.size(info, "index_size"), s.block = runtime_.size(info, "block_size");
    s.blocks = runtime_.size(info, "blocks"), s.newest = runtime_.size(info, "newest_blocks");
    s.scale = runtime_.real(info, "scale");
    require(s.heads % s.kv_heads == 0, "heads disagree: " + std::to_string(s.heads) + " on " + std::to_string(s.kv_heads));
    require(s.blocks - s.newest >= 2, std::to_string(s.blocks) + " blocks, the newest " + std::to_string(s.newest) +
                                          " among them: there is nothing to choose");
  }

  void compute(ort::KernelContext* context) const {
    const SelectedShape& s = shape_;
    SelectedInputs in;
    const Tensor query = runtime_.input(context, kQuery), index_query = runtime_.input(context, kIndexQuery);
    require(query.shape.size() == 3, "queries have shape " + text(query.shape));
    in.batch = query.shape[0], in.tokens = query.shape[1], in.room = dimension(runtime_.input(context, kKey), 2);
    in.query = floats_of(query, {in.batch, in.tokens, s.heads * s.head_size});
    in.index_query = floats_of(index_query, {in.batch, in.tokens, s.index_heads * s.index_size});
    const std::vector<int64_t> heads = {in.batch, s.kv_heads, in.room, s.head_size};
    in.key = floats_of(runtime_.input(context, kKey), heads), in.value = floats_of(runtime_.input(context, kValue), heads);
    in.index_key = floats_of(runtime_.input(context, kIndexKey), {in.batch, in.room, s.index_size});
    in.last = lengths_of(runtime_.input(context, kLast), in.batch, in.tokens, in.room);
    in.out = static_cast<float*>(runtime_.output(context, 0, query.shape));
    if (in.batch * in.tokens == 0) return;
    Runtime::Call call = {&runtime_, context};
    run_selected(s, in, &scratch_of_thread(), &Runtime::parallel, &call);
  }

  const Runtime& runtime() const { return runtime_; }

 private:
  enum Input { kQuery, kIndexQuery, kLast, kKey, kValue, kIndexKey };

  Runtime runtime_;
  SelectedShape shape_;
};

inline LatentShape latent_shape(const Runtime& runtime, const ort::KernelInfo* info, CacheType type) {
  LatentShape s;
  s.heads = runtime.size(info, "num_heads"), s.rank = runtime.size(info, "rank");
  s.rotated = runtime.size(info, "rotated_size"), s.unrotated = runtime.size(info, "unrotated_size");
  s.value = runtime.size(info, "value_size"), s.type = type;
  require(s.rotated % 2 == 0, "rotated channels come in pairs: " + std::to_string(s.rotated));
  return s;
}

inline void require_state(const LatentShape& s, const Tensor& state, int64_t batch, int64_t room) {
  require(state.type == element_of(s.type) && state.shape == std::vector<int64_t>{batch, room, s.rank + s.rotated},
          "the cache has shape " + text(state.shape) + ", or another type");
}

// Inputs of `LatentTokens`: those of the enum, the scale for an INT8 cache; behind them come what the portable body reads.
class LatentWriter {
 public:
  LatentWriter(ort::Table table, const ort::KernelInfo* info, const Operator& op)
      : runtime_(table), shape_(latent_shape(runtime_, info, op.cache)), epsilon_(runtime_.real(info, "epsilon")),
        factor_(runtime_.real(info, "scale")) {}

  void compute(ort::KernelContext* context) const {
    const LatentShape& s = shape_;
    LatentTokens in;
    const Tensor query = runtime_.input(context, kQuery), past = runtime_.input(context, kPast);
    require(query.shape.size() == 3, "queries have shape " + text(query.shape));
    in.batch = query.shape[0], in.tokens = query.shape[1], in.room = dimension(past, 1);
    in.query = floats_of(query, {in.batch, in.tokens, s.heads * (s.unrotated + s.rotated)});
    in.latent = floats_of(runtime_.input(context, kLatent), {in.batch, in.tokens, s.rank + s.rotated});
    in.cosine = floats_of(runtime_.input(context, kCosine), {in.batch, in.tokens, 1, s.rotated / 2});
    in.sine = floats_of(runtime_.input(context, kSine), {in.batch, in.tokens, 1, s.rotated / 2});
    in.norm = floats_of(runtime_.input(context, kNorm), {s.rank});
    if (s.type == CacheType::kInt8) in.scale = floats_of(runtime_.input(context, kScale), {s.rank + s.rotated});
    require_state(s, past, in.batch, in.room);
    in.last = lengths_of(runtime_.input(context, kLast), in.batch, in.tokens, in.room);
    in.epsilon = epsilon_, in.factor = factor_, in.past = past.data;
    in.unrotated = static_cast<float*>(runtime_.output(context, 0, {in.batch, s.heads, in.tokens, s.unrotated}));
    in.rotated = static_cast<float*>(runtime_.output(context, 1, {in.batch, s.heads, in.tokens, s.rotated}));
    in.present = runtime_.output(context, 2, past.shape);
    Runtime::Call call = {&runtime_, context};
    run_latent_tokens(s, in, &scratch_of_thread(), &Runtime::parallel, &call);
  }

  const Runtime& runtime() const { return runtime_; }

 private:
  enum Input { kQuery, kLatent, kCosine, kSine, kLast, kPast, kNorm, kScale };

  Runtime runtime_;
  LatentShape shape_;
  float epsilon_, factor_;
};

// Inputs of `LatentAttention`, in the same way.
class Latent {
 public:
  Latent(ort::Table table, const ort::KernelInfo* info, const Operator& op)
      : runtime_(table), shape_(latent_shape(runtime_, info, op.cache)) {}

  void compute(ort::KernelContext* context) const {
    const LatentShape& s = shape_;
    LatentInputs in;
    const Tensor unrotated = runtime_.input(context, kUnrotated), state = runtime_.input(context, kState);
    require(unrotated.shape.size() == 4, "queries have shape " + text(unrotated.shape));
    in.batch = unrotated.shape[0], in.tokens = unrotated.shape[2], in.room = dimension(state, 1);
    in.unrotated = floats_of(unrotated, {in.batch, s.heads, in.tokens, s.unrotated});
    in.rotated = floats_of(runtime_.input(context, kRotated), {in.batch, s.heads, in.tokens, s.rotated});
    in.keys = floats_of(runtime_.input(context, kKeys), {s.heads, s.unrotated, s.rank});
    in.values = floats_of(runtime_.input(context, kValues), {s.heads, s.value, s.rank});
    if (s.type == CacheType::kInt8) in.scale = floats_of(runtime_.input(context, kScale), {s.rank + s.rotated});
    require_state(s, state, in.batch, in.room);
    in.state = state.data;
    in.last = lengths_of(runtime_.input(context, kLast), in.batch, in.tokens, in.room);
    in.out = static_cast<float*>(runtime_.output(context, 0, {in.batch, s.heads, in.tokens, s.value}));
    if (in.batch * in.tokens == 0) return;
    Runtime::Call call = {&runtime_, context};
    run_latent(s, in, &scratch_of_thread(), &Runtime::parallel, &call);
  }

  const Runtime& runtime() const { return runtime_; }

 private:
  enum Input { kUnrotated, kRotated, kLast, kState, kKeys, kValues, kScale };

  Runtime runtime_;
  LatentShape shape_;
};

}  // namespace sportsllm
