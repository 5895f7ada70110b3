// Graphs of named nodes, for their ranks: from files of links, and the dependencies of Debian's
// packages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace phub::examples {

struct Graph {
  struct Link {
    uint32_t from = 0, to = 0;
    double weight = 1;  // above 0

    friend bool operator==(const Link&, const Link&) = default;
  };
  std::vector<std::string> names;  // by number
  std::vector<Link> links;         // by `from`, then `to`, each once
  uint64_t digest = 0;             // of the file
};

// Reads the output of `apt-cache dumpavail`. A link is a package's Depends or Pre-Depends on
// another that is in the file, each of several alternatives; no package is linked to itself. Names
// ascend. Throws Error(kNotFound): there is no such file; Error(kInvalid): it has no packages.
Graph read_packages(const std::string& path);

struct LinkOptions {
  bool undirected = false;  // a line is a link in both directions; of a node to itself, too: twice,
                            // as in igraph
  bool numbered = false;  // nodes are the numbers from 0 to the largest, as in igraph's edge lists
};

// Reads links, in the format that the end of the file's name says:
//   .lgl        igraph's: a line "# node", and a line "node [weight]" for each of its links
//   .mtx, .mm   a square matrix (matrix_market.h): an entry in row a and column b is a link from a
//               to b; nodes are the numbers from 1, also those without links
//   .csv        lines "from,to[,weight]"
//   all others  lines "from to [weight]", with spaces or tabs between them, as igraph's edge lists
//               and its .ncol have it
// Empty lines, and but for .lgl those that begin with # or %, are left out. A link without a weight
// has 1; weights of links that come twice are added up, and one of 0 is no link, though its nodes
// are there. Throws Error(kNotFound): there is no such file; Error(kInvalid) that says the line and
// what to do.
Graph read_links(const std::string& path, const LinkOptions& options = {});

}  // namespace phub::examples
