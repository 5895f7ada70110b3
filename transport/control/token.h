// The token that a client shows. It comes from the environment or a file, never from arguments,
// which every user of a machine can read.
#pragma once

#include <string>

namespace phub {

// PHUB_TOKEN, or the first line of the file that PHUB_TOKEN_FILE names; "": neither is set. Throws
// Error(kInvalid): the file cannot be read, others may use it (its mode must be 0600), or it holds
// no token.
std::string token_from_environment();

}  // namespace phub
