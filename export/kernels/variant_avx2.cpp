
#define KERNEL_VARIANT avx2_lanes

#include "simd_avx2.h"

#include "kernel_functions.h"

const sportsllm::Variant* sportsllm::variant_avx2() { return &KERNEL_VARIANT::functions("avx2"); }
