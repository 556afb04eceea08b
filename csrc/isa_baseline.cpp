#define TROTH_ISA baseline
#include "kernels.h"

namespace troth {
const Kernels* baseline_kernels() {
    static const Kernels kernels = baseline::table("baseline");
    return &kernels;
}
}  // namespace troth
