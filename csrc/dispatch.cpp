#include "dispatch.h"

namespace troth {

const Kernels* baseline_kernels();
#if defined(TROTH_X86)
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512bf16_kernels();
#endif

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
#if defined(TROTH_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) names.push_back("avx512bf16");
    if (avx512) names.push_back("avx512");
    if (avx2) names.push_back("avx2");
#endif
    names.push_back("baseline");
    return names;
}

const Kernels* kernels_named(const std::string& name) {
    bool known = false;
    for (const auto& one : instruction_sets()) known = known || one == name;
    if (!known) return nullptr;
#if defined(TROTH_X86)
    if (name == "avx512bf16") return avx512bf16_kernels();
    if (name == "avx512") return avx512_kernels();
    if (name == "avx2") return avx2_kernels();
#endif
    return baseline_kernels();
}

}  // namespace troth
