// A box that has a part of a job: the part's place in the plan, and the reports that its cores owe.
// And a question to all such boxes. RemoteParts has them. Control thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "phub/core/messages.h"
#include "phub/job/shards.h"
#include "phub/plan/plan.h"
#include "transport/control/messages.h"
#include "transport/error.h"

namespace phub {

// Throws Error(kInvalid): a box may not report that.
[[noreturn]] void refuse_report(std::string_view what);

struct RemoteBox {
  uint64_t shard = 0;
  std::string name;
  uint32_t box = 0;  // its index in the plan
  uint32_t first_core = 0, cores = 0;
  uint32_t first_queue = 0, queues = 0;
  // The reports that its cores owe, by type, the rank that it is about (0 means none), and the
  // core.
  struct Owed {
    uint64_t from_round = 0;  // due when the job has completed this; kNever: not yet
    uint64_t since_ms = 0;    // 0: nobody has seen it due
  };
  std::map<std::tuple<CoreReport::Type, uint32_t, uint32_t>, Owed> owed;
  bool told_rounds = false;      // has told the last rounds of the boundary's lost ranks
  uint64_t closed_round = 0;     // the latest round that it closed for a gate
  std::vector<uint32_t> chunks;  // the box's, ascending; empty: not needed yet

  RemoteBox(const Plan& plan, uint32_t box, const ShardBox& shard);

  // Each core owes one such report.
  void owes(CoreReport::Type type, uint32_t rank = 0, uint64_t from_round = 0);
  uint32_t owing(CoreReport::Type type) const;  // the number of cores
  // Closes the round for a gate; returns the box's chunks. Throws Error(kInvalid).
  std::span<const uint32_t> close(uint64_t round, const Plan& plan);
  // Completes the boundary with what the box knows of its lost ranks. Throws Error(kInvalid).
  void take_last_rounds(std::span<const ShardRounds> all, const Plan& plan, Boundary& boundary);
};

// A question to all boxes, some of which have not answered.
class BoxQuestion {
 public:
  using Done = std::function<void(const std::optional<Error>& failed)>;

  BoxQuestion() = default;
  // `done` is called when the last box has answered. A box may take `limit_ms`. If the answers are
  // queues of a rank, they go into `offer`.
  BoxQuestion(std::span<const RemoteBox> boxes, Offer* offer, Done done, uint64_t limit_ms);

  void answered(const RemoteBox& box, const ShardReport& report);
  bool is_open() const { return static_cast<bool>(done_); }
  bool has_all_answers() const { return awaited_.empty(); }
  uint64_t limit_ms() const { return limit_ms_; }
  // The boxes that have not answered, and since when that counts; 0: nobody has looked yet.
  std::map<uint64_t, uint64_t>& awaited() { return awaited_; }

 private:
  std::map<uint64_t, uint64_t> awaited_;  // by shard
  uint64_t limit_ms_ = 0;
  std::optional<Error> failed_;
  Offer* offer_ = nullptr;
  Done done_;
};

}  // namespace phub
