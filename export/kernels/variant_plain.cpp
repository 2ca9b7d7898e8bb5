
#define KERNEL_VARIANT plain_lanes

#include "simd_plain.h"

#include "kernel_functions.h"

const sportsllm::Variant* sportsllm::variant_plain() { return &KERNEL_VARIANT::functions("plain"); }
