// The oracle of jobs that are not in lock-step. Their gradients are whole numbers and the server
// adds them to the parameters, or subtracts them in a job with branches, so that their order does
// not matter, and the first elements of a chunk count the updates of each rank: what a rank sees
// says whose updates are in it. Of a branch these are those of its own rounds.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <span>
#include <utility>

#include "tests/sim/rack_oracle.h"
#include "transport/error.h"

namespace phub::sim {

namespace {

// By what the log said before this record: what was decided since is of later rounds, but for ranks
// that were lost ahead of the others.
uint32_t branch_in(uint64_t round, std::span<const LogRecord> log, size_t known) {
  uint32_t branch = 0;
  for (size_t i = 0; i < std::min(known, log.size()); ++i) {
    const LogRecord& record = log[i];
    if (record.kind == LogRecord::Kind::kScheduled && record.round <= round) branch = record.branch;
  }
  return branch;
}

size_t known_to(const Member& who, const Participation& participation) {
  const auto& stays = participation.stays();
  const auto stay = std::ranges::find_if(stays, [&](const Participation::Stay& each) {
    return each.rank == who.rank && each.incarnation == who.incarnation;
  });
  return stay == stays.end() ? ~size_t{0} : stay->ended;
}

}  // namespace

// Of one chunk, and not null.
struct Oracle::Update {
  Contribution by;
  bool sent = true;         // not carried over
  uint32_t branch = 0;      // of its round; what was carried over is of that with which it was sent
  size_t known = 0;         // of the log, when its rank went
  std::vector<float> adds;  // with what was carried over before
};

// A rank's updates of one branch, in their order.
struct Oracle::Share {
  std::vector<Update> updates;
  std::vector<std::vector<float>> sums;  // [n]: of the first n, where the last of them was sent

  // The last that was sent and is one of these, and those before it.
  size_t until(const std::function<bool(const Update&)>& is_one) const {
    size_t count = 0;
    for (size_t i = 0; i < updates.size(); ++i) {
      if (updates[i].sent && is_one(updates[i])) count = i + 1;
    }
    return count;
  }
  // That a copy has, which is ordered before this round by this record.
  size_t before(uint64_t round, size_t record) const {
    return until([&](const Update& u) { return u.by.round < round || u.known < record; });
  }
  // How many of `branch` there are in the result of a round: all before the forks from or of the
  // branch that are behind it, and none after the next one.
  std::pair<size_t, size_t> limits(uint64_t round, uint32_t branch, std::span<const LogRecord> log,
                                   size_t known) const {
    size_t fewest = 0;
    for (size_t i = 0; i < std::min(known, log.size()); ++i) {
      const LogRecord& record = log[i];
      if (record.kind != LogRecord::Kind::kForked || record.parent != branch) continue;
      if (record.round > round + 1) return {fewest, before(record.round, i)};
      fewest = before(record.round, i);
    }
    return {fewest, updates.size()};
  }
};

// As it was forked, and what was added since.
struct Oracle::Branch {
  std::vector<float> begins;
  std::vector<Share> shares;  // by rank
};

std::vector<Oracle::Update> Oracle::updates_of(uint32_t rank, uint32_t chunk,
                                               const Participation& participation,
                                               std::span<const LogRecord> log) const {
  const ChunkPlace place = chunks_of(job_.spec)[chunk];
  const bool coded = is_coded(job_.spec, place.key);
  std::vector<Update> updates;
  std::vector<float> update(place.elements);
  // What was carried over and not sent is lost.
  const auto forget_unsent = [&updates] {
    while (!updates.empty() && !updates.back().sent) updates.pop_back();
  };
  std::map<Member, std::map<uint64_t, std::vector<float>>> residuals;  // after each round
  for (const Participation::Stay& stay : participation.stays()) {
    if (stay.rank != rank) continue;
    std::vector<float> residual(update.size());
    forget_unsent();
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
      updates.push_back({.by = from,
                         .sent = sent,
                         .branch = branch_in(round, log, stay.ended),
                         .known = stay.ended,
                         .adds = sent ? update : std::vector<float>(update.size())});
    }
  }
  forget_unsent();
  for (size_t i = updates.size(); i-- > 0;) {
    if (!updates[i].sent) updates[i].branch = updates[i + 1].branch;
  }
  return updates;
}

std::map<uint32_t, Oracle::Branch> Oracle::branches_of(uint32_t chunk,
                                                       const Participation& participation,
                                                       std::span<const LogRecord> log) const {
  const ChunkLayout& c = plan_.chunks[chunk];
  const auto begin = initial_[c.key].begin() + static_cast<ptrdiff_t>(c.key_element);
  std::map<uint32_t, Branch> branches;
  const auto add = [&](uint32_t number) -> Branch& {
    Branch& branch = branches[number];
    branch.shares.resize(job_.spec.max_ranks);
    for (Share& share : branch.shares) share.sums.emplace_back(c.elements);
    return branch;
  };
  add(0).begins = {begin, begin + c.elements};
  for (const LogRecord& record : log) {
    if (record.kind == LogRecord::Kind::kForked) add(record.branch);
  }
  for (uint32_t rank = 0; rank < job_.spec.max_ranks; ++rank) {
    for (Update& update : updates_of(rank, chunk, participation, log)) {
      Share& share = branches.at(update.branch).shares[rank];
      std::vector<float> sum = share.sums.back();
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += update.adds[i];
      share.sums.push_back(std::move(sum));
      share.updates.push_back(std::move(update));
    }
  }
  for (size_t number = 0; number < log.size(); ++number) {
    const LogRecord& record = log[number];
    if (record.kind != LogRecord::Kind::kForked) continue;
    const Branch& parent = branches.at(record.parent);
    std::vector<float>& begins = branches.at(record.branch).begins = parent.begins;
    for (const Share& share : parent.shares) {
      const auto& sum = share.sums[share.before(record.round, number)];
      for (size_t i = 0; i < begins.size(); ++i) begins[i] -= sum[i];
    }
  }
  return branches;
}

void Oracle::check_clocks(uint32_t chunk, const Participation& participation,
                          const HyperHistory& hyper, std::span<const LogRecord> log) const {
  const ChunkLayout& c = plan_.chunks[chunk];
  const std::map<uint32_t, Branch> branches = branches_of(chunk, participation, log);
  const float sign = job_.spec.optimizer == "none" ? 1 : -1;
  std::vector<float> seen(c.elements), expected(c.elements);
  for (const auto& observation : seen_out_of_step_[chunk]) {
    const Contribution& by = observation.first;
    std::memcpy(seen.data(), observation.second.data(), observation.second.size());
    const size_t known = known_to(by, participation);
    const uint32_t runs = branch_in(by.round + 1, log, known);
    const Branch& branch = branches.at(runs);
    expected = branch.begins;
    const auto wrong = [&](const std::string& what) {
      fail(ErrorCode::kInvalid, "{} chunk {}: rank {} (incarnation {}) at clock {}, branch {}, {}",
           job_.spec.name, chunk, by.rank, by.incarnation, by.round, runs, what);
    };
    // Until the latest round that it may not be without.
    uint64_t slack = std::min(job_.spec.consistency == "ssp" ? job_.spec.slack : ~uint64_t{0},
                              static_cast<uint64_t>(hyper.of(c.key, by.round + 1).slack));
    uint64_t least = std::min(by.round, job_.rounds);
    for (; least > 0; --least) {
      if (branch_in(least, log, known) == runs && slack-- == 0) break;
    }
    for (uint32_t rank = 0; rank < branch.shares.size(); ++rank) {
      const Share& share = branch.shares[rank];
      const auto [fewest, most] = share.limits(by.round, runs, log, known);
      const float many = sign * (seen[rank] - branch.begins[rank]);
      if (!(many >= static_cast<float>(fewest) && many <= static_cast<float>(most) &&
            many == std::floor(many))) {
        wrong(fmt::format("sees {} updates of rank {}, of which there may be {} to {}", many, rank,
                          fewest, most));
      }
      const auto count = static_cast<size_t>(many);
      if (count > 0 && !share.updates[count - 1].sent) {
        wrong(fmt::format("sees update {} of rank {}, which was carried over", count, rank));
      }
      for (size_t i = 0; i < expected.size(); ++i) expected[i] += sign * share.sums[count][i];
      if (by.round > job_.rounds && count != share.updates.size()) {
        wrong(fmt::format("sees {} of {} updates of rank {} when all is quiet", count,
                          share.updates.size(), rank));
      }
      const std::string clock = check_clock(by, chunk, share, rank, count, least, participation);
      if (!clock.empty()) wrong(clock);
    }
    if (seen != expected) wrong("sees other updates than the first of each rank");
  }
}

// What `by` may see of a rank: of itself all until now, of others all until round `least`.
std::string Oracle::check_clock(const Contribution& by, uint32_t chunk, const Share& share,
                                uint32_t rank, size_t count, uint64_t least,
                                const Participation& participation) const {
  const auto until = [&](uint32_t incarnation, uint64_t round) {
    return share.until([&](const Update& update) {
      const Contribution& of = update.by;
      return of.incarnation < incarnation || (of.incarnation == incarnation && of.round <= round);
    });
  };
  if (rank == by.rank) {
    const size_t own = until(by.incarnation, by.round);
    return count == own ? "" : fmt::format("sees {} of its own {} updates", count, own);
  }
  if (least == 0) return "";
  for (const Participation::Stay& stay : participation.stays()) {
    if (stay.rank != rank) continue;
    // It surely takes part while some but not all of its updates are seen; who begins in round 1,
    // while none are, too.
    const uint64_t last = stay.last.empty() ? job_.rounds : stay.last[chunk];
    const bool begun = stay.first == 1 || count > until(stay.incarnation, stay.first - 1);
    if (!begun || last < least || count >= until(stay.incarnation, last)) continue;
    if (count < until(stay.incarnation, least)) {
      return fmt::format("sees {} updates of rank {}, which had to be in round {}", count, rank,
                         least);
    }
  }
  return "";
}

}  // namespace phub::sim
