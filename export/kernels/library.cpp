// The operators as ONNX Runtime sees them: domain "sportsllm", registered by `RegisterCustomOps`.
//
// Weights are read where the runtime holds them, which for data files is where they are mapped; nothing is copied.
// Shapes are checked when the graph is opened; those of activations at each call.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "layer.h"
#include "ort_api.h"
#include "version.h"

namespace {

using namespace sportsllm;

constexpr int kLayerStructures = 8;  // as many bodies may one graph have: DecoderLayer, DecoderLayer1, ...

std::string text(const std::vector<int64_t>& shape) {
  std::string out = "(";
  for (size_t i = 0; i < shape.size(); ++i) out += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return out + ")";
}

struct Tensor {
  const void* data = nullptr;
  ort::ElementType type = ort::kAny;
  std::vector<int64_t> shape;

  explicit operator bool() const { return data != nullptr; }
};

struct Failure {
  ort::Status* status;
};

// Calls of the runtime's table; every error becomes an exception, which `guarded` returns as a status.
class Runtime {
 public:
  explicit Runtime(ort::Table table) : table_(table) {}

  Tensor tensor(const ort::Value* value) const {
    Tensor out;
    if (value == nullptr) return out;
    ort::ShapeInfo* info = nullptr;
    check(ort::call(table_, ort::kGetTensorTypeAndShape, value, &info));
    size_t rank = 0;
    int type = 0;
    check(ort::call(table_, ort::kGetTensorElementType, static_cast<const ort::ShapeInfo*>(info), &type));
    check(ort::call(table_, ort::kGetDimensionsCount, static_cast<const ort::ShapeInfo*>(info), &rank));
    out.shape.resize(rank);
    check(ort::call(table_, ort::kGetDimensions, static_cast<const ort::ShapeInfo*>(info), out.shape.data(), rank));
    ort::call<void>(table_, ort::kReleaseTensorTypeAndShapeInfo, info);
    out.type = static_cast<ort::ElementType>(type);
    void* data = nullptr;
    check(ort::call(table_, ort::kGetTensorMutableData, const_cast<ort::Value*>(value), &data));
    static const char empty = 0;
    out.data = data == nullptr ? &empty : data;  // a tensor without elements
    return out;
  }

  Tensor constant(const ort::KernelInfo* info, size_t index) const {
    int is_constant = 0;
    const ort::Value* value = nullptr;
    ort::Status* status = ort::call(table_, ort::kKernelInfoGetConstantInput, info, index, &is_constant, &value);
    if (status != nullptr) {
      ort::call<void>(table_, ort::kReleaseStatus, status);
      return {};
    }
    return is_constant ? tensor(value) : Tensor();
  }

  Tensor input(ort::KernelContext* context, size_t index) const {
    const ort::Value* value = nullptr;
    check(ort::call(table_, ort::kKernelContextGetInput, static_cast<const ort::KernelContext*>(context), index, &value));
    return tensor(value);
  }

  void* output(ort::KernelContext* context, size_t index, const std::vector<int64_t>& shape) const {
    ort::Value* value = nullptr;
    check(ort::call(table_, ort::kKernelContextGetOutput, context, index, shape.data(), shape.size(), &value));
    void* data = nullptr;
    check(ort::call(table_, ort::kGetTensorMutableData, value, &data));
    return data;
  }

  int64_t whole(const ort::KernelInfo* info, const char* name) const {
    int64_t value = 0;
    check(ort::call(table_, ort::kKernelInfoGetAttributeInt64, info, name, &value));
    return value;
  }

  float real(const ort::KernelInfo* info, const char* name) const {
    float value = 0;
    check(ort::call(table_, ort::kKernelInfoGetAttributeFloat, info, name, &value));
    return value;
  }

  // `RunParallel` of layer.h, in the session's own threads.
  struct Call {
    const Runtime* runtime;
    ort::KernelContext* context;
  };
  static void parallel(void* call, void (*work)(void*, size_t), void* team) {
    const Call& c = *static_cast<Call*>(call);
    const size_t most = 64;  // the runtime starts no more than it has threads
    c.runtime->check(ort::call(c.runtime->table_, ort::kKernelContextParallelFor,
                               static_cast<const ort::KernelContext*>(c.context), work, most, size_t{0}, team));
  }

  ort::Status* error(const std::string& message) const {
    const std::string line = "sportsllm kernels " SPORTSLLM_KERNELS_VERSION ": " + message;
    return ort::call(table_, ort::kCreateStatus, static_cast<int>(ort::kInvalidArgument), line.c_str());
  }

  void check(ort::Status* status) const {
    if (status != nullptr) throw Failure{status};
  }

  template <typename Function>
  ort::Status* guarded(Function function) const {
    try {
      function();
      return nullptr;
    } catch (const Failure& failure) {
      return failure.status;
    } catch (const std::bad_alloc&) {
      return error("out of memory");
    } catch (const std::exception& problem) {
      return error(problem.what());
    }
  }

 private:
  ort::Table table_;
};

void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

// A constant input of a type and shape.
template <typename T>
const T* vector_of(const Runtime& runtime, const ort::KernelInfo* info, size_t index, ort::ElementType type,
                   const std::vector<int64_t>& shape, const char* name, bool optional = false) {
  const Tensor found = runtime.constant(info, index);
  if (!found && optional) return nullptr;
  require(static_cast<bool>(found), std::string(name) + " is missing, or is not stored with the graph");
  require(found.type == type && found.shape == shape,
          std::string(name) + " has shape " + text(found.shape) + " where " + text(shape) + " belongs, or another type");
  return static_cast<const T*>(found.data);
}

// Four inputs from `index` on: packed, scale, zero points and bias, the last two optional.
Matrix matrix_of(const Runtime& runtime, const ort::KernelInfo* info, size_t index, const std::string& name, int64_t rows,
                 int64_t columns) {
  Matrix out;
  out.rows = rows, out.columns = columns;
  out.bits = static_cast<int>(runtime.whole(info, (name + "_bits").c_str()));
  out.block = static_cast<int>(runtime.whole(info, (name + "_block_size").c_str()));
  require(out.bits == 4 || out.bits == 8, name + ": " + std::to_string(out.bits) + " bits; 4 and 8 are supported");
  require(out.block == 32 || out.block == 64 || out.block == 128 || out.block == 256,
          name + ": blocks of " + std::to_string(out.block) + "; 32, 64, 128 and 256 are supported");
  require(rows > 0 && columns > 0, name + " is empty");
  const int64_t blocks = out.blocks();
  out.packed = vector_of<uint8_t>(runtime, info, index, ort::kUint8, {rows, blocks, int64_t{out.block} * out.bits / 8},
                                  (name + " packed").c_str());
  out.scales = vector_of<float>(runtime, info, index + 1, ort::kFloat, {rows, blocks}, (name + " scale").c_str());
  out.zeros = vector_of<uint8_t>(runtime, info, index + 2, ort::kUint8, {rows, out.zero_bytes()},
                                 (name + " zero points").c_str(), true);
  out.bias = vector_of<float>(runtime, info, index + 3, ort::kFloat, {rows}, (name + " bias").c_str(), true);
  return out;
}

int64_t dimension(const Tensor& tensor, size_t axis) { return axis < tensor.shape.size() ? tensor.shape[axis] : -1; }

Scratch& scratch_of_thread() {
  thread_local Scratch scratch;
  return scratch;
}

// Inputs of `DecoderLayer`, in order.
enum LayerInput {
  kX, kResidual, kLast, kTotal, kKeep, kPastKey, kPastValue, kCosine, kSine, kKeyScale, kValueScale, kNorm, kQueryNorm,
  kKeyNorm, kQkv, kOutput = kQkv + 4, kSecondNorm = kOutput + 4, kGateUp, kDown = kGateUp + 4, kLayerInputs = kDown + 4
};
enum LayerOutput { kOut, kResidualOut, kKey, kValue, kLayerOutputs };

class Layer {
 public:
  Layer(ort::Table table, const ort::KernelInfo* info, bool int8) : runtime_(table), int8_(int8) {
    LayerWeights& w = weights_;
    w.heads = runtime_.whole(info, "num_heads"), w.kv_heads = runtime_.whole(info, "kv_num_heads");
    w.head_size = runtime_.whole(info, "head_size"), w.hidden = runtime_.whole(info, "hidden_size");
    w.inner = runtime_.whole(info, "intermediate_size"), w.epsilon = runtime_.real(info, "epsilon");
    require(w.heads > 0 && w.kv_heads > 0 && w.heads % w.kv_heads == 0 && w.head_size > 0 && w.head_size % 2 == 0,
            "heads disagree: " + std::to_string(w.heads) + " on " + std::to_string(w.kv_heads) + ", of " +
                std::to_string(w.head_size));
    require(w.hidden > 0 && w.inner > 0 && w.epsilon >= 0, "sizes must be positive");
    const int64_t e = w.head_size, half = e / 2;
    w.context = dimension(runtime_.constant(info, kCosine), 0);
    w.cosine = vector_of<float>(runtime_, info, kCosine, ort::kFloat, {w.context, half}, "cosine table");
    w.sine = vector_of<float>(runtime_, info, kSine, ort::kFloat, {w.context, half}, "sine table");
    if (int8) {
      w.key_scale = vector_of<float>(runtime_, info, kKeyScale, ort::kFloat, {1, w.kv_heads, 1, e}, "key scale");
      w.value_scale = vector_of<float>(runtime_, info, kValueScale, ort::kFloat, {1, w.kv_heads, 1, e}, "value scale");
    }
    w.norm = vector_of<float>(runtime_, info, kNorm, ort::kFloat, {w.hidden}, "norm");
    w.query_norm = vector_of<float>(runtime_, info, kQueryNorm, ort::kFloat, {e}, "query norm", true);
    w.key_norm = vector_of<float>(runtime_, info, kKeyNorm, ort::kFloat, {e}, "key norm", true);
    w.qkv = matrix_of(runtime_, info, kQkv, "qkv", (w.heads + 2 * w.kv_heads) * e, w.hidden);
    w.output = matrix_of(runtime_, info, kOutput, "output", w.hidden, w.heads * e);
    w.second_norm = vector_of<float>(runtime_, info, kSecondNorm, ort::kFloat, {w.hidden}, "second norm");
    w.gate_up = matrix_of(runtime_, info, kGateUp, "gate_up", 2 * w.inner, w.hidden);
    w.down = matrix_of(runtime_, info, kDown, "down", w.hidden, w.inner);
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
    const ort::ElementType type = int8_ ? ort::kInt8 : ort::kFloat;
    require(key.shape == expected && value.shape == expected && key.type == type && value.type == type,
            "the cache has shapes " + text(key.shape) + " and " + text(value.shape) + ", or another type");
    in.past_key = key.data, in.past_value = value.data;
    const int64_t all = *static_cast<const int32_t*>(total.data);
    require(all <= std::max(in.past_room, w.context),
            "a total length of " + std::to_string(all) + "; the context is " + std::to_string(w.context));
    in.room = std::max(in.past_room, all);
    for (int64_t b = 0; b < in.batch; ++b) {
      const int64_t start = std::max<int64_t>(0, int64_t{in.last[b]} + 1 - in.tokens);
      require(in.last[b] >= 0 && start <= in.past_room && start + in.tokens <= std::max(in.room, in.tokens) &&
                  start + in.tokens <= w.context,
              "a sequence of " + std::to_string(start + in.tokens) + " tokens; the cache has room for " +
                  std::to_string(in.room) + " and the context is " + std::to_string(w.context));
      in.room = std::max(in.room, start + in.tokens);
    }
    const std::vector<int64_t> shape = {in.batch, in.kept(), w.hidden};
    in.out = static_cast<float*>(runtime_.output(context, kOut, shape));
    in.residual_out = static_cast<float*>(runtime_.output(context, kResidualOut, shape));
    const std::vector<int64_t> cached = {in.batch, w.kv_heads, in.room, w.head_size};
    in.key = runtime_.output(context, kKey, cached), in.value = runtime_.output(context, kValue, cached);
    if (in.batch * in.tokens == 0) return;
    Runtime::Call call = {&runtime_, context};
    run_layer(w, in, &scratch_of_thread(), &Runtime::parallel, &call);
  }

  const Runtime& runtime() const { return runtime_; }

 private:
  Runtime runtime_;
  bool int8_;
  LayerWeights weights_;
};

// Inputs of `DecoderHead`: x, residual, norm, and the table's four.
class Head {
 public:
  Head(ort::Table table, const ort::KernelInfo* info, bool) : runtime_(table) {
    HeadWeights& w = weights_;
    w.hidden = runtime_.whole(info, "hidden_size"), w.epsilon = runtime_.real(info, "epsilon");
    require(w.hidden > 0 && w.epsilon >= 0, "sizes must be positive");
    w.norm = vector_of<float>(runtime_, info, 2, ort::kFloat, {w.hidden}, "norm");
    const Tensor scales = runtime_.constant(info, 4);
    w.table = matrix_of(runtime_, info, 3, "head", dimension(scales, 0), w.hidden);
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

// An operator's description; `base` is first, so that the runtime's pointer to it is one to this.
struct Operator {
  ort::CustomOp base;
  std::string name;
  bool int8 = false;
  std::vector<ort::ElementType> inputs, outputs;
  std::vector<ort::Presence> presence;
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
  op.get_variadic_input_minimum = op.get_variadic_input_alike = none;
  op.get_variadic_output_minimum = op.get_variadic_output_alike = none;
  op.get_first_version = [](const ort::CustomOp*) { return 1; };
  op.get_last_version = [](const ort::CustomOp*) { return 1; };
  op.create_kernel_with_status = [](const ort::CustomOp* o, ort::Table table, const ort::KernelInfo* info, void** kernel) {
    return Runtime(table).guarded([&] { *kernel = new Kernel(table, info, self(o).int8); });
  };
  op.compute_with_status = [](void* kernel, ort::KernelContext* context) {
    const Kernel* k = static_cast<const Kernel*>(kernel);
    return k->runtime().guarded([&] { k->compute(context); });
  };
  op.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  return op;
}

Operator layer_operator(int structure, bool int8) {
  Operator op;
  op.base = functions<Layer>();
  op.name = std::string("DecoderLayer") + (int8 ? "Int8" : "") + (structure > 0 ? std::to_string(structure) : "");
  op.int8 = int8;
  const ort::ElementType cache = int8 ? ort::kInt8 : ort::kFloat;
  op.inputs.assign(kLayerInputs, ort::kFloat);
  op.presence.assign(kLayerInputs, ort::kRequired);
  op.inputs[kLast] = op.inputs[kTotal] = ort::kInt32, op.inputs[kKeep] = ort::kInt64;
  op.inputs[kPastKey] = op.inputs[kPastValue] = cache;
  for (int i : {kQkv, kOutput, kGateUp, kDown}) {
    op.inputs[i] = op.inputs[i + 2] = ort::kUint8;
    op.presence[i + 2] = op.presence[i + 3] = ort::kOptional;
  }
  for (int i : {kResidual, kKeep, kKeyScale, kValueScale, kQueryNorm, kKeyNorm}) op.presence[i] = ort::kOptional;
  op.outputs = {ort::kFloat, ort::kFloat, cache, cache};
  return op;
}

Operator head_operator() {
  Operator op;
  op.base = functions<Head>();
  op.name = "DecoderHead";
  op.inputs = {ort::kFloat, ort::kFloat, ort::kFloat, ort::kUint8, ort::kFloat, ort::kUint8, ort::kFloat};
  op.presence = {ort::kRequired, ort::kOptional, ort::kRequired, ort::kRequired, ort::kRequired, ort::kOptional,
                 ort::kOptional};
  op.outputs = {ort::kFloat};
  return op;
}

}  // namespace

#if defined(_WIN32)
#define EXPORTED extern "C" __declspec(dllexport)
#else
#define EXPORTED extern "C" __attribute__((visibility("default")))
#endif

EXPORTED ort::Status* RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base) {
  ort::Table table = base->get_api(ort::kApiVersion);
  if (table == nullptr) {
    std::fprintf(stderr, "sportsllm kernels: ONNX Runtime %s is too old; 1.17 or later is needed\n", base->get_version());
    std::abort();  // without a table there is no way to return an error
  }
  const Runtime runtime(table);
  return runtime.guarded([&] {
    require(wanted_runs_here(), "SPORTSLLM_KERNELS names no variant that this processor runs");
    // They live as long as the program: a session may outlive the options.
    static std::vector<Operator>* operators = [] {
      auto* all = new std::vector<Operator>();
      for (int i = 0; i < kLayerStructures; ++i) {
        for (bool int8 : {false, true}) all->push_back(layer_operator(i, int8));
      }
      all->push_back(head_operator());
      return all;
    }();
    ort::Domain* domain = nullptr;
    runtime.check(ort::call(table, ort::kCreateCustomOpDomain, "sportsllm", &domain));
    for (const Operator& op : *operators) runtime.check(ort::call(table, ort::kCustomOpDomainAdd, domain, &op.base));
    runtime.check(ort::call(table, ort::kAddCustomOpDomain, options, domain));
  });
}
