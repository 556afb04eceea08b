#define TROTH_AVX512
#define TROTH_ISA avx512
#include "kernels.h"

namespace troth {
const Kernels* avx512_kernels() {
    static const Kernels kernels = avx512::table("avx512");
    return &kernels;
}
}  // namespace troth
