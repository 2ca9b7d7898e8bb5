#define KERNEL_VARIANT neon_lanes
#define KERNEL_DOT 0

#include "simd_neon.h"

#include "kernel_functions.h"

const sportsllm::Variant* sportsllm::variant_neon() { return &KERNEL_VARIANT::functions("neon"); }
