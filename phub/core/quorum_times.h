// How long after the quorum the other ranks come, and how long rounds take, as the cores of a job
// with a quorum see it. The control thread chooses the grace by this (job/quorum_grace.h).
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace phub {

// Any thread may call anything; times are the cores' (BoxEndpoint::now_ns). It keeps the latest.
class QuorumTimes {
 public:
  static constexpr size_t kRounds = 32, kLate = 64;

  // A quorum has sent the round. One core says so.
  void is_there(uint64_t round, uint64_t now_ns) {
    Round& of = rounds_[round % kRounds];
    of.number.store(0);
    of.ns.store(now_ns);
    of.number.store(round);
  }
  // A rank has sent the last of its chunks of this round. It counts if a quorum was there before,
  // and if that is no more than kRounds ago; also a rank without which the round went on.
  void came(uint64_t round, uint64_t now_ns) {
    const Round& of = rounds_[round % kRounds];
    if (of.number.load() != round) return;
    const uint64_t there_ns = of.ns.load();
    if (of.number.load() != round) return;
    late_[latest_.fetch_add(1) % kLate].store(1 + (now_ns - std::min(now_ns, there_ns)));
  }

  // Between the quorum and a rank that came after it, in no order.
  std::vector<uint64_t> late_ns() const {
    std::vector<uint64_t> all;
    for (const std::atomic<uint64_t>& late : late_) {
      if (const uint64_t ns = late.load(); ns > 0) all.push_back(ns - 1);
    }
    return all;
  }
  // From the quorum of a round to that of the next one.
  std::vector<uint64_t> round_ns() const {
    std::vector<std::pair<uint64_t, uint64_t>> there;
    for (const Round& round : rounds_) {
      if (const uint64_t number = round.number.load(); number > 0) {
        there.emplace_back(number, round.ns.load());
      }
    }
    std::ranges::sort(there);
    std::vector<uint64_t> all;
    for (size_t i = 1; i < there.size(); ++i) {
      const uint64_t ns = there[i].second - std::min(there[i].second, there[i - 1].second);
      all.push_back(ns / (there[i].first - there[i - 1].first));
    }
    return all;
  }

 private:
  struct Round {
    std::atomic<uint64_t> number{0};  // 0: none
    std::atomic<uint64_t> ns{0};
  };
  std::array<Round, kRounds> rounds_;
  std::array<std::atomic<uint64_t>, kLate> late_{};  // one more each; 0: none
  std::atomic<uint64_t> latest_{0};
};

}  // namespace phub
