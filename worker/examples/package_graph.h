// The dependencies of Debian's packages, as a graph.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace phub::examples {

struct PackageGraph {
  struct Link {
    uint32_t from = 0, to = 0;  // `from` depends on `to`

    friend bool operator==(const Link&, const Link&) = default;
  };
  std::vector<std::string> names;  // by number, ascending
  std::vector<Link> links;         // ascending, each once; nothing depends on itself
};

// Reads a file with the output of `apt-cache dumpavail`. A link is a package's Depends or
// Pre-Depends on another that is in the file, each of several alternatives. Throws
// Error(kNotFound): there is no such file; Error(kInvalid): it has no packages.
PackageGraph read_packages(const std::string& path);

}  // namespace phub::examples
