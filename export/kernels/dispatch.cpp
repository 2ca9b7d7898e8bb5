// Which variant runs on this processor.
#include <cstdlib>
#include <cstring>

#include "kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace sportsllm {

namespace {

struct Candidate {
  const Variant* (*variant)();
  bool (*runs_here)();
};

// The fastest first.
const Candidate kCandidates[] = {
#if defined(__x86_64__) || defined(_M_X64)
    {variant_avx512,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
     }},
    {variant_avx_vnni, [] { return __builtin_cpu_supports("avxvnni") && __builtin_cpu_supports("avx2") != 0; }},
    // All processors with AVX2 have F16C, which not all compilers can ask for.
    {variant_avx2, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#endif
#if defined(__aarch64__)
    {variant_dotprod,
     [] {
#if defined(__linux__)
       return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
       return true;  // Apple's processors
#endif
     }},
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
