// The suite's tests of who may take part: tickets, replacement, death, other jobs.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "tests/transport/transport_suite.h"
#include "transport/error.h"

namespace phub {

TEST_P(TransportSuite, APostToARankThatIsNotAttachedIsRefused) {
  open(3, {8});
  join(1, 1);
  EXPECT_FALSE(box_->endpoint(0).post({.rank = 0}, write_of(0, 0, 1)));
  EXPECT_TRUE(box_->endpoint(0).post({.rank = 1}, write_of(0, 0, 1)));
  box_->endpoint(0).flush();
  EXPECT_EQ(poll_for(workers_[1]->endpoint(), 1).size(), 1u);
  drop(1);
  EXPECT_FALSE(box_->endpoint(0).post({.rank = 1}, write_of(0, 0, 1)));
  std::array<Arrival, 4> some;
  for (int i = 0; i < 10; ++i) {
    pump();
    EXPECT_EQ(box_->endpoint(0).poll(some), 0u);
  }
}

// Fencing: whatever the replaced worker still does, the box and its successor see nothing of it.
TEST_P(TransportSuite, AReplacedWorkerChangesNothing) {
  if (GetParam().name == "ofi_shm") {
    GTEST_SKIP() << "libfabric's shm unmaps the endpoint under a writer of the same process";
  }
  open(2, {8, 8});
  join(0, 1);
  join(1, 1);
  const std::unique_ptr<WorkerLink> old = std::move(workers_[0]);
  for (uint32_t core = 0; core < cores(); ++core) box_->endpoint(core).detach(0);
  box_->revoke(0);
  join(0, 2);

  std::memset(workers_[0]->gradients().data(), 0x11, layout_.slots_bytes);
  for (uint32_t queue = 0; queue < cores(); ++queue) {
    for (uint32_t chunk = 0; chunk < 8; ++chunk) {
      post_surely(workers_[0]->endpoint(), {queue}, write_of(queue, chunk, 1));
    }
  }
  workers_[0]->endpoint().flush();
  for (uint32_t core = 0; core < cores(); ++core) {
    EXPECT_EQ(poll_for(box_->endpoint(core), 8).size(), 8u);
  }

  std::memset(old->gradients().data(), 0x22, layout_.slots_bytes);
  for (uint32_t queue = 0; queue < cores(); ++queue) {
    for (uint32_t chunk = 0; chunk < 8; ++chunk)
      old->endpoint().post({queue}, write_of(queue, chunk, 7));
  }
  old->endpoint().flush();
  for (int i = 0; i < 200; ++i) pump();
  std::array<Arrival, 16> some;
  for (uint32_t core = 0; core < cores(); ++core) EXPECT_EQ(box_->endpoint(core).poll(some), 0u);
  for (const std::byte byte : box_->slots(0)) ASSERT_EQ(byte, std::byte{0x11});
  EXPECT_TRUE(eventually([&] { return !old->connected(); }));

  // The successor's queue pairs work both ways.
  for (uint32_t core = 0; core < cores(); ++core) {
    post_surely(box_->endpoint(core), {.rank = 0}, write_of(core, 5, 2));
    box_->endpoint(core).flush();
  }
  EXPECT_EQ(poll_for(workers_[0]->endpoint(), 2).size(), 2u);
  EXPECT_TRUE(workers_[0]->connected());
}

TEST_P(TransportSuite, TheDeathOfAWorkerIsAnEvent) {
  open(3, {8, 8});
  for (uint32_t rank = 0; rank < 3; ++rank) join(rank, rank + 5);
  const auto seen = [&](TransportEvent::Kind kind, uint32_t rank, uint32_t incarnation) {
    const auto& events = rig_->events();
    return std::count_if(events.begin(), events.end(), [&](const TransportEvent& event) {
      return event.kind == kind && event.link == box_.get() && event.rank == rank &&
             event.incarnation == incarnation;
    });
  };
  EXPECT_EQ(seen(TransportEvent::kDisconnected, 1, 6), 0);
  rig_->kill(std::move(workers_[1]));
  EXPECT_TRUE(eventually([&] { return seen(TransportEvent::kDisconnected, 1, 6) >= 1; }));
  for (int i = 0; i < 50; ++i) {
    pump();
    rig_->transport().handle_events(rig_->events());
  }
  EXPECT_EQ(seen(TransportEvent::kDisconnected, 1, 6), 1) << "once";
  EXPECT_EQ(seen(TransportEvent::kDisconnected, 0, 5), 0);
  drop(1);
  join(1, 9);
  post_surely(workers_[1]->endpoint(), {0}, write_of(0, 1, 1));
  workers_[1]->endpoint().flush();
  EXPECT_EQ(poll_for(box_->endpoint(0), 1).size(), 1u);
}

TEST_P(TransportSuite, RevokingEndsTheConnection) {
  open(1, {8});
  join(0, 1);
  EXPECT_TRUE(workers_[0]->connected());
  box_->endpoint(0).detach(0);
  EXPECT_TRUE(workers_[0]->connected());
  box_->revoke(0);
  EXPECT_TRUE(eventually([&] { return !workers_[0]->connected(); }));
  workers_[0].reset();
}

TEST_P(TransportSuite, ATicketOpensOneIncarnationOnce) {
  open(2, {8});
  const auto refused = [&](const Offer& offer) {
    try {
      rig_->connect(offer, layout_);
    } catch (const Error& error) {
      return error.code() == ErrorCode::kUnauthorized;
    }
    return false;
  };
  const Offer offer = box_->admit(0, 1);
  box_->endpoint(0).attach(0, 1);
  ASSERT_EQ(offer.ticket.size(), 32u);
  Offer wrong = offer;
  wrong.ticket = std::string(32, '0');
  EXPECT_TRUE(refused(wrong));
  wrong.ticket = offer.ticket;
  wrong.ticket.back() = wrong.ticket.back() == 'a' ? 'b' : 'a';
  EXPECT_TRUE(refused(wrong));

  workers_[0] = rig_->connect(offer, layout_);  // what was refused has spoilt nothing
  EXPECT_TRUE(refused(offer)) << "used";
  EXPECT_TRUE(workers_[0]->connected());

  const Offer revoked = box_->admit(1, 1);
  EXPECT_NE(revoked.ticket, offer.ticket);
  box_->revoke(1);
  EXPECT_TRUE(refused(revoked));
}

TEST_P(TransportSuite, JobsDoNotMeet) {
  open(1, {8});
  join(0, 1);
  const std::vector<std::byte> before(box_->slots(0).begin(), box_->slots(0).end());
  const std::unique_ptr<BoxLink> other = rig_->transport().open_job(layout_);
  const Offer offer = other->admit(0, 1);
  other->endpoint(0).attach(0, 1);
  std::unique_ptr<WorkerLink> stranger = rig_->connect(offer, layout_);
  others_ = {&other->endpoint(0), &stranger->endpoint()};
  std::memset(stranger->gradients().data(), 0x33, layout_.slots_bytes);
  post_surely(stranger->endpoint(), {0}, write_of(0, 6, 1));
  stranger->endpoint().flush();
  EXPECT_EQ(poll_for(other->endpoint(0), 1).size(), 1u);
  std::array<Arrival, 4> some;
  EXPECT_EQ(box_->endpoint(0).poll(some), 0u);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), box_->slots(0).begin()));
  others_.clear();
  other->endpoint(0).detach(0);
  other->revoke(0);
  EXPECT_TRUE(workers_[0]->connected());
}

}  // namespace phub
