
#define KERNEL_VARIANT avx512_lanes

#include "simd_avx512.h"

#include "kernel_functions.h"

const sportsllm::Variant* sportsllm::variant_avx512() { return &KERNEL_VARIANT::functions("avx512"); }
