// What the RDMA transport does when devices and their queues fail, and in which order it lets go:
// over devices that do what the test says (fake_verbs.h).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/transport/fake_verbs.h"
#include "tests/transport/test_memory_device.h"
#include "tests/worker/expect_error.h"
#include "transport/error.h"
#include "transport/verbs/endpoint.h"
#include "transport/verbs/format.h"
#include "transport/verbs/resources.h"
#include "transport/verbs/transport.h"

namespace phub {
namespace verbs_failures_test {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;

// One job per device, each with one queue on one core, unless a test wants others.
class VerbsFailures : public ::testing::Test {
 protected:
  VerbsFailures() {
    transport_ = make_verbs_transport({.ports = {first_.port_, second_.port_}});
    events_of(*transport_);
  }

  static LinkLayout layout_on(const std::string& nic, uint32_t ranks = 2) {
    LinkLayout layout;
    layout.max_ranks = ranks;
    layout.cores = 1;
    layout.queue_chunks = {64};
    layout.queue_nic = {nic};
    layout.slots_bytes = layout.results_bytes = 64 * 256;
    layout.core_node = {0};
    return layout;
  }
  static std::vector<TransportEvent> events_of(Transport& transport) {
    std::vector<TransportEvent> events;
    transport.handle_events(events);
    return events;
  }
  // A worker asks to connect queue 0; the queue pair that was made for it, null when refused.
  ibv_qp* connect(fake::Device& device, const Offer& offer, uint64_t results_bytes = 64 * 256) {
    VerbsHello hello;
    hello.ticket = ticket_bytes(offer.ticket);
    hello.results_bytes = results_bytes;
    const auto bytes = std::as_bytes(std::span(&hello, 1));
    const size_t before = device.qps.size();
    fake::request_connection(device, {bytes.begin(), bytes.end()});
    events_ = events_of(*transport_);
    return device.qps.size() > before ? device.qps.back() : nullptr;
  }
  ibv_qp* join(BoxLink& link, fake::Device& device, uint32_t rank, uint32_t incarnation,
               uint64_t results_bytes = 64 * 256) {
    const Offer offer = link.admit(rank, incarnation);
    link.endpoint(0).attach(rank, incarnation);
    return connect(device, offer, results_bytes);
  }
  static std::vector<uint32_t> taken(Endpoint& endpoint) {
    std::vector<uint32_t> imms;
    std::array<Arrival, 32> some;
    for (size_t n = endpoint.poll(some); n > 0; n = endpoint.poll(some)) {
      for (size_t i = 0; i < n; ++i) {
        if (some[i].ok) imms.push_back(some[i].imm);
      }
    }
    return imms;
  }

  struct Named : fake::Device {
    explicit Named(const std::string& name) : Device(name), port_(port()) {}
    const VerbsPort port_;
  };
  Named first_{"mlx_first"}, second_{"mlx_second"};
  std::unique_ptr<Transport> transport_;
  std::vector<TransportEvent> events_;  // of the last connect()
};

// A notification is made for what comes after it was asked for. What lay there before, and be it
// more than is taken at once, has to be found by arm() itself.
TEST_F(VerbsFailures, ArmFindsAnArrivalBehindAnyNumberOfCompletedSends) {
  auto link = transport_->open_job(layout_on("mlx_first"));
  ibv_qp* qp = join(*link, first_, 0, 1);
  ASSERT_NE(qp, nullptr);
  BoxEndpoint& endpoint = link->endpoint(0);
  EXPECT_TRUE(endpoint.arm({}));
  for (const int sends : {1, 63, 64, 65, 500}) {
    for (int i = 0; i < sends; ++i) fake::complete_send(qp, 0);
    fake::arrive(qp, 7);
    EXPECT_FALSE(endpoint.arm({})) << sends << " sends";
    EXPECT_EQ(taken(endpoint), std::vector<uint32_t>{7});
    EXPECT_TRUE(endpoint.arm({}));
  }
  endpoint.detach(0);
}

// What the NIC has is in the order of its posts. The rest is not posted before some of it is sent.
TEST_F(VerbsFailures, TheNicHasNoMoreThanAPathHolds) {
  constexpr uint32_t kChunks = 64, kBytes = 64 << 10;
  LinkLayout layout = layout_on("mlx_first");
  layout.slots_bytes = layout.results_bytes = uint64_t{kChunks} * kBytes;
  auto link = transport_->open_job(layout);
  ibv_qp* qp = join(*link, first_, 0, 1, layout.results_bytes);
  ASSERT_NE(qp, nullptr);
  BoxEndpoint& endpoint = link->endpoint(0);
  fake::arrive(qp, 7);  // it is open now
  EXPECT_EQ(taken(endpoint), std::vector<uint32_t>{7});
  const auto post = [&] {
    uint32_t posted = 0;
    while (posted < kChunks && endpoint.post({}, {0, 0, kBytes, 1})) ++posted;
    endpoint.flush();
    return posted;
  };
  EXPECT_EQ(post(), kPathBytes / kBytes);
  EXPECT_TRUE(endpoint.arm({}));
  ASSERT_GE(first_.signaled.size(), 4u) << "room comes in steps";
  const auto writes = static_cast<uint32_t>(first_.signaled.front());
  fake::complete_send(qp, first_.signaled.front());
  EXPECT_FALSE(endpoint.arm({})) << "a post would find room";
  EXPECT_EQ(post(), writes);
  EXPECT_TRUE(endpoint.arm({}));
  endpoint.detach(0);
}

TEST_F(VerbsFailures, AQueueThatFailsIsAnErrorOfItsEndpointThatNamesTheCall) {
  const auto check = [&](int fake::Device::*failing, int value, const std::string& call) {
    auto link = transport_->open_job(layout_on("mlx_first"));
    auto other = transport_->open_job(layout_on("mlx_second"));
    ibv_qp* qp = join(*link, first_, 0, 1);
    ibv_qp* others = join(*other, second_, 0, 1);
    for (uint32_t i = 0; i < 200; ++i) fake::arrive(qp, i);  // receives are posted again
    first_.*failing = value;
    BoxEndpoint& endpoint = link->endpoint(0);
    const std::string error = error_of([&] {
      taken(endpoint);
      endpoint.arm({});
    });
    EXPECT_THAT(error, HasSubstr("internal: " + call + " on mlx_first: "));
    EXPECT_EQ(error_of([&] { taken(endpoint); }), error) << "for good";
    endpoint.detach(0);  // lets go without a word
    link->revoke(0);
    first_.*failing = 0;
    fake::arrive(others, 9);
    EXPECT_EQ(taken(other->endpoint(0)), std::vector<uint32_t>{9});
    other->endpoint(0).detach(0);
  };
  check(&fake::Device::receive_error, ENOMEM, "ibv_post_srq_recv");
  check(&fake::Device::notify_error, EIO, "ibv_req_notify_cq");
  check(&fake::Device::poll_result, -1, "ibv_poll_cq");
}

TEST_F(VerbsFailures, ADeadDeviceEndsItsJobsAndIsUsedNoMore) {
  auto doomed = transport_->open_job(layout_on("mlx_first"));
  auto other = transport_->open_job(layout_on("mlx_second"));
  ASSERT_NE(join(*doomed, first_, 0, 1), nullptr);
  ibv_qp* qp = join(*other, second_, 0, 1);
  EXPECT_EQ(transport_->ports().size(), 2u);
  first_.raise(IBV_EVENT_DEVICE_FATAL);
  first_.raise(IBV_EVENT_DEVICE_FATAL);
  const std::vector<TransportEvent> events = events_of(*transport_);
  ASSERT_EQ(events.size(), 1u) << "once";
  EXPECT_EQ(events[0].kind, TransportEvent::kFailed);
  EXPECT_EQ(events[0].link, doomed.get());
  EXPECT_THAT(events[0].reason, HasSubstr("mlx_first failed"));
  ASSERT_EQ(transport_->ports().size(), 1u);
  EXPECT_EQ(transport_->ports()[0].name, "mlx_second");
  EXPECT_THAT(transport_->describe(), HasSubstr("mlx_first failed"));

  fake::arrive(qp, 3);
  EXPECT_EQ(taken(other->endpoint(0)), std::vector<uint32_t>{3});
  LinkLayout anywhere = layout_on("");
  anywhere.queue_nic.clear();
  {
    auto next = transport_->open_job(anywhere);
    EXPECT_NE(join(*next, second_, 0, 1), nullptr);
    next->endpoint(0).detach(0);
  }
  EXPECT_THAT(error_of([&] { transport_->open_job(layout_on("mlx_first")); }),
              HasSubstr("which is not listened on"));
  fake::connection_event(second_, RDMA_CM_EVENT_DEVICE_REMOVAL);
  const std::vector<TransportEvent> removal = events_of(*transport_);
  ASSERT_EQ(removal.size(), 1u);
  EXPECT_EQ(removal[0].link, other.get());
  EXPECT_THAT(removal[0].reason, HasSubstr("mlx_second was removed"));
  EXPECT_THAT(error_of([&] { transport_->open_job(anywhere); }), HasSubstr("no RDMA device"));
  for (BoxLink* link : {doomed.get(), other.get()}) link->endpoint(0).detach(0);
}

// What nobody can take any more keeps its descriptor readable.
TEST_F(VerbsFailures, ADeadDeviceWakesNobody) {
  auto link = transport_->open_job(layout_on("mlx_first"));
  ASSERT_NE(join(*link, first_, 0, 1), nullptr);
  pollfd events = {transport_->event_fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&events, 1, 0), 0);
  eventfd_write(first_.context.async_fd, 1);
  EXPECT_EQ(::poll(&events, 1, 0), 1);
  first_.raise(IBV_EVENT_DEVICE_FATAL);
  EXPECT_EQ(events_of(*transport_).size(), 1u);
  EXPECT_EQ(::poll(&events, 1, 0), 0);
  eventfd_write(second_.context.async_fd, 1);
  EXPECT_EQ(::poll(&events, 1, 0), 1) << "the other one lives";
  fake::connection_event(second_, RDMA_CM_EVENT_DEVICE_REMOVAL);
  events_of(*transport_);
  EXPECT_EQ(::poll(&events, 1, 0), 0);
  link->endpoint(0).detach(0);
}

TEST_F(VerbsFailures, AQueueInErrorEndsTheJobThatOwnsIt) {
  auto doomed = transport_->open_job(layout_on("mlx_first"));
  auto other = transport_->open_job(layout_on("mlx_first"));
  for (BoxLink* link : {doomed.get(), other.get()}) link->admit(0, 1);
  first_.raise(IBV_EVENT_CQ_ERR, first_.cqs.front());
  const std::vector<TransportEvent> events = events_of(*transport_);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, TransportEvent::kFailed);
  EXPECT_EQ(events[0].link, doomed.get());
  EXPECT_THAT(events[0].reason, HasSubstr("completion queue on RDMA device mlx_first"));
  EXPECT_EQ(transport_->ports().size(), 2u) << "the device itself is well";
}

// The queue pair stays until its device has said that it took its last receive, nobody waits for
// that, and what happens to others meanwhile is heard.
TEST_F(VerbsFailures, ARevokedQueuePairLeavesInItsOwnTime) {
  auto link = transport_->open_job(layout_on("mlx_first"));
  ibv_qp* leaving = join(*link, first_, 0, 1);
  ibv_qp* staying = join(*link, first_, 1, 5);
  first_.raise(IBV_EVENT_QP_FATAL, staying);
  first_.raise(IBV_EVENT_QP_FATAL, leaving);
  link->endpoint(0).detach(0);
  const int disconnected = fake::calls().disconnected;
  link->revoke(0);
  EXPECT_EQ(fake::calls().disconnected, disconnected + 1) << "the worker hears of it at once";
  EXPECT_EQ(first_.qps.size(), 2u);
  const std::vector<TransportEvent> events = events_of(*transport_);
  ASSERT_EQ(events.size(), 1u) << "of the rank that stays";
  EXPECT_EQ(events[0].kind, TransportEvent::kDisconnected);
  EXPECT_EQ(events[0].rank, 1u);
  EXPECT_EQ(events[0].incarnation, 5u);
  first_.raise(IBV_EVENT_QP_LAST_WQE_REACHED, leaving);
  fake::connection_event(first_, RDMA_CM_EVENT_DISCONNECTED, leaving);
  EXPECT_TRUE(events_of(*transport_).empty());
  ASSERT_EQ(first_.qps.size(), 1u);
  EXPECT_EQ(first_.qps[0], staying);

  // A device that never says it is waited for within a bound.
  link->endpoint(0).detach(1);
  link->revoke(1);
  std::this_thread::sleep_for(std::chrono::milliseconds(25));
  events_of(*transport_);
  EXPECT_TRUE(first_.qps.empty());
}

TEST_F(VerbsFailures, ASuccessorDoesNotWaitForTheQueuePairOfItsPredecessor) {
  auto link = transport_->open_job(layout_on("mlx_first"));
  ibv_qp* before = join(*link, first_, 0, 1);
  link->endpoint(0).detach(0);
  link->revoke(0);
  const Offer offer = link->admit(0, 2);
  link->endpoint(0).attach(0, 2);
  first_.qps.reserve(8);
  const uint32_t number = before->qp_num;
  connect(first_, offer);
  ASSERT_EQ(first_.qps.size(), 1u) << "the completion queue has room for one";
  EXPECT_NE(first_.qps[0]->qp_num, number);
  fake::arrive(first_.qps[0], 11);
  EXPECT_EQ(taken(link->endpoint(0)), std::vector<uint32_t>{11});
  link->endpoint(0).detach(0);
}

// Devices give numbers of queue pairs that are gone to others.
TEST_F(VerbsFailures, NothingOfAQueuePairCountsForTheNextOneOfItsNumber) {
  auto link = transport_->open_job(layout_on("mlx_first"));
  BoxEndpoint& endpoint = link->endpoint(0);
  const Offer offer = link->admit(0, 1);
  EXPECT_EQ(connect(first_, offer), nullptr) << "its cores have not attached it";
  EXPECT_THAT(fake::calls().last_rejection, HasSubstr("join again"));
  endpoint.attach(0, 1);
  ibv_qp* old = connect(first_, offer);
  ASSERT_NE(old, nullptr);
  const uint32_t number = old->qp_num;
  endpoint.detach(0);  // before it has polled, ever
  fake::arrive(old, 1);
  EXPECT_TRUE(taken(endpoint).empty());
  fake::arrive(old, 2);  // and this one is not even taken
  link->revoke(0);
  first_.next_qp_num = number;
  ASSERT_NE(join(*link, first_, 1, 1), nullptr);
  ASSERT_EQ(first_.qps.back()->qp_num, number);
  static_cast<fake::Cq*>(first_.qps.back()->recv_cq)
      ->completions.clear();  // as ibv_destroy_qp does
  fake::arrive(first_.qps.back(), 3);
  EXPECT_EQ(taken(endpoint), std::vector<uint32_t>{3});
  endpoint.detach(1);
}

// What a peer sends at once finds its queue pair open, and nothing is left out, even when it comes
// in the middle of a pass.
TEST_F(VerbsFailures, EverythingThatIsSentAfterTheAnswerArrives) {
  auto link = transport_->open_job(layout_on("mlx_first"));
  BoxEndpoint& endpoint = link->endpoint(0);
  const Offer offer = link->admit(0, 1);
  endpoint.attach(0, 1);
  constexpr uint32_t kWrites = 6000;
  first_.before_poll = [&] {
    first_.before_poll = nullptr;
    ibv_qp* qp = connect(first_, offer);
    for (uint32_t i = 0; i < kWrites; ++i) fake::arrive(qp, i);
  };
  std::vector<uint32_t> expected(kWrites);
  for (uint32_t i = 0; i < kWrites; ++i) expected[i] = i;
  EXPECT_EQ(taken(endpoint), expected);
  endpoint.detach(0);
}

// The peer has its answer before rdma_accept() returns.
TEST_F(VerbsFailures, WhatComesWhileItsRequestIsAcceptedArrives) {
  auto link = transport_->open_job(layout_on("mlx_first"));
  BoxEndpoint& endpoint = link->endpoint(0);
  const Offer offer = link->admit(0, 1);
  endpoint.attach(0, 1);
  std::vector<uint32_t> imms;
  first_.during_accept = [&] {
    fake::arrive(first_.qps.back(), 5);
    imms = taken(endpoint);
  };
  ASSERT_NE(connect(first_, offer), nullptr);
  EXPECT_EQ(imms, std::vector<uint32_t>{5});
  EXPECT_TRUE(events_.empty());
  endpoint.detach(0);
}

TEST_F(VerbsFailures, AnAnswerThatFailsIsABrokenConnection) {
  auto link = transport_->open_job(layout_on("mlx_first"));
  BoxEndpoint& endpoint = link->endpoint(0);
  const Offer offer = link->admit(0, 7);
  endpoint.attach(0, 7);
  first_.accept_error = ENOMEM;
  const int rejected = fake::calls().rejected;
  connect(first_, offer);
  EXPECT_EQ(fake::calls().rejected, rejected + 1);
  EXPECT_THAT(fake::calls().last_rejection, HasSubstr("rdma_accept of rank 0"));
  ASSERT_EQ(events_.size(), 2u);
  EXPECT_EQ(events_[0].kind, TransportEvent::kRefused);
  EXPECT_THAT(events_[0].reason, HasSubstr("rdma_accept of rank 0"));
  EXPECT_EQ(events_[1].kind, TransportEvent::kDisconnected);
  EXPECT_EQ(events_[1].incarnation, 7u);
  std::array<Arrival, 4> some;
  ASSERT_EQ(endpoint.poll(some), 1u);
  EXPECT_FALSE(some[0].ok);

  first_.accept_error = 0;
  endpoint.detach(0);
  const Offer again = link->reconnect(0);
  endpoint.attach(0, 7);
  connect(first_, again);
  ASSERT_EQ(first_.qps.size(), 1u);
  fake::arrive(first_.qps[0], 6);
  EXPECT_EQ(taken(endpoint), std::vector<uint32_t>{6});
  endpoint.detach(0);
}

TEST_F(VerbsFailures, AFloodOfRequestsLeavesTimeForTheRest) {
  const int before = fake::calls().rejected;
  for (int i = 0; i < 1000; ++i) fake::request_connection(first_, {});
  pollfd events = {transport_->event_fd(), POLLIN, 0};
  int passes = 0;
  for (int last = before; ::poll(&events, 1, 0) == 1; last = fake::calls().rejected) {
    events_of(*transport_);
    EXPECT_LE(fake::calls().rejected - last, 256);
    ASSERT_LT(++passes, 1000);
  }
  EXPECT_EQ(fake::calls().rejected - before, 1000);
}

TEST_F(VerbsFailures, AWorkerRefusesAnOfferOfMoreQueuesThanItsPlanHas) {
  Offer offer = {.transport = "verbs", .ticket = std::string(32, '0')};
  offer.queues.push_back({.address = first_.port_.address + ":7000"});
  auto worker = connect_verbs(offer, layout_on("mlx_first"), 5000);
  EXPECT_TRUE(worker->connected());
  worker->reconnect(offer);
  EXPECT_TRUE(worker->connected());
  offer.queues.push_back(offer.queues[0]);
  EXPECT_EQ(error_of([&] { worker->reconnect(offer); }),
            "mismatch: 2 queues are offered, the plan has 1");
  offer.queues.clear();
  EXPECT_THAT(error_of([&] { worker->reconnect(offer); }), HasSubstr("0 queues"));
}

TEST_F(VerbsFailures, MemoryOfAGpuIsRegisteredAsADmaBuffer) {
  TestMemoryDevice gpu(/*cuda_ordinal=*/0);
  Offer offer = {.transport = "verbs", .ticket = std::string(32, '0')};
  offer.queues.push_back({.address = first_.port_.address + ":7000"});
  LinkLayout layout = layout_on("mlx_first");
  layout.worker_gradients_bytes = 64 * 128;
  fake::calls().dma_bufs.clear();
  {
    const auto worker = connect_verbs(offer, layout, 5000, arrays_on(&gpu, layout));
    const auto& registered = fake::calls().dma_bufs;
    ASSERT_EQ(registered.size(), 2u);
    const auto* const gradients = worker->gradients().data();
    const auto* const results = worker->results().data();
    EXPECT_EQ(registered[0].address, reinterpret_cast<uint64_t>(gradients));
    EXPECT_EQ(registered[0].offset, TestMemoryDevice::offset_of(gradients));
    EXPECT_EQ(registered[0].bytes, 64u * 128);
    EXPECT_EQ(registered[0].access, 0) << "nobody writes gradients";
    EXPECT_EQ(registered[1].address, reinterpret_cast<uint64_t>(results));
    EXPECT_EQ(registered[1].offset, TestMemoryDevice::offset_of(results));
    EXPECT_EQ(registered[1].bytes, 64u * 256);
    EXPECT_EQ(registered[1].access, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    EXPECT_THAT(worker->describe(), HasSubstr("gradients in the device's memory"));
    worker->reconnect(offer);
    EXPECT_EQ(registered.size(), 2u) << "it is the same memory";
  }
  EXPECT_TRUE(gpu.empty());
  EXPECT_EQ(dma_buf_problem(&first_.context), "");
}

TEST_F(VerbsFailures, ANicThatTakesNoDmaBufferIsToldFromOneThatDoesNotReachTheGpu) {
  TestMemoryDevice gpu(/*cuda_ordinal=*/0);
  Offer offer = {.transport = "verbs", .ticket = std::string(32, '0')};
  offer.queues.push_back({.address = first_.port_.address + ":7000"});
  const auto refusal = [&](int error) {
    first_.dma_buf_error = error;
    return error_of([&] {
      connect_verbs(offer, layout_on("mlx_first"), 5000, arrays_on(&gpu, layout_on("mlx_first")));
    });
  };
  EXPECT_THAT(refusal(EOPNOTSUPP),
              AllOf(HasSubstr("invalid: ibv_reg_dmabuf_mr of 0.0 MiB on mlx_first: "),
                    HasSubstr("the NIC's driver takes no DMA buffers")));
  EXPECT_THAT(dma_buf_problem(&first_.context), HasSubstr("takes no DMA buffers"));
  EXPECT_THAT(refusal(ENOSYS), HasSubstr("install rdma-core 34"));
  EXPECT_THAT(dma_buf_problem(&first_.context), HasSubstr("install rdma-core 34"));
  EXPECT_THAT(refusal(EINVAL), HasSubstr("does not reach the GPU's memory"));
  EXPECT_EQ(dma_buf_problem(&first_.context), "") << "the driver has looked";
  EXPECT_TRUE(gpu.empty());
}

TEST_F(VerbsFailures, ForksAreProvidedForBeforeAnythingIsRegistered) {
  auto link = transport_->open_job(layout_on("mlx_first"));
  EXPECT_EQ(fake::calls().fork_inits, 1);
  EXPECT_GT(fake::calls().registrations, 0);
  EXPECT_EQ(fake::calls().registrations_before_fork_init, 0);
}

}  // namespace verbs_failures_test
}  // namespace phub
