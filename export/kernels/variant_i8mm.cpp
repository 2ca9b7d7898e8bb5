#define KERNEL_VARIANT i8mm_lanes
#define KERNEL_DOT 1
#define KERNEL_I8MM 1

#include "simd_i8mm.h"

#include "kernel_functions.h"

const sportsllm::Variant* sportsllm::variant_i8mm() { return &KERNEL_VARIANT::functions("i8mm"); }
