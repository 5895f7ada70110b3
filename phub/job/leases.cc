#include "phub/job/leases.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "phub/core/index_set.h"

namespace phub {

Leases::Leases(const JobSpec& spec, const RankTable& ranks)
    : spec_(spec), ranks_(ranks), times_(ranks.size()) {}

void Leases::begin(uint32_t rank, Ms now) {
  times_[rank].waited_since = 0;
  renew(rank, now);
  check_after_ = std::min(check_after_, times_[rank].lease_until);
}

void Leases::renew(uint32_t rank, Ms now) {
  now_ = now;
  times_[rank].lease_until = now + spec_.lease_ms;
}

void Leases::probed(const std::vector<uint64_t>& sent, std::vector<uint64_t> waited_for, Ms now) {
  waited_for_ = std::move(waited_for);
  for (uint32_t r = 0; r < times_.size(); ++r) {
    Times& rank = times_[r];
    const bool waited = (waited_for_[r / 64] >> (r % 64)) & 1;
    if (!waited || sent[r] != rank.sent) {
      rank.waited_since = waited ? now : 0;
    } else if (rank.waited_since == 0) {
      rank.waited_since = now;
    }
    rank.sent = sent[r];
  }
}

std::vector<uint32_t> Leases::waiting_for() const {
  std::vector<uint32_t> out;
  for (uint32_t w = 0; w < waited_for_.size(); ++w) {
    for_each_bit(waited_for_[w], w, [&out](uint32_t rank) { out.push_back(rank); });
  }
  return out;
}

std::vector<Leases::Over> Leases::check(Ms now) {
  std::vector<Over> over;
  check_after_ = kNever;
  for (uint32_t r = 0; r < times_.size(); ++r) {
    const Times& rank = times_[r];
    if (ranks_[r].stage != RankRecord::Stage::kLive || ranks_[r].losing) continue;
    const Ms progress_until =
        rank.waited_since == 0 ? kNever : rank.waited_since + spec_.progress_limit_ms;
    if (now > rank.lease_until) {
      over.push_back({r, fmt::format("its lease of {} ms expired", spec_.lease_ms)});
    } else if (now > progress_until) {
      over.push_back({r, fmt::format("sent nothing for {} ms while the others waited for it",
                                     now - rank.waited_since)});
    } else {
      check_after_ = std::min({check_after_, rank.lease_until, progress_until});
    }
  }
  return over;
}

void Leases::add_to(std::vector<RankStatus>& statuses) const {
  for (RankStatus& status : statuses) {
    const Times& rank = times_[status.rank];
    const Ms last_heartbeat = rank.lease_until - std::min<Ms>(rank.lease_until, spec_.lease_ms);
    const Ms since_heartbeat = now_ - std::min(now_, last_heartbeat);
    const Ms waited = rank.waited_since == 0 ? 0 : now_ - std::min(now_, rank.waited_since);
    if (ranks_[status.rank].stage == RankRecord::Stage::kLive) {
      status.lease_age_s = static_cast<double>(since_heartbeat) / 1000;
    }
    status.waited_s = static_cast<double>(waited) / 1000;
  }
}

}  // namespace phub
