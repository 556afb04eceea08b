#define TROTH_AVX2
#define TROTH_ISA avx2
#include "kernels.h"

namespace troth {
const Kernels* avx2_kernels() {
    static const Kernels kernels = avx2::table("avx2");
    return &kernels;
}
}  // namespace troth
