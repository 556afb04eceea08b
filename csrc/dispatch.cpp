#include "dispatch.h"

#if defined(TROTH_X86)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace troth {

const Kernels* baseline_kernels();
#if defined(TROTH_ARM)
const Kernels* neon_kernels();
#endif
#if defined(TROTH_X86)
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512bf16_kernels();
const Kernels* amx_kernels();

namespace {

// Whether this processor has AMX tiles with bf16 products (CPUID leaf 7, EDX bits 22 and 24) and this process may use them:
// Linux hands out their 8 KiB of state on request only (arch_prctl ARCH_REQ_XCOMP_PERM, component 18).
bool amx_is_granted() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
#if defined(__linux__)
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return false;
#endif
}

}  // namespace
#endif

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
#if defined(TROTH_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vnni");
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    static const bool amx = bf16 && amx_is_granted();
    if (amx) names.push_back("amx");
    // Bf16 products are twice as fast as float32 ones on AMD, and slower outside AMX on Intel (Sapphire Rapids: 0.65x).
    const bool fast_bf16 = bf16 && __builtin_cpu_is("amd");
    if (fast_bf16) names.push_back("avx512bf16");
    if (avx512) names.push_back("avx512");
    if (bf16 && !fast_bf16) names.push_back("avx512bf16");
    if (avx2) names.push_back("avx2");
#endif
#if defined(TROTH_ARM)
    names.push_back("neon");  // every 64-bit ARM processor has it
#endif
    names.push_back("baseline");
    return names;
}

const Kernels* kernels_named(const std::string& name) {
    bool known = false;
    for (const auto& one : instruction_sets()) known = known || one == name;
    if (!known) return nullptr;
#if defined(TROTH_X86)
    if (name == "amx") return amx_kernels();
    if (name == "avx512bf16") return avx512bf16_kernels();
    if (name == "avx512") return avx512_kernels();
    if (name == "avx2") return avx2_kernels();
#endif
#if defined(TROTH_ARM)
    if (name == "neon") return neon_kernels();
#endif
    return baseline_kernels();
}

}  // namespace troth
