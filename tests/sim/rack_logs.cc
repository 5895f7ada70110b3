#include "tests/sim/rack_logs.h"

#include <algorithm>
#include <map>
#include <optional>

#include "phub/job/membership_log.h"
#include "phub/job/rack.h"
#include "tests/oracle/participation.h"
#include "tests/oracle/replay.h"
#include "transport/control/rank_tree.h"
#include "transport/error.h"

namespace phub::sim {
namespace {

// Membership::begin_life()
constexpr uint32_t kOfOneLife = 1024;

using Stay = Participation::Stay;
using Stays = std::map<Member, Stay>;

// What a rank did in rounds that its rack was not counted in is void.
void cut(Stay& stay, const Stay& rack) {
  stay.first = std::max(stay.first, rack.first);
  if (rack.last.empty()) return;
  if (stay.last.empty()) stay.last = rack.last;
  for (size_t chunk = 0; chunk < stay.last.size(); ++chunk) {
    stay.last[chunk] = std::min(stay.last[chunk], rack.last[chunk]);
  }
}

class Join {
 public:
  Join(const JobSpec& spec, uint32_t levels, const std::vector<LogRecord>& root, uint64_t life)
      : life_(life), chunks_(static_cast<uint32_t>(chunks_of(spec).size())), specs_{spec} {
    for (uint32_t level = 0; level < levels; ++level) specs_.push_back(spec_above(specs_.back()));
    const Participation of_racks(root, chunks_);
    for (const Stay& stay : of_racks.stays()) above_.emplace(stay, stay);
    for (const LogRecord& record : root) {
      using Kind = LogRecord::Kind;
      const bool is_of_job = record.kind == Kind::kHyper || record.kind == Kind::kFailed ||
                             record.kind == Kind::kSet;  // of which the root names the rack
      if (is_of_job) joined_.push_back(record);
    }
  }

  void go_down(uint32_t level, const std::vector<BoxLog>& logs) {
    const JobSpec& spec = specs_[level];
    groups_ = RankTree(spec.groups, spec.max_ranks).last_groups();
    Stays here;
    std::map<Member, JobLife> latest;  // by rack
    JobLife newest{life_, 0};
    for (const BoxLog& log : logs) {
      newest = std::max(newest, log.life);
      const std::optional<Member> rack = rack_in(log, level);
      if (rack) latest[*rack] = std::max(latest[*rack], log.life);
    }
    for (const BoxLog& log : logs) {
      const std::optional<Member> rack = rack_in(log, level);
      if (!rack) continue;
      const bool is_void =
          log.life < latest[*rack] || (log.life < newest && !above_.contains(*rack));
      if (is_void) continue;
      const std::vector<Stay> stays = stays_in(log);
      for (const Stay& stay : stays) here.insert_or_assign(stay, stay);
      if (level == 0) add(log.records, stays);
    }
    above_ = std::move(here);
  }

  std::vector<LogRecord> take() { return std::move(joined_); }

 private:
  // Of whose job a log of this level is; nothing: of another level, or nobody was there.
  std::optional<Member> rack_in(const BoxLog& log, uint32_t level) const {
    if (log.level != level) return std::nullopt;
    const auto first = std::ranges::find(log.records, LogRecord::Kind::kAdmitted, &LogRecord::kind);
    if (first == log.records.end()) return std::nullopt;
    return rack_of({first->rank, first->incarnation});
  }
  Member rack_of(const Member& who) const {
    const auto group =
        std::ranges::find_if(groups_, [&who](const RankRange& g) { return g.contains(who.rank); });
    return {static_cast<uint32_t>(group - groups_.begin()), (who.incarnation - 1) / kOfOneLife + 1};
  }
  const Stay& stay_of_rack(const Member& who) const {
    const Member rack = rack_of(who);
    const auto at = above_.find(rack);
    if (at != above_.end()) return at->second;
    fail(ErrorCode::kInvalid,
         "rank {} (incarnation {}) is in the log of its rack, which was not there above as rank {} "
         "(incarnation {})",
         who.rank, who.incarnation, rack.rank, rack.incarnation);
  }

  std::vector<Stay> stays_in(const BoxLog& log) const {
    std::vector<Stay> stays = Participation(log.records, chunks_).stays();
    for (Stay& stay : stays) cut(stay, stay_of_rack(stay));
    return stays;
  }

  void add(const std::vector<LogRecord>& records, const std::vector<Stay>& stays) {
    for (const Stay& stay : stays) {
      joined_.push_back({.kind = LogRecord::Kind::kAdmitted,
                         .round = stay.first,
                         .rank = stay.rank,
                         .incarnation = stay.incarnation});
      if (stay.last.empty()) continue;
      const auto end = std::ranges::find_if(records, [&stay](const LogRecord& record) {
        return record.rank == stay.rank && record.incarnation == stay.incarnation &&
               (record.kind == LogRecord::Kind::kLost || record.kind == LogRecord::Kind::kLeft);
      });
      const bool by_itself = end != records.end();
      joined_.push_back({.kind = by_itself ? end->kind : LogRecord::Kind::kLost,
                         .rank = stay.rank,
                         .incarnation = stay.incarnation,
                         .reason = by_itself ? end->reason : "with its rack",
                         .last_rounds = ranges_of(stay.last)});
    }
    for (const LogRecord& record : records) {
      if (record.kind == LogRecord::Kind::kExcluded) add_excluded(record, stays);
    }
  }

  void add_excluded(const LogRecord& record, const std::vector<Stay>& stays) {
    const auto counts = [&](uint64_t round, uint32_t chunk) {
      return std::ranges::any_of(stays, [&](const Stay& stay) {
        return stay.rank == record.rank && stay.covers(round, chunk);
      });
    };
    for (uint64_t round = record.round; round <= record.last_round; ++round) {
      for (const ChunkSpan& span : record.chunks) {
        for (uint32_t chunk = span.first; chunk <= span.last; ++chunk) {
          if (!counts(round, chunk)) continue;
          LogRecord one = record;
          one.round = one.last_round = round;
          one.chunks = {{chunk, chunk}};
          joined_.push_back(std::move(one));
        }
      }
    }
  }

  const uint64_t life_;
  const uint32_t chunks_;
  std::vector<JobSpec> specs_;  // by level
  std::vector<RankRange> groups_;
  Stays above_;
  std::vector<LogRecord> joined_;
};

}  // namespace

Member at_root(JobSpec spec, uint32_t levels, Member who) {
  for (; levels > 0; --levels) {
    who.rank = static_cast<uint32_t>(rank_above(spec, static_cast<int32_t>(who.rank)));
    who.incarnation = (who.incarnation - 1) / kOfOneLife + 1;
    spec = spec_above(spec);
  }
  return who;
}

std::vector<LogRecord> join_logs(const JobSpec& spec, uint32_t levels,
                                 const std::vector<LogRecord>& root, uint64_t life,
                                 const std::vector<BoxLog>& below) {
  Join join(spec, levels, root, life);
  for (uint32_t level = levels; level > 0; --level) join.go_down(level - 1, below);
  return join.take();
}

}  // namespace phub::sim
