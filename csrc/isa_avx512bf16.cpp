#define TROTH_AVX512
#define TROTH_ISA avx512bf16
#include "panels16.h"

namespace troth {

const Kernels* avx512_kernels();

const Kernels* avx512bf16_kernels() {
    static const Kernels kernels = avx512bf16::with_panels16("avx512bf16", *avx512_kernels());
    return &kernels;
}

}  // namespace troth
