#define KERNEL_AVX_VNNI 1
#define KERNEL_VARIANT avx_vnni_lanes

#include "simd_avx2.h"

#include "kernel_functions.h"

const sportsllm::Variant* sportsllm::variant_avx_vnni() { return &KERNEL_VARIANT::functions("avx_vnni"); }
