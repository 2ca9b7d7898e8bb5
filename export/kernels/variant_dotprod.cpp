#define KERNEL_VARIANT dotprod_lanes
#define KERNEL_DOT 1

#include "simd_neon.h"

#include "kernel_functions.h"

const sportsllm::Variant* sportsllm::variant_dotprod() { return &KERNEL_VARIANT::functions("dotprod"); }
