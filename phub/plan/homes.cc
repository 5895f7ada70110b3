#include "phub/plan/homes.h"

#include <fmt/format.h>

#include <algorithm>

#include "phub/text_table.h"

namespace phub {

std::vector<uint64_t> ranks_exchanging(const ChunkLayout& chunk, const KeySpec& key) {
  std::vector<uint64_t> ranks;
  const std::vector<ExchangedRange>& ranges = key.exchanged_by;
  auto range = std::ranges::upper_bound(ranges, chunk.key_element, {}, &ExchangedRange::end);
  for (uint64_t at = chunk.key_element;
       range != ranges.end() && at < chunk.key_element + chunk.elements; ++range) {
    ranks.resize(std::max(ranks.size(), range->ranks.size()));
    for (size_t word = 0; word < range->ranks.size(); ++word) ranks[word] |= range->ranks[word];
    at = range->end;
  }
  return ranks;
}

std::string describe(const HomeBytes& bytes) {
  if (!bytes.known) return "";
  const auto shown = [](uint64_t count) { return count == 0 ? "0 B" : human_bytes(count); };
  return fmt::format(
      "gradients of a round: {} stay at their ranks' machines, {} go to another box since several "
      "machines exchange them, {} for the balance of the boxes, and {} since no box is known at "
      "their ranks' machine",
      shown(bytes.stays), shown(bytes.shared), shown(bytes.for_balance), shown(bytes.without_box));
}

Homes::Homes(std::span<const uint64_t> hosts, std::span<const uint64_t> rank_hosts, uint32_t ranks)
    : hosts_(hosts.begin(), hosts.end()), rank_hosts_(ranks) {
  for (size_t rank = 0; rank < std::min<size_t>(ranks, rank_hosts.size()); ++rank) {
    const uint64_t host = rank_hosts[rank];
    if (host == 0) continue;
    known_ = true;
    if (std::ranges::count(hosts_, host) > 0) rank_hosts_[rank] = host;
  }
}

const Homes::Home& Homes::home_of(const std::vector<uint64_t>& ranks) {
  const auto [at, is_new] = homes_.try_emplace(ranks);
  Home& home = at->second;
  if (!is_new) return home;
  uint32_t all = 0;
  for (uint32_t rank = 0; rank < rank_hosts_.size(); ++rank) {
    const bool exchanges =
        ranks.empty() || (rank / 64 < ranks.size() && (ranks[rank / 64] >> (rank % 64) & 1) != 0);
    if (!exchanges) continue;
    ++all;
    if (rank_hosts_[rank] == 0) {
      ++home.without_box;
    } else {
      home.most = std::max(home.most, ++home.ranks_at[rank_hosts_[rank]]);
    }
  }
  home.strangers = all - home.most;
  for (uint32_t place = 0; place < hosts_.size() && home.most > 0; ++place) {
    const auto of_host = home.ranks_at.find(hosts_[place]);
    if (of_host != home.ranks_at.end() && of_host->second == home.most) {
      home.places.push_back(place);
    }
  }
  if (home.places.size() == hosts_.size()) home.places.clear();
  return home;
}

void Homes::count(const Home& home, uint32_t place, uint64_t slot_bytes, HomeBytes& bytes) const {
  uint64_t boxed = 0;
  for (const auto& [host, of_host] : home.ranks_at) boxed += of_host;
  const auto at = home.ranks_at.find(hosts_[place]);
  const uint64_t here = at == home.ranks_at.end() ? 0 : at->second;
  bytes.stays += slot_bytes * here;
  bytes.for_balance += slot_bytes * (home.most - here);
  bytes.shared += slot_bytes * (boxed - home.most);
  bytes.without_box += slot_bytes * home.without_box;
}

}  // namespace phub
