// What a custom operator needs of ONNX Runtime's C interface, version 17 (ONNX Runtime 1.17 and later).
//
// The runtime hands its table of functions to `RegisterCustomOps`; nothing is linked. The table only grows, so a place
// stays what it is.
// Source: https://onnxruntime.ai/docs/api/c/struct_ort_api.html
#pragma once

#include <cstddef>
#include <cstdint>

namespace ort {

constexpr uint32_t kApiVersion = 17;

// Opaque to everybody but the runtime.
struct Status;
struct Value;
struct KernelInfo;
struct KernelContext;
struct Domain;
struct SessionOptions;
struct ShapeInfo;

enum ErrorCode { kFail = 1, kInvalidArgument = 2 };
enum ElementType { kAny = 0, kFloat = 1, kUint8 = 2, kInt8 = 3, kInt32 = 6, kInt64 = 7, kHalf = 10 };
enum Presence { kRequired = 0, kOptional = 1, kVariadic = 2 };

// Places in the table.
enum Slot {
  kCreateStatus = 0,
  kCreateCustomOpDomain = 26,
  kCustomOpDomainAdd = 27,
  kAddCustomOpDomain = 28,
  kGetTensorMutableData = 51,
  kGetTensorElementType = 60,
  kGetDimensionsCount = 61,
  kGetDimensions = 62,
  kGetTensorTypeAndShape = 65,
  kKernelInfoGetAttributeFloat = 85,
  kKernelInfoGetAttributeInt64 = 86,
  kKernelContextGetInput = 90,
  kKernelContextGetOutput = 91,
  kReleaseStatus = 93,
  kReleaseTensorTypeAndShapeInfo = 99,
  kKernelInfoGetConstantInput = 249,
  kKernelContextParallelFor = 274,
};

using Table = void* const*;

// Calls the function at a place; its signature comes from the arguments.
template <typename Result = Status*, typename... Arguments>
inline Result call(Table table, Slot slot, Arguments... arguments) {
  using Function = Result (*)(Arguments...);
  return reinterpret_cast<Function>(table[slot])(arguments...);
}

struct ApiBase {
  Table (*get_api)(uint32_t version);  // null where the runtime is older
  const char* (*get_version)();
};

// The plain structure behind one operator.
struct CustomOp {
  uint32_t version = kApiVersion;
  void* (*create_kernel)(const CustomOp*, Table, const KernelInfo*) = nullptr;
  const char* (*get_name)(const CustomOp*) = nullptr;
  const char* (*get_provider)(const CustomOp*) = nullptr;
  ElementType (*get_input_type)(const CustomOp*, size_t) = nullptr;
  size_t (*get_input_count)(const CustomOp*) = nullptr;
  ElementType (*get_output_type)(const CustomOp*, size_t) = nullptr;
  size_t (*get_output_count)(const CustomOp*) = nullptr;
  void (*compute)(void*, KernelContext*) = nullptr;
  void (*destroy)(void*) = nullptr;
  Presence (*get_input_presence)(const CustomOp*, size_t) = nullptr;
  Presence (*get_output_presence)(const CustomOp*, size_t) = nullptr;
  int (*get_input_memory)(const CustomOp*, size_t) = nullptr;
  int (*get_variadic_input_minimum)(const CustomOp*) = nullptr;
  int (*get_variadic_input_alike)(const CustomOp*) = nullptr;
  int (*get_variadic_output_minimum)(const CustomOp*) = nullptr;
  int (*get_variadic_output_alike)(const CustomOp*) = nullptr;
  Status* (*create_kernel_with_status)(const CustomOp*, Table, const KernelInfo*, void**) = nullptr;
  Status* (*compute_with_status)(void*, KernelContext*) = nullptr;
  Status* (*infer_shapes)(const CustomOp*, void*) = nullptr;
  int (*get_first_version)(const CustomOp*) = nullptr;
  int (*get_last_version)(const CustomOp*) = nullptr;
};

}  // namespace ort
