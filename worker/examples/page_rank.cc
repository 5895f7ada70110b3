#include "worker/examples/page_rank.h"

#include <cstring>

namespace phub::examples {
namespace {

constexpr uint32_t kRanks = 0;  // the table

}  // namespace

PageRank::PageRank(const PackageGraph& graph, double damping) : graph_(graph), damping_(damping) {}

iterstore::TableSpec PageRank::table(const PackageGraph& graph) {
  return {.name = "ranks",
          .rows = graph.names.size(),
          .type = "f64",
          .operation = "add",
          .fixed = true};
}

std::vector<RankedLink> PageRank::links(uint32_t part, uint32_t parts) const {
  std::vector<uint32_t> of_source(graph_.names.size());
  for (const PackageGraph::Link& link : graph_.links) ++of_source[link.from];
  std::vector<RankedLink> links;
  const size_t all = graph_.links.size();
  for (size_t l = all * part / parts; l < all * (part + 1) / parts; ++l) {
    const auto [from, to] = graph_.links[l];
    links.push_back({.from = from, .to = to, .share = damping_ / of_source[from]});
  }
  return links;
}

void PageRank::iterate(iterstore::StoreThread& store, std::span<RankedLink> links) const {
  for (RankedLink& link : links) {
    const double rank = 1 - damping_ + store.read<double>(kRanks, link.from);
    store.update(kRanks, link.to, link.share * (rank - link.passed_on));
    if (!store.is_virtual()) link.passed_on = rank;
  }
  store.clock();
}

std::vector<double> PageRank::ranks(std::span<const std::byte> table) const {
  std::vector<double> ranks(graph_.names.size());
  std::memcpy(ranks.data(), table.data(), table.size());
  double sum = 0;
  for (double& rank : ranks) sum += rank += 1 - damping_;
  for (double& rank : ranks) rank /= sum;
  return ranks;
}

}  // namespace phub::examples
