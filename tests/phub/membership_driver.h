// Plays server and cores for a Membership: carries its actions out, answers its boundaries when the
// test says so, and checks on the way what must hold in every order of events.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "phub/job/membership.h"

namespace phub::testing {

class MembershipDriver {
 public:
  explicit MembershipDriver(const JobSpec& spec, uint32_t cores = 2);

  Membership& operator*() { return membership_; }
  Membership* operator->() { return &membership_; }

  // Requests; each returns its token.
  uint64_t join(int32_t rank, bool replace = false);
  uint64_t leave(uint32_t rank);
  uint64_t barrier(uint32_t rank);
  uint64_t hyper(const std::map<std::string, double>& values, uint64_t round = 0,
                 uint32_t rank = 0);
  uint64_t branches(const BranchChange& change);

  // What the cores say next: highest round in progress, highest that a contribution came for,
  // lowest in progress.
  void cores_at(uint64_t round, uint64_t started, uint64_t min_round);
  // What completed between hold and commit.
  void committed_at(uint64_t min_round) { committed_.min_round = min_round; }
  // One core's answer to a hold or a commit, or the end of an admission that takes its time. False:
  // nobody waits for one.
  bool answer();
  bool finish_admission();
  void settle() {  // a whole boundary, and those that follow from it
    while (answer()) {
    }
  }
  void probe(uint64_t min_round, const std::vector<uint64_t>& arrivals,
             const std::vector<uint32_t>& waited_for);
  void tick(uint64_t ms);
  // Carries out what the membership decided. After every call of its own, otherwise by hand.
  void carry_out();

  // The answer to a token as "", "ok" or "code: message".
  std::string answered(uint64_t token) const;
  MembershipAction reply(uint64_t token) const;
  size_t unanswered() const { return open_.size(); }
  // What happened since the last call: "hold", "admit 1.2", "commit 5: -1 ~2 +1.2@6", "revoke 1",
  // "fail rank_lost", "end". In a commit: - lost, ~ lost and expected again, x forgotten, +
  // admitted.
  std::vector<std::string> take_trace();
  // Of a rank: its state's name.
  std::string state_of(uint32_t rank) const { return membership_.statuses()[rank].state; }
  bool over() const { return over_; }
  std::vector<LogRecord> records() {  // of the whole log
    std::vector<LogRecord> all;
    for (LogPage page{.more = true}; page.more;) {
      page = membership_.log().page(all.size());
      all.insert(all.end(), page.records.begin(), page.records.end());
    }
    return all;
  }
  // Broken rules, one per line; empty when all was well.
  const std::string& wrong() const { return wrong_; }

  uint64_t now = 1000;
  bool admissions_work = true;
  bool admissions_take_time = false;  // until finish_admission()
  // The last round that a rank took part in, per chunk of the job; told in a commit.
  std::function<uint64_t(uint32_t rank, uint32_t chunk)> last_round = [](uint32_t, uint32_t) {
    return uint64_t{0};
  };
  static constexpr uint32_t kChunks = 3;

 private:
  void act(const MembershipAction& action);
  void admit(uint32_t rank, uint32_t incarnation);
  std::string describe_commit(const MembershipAction& action);
  void apply_commit();
  void check_expected();
  void rule(bool holds, const std::string& otherwise);

  const JobSpec spec_;
  const uint32_t cores_;
  Membership membership_;
  uint64_t next_token_ = 1;
  std::set<uint64_t> open_;
  std::map<uint64_t, MembershipAction> replies_;
  std::vector<std::string> trace_;
  std::string wrong_;
  uint32_t holds_ = 0, commits_ = 0;                     // answers that are to come
  std::deque<std::pair<uint32_t, uint32_t>> admitting_;  // rank, incarnation
  CoreReport held_{.type = CoreReport::kHeld, .round = 1, .started = 0, .min_round = 1};
  CoreReport committed_{.type = CoreReport::kCommitted, .min_round = 1};
  bool over_ = false;

  // What the cores and the link know.
  std::set<uint32_t> expected_;
  std::map<uint32_t, uint32_t> seats_;               // admitted, not revoked: rank → incarnation
  std::map<uint32_t, uint32_t> last_incarnation_;    // ever
  std::map<uint32_t, uint64_t> last_participation_;  // of those who are gone
};

}  // namespace phub::testing
