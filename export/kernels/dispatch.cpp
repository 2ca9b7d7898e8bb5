// Which variant runs on this processor.
#include <cstdlib>
#include <cstring>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
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

#if defined(__x86_64__)
// Read here, since zig 0.17's __builtin_cpu_supports says no to everything. Bits of Intel's manual, volume 2A, CPUID.
struct Features {
  bool avx2 = false, avx_vnni = false, avx512 = false;

  Features() {
    unsigned eax, ebx, ecx, edx, highest;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return;
    const bool has_xgetbv = ecx >> 27 & 1, fma_and_f16c = (ecx >> 12 & 1) && (ecx >> 29 & 1);
    if (!has_xgetbv || !__get_cpuid_count(7, 0, &highest, &ebx, &ecx, &edx)) return;
    unsigned saved, unused;  // registers whose contents the operating system keeps
    __asm__("xgetbv" : "=a"(saved), "=d"(unused) : "c"(0));
    const bool keeps_ymm = (saved & 0x06) == 0x06, keeps_zmm = (saved & 0xe6) == 0xe6;
    const unsigned f_dq_bw_vl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    avx2 = keeps_ymm && fma_and_f16c && (ebx >> 5 & 1);
    avx512 = keeps_zmm && (ebx & f_dq_bw_vl) == f_dq_bw_vl && (ecx >> 11 & 1);
    if (highest >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) avx_vnni = avx2 && (eax >> 4 & 1);
  }
};

const Features& features() {
  static const Features found;
  return found;
}
#elif defined(__aarch64__) && defined(__linux__)
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
#if defined(__x86_64__)
#ifndef SPORTSLLM_WITHOUT_AVX512
    {variant_avx512, [] { return features().avx512; }},
#endif
#ifndef SPORTSLLM_WITHOUT_AVX_VNNI
    {variant_avx_vnni, [] { return features().avx_vnni; }},
#endif
#ifndef SPORTSLLM_WITHOUT_AVX2
    {variant_avx2, [] { return features().avx2; }},
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
