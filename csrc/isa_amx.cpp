#define TROTH_AVX512
#define TROTH_BF16
#define TROTH_AMX
#define TROTH_ISA amx
#include "kernels.h"

namespace troth {
const Kernels* amx_kernels() {
    static const Kernels kernels = amx::table("amx");
    return &kernels;
}
}  // namespace troth
