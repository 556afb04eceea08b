#define TROTH_AVX512
#define TROTH_BF16
#define TROTH_ISA avx512bf16
#include "kernels.h"

namespace troth {
const Kernels* avx512bf16_kernels() {
    static const Kernels kernels = avx512bf16::table("avx512bf16");
    return &kernels;
}
}  // namespace troth
