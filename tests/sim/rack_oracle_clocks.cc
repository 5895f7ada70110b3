// The oracle of jobs that are not in lock-step. Their gradients are whole numbers and the server
// adds them to the parameters, or subtracts them in a job with branches, so that their order does
// not matter, and the first elements of a chunk count the updates of each rank: what a rank sees
// says whose updates are in it.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>

#include "tests/sim/rack_oracle.h"
#include "transport/error.h"

namespace phub::sim {

// A rank's updates of one chunk that are not null, in their order, and what they add up to. What
// was carried over came with the next one that was not.
struct Oracle::History {
  std::vector<Contribution> updates;
  std::vector<bool> sent;                // of the updates: not carried over
  std::vector<std::vector<float>> sums;  // [n]: of the first n, where the last of them was sent

  // What was carried over and not sent is lost.
  void forget_unsent() {
    while (!sent.empty() && !sent.back()) updates.pop_back(), sent.pop_back(), sums.pop_back();
  }
  size_t all_sent() const {
    size_t count = sent.size();
    while (count > 0 && !sent[count - 1]) --count;
    return count;
  }
  // The last of the rounds before this one that was sent, and those before it.
  size_t before(uint64_t round) const {
    size_t count = 0;
    for (size_t i = 0; i < updates.size(); ++i) {
      if (sent[i] && updates[i].round < round) count = i + 1;
    }
    return count;
  }
};

// The rounds of one branch from a change of branches to the next: it begins with the updates that
// it has, and all ranks' of earlier rounds are over.
struct Oracle::Stretch {
  uint64_t first = 1;
  std::vector<float> begins;
  std::vector<size_t> counts;  // by rank, of all its updates
};

Oracle::History Oracle::history_of(uint32_t rank, uint32_t chunk,
                                   const Participation& participation) const {
  const ChunkPlace place = chunks_of(job_.spec)[chunk];
  const bool coded = is_coded(job_.spec, place.key);
  History history;
  std::vector<float> update(place.elements);
  history.sums.emplace_back(update.size());
  std::map<Member, std::map<uint64_t, std::vector<float>>> residuals;  // after each round
  for (const Participation::Stay& stay : participation.stays()) {
    if (stay.rank != rank) continue;
    std::vector<float> residual(update.size());
    history.forget_unsent();
    if (const auto before = heritage(stay, participation); before && coded) {
      residual = residuals.at(*before).at(stay.first - 1);
    }
    const uint64_t last = stay.last.empty() ? job_.rounds : stay.last[chunk];
    for (uint64_t round = stay.first; round <= last; ++round) {
      const Contribution from{stay, round};
      const bool null = is_null(from, place.key);
      const bool sent = !carried_.contains({stay, chunk, round});
      if (!null) {
        fill_chunk(from, chunk, reinterpret_cast<std::byte*>(update.data()));
        if (coded) update = send_coded(job_.spec, place, rank, round, update, residual);
        for (size_t i = 0; i < update.size() && !coded; ++i) {
          update[i] += std::exchange(residual[i], 0.0F);
        }
        for (size_t i = 0; i < update.size() && !sent; ++i) residual[i] += update[i];
      }
      residuals[stay][round] = residual;
      if (null || !stay.covers(round, chunk)) continue;  // or it was there already
      history.updates.push_back(from);
      history.sent.push_back(sent);
      std::vector<float> sum = history.sums.back();
      for (size_t i = 0; i < sum.size() && sent; ++i) sum[i] += update[i];
      history.sums.push_back(std::move(sum));
    }
  }
  return history;
}

std::vector<Oracle::Stretch> Oracle::stretches_of(uint32_t chunk,
                                                  const std::vector<History>& histories,
                                                  const HyperHistory& hyper) const {
  const ChunkLayout& c = plan_.chunks[chunk];
  const auto begin = initial_[c.key].begin() + static_cast<ptrdiff_t>(c.key_element);
  std::map<uint32_t, std::vector<float>> branches = {{0, {begin, begin + c.elements}}};
  uint32_t running = 0;
  std::vector<Stretch> stretches = {
      {.begins = branches[0], .counts = std::vector<size_t>(histories.size())}};
  for (const LogRecord& record : hyper.branches()) {
    if (record.kind == LogRecord::Kind::kDiscarded) continue;
    Stretch next = {.first = record.round, .begins = {}, .counts = stretches.back().counts};
    for (uint32_t rank = 0; rank < histories.size(); ++rank) {
      const auto& sums = histories[rank].sums;
      const size_t had = std::exchange(next.counts[rank], histories[rank].before(record.round));
      std::vector<float>& state = branches[running];
      for (size_t i = 0; i < state.size(); ++i)
        state[i] -= sums[next.counts[rank]][i] - sums[had][i];
    }
    if (record.kind == LogRecord::Kind::kForked) {
      branches[record.branch] = branches.at(record.parent);
    } else {
      running = record.branch;
    }
    next.begins = branches.at(running);
    if (next.first == stretches.back().first) stretches.pop_back();
    stretches.push_back(std::move(next));
  }
  return stretches;
}

void Oracle::check_clocks(uint32_t chunk, const Participation& participation,
                          const HyperHistory& hyper) const {
  const ChunkLayout& c = plan_.chunks[chunk];
  std::vector<History> histories;
  for (uint32_t rank = 0; rank < job_.spec.max_ranks; ++rank) {
    histories.push_back(history_of(rank, chunk, participation));
  }
  const std::vector<Stretch> stretches = stretches_of(chunk, histories, hyper);
  const float sign = job_.spec.optimizer == "none" ? 1 : -1;
  std::vector<float> seen(c.elements), expected(c.elements);
  std::vector<size_t> counts(histories.size());
  for (const auto& observation : seen_out_of_step_[chunk]) {
    const Contribution& by = observation.first;
    std::memcpy(seen.data(), observation.second.data(), observation.second.size());
    const auto next =
        std::ranges::upper_bound(stretches, by.round + 1, {}, &Stretch::first);  // to the end
    const Stretch& stretch = *std::prev(next);
    expected = stretch.begins;
    const auto wrong = [&](const std::string& what) {
      fail(ErrorCode::kInvalid, "{} chunk {}: rank {} (incarnation {}) at clock {} {}",
           job_.spec.name, chunk, by.rank, by.incarnation, by.round, what);
    };
    for (uint32_t rank = 0; rank < histories.size(); ++rank) {
      const auto& sums = histories[rank].sums;
      const size_t begun = stretch.counts[rank];
      const size_t most = next == stretches.end() ? sums.size() - 1 : next->counts[rank];
      const float count = sign * (seen[rank] - stretch.begins[rank]) + static_cast<float>(begun);
      if (!(count >= static_cast<float>(begun) && count <= static_cast<float>(most) &&
            count == std::floor(count))) {
        wrong(fmt::format("sees {} updates of rank {}, of which there may be {} to {}", count, rank,
                          begun, most));
      }
      counts[rank] = static_cast<size_t>(count);
      if (count > 0 && !histories[rank].sent[counts[rank] - 1]) {
        wrong(fmt::format("sees update {} of rank {}, which was carried over", count, rank));
      }
      for (size_t i = 0; i < expected.size(); ++i) {
        expected[i] += sign * (sums[counts[rank]][i] - sums[begun][i]);
      }
    }
    if (seen != expected) wrong("sees other updates than the first of each rank");
    const uint64_t slack = std::min(job_.spec.consistency == "ssp" ? job_.spec.slack : ~uint64_t{0},
                                    static_cast<uint64_t>(hyper.of(c.key, by.round + 1).slack));
    for (uint32_t rank = 0; rank < histories.size(); ++rank) {
      if (by.round > job_.rounds && counts[rank] != histories[rank].all_sent()) {
        wrong(fmt::format("sees {} of {} updates of rank {} when all is quiet", counts[rank],
                          histories[rank].all_sent(), rank));
      }
      const std::string clock =
          check_clock(by, chunk, histories[rank], rank, counts[rank], slack, participation);
      if (!clock.empty()) wrong(clock);
    }
  }
}

// What `by` may see of a rank: of itself all until now, of others all but the slack's.
std::string Oracle::check_clock(const Contribution& by, uint32_t chunk, const History& history,
                                uint32_t rank, size_t count, uint64_t slack,
                                const Participation& participation) const {
  const auto until = [&](uint32_t incarnation, uint64_t round) {
    size_t count = 0;  // with the latest of these that was sent
    for (size_t i = 0; i < history.updates.size(); ++i) {
      const Contribution& update = history.updates[i];
      const bool is_later = update.incarnation > incarnation ||
                            (update.incarnation == incarnation && update.round > round);
      if (!is_later && history.sent[i]) count = i + 1;
    }
    return count;
  };
  if (rank == by.rank) {
    const size_t own = until(by.incarnation, by.round);
    return count == own ? "" : fmt::format("sees {} of its own {} updates", count, own);
  }
  if (by.round <= slack) return "";
  const uint64_t least = std::min(by.round, job_.rounds) - slack;
  for (const Participation::Stay& stay : participation.stays()) {
    if (stay.rank != rank) continue;
    // It surely takes part while some but not all of its updates are seen; who begins in round 1,
    // while none are, too.
    const uint64_t last = stay.last.empty() ? job_.rounds : stay.last[chunk];
    const bool begun = stay.first == 1 || count > until(stay.incarnation, stay.first - 1);
    if (!begun || last < least || count >= until(stay.incarnation, last)) continue;
    if (count < until(stay.incarnation, least)) {
      return fmt::format("sees {} updates of rank {}: the slack is {}", count, rank, slack);
    }
  }
  return "";
}

}  // namespace phub::sim
