#include "worker/examples/page_rank.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

namespace phub::examples {
namespace {

constexpr uint32_t kRanks = 0;  // the table

// Each row once, ascending.
std::vector<uint64_t> distinct(std::vector<uint64_t> rows) {
  std::ranges::sort(rows);
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return rows;
}

uint32_t index_of(const std::vector<uint64_t>& rows, uint64_t row) {
  return static_cast<uint32_t>(std::ranges::lower_bound(rows, row) - rows.begin());
}

}  // namespace

PageRank::PageRank(const Graph& graph, double damping) : graph_(graph), damping_(damping) {}

iterstore::TableSpec PageRank::table(const Graph& graph) {
  return {.name = "ranks",
          .rows = graph.names.size(),
          .type = "f64",
          .operation = "add",
          .fixed = true};
}

RankedLinks PageRank::links(uint32_t part, uint32_t parts) const {
  std::vector<double> of_source(graph_.names.size());
  for (const Graph::Link& link : graph_.links) of_source[link.from] += link.weight;
  const size_t all = graph_.links.size(), begin = all * part / parts;
  const auto mine = std::span(graph_.links).subspan(begin, all * (part + 1) / parts - begin);
  RankedLinks ranked;
  for (const Graph::Link& link : mine) {
    ranked.sources.push_back(link.from);
    ranked.targets.push_back(link.to);
  }
  ranked.sources = distinct(std::move(ranked.sources));
  ranked.targets = distinct(std::move(ranked.targets));
  for (const auto& [from, to, weight] : mine) {
    ranked.links.push_back({.from = index_of(ranked.sources, from),
                            .to = index_of(ranked.targets, to),
                            .share = damping_ * weight / of_source[from]});
  }
  ranked.ranks.resize(ranked.sources.size());
  ranked.passed_on.resize(ranked.sources.size());
  ranked.received.resize(ranked.targets.size());
  return ranked;
}

void PageRank::iterate(iterstore::StoreThread& store, RankedLinks& links) const {
  store.read_batch<double>(kRanks, links.sources, links.ranks);
  std::ranges::fill(links.received, 0);
  if (!store.is_virtual()) {
    for (size_t s = 0; s < links.ranks.size(); ++s) {
      const double rank = 1 - damping_ + links.ranks[s];
      links.ranks[s] = rank - std::exchange(links.passed_on[s], rank);
    }
    for (const auto& [from, to, share] : links.links) {
      links.received[to] += share * links.ranks[from];
    }
  }
  store.update_batch<double>(kRanks, links.targets, links.received);
  store.clock();
}

double PageRank::apart_after(uint32_t iterations) const {
  return 2 * std::pow(damping_, iterations + 1) / (1 - damping_);
}

uint32_t PageRank::iterations_for(double apart) const {
  if (damping_ == 0) return 1;
  const double wanted = std::log(apart * (1 - damping_) / 2) / std::log(damping_) - 1;
  return static_cast<uint32_t>(std::max(1.0, std::ceil(wanted)));
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
