// What goes to another box, chunk by chunk: to the parent of a rack (uplinked.h), or to a standby
// (mirrored.h). A chunk is pending from its sum until that box has answered.
//
// Every round of a chunk is sent, so that both boxes count the same rounds: one in which no rank is
// there, while others come later, is a null of no rank.
//
// A sum that finds no room in its queue, or no budget of its NIC, waits: on each queue by itself,
// by the keys' priority.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "phub/core/chunk_table.h"
#include "phub/core/index_set.h"
#include "phub/core/reports.h"
#include "phub/core/way.h"
#include "transport/transport.h"

namespace phub {

// A core's part of the connection to the other box. All of it outlives the core job.
struct CoreUplink {
  struct Place {
    uint64_t sum = 0;     // bytes, in `sums`
    uint64_t slot = 0;    // bytes, at the other box
    uint64_t result = 0;  // bytes, in `results`
    uint32_t queue = 0;   // by the other box's plan
    uint32_t index = 0;   // in the queue
  };
  Endpoint* endpoint = nullptr;
  std::span<std::byte> sums;           // this box's, with their trailers
  std::span<const std::byte> results;  // the other box's results land here
  std::vector<Place> places;           // by chunk of the core
  std::byte* own_results = nullptr;    // those of this box's job (JobArrays)
};

class SumSender {
 public:
  SumSender(const Stages& stages, CoreUplink uplink);
  static constexpr uint64_t bytes(uint64_t chunks) {  // held
    return IndexSet::bytes(chunks) +
           chunks * (sizeof(CoreUplink::Place) + 3 * sizeof(uint32_t) + sizeof(ImmKind));
  }

 protected:
  static constexpr ImmKind kNothing = ImmKind::kControl;  // nothing is sent of this chunk

  float* sum_of(uint32_t index) const {
    return reinterpret_cast<float*>(uplink_.sums.data() + uplink_.places[index].sum);
  }
  // Sends the sum at sum_of(), of so many ranks; or a null.
  void post_sum(uint32_t index, uint32_t participants, bool null);
  void post(uint32_t index, ImmKind kind);
  void wait_for_room(uint32_t index);
  // Posts what waits. Then takes the next arrival; false: there is none.
  bool next_arrival(Arrival& arrival);
  // It is no message, but the end of the connection: reports that.
  bool is_break(const Arrival& arrival);
  void break_off();
  // The chunk of the core. Throws Error.
  uint32_t chunk_of(const Arrival& arrival, const Imm& imm) const;

  void suspend();
  bool arm_endpoint();
  void disarm_endpoint() {
    if (!broken_) uplink_.endpoint->disarm();
  }
  uint64_t room_in_ns() const {  // 0: nothing waits
    if (broken_ || unposted_ == 0) return 0;
    return std::max(uplink_.endpoint->refused_for_ns(), kTryAgainNs);
  }

  const CoreUplink uplink_;
  struct Queue {                   // by the other box's plan
    std::vector<uint32_t> chunks;  // [index] = chunk of the core
    std::vector<uint32_t> order;   // `chunks` by priority
    IndexSet unposted{0};          // places in `order` that found no room, or no budget
  };
  std::vector<Queue> queues_;
  std::vector<ImmKind> sent_;  // by chunk: the kind that the other box has not answered
  bool broken_ = false;        // the connection is

 private:
  static constexpr size_t kArrivals = 64;
  static constexpr uint64_t kTryAgainNs = 1'000'000;  // where the endpoint does not ring

  bool post_again(uint32_t index);
  void post_unposted();

  ChunkTable& chunks_;
  Reports& reports_of_sums_;
  std::vector<uint32_t> place_;  // by chunk: in its queue's order
  size_t unposted_ = 0;          // in all queues
  std::array<Arrival, kArrivals> arrivals_;
  size_t taken_ = 0, arrived_ = 0;  // in arrivals_
  bool unflushed_ = false;
};

// A way whose sums go there. `Base` says how chunks close.
template <typename Base>
class SendsSums : public Base, protected SumSender {
 public:
  // `of_base`: what Base needs beside the stages.
  template <typename... OfBase>
  SendsSums(CoreUplink uplink, const Stages& stages, OfBase&&... of_base)
      : Base(stages, std::forward<OfBase>(of_base)...), SumSender(stages, std::move(uplink)) {
    stages.table.every_round = true;
  }
  using SumSender::bytes;

  void suspend_parent() override { suspend(); }
  bool arm() override { return Base::arm() && arm_endpoint(); }
  void disarm() override {
    Base::disarm();
    disarm_endpoint();
  }
  std::array<int, 2> wake_fds() const override {
    return {Base::wake_fds().front(), uplink_.endpoint->wake_fd()};
  }
  uint64_t waits_for_room_ns() const override { return room_in_ns(); }
};

}  // namespace phub
