#include "tests/phub/membership_driver.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace phub::testing {

MembershipDriver::MembershipDriver(const JobSpec& spec, uint32_t cores)
    : spec_(spec), cores_(cores), membership_(spec_, cores, kChunks) {
  for (uint32_t rank = 0; rank < spec.world_size; ++rank) expected_.insert(rank);
}

uint64_t MembershipDriver::join(int32_t rank, bool replace) {
  const uint64_t token = next_token_++;
  open_.insert(token);
  membership_.join(token, rank, replace, now);
  carry_out();
  return token;
}

uint64_t MembershipDriver::leave(uint32_t rank) {
  const uint64_t token = next_token_++;
  open_.insert(token);
  membership_.changes().leave(token, rank);
  carry_out();
  return token;
}

uint64_t MembershipDriver::barrier(uint32_t rank) {
  const uint64_t token = next_token_++;
  open_.insert(token);
  membership_.enter_barrier(token, rank);
  carry_out();
  return token;
}

uint64_t MembershipDriver::hyper(const std::map<std::string, double>& values, uint64_t round,
                                 uint32_t rank) {
  const uint64_t token = next_token_++;
  open_.insert(token);
  membership_.changes().decide(token, rank, HyperChange{.round = round, .values = values});
  carry_out();
  return token;
}

uint64_t MembershipDriver::branches(const BranchChange& change) {
  const uint64_t token = next_token_++;
  open_.insert(token);
  const bool forks = change.action == BranchAction::kFork;
  membership_.changes().decide(token, change,
                               forks ? membership_.changes().decisions().branches().next() : 0);
  carry_out();
  return token;
}

void MembershipDriver::cores_at(uint64_t round, uint64_t started, uint64_t min_round) {
  held_.round = round;
  held_.started = started;
  held_.min_round = held_.lowest = committed_.min_round = min_round;
}

bool MembershipDriver::answer() {
  if (over_) return false;
  if (holds_ == 0 && commits_ == 0) return finish_admission();
  if (holds_ > 0) {
    // Cores are not in step: only the last one is as far as the job is.
    CoreReport report = held_;
    if (--holds_ > 0) report.started = report.round = report.min_round;
    membership_.held(report, now);
  } else if (commits_ > 0) {
    if (commits_ == cores_) apply_commit();
    --commits_;
    membership_.committed(committed_, now);
  }
  carry_out();
  if (holds_ == 0 && commits_ == 0 && !over_) check_expected();
  return true;
}

void MembershipDriver::probe(uint64_t min_round, const std::vector<uint64_t>& arrivals,
                             const std::vector<uint32_t>& waited_for) {
  std::vector<uint64_t> bits((spec_.max_ranks + 63) / 64);
  for (const uint32_t rank : waited_for) bits[rank / 64] |= uint64_t{1} << (rank % 64);
  membership_.probed(min_round, arrivals, bits, now);
  carry_out();
}

void MembershipDriver::tick(uint64_t ms) {
  now += ms;
  membership_.tick(now);
  carry_out();
}

void MembershipDriver::carry_out() {
  while (!membership_.actions().empty()) act(membership_.actions().take());
}

void MembershipDriver::act(const MembershipAction& action) {
  rule(!over_ || action.type == MembershipAction::kReply, "an action after the job's end");
  switch (action.type) {
    case MembershipAction::kHold:
      rule(holds_ == 0 && commits_ == 0, "two boundaries at once");
      holds_ = cores_;
      trace_.emplace_back("hold");
      break;
    case MembershipAction::kAdmit: {
      trace_.push_back(fmt::format("admit {}.{}", action.rank, action.incarnation));
      rule(!seats_.contains(action.rank),
           fmt::format("rank {} is admitted before its predecessor is revoked", action.rank));
      rule(action.incarnation > last_incarnation_[action.rank], "an incarnation comes twice");
      last_incarnation_[action.rank] = action.incarnation;
      admitting_.emplace_back(action.rank, action.incarnation);
      if (!admissions_take_time) finish_admission();
      break;
    }
    case MembershipAction::kCommit:
      rule(holds_ == 0 && commits_ == 0, "a commit while cores have not held");
      commits_ = cores_;
      trace_.push_back(describe_commit(action));
      break;
    case MembershipAction::kRevoke:
      trace_.push_back(fmt::format("revoke {}", action.rank));
      rule(seats_.erase(action.rank) == 1, fmt::format("rank {} has no seat", action.rank));
      rule(commits_ == 0, "a revocation before every core has let go");
      break;
    case MembershipAction::kSaveForRanks:
      trace_.emplace_back("save for ranks");
      membership_.end_saved();
      break;
    case MembershipAction::kSave:
      trace_.emplace_back("save");
      rule(seats_.empty(), "the end is saved while ranks are there");
      membership_.end_saved();
      break;
    case MembershipAction::kReply:
      rule(open_.erase(action.token) == 1,
           fmt::format("token {} is answered twice, or was never there", action.token));
      replies_[action.token] = action;
      break;
    case MembershipAction::kStop:
      return membership_.failed(action.message, ErrorCode::kRankLost);
    case MembershipAction::kFail:
      trace_.push_back(fmt::format("fail {}", name_of(action.code)));
      rule(open_.empty(), "the job failed with requests unanswered");
      over_ = true;
      break;
    case MembershipAction::kEnd:
      trace_.emplace_back("end");
      rule(open_.empty(), "the job ended with requests unanswered");
      over_ = true;
      break;
  }
}

bool MembershipDriver::finish_admission() {
  if (over_ || admitting_.empty()) return false;
  const auto [rank, incarnation] = admitting_.front();
  admitting_.pop_front();
  if (admissions_work) seats_[rank] = incarnation;
  membership_.admitted(rank, admissions_work, "no memory left");
  carry_out();
  return true;
}

std::string MembershipDriver::describe_commit(const MembershipAction& action) {
  const Boundary& boundary = membership_.changes().boundary();
  std::string text = fmt::format("commit {}:", boundary.round);
  for (const auto& lost : boundary.lost) {
    text += fmt::format(" {}{}", lost.expected_again == kNever ? '-' : '~', lost.rank);
    if (lost.expected_again != kNever) text += fmt::format("@{}", lost.expected_again);
  }
  for (const uint32_t rank : boundary.forgotten) text += fmt::format(" x{}", rank);
  for (const auto& admitted : boundary.admitted) {
    text += fmt::format(" +{}.{}@{}", admitted.rank, admitted.incarnation, admitted.first_round);
  }
  for (const HyperChange& change : action.decided.hyper) {
    rule(change.round >= boundary.round, "a change of a round that may be complete");
    for (const auto& [name, value] : change.values) text += fmt::format(" {}={}", name, value);
    if (change.round != boundary.round) text += fmt::format("@{}", change.round);
  }
  return text;
}

// What the cores make of the boundary (phub/core/boundary.cc).
void MembershipDriver::apply_commit() {
  Boundary& boundary = membership_.changes().boundary();
  for (const auto& lost : boundary.lost) {
    uint64_t most = 0;
    rule(lost.last_rounds.size() == kChunks, "a loss without room for the last rounds");
    for (uint32_t chunk = 0; chunk < lost.last_rounds.size(); ++chunk) {
      lost.last_rounds[chunk] = last_round(lost.rank, chunk);
      most = std::max(most, lost.last_rounds[chunk]);
    }
    last_participation_[lost.rank] = most;
    expected_.erase(lost.rank);
    if (lost.expected_again != kNever) expected_.insert(lost.rank);
  }
  for (const uint32_t rank : boundary.forgotten) expected_.erase(rank);
  for (const auto& admitted : boundary.admitted) {
    rule(admitted.first_round >= boundary.round, "a rank begins in a round that may be complete");
    rule(admitted.first_round > last_participation_[admitted.rank],
         "a rank takes part twice in a round");
    expected_.insert(admitted.rank);
  }
}

// At rest, the membership and the cores agree on who is waited for.
void MembershipDriver::check_expected() {
  std::set<uint32_t> here;
  for (const uint32_t rank : membership_.ranks().missing()) here.insert(rank);
  for (const RankStatus& rank : membership_.statuses()) {
    if (rank.state != "live") continue;
    here.insert(rank.rank);
    rule(seats_.contains(rank.rank) && seats_[rank.rank] == rank.incarnation,
         fmt::format("rank {} is live without a seat", rank.rank));
  }
  rule(here == expected_, "the cores wait for other ranks than the membership thinks");
}

void MembershipDriver::rule(bool holds, const std::string& otherwise) {
  if (!holds) wrong_ += otherwise + "\n";
}

std::string MembershipDriver::answered(uint64_t token) const {
  const auto at = replies_.find(token);
  if (at == replies_.end()) return "";
  if (at->second.ok) return "ok";
  return fmt::format("{}: {}", name_of(at->second.code), at->second.message);
}

MembershipAction MembershipDriver::reply(uint64_t token) const {
  const auto at = replies_.find(token);
  return at == replies_.end() ? MembershipAction{} : at->second;
}

std::vector<std::string> MembershipDriver::take_trace() { return std::exchange(trace_, {}); }

}  // namespace phub::testing
