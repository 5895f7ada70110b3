// libfabric is opened at run time, when the ofi transport is first asked for: a program that was
// built with it runs on hosts without it, and uses the host's own, with its providers. The calls
// of it that phub makes are defined in library.cc, and go on to it; all others are inline.
#pragma once

#include <string>

namespace phub {

// The reason why there is no libfabric in this process, and what to do; "": it is open. The first
// call opens it. Any thread. REQUIRES: called before any other use of libfabric.
const std::string& ofi_library_problem();

}  // namespace phub
