#define TROTH_AVX512
#define TROTH_AMX
#define TROTH_ISA amx
#include "panels16.h"

namespace troth {

const Kernels* avx512_kernels();

const Kernels* amx_kernels() {
    static const Kernels kernels = amx::with_panels16("amx", *avx512_kernels());
    return &kernels;
}

}  // namespace troth
