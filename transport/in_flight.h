// A limit for the bytes that an endpoint takes ahead of the network.
//
// A write that is posted cannot be overtaken. So that priorities (or another order) decide late, an
// endpoint refuses posts while it holds much for a peer, and its user keeps the rest in an order of
// its own: a worker in its session, a box in its outboxes, a rack in its uplink.
//
// How much is enough? A path of 10 Gbit/s with a round trip of 1 ms holds 1.25 MB.
//
// - Where a write counts until the peer's NIC has acknowledged it (RDMA, libfabric), that is the
//   least that keeps such a path full: kPathBytes.
// - Under TCP the kernel holds what is on the path, in a window that grows as far as it needs, and
//   kKernelBytes in each connection that are still to be sent. When half of these are left it asks
//   for more. An endpoint holds the bytes that 10 Gbit/s take in 200 us, within which its owner
//   looks again: kRingBytes. All connections to a peer share them, which keeps the connections in
//   step: one that gets less of the link than the others soon holds most. Then each of the others
//   still may have one write, or the link would idle while TCP repairs one connection. Within one
//   host there is no link, only processors, which large writes spare: kLocalTimes as much is 1 ms
//   of a core's copying.
//
// At 200 Mbit/s these are 52 ms of the link's time, and 10 ms and 5 ms for each connection; a write
// of 32 KiB is 1.3 ms.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace phub {

inline constexpr uint64_t kPathBytes = 1280 << 10;
inline constexpr uint64_t kRingBytes = 256 << 10;
inline constexpr uint64_t kKernelBytes = 128 << 10;
inline constexpr uint64_t kLocalTimes = 4;

// Counts the bytes that one endpoint holds for each peer, over all its queue pairs. Owned by the
// endpoint's thread.
class InFlight {
 public:
  // `most` bytes are shared by so many endpoints that have queue pairs to the same peers, this one
  // `pairs` to each.
  InFlight(uint64_t most, uint32_t endpoints, uint32_t pairs, uint32_t peers)
      : most_(std::max(most / std::max(endpoints, 1u), kLeastBytes)),
        pairs_(std::max(pairs, 1u)),
        held_(peers) {}

  // Whether there is room for a write on a queue pair that holds `held` bytes, and may have so many
  // `times` as much as others. Each queue pair may have one write.
  bool has_room(uint32_t peer, uint64_t held, uint64_t times = 1) const {
    return held_[peer] < most_ * times || held == 0;
  }
  // A queue pair that tells only now and then how many bytes are gone does so after this many at
  // the latest, so that the untold bytes of all of them are a small part of the limit.
  uint64_t bytes_untold() const { return most_ / kStepsToTell / pairs_; }

  void posted(uint32_t peer, uint64_t bytes) { held_[peer] += bytes; }
  void refused() { refused_ = true; }         // a post, for whatever lack of room
  void gone(uint32_t peer, uint64_t bytes) {  // they are sent, or never will be
    held_[peer] -= bytes;
    made_room_ = refused_;
  }
  // Tells once that there may be room now, after a post has found none. REQUIRES: called before the
  // owner sleeps.
  bool made_room() {
    refused_ = refused_ && !made_room_;
    return std::exchange(made_room_, false);
  }

 private:
  static constexpr uint64_t kLeastBytes = 128 << 10;
  static constexpr uint64_t kStepsToTell = 8;

  const uint64_t most_;
  const uint32_t pairs_;
  std::vector<uint64_t> held_;  // by peer
  bool refused_ = false, made_room_ = false;
};

}  // namespace phub
