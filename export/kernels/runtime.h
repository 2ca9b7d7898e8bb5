// ONNX Runtime's interface as the operators use it: every error is an exception, weights are read where they lie.
#pragma once

#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "ort_api.h"
#include "version.h"

namespace sportsllm {

inline std::string text(const std::vector<int64_t>& shape) {
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

inline void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

constexpr int64_t kLargest = 1 << 20;  // of a size in a graph, so that no product of three overflows

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

  // An attribute that counts something.
  int64_t size(const ort::KernelInfo* info, const std::string& name) const {
    const int64_t value = whole(info, name.c_str());
    require(value > 0 && value <= kLargest,
            name + " is " + std::to_string(value) + "; it must be from 1 to " + std::to_string(kLargest));
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

// A constant input of a type and shape.
template <typename T>
const T* vector_of(const Runtime& runtime, const ort::KernelInfo* info, size_t index, ort::ElementType type,
                   const std::vector<int64_t>& shape, const char* name, bool optional = false) {
  const Tensor found = runtime.constant(info, index);
  if (!found && optional) return nullptr;
  require(static_cast<bool>(found), std::string(name) + " is missing, or is not stored with the graph");
  require(found.type == type && found.shape == shape,
          std::string(name) + " has shape " + text(found.shape) + " where " + text(shape) + " belongs, or another type");
  require(reinterpret_cast<uintptr_t>(found.data) % alignof(T) == 0, std::string(name) + " is not aligned");
  return static_cast<const T*>(found.data);
}

constexpr size_t kNone = ~size_t{0};

// Inputs of a matrix. The last two are optional; `kNone` where there is no place for them.
struct MatrixInputs {
  size_t packed, scale, zeros, bias;
};

inline MatrixInputs four_from(size_t index) { return {index, index + 1, index + 2, index + 3}; }

inline Matrix matrix_of(const Runtime& runtime, const ort::KernelInfo* info, const MatrixInputs& inputs, const std::string& name,
                 int64_t rows, int64_t columns) {
  Matrix out;
  out.rows = rows, out.columns = columns;
  out.bits = static_cast<int>(runtime.whole(info, (name + "_bits").c_str()));
  out.block = static_cast<int>(runtime.whole(info, (name + "_block_size").c_str()));
  require(out.bits == 4 || out.bits == 8, name + ": " + std::to_string(out.bits) + " bits; 4 and 8 are supported");
  require(out.block == 32 || out.block == 64 || out.block == 128 || out.block == 256,
          name + ": blocks of " + std::to_string(out.block) + "; 32, 64, 128 and 256 are supported");
  require(rows > 0 && columns > 0, name + " is empty");
  const int64_t blocks = out.blocks();
  out.packed = vector_of<uint8_t>(runtime, info, inputs.packed, ort::kUint8, {rows, blocks, int64_t{out.block} * out.bits / 8},
                                  (name + " packed").c_str());
  require(blocks <= Matrix::kMostBlocks, name + ": " + std::to_string(blocks) + " blocks in a row; 1024 are supported");
  out.scales = vector_of<uint16_t>(runtime, info, inputs.scale, ort::kHalf, {rows, blocks}, (name + " scale").c_str());
  if (inputs.zeros != kNone) {
    out.zeros = vector_of<uint8_t>(runtime, info, inputs.zeros, ort::kUint8, {rows, out.zero_bytes()},
                                   (name + " zero points").c_str(), true);
  }
  if (inputs.bias != kNone) {
    out.bias = vector_of<float>(runtime, info, inputs.bias, ort::kFloat, {rows}, (name + " bias").c_str(), true);
  }
  return out;
}

inline int64_t dimension(const Tensor& tensor, size_t axis) { return axis < tensor.shape.size() ? tensor.shape[axis] : -1; }

}  // namespace sportsllm
