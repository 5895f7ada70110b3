// Priorities count until late: over real sockets whose other end takes nothing for a while, most of
// what was pushed first has not left its sender when something more urgent is pushed.
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/transport/ofi_rig.h"
#include "tests/transport/tcp_rig.h"
#include "tests/worker/session_rig.h"
#include "transport/layout.h"

namespace phub {
namespace late_priority_test {

constexpr uint32_t kBig = 1024, kSmall = 4;  // chunks of 32 KiB
constexpr uint32_t kQueues = 2;
constexpr int kTurns = 30;  // until kernels take no more

JoinReply reply_of_two_keys() {
  JoinReply reply;
  reply.spec.name = "job";
  reply.spec.max_ranks = reply.spec.world_size = 1;
  const uint64_t elements = reply.spec.chunk_elements;
  reply.spec.keys = {{.name = "big", .elements = kBig * elements},
                     {.name = "small", .elements = kSmall * elements}};
  reply.layout.key_offset = {0, kBig * elements};
  reply.layout.total_elements = (kBig + kSmall) * elements;
  reply.layout.queue_chunks.resize(kQueues);
  for (uint32_t chunk = 0; chunk < kBig + kSmall; ++chunk) {
    reply.layout.queue_chunks[chunk % kQueues].push_back(chunk);
  }
  return reply;
}

struct Way {
  std::string name;
  std::function<std::unique_ptr<TransportRig>()> make;

  friend void PrintTo(const Way& way, std::ostream* out) {  // NOLINT: GoogleTest looks for it
    *out << way.name;
  }
};

// One rank, whose session the test drives, and a box that is the test.
class LatePriority : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    rig_ = GetParam().make();
    if (rig_ == nullptr) return;  // skipped
    const LinkLayout layout = link_layout_of(reply_);
    box_ = rig_->transport().open_job(layout);
    const Offer offer = box_->admit(0, 1);
    for (uint32_t q = 0; q < kQueues; ++q) box_->endpoint(q).attach(0, 1);
    worker_ = rig_->connect(offer, layout);
    session_ = std::make_unique<Session>(reply_, *worker_);
  }
  void TearDown() override {
    if (box_ == nullptr) return;
    for (uint32_t q = 0; q < kQueues; ++q) box_->endpoint(q).detach(0);
    box_->revoke(0);
    session_.reset();
    worker_.reset();
    box_->close();
  }

  // The results of the round before the first, as far as there is room now.
  void post_results() {
    for (uint32_t q = 0; q < kQueues; ++q) {
      const std::vector<uint32_t>& chunks = reply_.layout.queue_chunks[q];
      for (uint32_t& next = posted_[q]; next < chunks.size(); ++next) {
        const ResultPlace place =
            result_place({}, layout_.chunks[chunks[next]].offset, reply_.spec.chunk_elements);
        const Write write = {0, place.byte, place.bytes, encode({next, 0, ImmKind::kData})};
        if (!box_->endpoint(q).post({}, write)) break;
      }
      box_->endpoint(q).flush();
    }
  }
  uint32_t results_posted() const { return posted_[0] + posted_[1]; }

  // The chunks whose gradients the box has by now.
  std::vector<uint32_t> take() {
    std::vector<uint32_t> chunks;
    for (uint32_t q = 0; q < kQueues; ++q) {
      std::array<Arrival, 1> one;
      if (box_->endpoint(q).poll(one) == 0) continue;
      EXPECT_TRUE(one[0].ok);
      chunks.push_back(reply_.layout.queue_chunks[q][decode(one[0].imm).chunk]);
    }
    return chunks;
  }
  template <typename Condition, typename Step>
  bool eventually(Condition condition, Step step) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!condition() && std::chrono::steady_clock::now() < until) {
      if (!step()) rig_->pump();
    }
    return condition();
  }

  const JoinReply reply_ = reply_of_two_keys();
  const Layout layout_ = layout_of(reply_);
  std::array<uint32_t, kQueues> posted_ = {};
  std::unique_ptr<TransportRig> rig_;
  std::unique_ptr<BoxLink> box_;
  std::unique_ptr<WorkerLink> worker_;
  std::unique_ptr<Session> session_;
};

TEST_P(LatePriority, LittleHasLeftTheSenderWhenTheOtherEndTakesNothing) {
  if (rig_ == nullptr) return;
  for (int turn = 0; turn < kTurns; ++turn) {
    take();  // opens the connections
    post_results();
    rig_->pump();
  }
  EXPECT_GT(results_posted(), 0u);
  EXPECT_LT(results_posted(), (kBig + kSmall) / 2) << "by the box";
  ASSERT_TRUE(eventually([&] { return session_->all_ready(); },
                         [&] {
                           post_results();
                           take();
                           return session_->poll();
                         }))
      << "what found no room goes on";

  session_->push(0, 0, false);
  session_->flush();
  for (int turn = 0; turn < kTurns; ++turn) {
    session_->poll();
    rig_->pump();
  }
  session_->push(1, 1, false);
  uint32_t of_big = 0, of_small = 0, before = 0;
  ASSERT_TRUE(eventually([&] { return of_big == kBig && of_small == kSmall; },
                         [&] {
                           const std::vector<uint32_t> chunks = take();
                           for (const uint32_t chunk : chunks) {
                             ++(chunk < kBig ? of_big : of_small);
                             if (of_small < kSmall) before = of_big;
                           }
                           return session_->poll() || !chunks.empty();
                         }));
  EXPECT_LT(before, kBig / 2) << "by the worker";
}

INSTANTIATE_TEST_SUITE_P(Over, LatePriority,
                         ::testing::Values(Way{"tcp", [] { return std::make_unique<TcpRig>(); }},
                                           Way{"ofi_net", [] { return OfiRig::over("net"); }},
                                           Way{"ofi_rxm",
                                               [] { return OfiRig::over("tcp;ofi_rxm"); }}),
                         [](const ::testing::TestParamInfo<Way>& way) { return way.param.name; });

}  // namespace late_priority_test
}  // namespace phub
