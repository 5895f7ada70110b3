// The desk for boxes that serve under this server: answers their calls, brings their reports to the
// jobs, and tells the jobs of boxes that are lost. Control thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "phub/control/shard_calls.h"
#include "phub/jobs.h"
#include "phub/task.h"

namespace phub {

class ShardDesk final : public ShardCalls {
 public:
  // `retry` happens when enough boxes are there again for a job that has lost one. `takes_boxes`
  // is false at a rack, which is one box. All of these outlive this.
  ShardDesk(JobHost& host, Jobs& jobs, Event& retry, bool takes_boxes)
      : host_(host), jobs_(jobs), retry_(retry), takes_boxes_(takes_boxes) {}

  void join(ShardHello hello, Reply<ShardWelcome> reply) override;
  void take_mail(uint64_t shard, ShardMail mail, Reply<ShardOrders> reply) override;
  void read_copy(uint64_t shard, const CopyPlace& place, Reply<PartBytes> reply) override;
  void check_copy(uint64_t shard, const CopyPlace& place, uint64_t bytes) override;
  void write_copy(uint64_t shard, const CopyPlace& place, std::string_view piece,
                  Reply<Done> reply) override;

  // A join of this job waits, as the job needs boxes that are not there.
  bool awaits_boxes(const std::string& job) const { return awaited_.contains(job); }
  // Loses boxes whose mail or answers are late. `now` is served time.
  void tick(uint64_t now);

 private:
  RemoteParts& parts_of(uint64_t job);  // throws kNotFound
  void moved(uint64_t shard, const CopyPlace& place);
  void lose(const ShardBox& shard, const std::string& why);
  void lose_late(uint64_t now);
  void await_no_longer();

  JobHost& host_;
  Jobs& jobs_;
  Event& retry_;
  const bool takes_boxes_;
  // Jobs that have lost a box, and go on when there are so many other boxes, or at that time.
  struct Awaited {
    size_t shards = 0;
    uint64_t until_ms = 0;
  };
  std::map<std::string, Awaited> awaited_;
};

}  // namespace phub
