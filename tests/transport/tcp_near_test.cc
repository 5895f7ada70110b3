// Workers and a box of one host over the tcp transport: payloads in memory that both map, and what
// the box puts up with of a worker that shows it any.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <random>
#include <string>

#include "tests/transport/tcp_frames.h"
#include "tests/transport/tcp_raw_worker.h"
#include "tests/transport/tcp_rig.h"
#include "tests/worker/expect_error.h"
#include "transport/in_place.h"
#include "transport/tcp/near.h"
#include "transport/unix_message.h"

namespace phub {
namespace tcp_near_test {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr uint64_t kBytes = 5000;

size_t mappings_of(const std::string& name) {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find(name) != line.npos;
  return count;
}

class TcpNearTest : public TcpFramesTest {
 protected:
  TcpNearTest() { rig_ = std::make_unique<TcpRig>(TcpOptions(), TcpTrust(), nullptr, true); }
};

TEST_F(TcpNearTest, PayloadsGoThroughMemory) {
  open();
  const auto link = join(1, 1);
  EXPECT_THAT(link->describe(), HasSubstr("2 over memory of this host; 0 connections"));
  EXPECT_FALSE(link->zero_copy());
  EXPECT_TRUE(link->can_reconnect());
  for (int i = 0; i < 10; ++i) expect_exchange(*link, 1, static_cast<uint32_t>(i % 2));
}

// What lies in memory of the application's is copied to where the box reads, and from where it
// writes.
TEST_F(TcpNearTest, MemoryOfTheApplicationsIsUsed) {
  open();
  const auto link = join(1, 1);
  std::vector<std::byte> gradient(100, std::byte{5}), result(200);
  InPlace& in_place = *link->in_place();
  in_place.gradients.add(16, 100);
  in_place.gradients.move(16, gradient.data());
  in_place.results.add(64, 200);
  in_place.results.move(64, result.data());
  ASSERT_TRUE(link->endpoint().post({0}, {16, 32, 100, 77}));
  link->endpoint().flush();
  ASSERT_EQ(poll(box_->endpoint(0), 1).size(), 1u);
  EXPECT_TRUE(std::ranges::equal(box_->slots(1).subspan(32, 100), gradient));
  std::ranges::fill(box_->results(), std::byte{6});
  ASSERT_TRUE(box_->endpoint(0).post({.rank = 1}, {48, 64, 200, 78}));
  box_->endpoint(0).flush();
  ASSERT_EQ(poll(link->endpoint(), 1).size(), 1u);
  EXPECT_EQ(std::ranges::count(result, std::byte{6}), 200);
  in_place.gradients.move(16, nullptr);
  in_place.results.move(64, nullptr);
  expect_exchange(*link, 1, 0);
}

// A contribution that was accepted is the box's.
TEST_F(TcpNearTest, WhatWasTakenDoesNotChange) {
  open(2, 1);
  const auto link = join(1, 1);
  EXPECT_FALSE(box_->slots_belong_to_worker());
  link->gradients()[16] = std::byte{1};
  ASSERT_TRUE(link->endpoint().post({0}, {16, 32, 100, 77}));
  link->endpoint().flush();
  ASSERT_EQ(poll(box_->endpoint(0), 1).size(), 1u);
  link->gradients()[16] = std::byte{2};
  EXPECT_EQ(box_->slots(1)[32], std::byte{1});
}

// The name is that of a box on another host: nobody listens at it here.
TEST_F(TcpNearTest, ABoxOfAnotherHostIsReachedOverTcp) {
  open();
  Offer offer = box_->admit(1, 1);
  offer.queues[1].near = new_near_name();
  const auto mixed = rig_->connect(offer, layout_);
  attach(1, 1);
  EXPECT_THAT(mixed->describe(), HasSubstr("1 over memory of this host; 1 connections: 127"));
  expect_exchange(*mixed, 1, 0);
  expect_exchange(*mixed, 1, 1);
  offer = box_->admit(0, 1);
  offer.queues[0].near = std::string(300, 'x');  // no name of a socket is so long
  offer.queues[1].near = "";
  const auto far = rig_->connect(offer, layout_);
  attach(0, 1);
  EXPECT_THAT(far->describe(), Not(HasSubstr("memory")));
  expect_exchange(*far, 0, 0);
  expect_exchange(*far, 0, 1);
}

TEST_F(TcpNearTest, AReconnectionHasTheSameMemory) {
  open();
  const auto link = join(1, 1);
  expect_exchange(*link, 1, 0);
  const std::byte* const gradients = link->gradients().data();
  const auto again = [&](const std::string& near) {
    detach(1);
    Offer offer = box_->reconnect(1);
    if (!near.empty()) offer.queues[0].near = near;
    attach(1, 1);
    rig_->reconnect(*link, offer);
    EXPECT_EQ(link->gradients().data(), gradients);
    expect_exchange(*link, 1, 0);
    expect_exchange(*link, 1, 1);
  };
  again("");
  again("a name of another host");
  again("");
}

TEST_F(TcpNearTest, NothingIsLeftBehind) {
  open();
  auto link = join(1, 1);
  expect_exchange(*link, 1, 0);
  EXPECT_EQ(mappings_of("phub-gradients"), 2u);  // the worker's, and the box's
  detach(1);
  BoxLink::HeldMemory held = box_->revoke(1);
  EXPECT_NE(held, nullptr);
  held.reset();
  EXPECT_EQ(mappings_of("phub-gradients"), 1u);
  link.reset();
  EXPECT_EQ(mappings_of("phub-gradients") + mappings_of("phub-received"), 0u);
}

// --- a worker without manners --------------------------------------------------------------------

Fd file_of(uint64_t bytes, int seals) {
  Fd file(memfd_create("a-file", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(file.get(), static_cast<off_t>(bytes)), 0);
  if (seals != 0) {
    EXPECT_EQ(fcntl(file.get(), F_ADD_SEALS, seals), 0);
  }
  return file;
}
constexpr int kSize = F_SEAL_SHRINK | F_SEAL_GROW;

class TcpNearAttackTest : public TcpNearTest {
 protected:
  // What the box answers to a hello with these descriptors: "none" is a welcome.
  std::string answer_to(const Offer& offer, std::span<const int> descriptors) {
    socket_ = connect_near(offer.queues[0].near);
    const TcpHello hello = tcp_hello_of(offer, layout_, 0);
    send_message(socket_.get(), std::as_bytes(std::span(&hello, 1)), descriptors);
    handle();
    std::vector<std::byte> answer(4096);
    const ssize_t bytes = recv(socket_.get(), answer.data(), answer.size(), MSG_DONTWAIT);
    if (bytes <= 0) return "";
    answer.resize(static_cast<size_t>(bytes));
    return testing::error_of([&] { parse_tcp_answer(answer); });
  }
  void join_by_hand() {
    open(2, 1);
    gradients_ = file_of(kBytes, kSize);
    results_ = file_of(kBytes, kSize);
    const std::array<int, 2> memory = {gradients_.get(), results_.get()};
    ASSERT_EQ(answer_to(box_->admit(1, 1), memory), "none");
    attach(1, 1);
  }
  void send(std::span<const std::byte> bytes) {
    ASSERT_EQ(::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  Fd socket_, gradients_, results_;
};

TEST_F(TcpNearAttackTest, MemoryThatCannotBeIsRefused) {
  open(2, 1);
  const Fd good = file_of(kBytes, kSize), short_file = file_of(kBytes - 1, kSize);
  const Fd open_file = file_of(kBytes, 0), closed = file_of(kBytes, kSize | F_SEAL_WRITE);
  const Offer offer = box_->admit(1, 1);
  const auto answer = [&](const std::vector<int>& descriptors) {
    return answer_to(offer, descriptors);
  };
  EXPECT_THAT(answer({}), HasSubstr("0 descriptors of memory, 2 expected"));
  EXPECT_THAT(answer({good.get()}), HasSubstr("1 descriptors"));
  EXPECT_EQ(answer({good.get(), good.get(), good.get()}), "");  // more than the box has room for
  EXPECT_THAT(answer({short_file.get(), good.get()}), HasSubstr("has 4999 bytes, not 5000"));
  EXPECT_THAT(answer({good.get(), open_file.get()}), HasSubstr("not sealed against shrinking"));
  EXPECT_THAT(answer({good.get(), STDERR_FILENO}), HasSubstr("not sealed against shrinking"));
  EXPECT_THAT(answer({good.get(), closed.get()}), HasSubstr("mmap of a worker's results"));
  EXPECT_EQ(answer({good.get(), good.get()}), "none");
  EXPECT_THAT(answer({good.get(), good.get()}), HasSubstr("this ticket was used already"));
}

TEST_F(TcpNearAttackTest, FramesArriveWholeHoweverTheyAreCut) {
  join_by_hand();
  std::vector<std::byte> data(kBytes);
  std::ranges::generate(data, [&] { return static_cast<std::byte>(random_()); });
  ASSERT_EQ(pwrite(gradients_.get(), data.data(), kBytes, 0), static_cast<ssize_t>(kBytes));
  expect_whole(data, true, [&](auto bytes) { send(bytes); });
}

TEST_F(TcpNearAttackTest, AFrameFromOutsideItsMemoryEndsTheRank) {
  for (const uint64_t source : {kBytes - 99, kBytes, ~uint64_t{0}, ~uint64_t{0} - 98}) {
    join_by_hand();
    const std::array<TcpFrame, 2> frames = {TcpFrame{1, 100, 0}, TcpFrame{2, 100, 200}};
    const std::vector<std::byte> ones(kBytes, std::byte{1});
    ASSERT_EQ(pwrite(gradients_.get(), ones.data(), kBytes, 0), static_cast<ssize_t>(kBytes));
    const std::array<uint64_t, 2> sources = {0, source};
    send(batch_of(frames, std::as_bytes(std::span(sources))));
    const std::vector<Arrival> come = poll(box_->endpoint(0), 1);
    ASSERT_EQ(come.size(), 1u) << source;
    EXPECT_TRUE(!come[0].ok && come[0].violation) << source;
    EXPECT_EQ(std::ranges::count(box_->slots(1), std::byte{1}), 0) << "nothing of its batch lands";
    detach(1);
    box_->revoke(1);
  }
}

TEST_F(TcpNearAttackTest, AFrameOutsideTheSlotsEndsTheRank) {
  join_by_hand();
  const uint64_t source = 0;
  send(batch_of(std::array<TcpFrame, 1>{TcpFrame{1, 100, kBytes - 99}},
                std::as_bytes(std::span(&source, 1))));
  const std::vector<Arrival> come = poll(box_->endpoint(0), 1);
  ASSERT_EQ(come.size(), 1u);
  EXPECT_TRUE(!come[0].ok && come[0].violation);
}

}  // namespace tcp_near_test
}  // namespace phub
