#include "phub/job/joins.h"

#include <algorithm>
#include <utility>

namespace phub {

void Joins::add(uint64_t token, uint32_t rank) {
  ranks_[rank].joining = true;
  waiting_.push_back({token, rank});
}

void Joins::admit_waiting() {
  for (Join& join : waiting_) {
    RankRecord& r = ranks_[join.rank];
    if (join.stage != Join::kWaiting || r.losing) continue;
    join.stage = Join::kAdmitting;
    join.before = std::exchange(r.stage, RankRecord::Stage::kJoining);
    ++r.incarnation;
    actions_.add({.type = MembershipAction::kAdmit,
                  .rank = join.rank,
                  .incarnation = r.incarnation,
                  .token = join.token});
  }
}

std::vector<Joins::Join>::iterator Joins::admitting(uint32_t rank) {
  return std::ranges::find_if(waiting_, [rank](const Join& join) {
    return join.rank == rank && join.stage == Join::kAdmitting;
  });
}

bool Joins::admitted(uint32_t rank) {
  const auto join = admitting(rank);
  if (join == waiting_.end()) return false;
  join->stage = Join::kAdmitted;
  return true;
}

void Joins::failed(uint32_t rank, const std::string& why) {
  const auto join = admitting(rank);
  if (join == waiting_.end()) return;
  actions_.refuse(join->token, ErrorCode::kFull, why);
  ranks_[rank].stage = join->before;
  ranks_[rank].joining = false;
  waiting_.erase(join);
}

bool Joins::begin() {
  const auto admitted =
      std::stable_partition(waiting_.begin(), waiting_.end(),
                            [](const Join& join) { return join.stage != Join::kAdmitted; });
  current_.assign(admitted, waiting_.end());
  waiting_.erase(admitted, waiting_.end());
  return !current_.empty();
}

void Joins::close(ErrorCode code, const std::string& message) {
  for (auto* joins : {&waiting_, &current_}) {
    for (const Join& join : *joins) actions_.refuse(join.token, code, message);
    joins->clear();
  }
}

}  // namespace phub
