// libbpf is opened at run time, as libfabric is (transport/ofi/library.h). The calls of it that
// phub makes are defined in library.cc, and go on to it.
#pragma once

#include <string>

namespace phub {

// The reason why there is no libbpf in this process, or no program for it in this build, and what
// to do; "": it is open. The first call opens it. Any thread. REQUIRES: called before any other use
// of libbpf.
const std::string& bpf_library_problem();

}  // namespace phub
