// Ranks Debian's packages by their dependencies (PageRank), in several processes of several
// threads:
//
//   apt-cache dumpavail >packages
//   bin/phub serve --listen 127.0.0.1:7717 &
//   for rank in 0 1; do bin/pagerank --world 2 --rank $rank --packages packages & done; wait
//
// Every thread has a part of the links, and passes on over each what its source's rank has changed
// by; so the ranks are the same, but for rounding, in lock-step and out of it.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "worker/examples/files.h"
#include "worker/examples/numbers.h"
#include "worker/examples/page_rank.h"
#include "worker/examples/program.h"
#include "worker/examples/store_program.h"

namespace phub::examples {
namespace {

struct Options {
  StoreProgram program;
  std::string packages = "packages";
  double damping = 0.85;
  std::string out;
};

Options parse(int argc, char** argv) {
  Options options;
  options.program.iterations = 150;
  options.program.store.worker = options_from_environment();
  if (auto& name = options.program.store.worker.spec.name; name.empty()) name = "pagerank";
  CLI::App app("Ranks Debian's packages by their dependencies, one process per rank.");
  add_store_options(app, options.program);
  app.add_option("--packages", options.packages, "What `apt-cache dumpavail` prints")
      ->capture_default_str();
  app.add_option("--damping", options.damping, "Part of a rank that is passed on")
      ->check(between(0, 0.999))
      ->capture_default_str();
  app.add_option("--out", options.out, "Write every package's rank to this file");
  parse_or_exit(app, argc, argv);
  return options;
}

void report(const PackageGraph& graph, std::span<const double> ranks, const std::string& out) {
  std::vector<uint32_t> order(ranks.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](uint32_t n) { return -ranks[n]; });
  fmt::print("{} packages, {} dependencies\n", graph.names.size(), graph.links.size());
  for (size_t i = 0; i < std::min<size_t>(5, order.size()); ++i) {
    fmt::print("{:<24} {:.6f}\n", graph.names[order[i]], ranks[order[i]]);
  }
  std::string lines;
  for (size_t n = 0; n < ranks.size(); ++n) {
    lines += fmt::format("{} {:.17g}\n", graph.names[n], ranks[n]);
  }
  write_file(out, lines);
}

void run(Options options) {
  StoreProgram& program = options.program;
  check_can_write(options.out);
  const PackageGraph graph = read_packages(options.packages);
  const PageRank page_rank(graph, options.damping);
  program.store.tables = {PageRank::table(graph)};
  iterstore::Store store(program.store);
  agree(program, "pagerank",
        {fmt::format("damping {}", options.damping), fmt::format("links {}", graph.links.size())});
  run_threads(store, program, [&](iterstore::StoreThread& mine, uint32_t part) {
    RankedLinks links = page_rank.links(part, parts_of(program));
    run_iterations(mine, program, [&](uint32_t) { page_rank.iterate(mine, links); });
  });
  const std::vector<double> ranks = page_rank.ranks(store.table(0));
  if (program.store.worker.rank == 0) report(graph, ranks, options.out);
}

}  // namespace
}  // namespace phub::examples

int main(int argc, char** argv) {
  using namespace phub::examples;  // NOLINT
  return status_of("pagerank", [&] { run(parse(argc, argv)); });
}
