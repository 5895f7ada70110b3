// Datagrams in batches: what is sent comes, in order, whatever their number and sizes.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <random>
#include <vector>

#include "tests/seeds.h"
#include "tests/worker/expect_error.h"
#include "transport/error.h"
#include "transport/switch/packet.h"
#include "transport/switch/socket.h"

namespace phub {
namespace switch_socket_test {

using Bytes = std::vector<std::byte>;

sockaddr_in here(uint16_t port) { return switch_address("127.0.0.1:" + std::to_string(port)); }

Bytes some_bytes(std::mt19937_64& random, size_t count) {
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

TEST(SwitchSocket, WhatIsSentComes) {
  const uint64_t seed = testing::fresh_seeds(1).first;
  SCOPED_TRACE("PHUB_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  SwitchSocket to{uint16_t{0}};
  std::vector<SwitchSocket> from;
  for (int i = 0; i < 3; ++i) from.emplace_back(uint16_t{0});  // and moved
  std::vector<std::deque<Bytes>> under_way(from.size());
  size_t waiting = 0, sent = 0;
  const auto take_all = [&] {
    for (SwitchSocket& socket : from) socket.flush();
    while (waiting > 0) {
      const auto got = to.receive(5000);
      ASSERT_TRUE(got.has_value()) << waiting << " are still to come";
      size_t who = 0;
      while (who < from.size() && from[who].port() != ntohs(got->from.sin_port)) ++who;
      ASSERT_LT(who, from.size());
      ASSERT_FALSE(under_way[who].empty());
      const Bytes& want = under_way[who].front();
      ASSERT_EQ(got->bytes.size(), want.size());
      ASSERT_TRUE(std::equal(want.begin(), want.end(), got->bytes.begin()));
      under_way[who].pop_front();
      --waiting;
    }
    EXPECT_FALSE(to.receive().has_value());
    EXPECT_FALSE(to.holds_some());
  };
  while (sent < 1000) {
    // A socket has room for some hundred small ones, and some twenty large ones.
    const bool small = random() % 2 == 0;
    const size_t count = 1 + random() % (small ? 150 : 20);
    for (size_t i = 0; i < count; ++i, ++sent, ++waiting) {
      const size_t who = random() % from.size();
      const Bytes bytes = some_bytes(random, random() % (small ? 60 : sizeof(SwitchPacket) + 1));
      from[who].send(bytes, here(to.port()));
      under_way[who].push_back(bytes);
    }
    take_all();
    if (HasFatalFailure()) return;
  }
}

// What is longer than a packet does not pass for one.
TEST(SwitchSocket, WhatIsTooLongShows) {
  SwitchSocket to{uint16_t{0}};
  const Fd plain(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const Bytes bytes(sizeof(SwitchPacket) + 700);
  const sockaddr_in address = here(to.port());
  ASSERT_EQ(sendto(plain.get(), bytes.data(), bytes.size(), 0,
                   reinterpret_cast<const sockaddr*>(&address), sizeof address),
            static_cast<ssize_t>(bytes.size()));
  const auto got = to.receive(5000);
  ASSERT_TRUE(got.has_value());
  EXPECT_GT(got->bytes.size(), sizeof(SwitchPacket));
}

TEST(SwitchSocket, AClosedOneLeavesItsPort) {
  SwitchSocket first{uint16_t{0}};
  const uint16_t port = first.port();
  testing::expect_error(ErrorCode::kUnavailable, "UDP port " + std::to_string(port),
                        [&] { const SwitchSocket second(port); });
  first.send(Bytes(10), here(port));
  first.close();
  first.flush();
  EXPECT_FALSE(first.receive().has_value());
  SwitchSocket second(port);
  second.send(Bytes(10), here(port));
  second.flush();
  EXPECT_TRUE(second.receive(5000).has_value());
}

}  // namespace switch_socket_test
}  // namespace phub
