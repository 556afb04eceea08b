// Which kernels this processor can run.
#pragma once

#include <string>
#include <vector>

namespace troth {

struct Kernels;

// Names, the fastest first; "baseline" is always last.
std::vector<std::string> instruction_sets();

// The kernels of one of them, or null when the processor lacks it or the build left it out.
const Kernels* kernels_named(const std::string& name);

}  // namespace troth
