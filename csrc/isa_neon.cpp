#define TROTH_NEON
#define TROTH_ISA neon
#include "kernels.h"

namespace troth {
const Kernels* neon_kernels() {
    static const Kernels kernels = neon::table("neon");
    return &kernels;
}
}  // namespace troth
