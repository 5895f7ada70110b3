// What a CoreJob may have around it beside its ranks: a way whose results come when the test says
// so, a parent, or a switch that adds.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "phub/core/lock_step.h"
#include "phub/core/switched_way.h"
#include "phub/core/uplinked.h"
#include "tests/phub/core_job_rig.h"
#include "transport/switch/generation.h"
#include "transport/switch/socket.h"
#include "transport/switch/stream.h"

namespace phub::testing {

// Chunks close now, and are done in the order of `done`.
class Deferred final : public LockStep {
 public:
  using LockStep::LockStep;

  Closed close(uint32_t index) override {
    if (LockStep::close(index) != Closed::kDone) return Closed::kNotNow;
    EXPECT_TRUE(pending.insert(index).second) << "chunk " << index << " is closed twice";
    return Closed::kPending;
  }
  uint32_t next_done() override {
    if (done.empty()) return kNoChunk;
    const uint32_t index = done.front();
    done.pop_front();
    pending.erase(index);
    return index;
  }

  std::set<uint32_t> pending;
  std::deque<uint32_t> done;
};

class FakeUplink : public InboxEndpoint<Endpoint> {
 public:
  bool post(QueuePair to, const Write& write) override {
    if (room == 0 || full_queue == to.queue) return false;
    --room;
    posted.emplace_back(to.queue, write);
    return true;
  }
  uint64_t refused_for_ns() const override { return refused_ns; }

  uint32_t full_queue = ~0u;
  uint64_t refused_ns = 0;
};

// The parent of a rack with four chunks, which lie there in reverse order, in two queues.
class CoreParent {
 public:
  static constexpr uint32_t kElements = 64, kStride = 96;

  std::unique_ptr<LockStep> way_below(const Stages& stages, std::byte* rack_results) {
    CoreUplink up{.endpoint = &uplink,
                  .sums = sums_,
                  .results = results_,
                  .places = {},
                  .own_results = rack_results};
    for (uint32_t chunk = 0; chunk < 4; ++chunk) {
      const uint32_t at = 3 - chunk;
      up.places.push_back({.sum = at * kStride * uint64_t{4},
                           .slot = kAbove + at * kStride * uint64_t{4},
                           .result = at * kStride * uint64_t{4},
                           .queue = at / 2,
                           .index = at % 2});
    }
    return std::make_unique<Uplinked>(stages, std::move(up));
  }
  // It has the result of the chunk's round.
  void answer(uint32_t chunk, uint64_t round, float value) {
    const uint32_t at = 3 - chunk;
    std::fill_n(reinterpret_cast<float*>(results_.data()) + at * kStride, kElements, value);
    uplink.inbox.push_back({.queue = at / 2,
                            .imm = encode({at % 2, low8(round), ImmKind::kData}),
                            .bytes = kElements * 4,
                            .offset = at * kStride * 4});
  }
  // What came since the last call: "chunk@round=sum/participants", n: null, i: initial, ?: asks.
  std::vector<std::string> take_sent() {
    std::vector<std::string> out;
    for (const auto& [queue, write] : std::exchange(uplink.posted, {})) {
      const Imm imm = decode(write.imm);
      const uint32_t at = queue * 2 + imm.chunk;
      const auto* slot = reinterpret_cast<const float*>(sums_.data()) + at * kStride;
      uint32_t participants = 0;
      std::memcpy(&participants, slot + kElements, sizeof participants);
      EXPECT_EQ(write.remote_offset, kAbove + write.local_offset);
      if (imm.kind == ImmKind::kInitial) {
        EXPECT_EQ(write.bytes, kElements * 4);
        out.push_back(fmt::format("{}i={}", 3 - at, slot[0]));
      } else if (imm.kind == ImmKind::kNull) {
        EXPECT_EQ(write.local_offset, (at * kStride + kElements) * 4);
        EXPECT_EQ(write.bytes, 4u);
        out.push_back(
            fmt::format("{}@{}n/{}", 3 - at, imm.round,
                        participants == kNoneLeft ? "none-left" : std::to_string(participants)));
      } else if (imm.kind == ImmKind::kControl) {
        EXPECT_EQ(write.bytes, 0u);
        out.push_back(fmt::format("{}?{}", 3 - at, imm.round));
      } else {
        EXPECT_EQ(write.local_offset, at * kStride * 4);
        EXPECT_EQ(write.bytes, kElements * 4 + 4);
        out.push_back(fmt::format("{}@{}={}/{}", 3 - at, imm.round, slot[0], participants));
      }
    }
    return out;
  }

  FakeUplink uplink;

 private:
  static constexpr uint64_t kAbove = 4096;  // where its slots begin
  std::vector<std::byte> sums_ = std::vector<std::byte>(4 * kStride * 4);
  std::vector<std::byte> results_ = std::vector<std::byte>(4 * kStride * 4);
};

// A switch and the workers behind it: what they send, and what they are answered. It outlives the
// rig that is made with its options.
class FakeSwitch {
 public:
  // These, for a job behind the switch. REQUIRES: called once.
  CoreJobRig::Options before(CoreJobRig::Options job) {
    const auto ranks = static_cast<uint32_t>(job.expected.size());
    all_ = switch_workers(ranks);
    SwitchIntake::Options options{.ranks = ranks, .all_chunks = job.chunks};
    for (uint32_t chunk = 0; chunk < job.chunks; ++chunk) {
      options.chunks.push_back(chunk);
      options.elements.push_back(job.elements);
    }
    options.slots = static_cast<uint16_t>(job.chunks);
    options.rounds_between = 2;
    options.to_all = here(socket_.port());
    box_ = here(own_->port());
    job.make_lock_step = [this, options](const Stages& stages) {
      return std::make_unique<Switched<LockStep>>(
          std::make_unique<SwitchIntake>(options, std::move(own_)), stages);
    };
    return job;
  }

  void send_sum(uint32_t chunk, uint32_t round, int32_t value) {
    send(kSwitchSum, chunk, round, all_, value);
  }
  // The switch waits for ranks beside these.
  void send_waiting(uint32_t chunk, uint32_t round, uint64_t there) {
    send(kSwitchWaiting, chunk, round, there, 0);
  }
  // The generation with this index, from this round on.
  void begin(uint32_t index, uint32_t first_round) {
    generation_ = switch_generation(1, 0, index);
    turns_from_ = first_round;
  }
  // The kind of the next answer; nothing: there is none.
  std::optional<int> answer() {
    const std::optional<Datagram> got = socket_.receive();
    if (!got || got->bytes.size() != sizeof(SwitchHeader)) return {};
    SwitchHeader header;
    std::memcpy(&header, got->bytes.data(), sizeof header);
    return header.kind;
  }

 private:
  static sockaddr_in here(uint16_t port) {
    return switch_address("127.0.0.1:" + std::to_string(port));
  }
  void send(uint8_t kind, uint32_t chunk, uint32_t round, uint64_t workers, int32_t value) {
    SwitchPacket packet{.header = {.magic = kSwitchMagic,
                                   .kind = kind,
                                   .slot = static_cast<uint16_t>(chunk),
                                   .generation = generation_,
                                   .turn = round - turns_from_ + 1,
                                   .chunk = chunk,
                                   .round = static_cast<uint16_t>(round),
                                   .exponent = 0,
                                   .workers = workers}};
    std::ranges::fill(packet.codes, value);
    socket_.send(std::as_bytes(std::span(&packet, 1)), box_);
    socket_.flush();
  }

  uint64_t generation_ = 1;
  uint32_t turns_from_ = 1;  // the round of the first turn
  SwitchSocket socket_{0};
  std::unique_ptr<SwitchSocket> own_ = std::make_unique<SwitchSocket>(0);  // the box's
  sockaddr_in box_{};
  uint64_t all_ = 0;
};

}  // namespace phub::testing
