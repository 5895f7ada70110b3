// Hyperparameters by their names ("lr", "momentum", …), as jobs and configurations spell them.
#pragma once

#include <string>

#include "kernels/kernels.h"

namespace phub::kernels {

// Sets one value. Returns "", or a sentence that lists the known names or says what values are
// allowed; then nothing is set.
std::string set(Hyper& hyper, const std::string& name, double value);

}  // namespace phub::kernels
