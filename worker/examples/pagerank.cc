// Ranks the nodes of a graph (PageRank), in one process or in several, each of several threads:
//
//   bin/pagerank --links links.txt --out ranks.txt
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

constexpr uint32_t kIterations = 150;  // enough for most dampings
constexpr double kApart = 1e-9;        // for others so many that the ranks are as near as this

struct Options {
  StoreProgram program;
  std::string packages = "packages", links;
  LinkOptions how;
  double damping = 0.85;
  bool enough_iterations = true;  // none are given
  std::string out;
};

Options parse(int argc, char** argv) {
  Options options;
  options.program.iterations = kIterations;
  options.program.store.worker = options_from_environment();
  if (auto& name = options.program.store.worker.spec.name; name.empty()) name = "pagerank";
  CLI::App app("Ranks the nodes of a graph (PageRank), one process per rank.");
  add_store_options(app, options.program);
  auto* links = app.add_option("--links", options.links,
                               "A file of lines \"from to [weight]\", .csv, .ncol, .lgl or .mtx");
  app.add_flag("--undirected", options.how.undirected, "A line is a link in both directions")
      ->needs(links);
  app.add_flag("--numbered", options.how.numbered,
               "Nodes are the numbers from 0 to the largest, also those without links")
      ->needs(links);
  app.add_option("--packages", options.packages,
                 "Instead: what `apt-cache dumpavail` prints, packages and their dependencies")
      ->excludes(links)
      ->capture_default_str();
  app.add_option("--damping", options.damping, "Part of a rank that is passed on")
      ->check(between(0, 0.999))
      ->capture_default_str();
  app.add_option("--out", options.out, "Write every node's rank to this file, \"node rank\"");
  parse_or_exit(app, argc, argv);
  options.enough_iterations = app.get_option("--iterations")->count() == 0;
  return options;
}

void report(const Graph& graph, std::span<const double> ranks, const Options& options) {
  std::vector<uint32_t> order(ranks.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](uint32_t n) { return -ranks[n]; });
  const bool packages = options.links.empty();
  fmt::print("{} {}, {} {}\n", graph.names.size(), packages ? "packages" : "nodes",
             graph.links.size(), packages ? "dependencies" : "links");
  for (size_t i = 0; i < std::min<size_t>(5, order.size()); ++i) {
    fmt::print("{:<24} {:.6f}\n", graph.names[order[i]], ranks[order[i]]);
  }
  std::string lines;
  for (size_t n = 0; n < ranks.size(); ++n) {
    lines += fmt::format("{} {:.17g}\n", graph.names[n], ranks[n]);
  }
  write_file(options.out, lines);
}

void run(Options options) {
  StoreProgram& program = options.program;
  check_can_write(options.out);
  const Graph graph = options.links.empty() ? read_packages(options.packages)
                                            : read_links(options.links, options.how);
  const PageRank page_rank(graph, options.damping);
  if (options.enough_iterations) {
    program.iterations = std::max(kIterations, page_rank.iterations_for(kApart));
  }
  program.store.tables = {PageRank::table(graph)};
  const auto box = own_box(program);
  iterstore::Store store(program.store);
  agree(
      program, "pagerank",
      {fmt::format("damping {}", options.damping), fmt::format("numbered {}", options.how.numbered),
       fmt::format("undirected {}", options.how.undirected),
       fmt::format("links {}", graph.links.size()), fmt::format("file {:016x}", graph.digest)});
  run_threads(store, program, [&](iterstore::StoreThread& mine, uint32_t part) {
    RankedLinks links = page_rank.links(part, parts_of(program));
    run_iterations(mine, program, [&](uint32_t) { page_rank.iterate(mine, links); });
  });
  const std::vector<double> ranks = page_rank.ranks(store.table(0));
  if (program.store.worker.rank != 0) return;
  report(graph, ranks, options);
  if (const double apart = page_rank.apart_after(program.iterations); apart > kApart) {
    fmt::print("after {} iterations the ranks may be {:.1g} apart from what they tend to, in all\n",
               program.iterations, apart);
  }
}

}  // namespace
}  // namespace phub::examples

int main(int argc, char** argv) {
  using namespace phub::examples;  // NOLINT
  return status_of("pagerank", [&] { run(parse(argc, argv)); });
}
