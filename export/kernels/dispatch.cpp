// Which variant runs on this processor.
#include <cstdlib>
#include <cstring>

#include "kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace sportsllm {

namespace {

struct Candidate {
  const Variant* (*variant)();
  bool (*runs_here)();
};

#if defined(__aarch64__) && defined(__linux__)
// Bits of the kernel's documentation (arm64/elf_hwcaps), which old headers lack.
bool has_dot_products() { return (getauxval(AT_HWCAP) >> 20 & 1) != 0; }
bool has_i8mm() { return (getauxval(AT_HWCAP2) >> 13 & 1) != 0; }
#elif defined(__aarch64__) && defined(__APPLE__)
bool has_dot_products() { return true; }
bool has_i8mm() {
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &size, nullptr, 0) == 0 && has != 0;
}
#elif defined(__aarch64__)
bool has_dot_products() { return false; }
bool has_i8mm() { return false; }
#endif

// The fastest first.
const Candidate kCandidates[] = {
// The build defines SPORTSLLM_WITHOUT_... for variants that its compiler does not know.
#if defined(__x86_64__) || defined(_M_X64)
#ifndef SPORTSLLM_WITHOUT_AVX512
    {variant_avx512,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
     }},
#endif
#ifndef SPORTSLLM_WITHOUT_AVX_VNNI
    {variant_avx_vnni, [] { return __builtin_cpu_supports("avxvnni") && __builtin_cpu_supports("avx2") != 0; }},
#endif
#ifndef SPORTSLLM_WITHOUT_AVX2
    // All processors with AVX2 have F16C, which not all compilers can ask for.
    {variant_avx2, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#endif
#endif
#if defined(__aarch64__)
#ifndef SPORTSLLM_WITHOUT_I8MM
    {variant_i8mm, has_i8mm},
#endif
#ifndef SPORTSLLM_WITHOUT_DOTPROD
    {variant_dotprod, has_dot_products},
#endif
    {variant_neon, [] { return true; }},
#endif
    {variant_plain, [] { return true; }},
};

const Variant& choose() {
  const char* wanted = std::getenv("SPORTSLLM_KERNELS");
  for (const Candidate& candidate : kCandidates) {
    const Variant& variant = *candidate.variant();
    if (candidate.runs_here() && (wanted == nullptr || std::strcmp(wanted, variant.name) == 0)) return variant;
  }
  return *variant_plain();
}

}  // namespace

const Variant& chosen_variant() {
  static const Variant& chosen = choose();
  return chosen;
}

bool wanted_runs_here() {
  const char* wanted = std::getenv("SPORTSLLM_KERNELS");
  return wanted == nullptr || std::strcmp(wanted, chosen_variant().name) == 0;
}

}  // namespace sportsllm
