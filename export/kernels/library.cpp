// The operators as ONNX Runtime sees them: domain "sportsllm", registered by `RegisterCustomOps`.
//
// Weights are read where the runtime holds them, which for data files is where they are mapped; nothing is copied.
// Shapes are checked when the graph is opened; those of activations at each call.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "attention_operators.h"
#include "feed_forward.h"
#include "layer.h"
#include "operator.h"
#include "ort_api.h"
#include "runtime.h"
#include "version.h"

namespace {

using namespace sportsllm;

#ifndef SPORTSLLM_STRUCTURES
#define SPORTSLLM_STRUCTURES 8
#endif
constexpr int kStructures = SPORTSLLM_STRUCTURES;  // bodies of an operator in one graph: DecoderLayer, DecoderLayer1, ...

// Inputs of `DecoderLayer`, in order; `DecoderAttention` has those before kGateUp. `GeneralLayer` and `GeneralAttention`, with
// norms after both parts, LayerNorm, windows, another scale of scores, gelu or 16-bit inputs, have those behind kLayerInputs too.
enum LayerInput {
  kX, kResidual, kLast, kTotal, kKeep, kPastKey, kPastValue, kFrequencies, kKeyScale, kValueScale, kNorm, kQueryNorm, kKeyNorm,
  kQkv, kOutput = kQkv + 4, kSecondNorm = kOutput + 4, kGateUp, kDown = kGateUp + 4, kLayerInputs = kDown + 4,
  kAttentionOutputNorm = kLayerInputs, kFeedForwardOutputNorm, kNormBias, kSecondNormBias,
  kGeneralInputs
};
const std::string kMost = "; the most is " + std::to_string(RotaryTable::kPositions);

enum LayerOutput { kOut, kResidualOut, kKey, kValue, kLayerOutputs };

class Layer {
 public:
  Layer(ort::Table table, const ort::KernelInfo* info, const Operator& op) : runtime_(table) {
    LayerWeights& w = weights_;
    w.cache = op.cache;
    w.heads = runtime_.size(info, "num_heads"), w.kv_heads = runtime_.size(info, "kv_num_heads");
    w.head_size = runtime_.size(info, "head_size"), w.hidden = runtime_.size(info, "hidden_size");
    w.inner = op.attention_alone ? 0 : runtime_.size(info, "intermediate_size");
    w.epsilon = runtime_.real(info, "epsilon");
    require(w.heads % w.kv_heads == 0 && w.head_size % 2 == 0,
            "heads disagree: " + std::to_string(w.heads) + " on " + std::to_string(w.kv_heads) + ", of " +
                std::to_string(w.head_size));
    require(w.epsilon >= 0, "epsilon is negative");
    const int64_t e = w.head_size;
    w.scale = 1.0f / std::sqrt(static_cast<float>(e));
    const float* frequencies =
        vector_of<float>(runtime_, info, kFrequencies, ort::kFloat, {e / 2}, "rotary frequencies", op.general);
    if (frequencies != nullptr) w.rotary = RotaryTable::shared(frequencies, e / 2, runtime_.real(info, "rotary_factor"));
    if (w.cache == CacheType::kInt8) {
      w.key_scale = vector_of<float>(runtime_, info, kKeyScale, ort::kFloat, {1, w.kv_heads, 1, e}, "key scale");
      w.value_scale = vector_of<float>(runtime_, info, kValueScale, ort::kFloat, {1, w.kv_heads, 1, e}, "value scale");
    }
    w.norm = vector_of<float>(runtime_, info, kNorm, ort::kFloat, {w.hidden}, "norm");
    w.query_norm = vector_of<float>(runtime_, info, kQueryNorm, ort::kFloat, {e}, "query norm", true);
    w.key_norm = vector_of<float>(runtime_, info, kKeyNorm, ort::kFloat, {e}, "key norm", true);
    w.qkv = matrix_of(runtime_, info, four_from(kQkv), "qkv", (w.heads + 2 * w.kv_heads) * e, w.hidden);
    w.output = matrix_of(runtime_, info, four_from(kOutput), "output", w.hidden, w.heads * e);
    w.second_norm = vector_of<float>(runtime_, info, kSecondNorm, ort::kFloat, {w.hidden}, "second norm");
    if (op.general) read_general(info);
    if (op.attention_alone) return;
    w.gated = !op.general || runtime_.whole(info, "gated") != 0;
    w.gate_up = matrix_of(runtime_, info, four_from(kGateUp), "gate_up", (w.gated ? 2 : 1) * w.inner, w.hidden);
    w.down = matrix_of(runtime_, info, four_from(kDown), "down", w.hidden, w.inner);
    if (!op.general) return;
    w.gate_up.wide = runtime_.whole(info, "gate_up_wide") != 0, w.down.wide = runtime_.whole(info, "down_wide") != 0;
    w.gelu = runtime_.whole(info, "gelu") != 0;
    w.feed_forward_output_norm =
        vector_of<float>(runtime_, info, kFeedForwardOutputNorm, ort::kFloat, {w.hidden}, "feed-forward output norm", true);
  }

  void compute(ort::KernelContext* context) const {
    const LayerWeights& w = weights_;
    LayerInputs in;
    const Tensor x = runtime_.input(context, kX);
    require(x.type == ort::kFloat && x.shape.size() == 3 && x.shape[2] == w.hidden, "input has shape " + text(x.shape));
    in.batch = x.shape[0], in.tokens = x.shape[1], in.x = static_cast<const float*>(x.data);
    const Tensor residual = runtime_.input(context, kResidual);
    require(!residual || residual.shape == x.shape, "residual has shape " + text(residual.shape));
    in.residual = static_cast<const float*>(residual.data);
    const Tensor last = runtime_.input(context, kLast), total = runtime_.input(context, kTotal);
    require(last.type == ort::kInt32 && last.shape == std::vector<int64_t>{in.batch}, "lengths have shape " + text(last.shape));
    require(total.type == ort::kInt32 && (total.shape.empty() || total.shape == std::vector<int64_t>{1}),
            "the total length has shape " + text(total.shape));
    in.last = static_cast<const int32_t*>(last.data);
    if (const Tensor keep = runtime_.input(context, kKeep)) {
      require(keep.type == ort::kInt64 && keep.shape == std::vector<int64_t>{1}, "positions to keep have shape " + text(keep.shape));
      in.keep = std::max<int64_t>(0, *static_cast<const int64_t*>(keep.data));
    }
    const Tensor key = runtime_.input(context, kPastKey), value = runtime_.input(context, kPastValue);
    in.past_room = dimension(key, 2);
    const std::vector<int64_t> expected = {in.batch, w.kv_heads, in.past_room, w.head_size};
    const ort::ElementType type = element_of(w.cache);
    require(key.shape == expected && value.shape == expected && key.type == type && value.type == type,
            "the cache has shapes " + text(key.shape) + " and " + text(value.shape) + ", or another type");
    in.past_key = key.data, in.past_value = value.data;
    const int64_t all = *static_cast<const int32_t*>(total.data);
    require(all <= RotaryTable::kPositions, "a total length of " + std::to_string(all) + kMost);
    in.room = std::max(in.past_room, all);
    for (int64_t b = 0; b < in.batch; ++b) {
      const int64_t start = std::max<int64_t>(0, int64_t{in.last[b]} + 1 - in.tokens);
      require(in.last[b] >= 0 && start <= in.past_room && start + in.tokens <= std::max(in.room, in.tokens) &&
                  start + in.tokens <= RotaryTable::kPositions,
              "a sequence of " + std::to_string(start + in.tokens) + " tokens; the cache has room for " +
                  std::to_string(in.room) + kMost);
      in.room = std::max(in.room, start + in.tokens);
    }
    const std::vector<int64_t> shape = {in.batch, in.kept(), w.hidden};
    in.out = static_cast<float*>(runtime_.output(context, kOut, shape));
    in.residual_out = static_cast<float*>(runtime_.output(context, kResidualOut, shape));
    const std::vector<int64_t> cached = {in.batch, w.kv_heads, in.room, w.head_size};
    in.key = runtime_.output(context, kKey, cached), in.value = runtime_.output(context, kValue, cached);
    require((in.key != in.past_key && in.value != in.past_value) || in.room == in.past_room,
            "past and present share a buffer with room for " + std::to_string(in.past_room) + " tokens; " +
                std::to_string(in.room) + " are needed");
    if (in.batch * in.tokens == 0) {
      for (int64_t b = 0; b < in.batch; ++b) {
        for (int64_t kv = 0; kv < w.kv_heads; ++kv) copy_past(w, in, b, kv, true), copy_past(w, in, b, kv, false);
      }
      return;
    }
    Runtime::Call call = {&runtime_, context};
    run_layer(w, in, &scratch_of_thread(), &Runtime::parallel, &call);
  }

  const Runtime& runtime() const { return runtime_; }

 private:
  // What attention of `GeneralLayer` has and that of `DecoderLayer` has not.
  void read_general(const ort::KernelInfo* info) {
    LayerWeights& w = weights_;
    w.scale = runtime_.real(info, "scale"), w.window = runtime_.whole(info, "window");
    require(std::isfinite(w.scale), "scale is not finite");
    require(w.window >= 0 && w.window <= kLargest, "window is " + std::to_string(w.window));
    w.qkv.wide = runtime_.whole(info, "qkv_wide") != 0, w.output.wide = runtime_.whole(info, "output_wide") != 0;
    w.attention_output_norm =
        vector_of<float>(runtime_, info, kAttentionOutputNorm, ort::kFloat, {w.hidden}, "attention output norm", true);
    w.norm_bias = vector_of<float>(runtime_, info, kNormBias, ort::kFloat, {w.hidden}, "norm bias", true);
    w.second_norm_bias = vector_of<float>(runtime_, info, kSecondNormBias, ort::kFloat, {w.hidden}, "second norm bias", true);
  }

  Runtime runtime_;
  LayerWeights weights_;
};

// Inputs of `DecoderHead`: x, residual, norm, and the table's four; of `GeneralHead` LayerNorm's bias behind them, which
// may be missing.
class Head {
 public:
  Head(ort::Table table, const ort::KernelInfo* info, const Operator& op) : runtime_(table) {
    HeadWeights& w = weights_;
    w.hidden = runtime_.size(info, "hidden_size"), w.epsilon = runtime_.real(info, "epsilon");
    require(w.epsilon >= 0, "epsilon is negative");
    w.norm = vector_of<float>(runtime_, info, 2, ort::kFloat, {w.hidden}, "norm");
    const Tensor scales = runtime_.constant(info, 4);
    w.table = matrix_of(runtime_, info, four_from(3), "head", dimension(scales, 0), w.hidden);
    if (!op.general) return;
    w.norm_bias = vector_of<float>(runtime_, info, 7, ort::kFloat, {w.hidden}, "norm bias", true);
    w.table.wide = runtime_.whole(info, "head_wide") != 0;
  }

  void compute(ort::KernelContext* context) const {
    const Tensor x = runtime_.input(context, 0), residual = runtime_.input(context, 1);
    require(x.type == ort::kFloat && x.shape.size() == 3 && x.shape[2] == weights_.hidden, "input has shape " + text(x.shape));
    require(!residual || residual.shape == x.shape, "residual has shape " + text(residual.shape));
    const std::vector<int64_t> shape = {x.shape[0], x.shape[1], weights_.table.rows};
    float* logits = static_cast<float*>(runtime_.output(context, 0, shape));
    const int64_t rows = x.shape[0] * x.shape[1];
    if (rows == 0) return;
    Runtime::Call call = {&runtime_, context};
    run_head(weights_, static_cast<const float*>(x.data), static_cast<const float*>(residual.data), rows, logits,
             &scratch_of_thread(), &Runtime::parallel, &call);
  }

  const Runtime& runtime() const { return runtime_; }

 private:
  Runtime runtime_;
  HeadWeights weights_;
};

// Inputs of `DecoderFeedForward`: x, the chosen experts and their weights, and the matrices of all parts, experts before
// shared ones. Of a matrix these are packed numbers, scales, and zero points and bias where attributes say so.
class FeedForward {
 public:
  FeedForward(ort::Table table, const ort::KernelInfo* info, const Operator&) : runtime_(table) {
    weights_.hidden = runtime_.size(info, "hidden_size"), weights_.active = runtime_.whole(info, "active_experts");
    weights_.gated = runtime_.whole(info, "gated") != 0;
    const int64_t experts = runtime_.whole(info, "experts"), shared = runtime_.whole(info, "shared");
    require(experts >= 0 && experts <= kMostParts && shared >= 0 && shared <= kMostParts && experts + shared > 0,
            "parts: " + std::to_string(experts) + " experts and " + std::to_string(shared) + " shared");
    require(weights_.active >= 0 && weights_.active <= experts && (weights_.active > 0 || experts == 0),
            std::to_string(weights_.active) + " experts a token of " + std::to_string(experts));
    size_t next = kMatrices;
    for (int64_t n = 0; n < experts; ++n) weights_.experts.push_back(part(info, "expert", &next));
    for (int64_t n = 0; n < shared; ++n) weights_.shared.push_back(part(info, "shared", &next));
  }

  void compute(ort::KernelContext* context) const {
    const FeedForwardWeights& w = weights_;
    FeedForwardInputs in;
    const Tensor x = runtime_.input(context, kX);
    require(x.type == ort::kFloat && x.shape.size() == 3 && x.shape[2] == w.hidden, "input has shape " + text(x.shape));
    in.tokens = x.shape[0] * x.shape[1], in.x = static_cast<const float*>(x.data);
    if (w.active > 0) {
      const Tensor chosen = runtime_.input(context, kChosen), weights = runtime_.input(context, kWeights);
      const std::vector<int64_t> shape = {x.shape[0], x.shape[1], w.active};
      require(chosen.type == ort::kInt64 && chosen.shape == shape && weights.type == ort::kFloat && weights.shape == shape,
              "experts have shapes " + text(chosen.shape) + " and " + text(weights.shape) + ", or another type");
      in.chosen = static_cast<const int64_t*>(chosen.data), in.weights = static_cast<const float*>(weights.data);
      const int64_t count = static_cast<int64_t>(w.experts.size());
      for (int64_t i = 0; i < in.tokens * w.active; ++i) {
        require(in.chosen[i] >= 0 && in.chosen[i] < count, "expert " + std::to_string(in.chosen[i]) + " of " + std::to_string(count));
      }
    }
    in.out = static_cast<float*>(runtime_.output(context, 0, x.shape));
    if (in.tokens == 0) return;
    Runtime::Call call = {&runtime_, context};
    run_feed_forward(w, in, &scratch_of_thread(), &Runtime::parallel, &call);
  }

  const Runtime& runtime() const { return runtime_; }

 private:
  static constexpr int64_t kMostParts = 1024;
  enum Input { kX, kChosen, kWeights, kMatrices };

  Part part(const ort::KernelInfo* info, const std::string& kind, size_t* next) const {
    const int64_t inner = runtime_.size(info, kind + "_size");
    Part out;
    out.up = matrix(info, kind + "_up", inner * (weights_.gated ? 2 : 1), weights_.hidden, next);
    out.down = matrix(info, kind + "_down", weights_.hidden, inner, next);
    return out;
  }

  Matrix matrix(const ort::KernelInfo* info, const std::string& name, int64_t rows, int64_t columns, size_t* next) const {
    MatrixInputs inputs = {*next, *next + 1, kNone, kNone};
    *next += 2;
    if (runtime_.whole(info, (name + "_zero_points").c_str()) != 0) inputs.zeros = (*next)++;
    if (runtime_.whole(info, (name + "_biases").c_str()) != 0) inputs.bias = (*next)++;
    return matrix_of(runtime_, info, inputs, name, rows, columns);
  }

  Runtime runtime_;
  FeedForwardWeights weights_;
};

const Operator& self(const ort::CustomOp* op) { return *reinterpret_cast<const Operator*>(op); }

template <typename Kernel>
ort::CustomOp functions() {
  ort::CustomOp op;
  op.get_name = [](const ort::CustomOp* o) { return self(o).name.c_str(); };
  op.get_provider = [](const ort::CustomOp*) -> const char* { return nullptr; };
  op.get_input_type = [](const ort::CustomOp* o, size_t i) { return self(o).inputs[i]; };
  op.get_input_count = [](const ort::CustomOp* o) { return self(o).inputs.size(); };
  op.get_output_type = [](const ort::CustomOp* o, size_t i) { return self(o).outputs[i]; };
  op.get_output_count = [](const ort::CustomOp* o) { return self(o).outputs.size(); };
  op.get_input_presence = [](const ort::CustomOp* o, size_t i) { return self(o).presence[i]; };
  op.get_output_presence = [](const ort::CustomOp*, size_t) { return ort::kRequired; };
  op.get_input_memory = [](const ort::CustomOp*, size_t) { return 0; };
  const auto none = [](const ort::CustomOp*) { return 0; };
  op.get_variadic_input_minimum = [](const ort::CustomOp*) { return 1; };
  op.get_variadic_input_alike = op.get_variadic_output_minimum = op.get_variadic_output_alike = none;
  op.get_first_version = op.get_last_version = [](const ort::CustomOp*) { return std::atoi(SPORTSLLM_KERNELS_VERSION); };
  op.create_kernel_with_status = [](const ort::CustomOp* o, ort::Table table, const ort::KernelInfo* info, void** kernel) {
    return Runtime(table).guarded([&] { *kernel = new Kernel(table, info, self(o)); });
  };
  op.compute_with_status = [](void* kernel, ort::KernelContext* context) {
    const Kernel* k = static_cast<const Kernel*>(kernel);
    return k->runtime().guarded([&] { k->compute(context); });
  };
  op.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  return op;
}

std::string numbered(const std::string& name, int structure) {
  return name + (structure > 0 ? std::to_string(structure) : "");
}

Operator layer_operator(int structure, CacheType type, bool attention_alone, bool general) {
  const char* suffix = type == CacheType::kInt8 ? "Int8" : type == CacheType::kHalf ? "Half" : "";
  Operator op;
  op.base = functions<Layer>();
  op.name = numbered(std::string(general ? "General" : "Decoder") + (attention_alone ? "Attention" : "Layer") + suffix, structure);
  op.cache = type, op.attention_alone = attention_alone, op.general = general;
  const ort::ElementType cache = element_of(type);
  const int count = general ? kGeneralInputs : attention_alone ? kGateUp : kLayerInputs;
  op.inputs.assign(kGeneralInputs, ort::kFloat);
  op.presence.assign(kGeneralInputs, ort::kRequired);
  op.inputs[kLast] = op.inputs[kTotal] = ort::kInt32, op.inputs[kKeep] = ort::kInt64;
  op.inputs[kPastKey] = op.inputs[kPastValue] = cache;
  for (int i : {kQkv, kOutput, kGateUp, kDown}) {
    op.inputs[i] = op.inputs[i + 2] = ort::kUint8, op.inputs[i + 1] = ort::kHalf;
    op.presence[i + 2] = op.presence[i + 3] = ort::kOptional;
  }
  for (int i : {kResidual, kKeep, kKeyScale, kValueScale, kQueryNorm, kKeyNorm}) op.presence[i] = ort::kOptional;
  if (general) {
    op.presence[kFrequencies] = ort::kOptional;
    for (int i = kGateUp; i < kGeneralInputs; ++i) op.presence[i] = ort::kOptional;
  }
  op.inputs.resize(count), op.presence.resize(count);
  op.inputs.push_back(ort::kAny), op.presence.push_back(ort::kVariadic);  // what only the body reads
  op.outputs = {ort::kFloat, ort::kFloat, cache, cache};
  return op;
}

Operator feed_forward_operator(int structure) {
  Operator op;
  op.base = functions<FeedForward>();
  op.name = numbered("DecoderFeedForward", structure);
  op.inputs = {ort::kFloat, ort::kInt64, ort::kFloat, ort::kAny};
  op.presence = {ort::kRequired, ort::kOptional, ort::kOptional, ort::kVariadic};
  op.outputs = {ort::kFloat};
  return op;
}

Operator selected_operator(int structure) {
  Operator op;
  op.base = functions<Selected>();
  op.name = numbered("SelectedAttention", structure);
  op.inputs.assign(6, ort::kFloat), op.presence.assign(6, ort::kRequired);
  op.inputs[2] = ort::kInt32;
  op.inputs.push_back(ort::kAny), op.presence.push_back(ort::kVariadic);
  op.outputs = {ort::kFloat};
  return op;
}

// The last of the inputs is the scale; `last` and `state` are the places of the lengths and the cache.
template <typename Kernel>
Operator latent_operator(const char* name, int structure, CacheType type, size_t inputs, size_t last, size_t state) {
  Operator op;
  op.base = functions<Kernel>();
  op.name = numbered(std::string(name) + (type == CacheType::kInt8 ? "Int8" : ""), structure);
  op.cache = type;
  op.inputs.assign(inputs, ort::kFloat), op.presence.assign(inputs, ort::kRequired);
  op.inputs[last] = ort::kInt32, op.inputs[state] = element_of(type), op.presence[inputs - 1] = ort::kOptional;
  op.inputs.push_back(ort::kAny), op.presence.push_back(ort::kVariadic);
  op.outputs = {ort::kFloat};
  return op;
}

Operator head_operator(bool general) {
  Operator op;
  op.base = functions<Head>();
  op.name = general ? "GeneralHead" : "DecoderHead", op.general = general;
  op.inputs = {ort::kFloat, ort::kFloat, ort::kFloat, ort::kUint8, ort::kHalf, ort::kUint8, ort::kFloat};
  op.presence = {ort::kRequired, ort::kOptional, ort::kRequired, ort::kRequired, ort::kRequired, ort::kOptional,
                 ort::kOptional};
  if (general) op.inputs.push_back(ort::kFloat), op.presence.push_back(ort::kOptional);
  op.outputs = {ort::kFloat};
  return op;
}

}  // namespace

#if defined(_WIN32)
#define EXPORTED extern "C" __declspec(dllexport)
#else
#define EXPORTED extern "C" __attribute__((visibility("default")))
#endif

// The variant that this processor runs.
EXPORTED const char* SportsllmVariant() { return chosen_variant().name; }

EXPORTED ort::Status* RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base) {
  ort::Table table = base->get_api(ort::kApiVersion);
  if (table == nullptr) {  // every table begins with what makes an error
    return Runtime(base->get_api(1)).error(std::string("ONNX Runtime ") + base->get_version() + " is too old; 1.17 is needed");
  }
  const Runtime runtime(table);
  return runtime.guarded([&] {
    require(wanted_runs_here(), "SPORTSLLM_KERNELS names no variant that this processor runs");
    // They live as long as the program: a session may outlive the options.
    static std::vector<Operator>* operators = [] {
      auto* all = new std::vector<Operator>();
      for (int i = 0; i < kStructures; ++i) {
        for (CacheType type : {CacheType::kFloat, CacheType::kHalf, CacheType::kInt8}) {
          for (bool alone : {false, true}) {
            for (bool general : {false, true}) all->push_back(layer_operator(i, type, alone, general));
          }
        }
        all->push_back(feed_forward_operator(i));
        all->push_back(selected_operator(i));
        for (CacheType type : {CacheType::kFloat, CacheType::kInt8}) {
          all->push_back(latent_operator<Latent>("LatentAttention", i, type, 7, 2, 3));
          all->push_back(latent_operator<LatentWriter>("LatentTokens", i, type, 8, 4, 5));
          all->back().outputs = {ort::kFloat, ort::kFloat, element_of(type)};
        }
      }
      for (bool general : {false, true}) all->push_back(head_operator(general));
      return all;
    }();
    ort::Domain* domain = nullptr;
    runtime.check(ort::call(table, ort::kCreateCustomOpDomain, "sportsllm", &domain));
    for (const Operator& op : *operators) runtime.check(ort::call(table, ort::kCustomOpDomainAdd, domain, &op.base));
    runtime.check(ort::call(table, ort::kAddCustomOpDomain, options, domain));
  });
}
