// Immediates that a rank gets before a result, on each of its queues: the verdict on a round
// (transport/verdict.h), or the beginning of a switch's generation (transport/switch/generation.h).
//
// Owned by the core's thread. Nothing allocates after construction.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "transport/error.h"
#include "transport/transport.h"

namespace phub {

class Notice {
 public:
  Notice() = default;  // is never set
  Notice(uint32_t queues, uint32_t ranks) : ranks_(ranks), told_(size_t{queues} * ranks) {}
  static constexpr uint64_t bytes(uint64_t queues, uint64_t ranks) {  // held
    return queues * ranks * sizeof(Told);
  }

  // From here on the ranks are told this, and no longer what was set before. `number` is another
  // than that of the notice before, and not 0.
  void set(uint64_t number, std::span<const uint32_t> imms) {
    number_ = number;
    PHUB_CHECK(imms.size() <= kMostParts);
    parts_ = static_cast<uint32_t>(imms.size());
    std::copy_n(imms.begin(), parts_, imms_.begin());
  }
  void withdraw() { number_ = 0; }
  uint64_t number() const { return number_; }  // 0: there is none

  // Posts what the rank was not told yet on this queue. False: the queue has no room for all.
  bool tell(Endpoint& endpoint, QueuePair to) {
    if (number_ == 0 || to.rank >= ranks_) return true;
    Told& told = told_[size_t{to.queue} * ranks_ + to.rank];
    if (told.number != number_) told = {.number = number_};
    for (; told.parts < parts_; ++told.parts) {
      if (!endpoint.post(to, {.imm = imms_[told.parts]})) return false;
    }
    return true;
  }
  // The rank has new queues, and was told nothing on them.
  void attached(uint32_t rank) {
    for (size_t at = rank; rank < ranks_ && at < told_.size(); at += ranks_) told_[at] = {};
  }

 private:
  static constexpr uint32_t kMostParts = 3;
  struct Told {
    uint64_t number = 0;
    uint32_t parts = 0;
  };

  uint64_t number_ = 0;
  uint32_t parts_ = 0;
  std::array<uint32_t, kMostParts> imms_{};
  uint32_t ranks_ = 0;
  std::vector<Told> told_;  // [queue][rank]
};

}  // namespace phub
