// libibverbs and librdmacm are opened at run time, when RDMA is first asked for: a program that was
// built with RDMA runs on hosts without them, and uses the host's own, with its providers. The
// calls of theirs that phub makes are defined in library.cc, and go on to them.
#pragma once

#include <string>

namespace phub {

// The reason why there is no RDMA in this process, and what to do; "": both are open. The first
// call opens them. Any thread. REQUIRES: called before any other use of them.
const std::string& verbs_library_problem();

}  // namespace phub
