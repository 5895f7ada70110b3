// The private data of an RDMA connection, and the words that name a device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "tests/worker/expect_error.h"
#include "transport/verbs/devices.h"
#include "transport/verbs/format.h"

namespace phub {
namespace verbs_format_test {

using ::testing::HasSubstr;

std::vector<std::byte> hello_bytes(const VerbsHello& hello = {}) {
  const auto bytes = std::as_bytes(std::span(&hello, 1));
  return {bytes.begin(), bytes.end()};
}
template <typename Call>
void expect_error(const Call& call, ErrorCode code, const std::string& text) {
  testing::expect_error(code, text, call);
}

// Not in lock-step, every rank has results of its own, and all of them are registered.
TEST(VerbsFormatTest, EveryCopyOfTheResultsIsLocked) {
  LinkLayout layout;
  layout.max_ranks = 5;
  layout.slots_bytes = 1000;
  layout.results_bytes = 300;
  EXPECT_EQ(verbs_locked_bytes(layout), 5300u);
  layout.result_copies = 5;
  EXPECT_EQ(verbs_locked_bytes(layout), 6500u);
}

// Written out by hand: another implementation must read the same.
TEST(VerbsFormatTest, TheHelloByteForByte) {
  VerbsHello hello;
  hello.queue = 0x0102;
  for (size_t i = 0; i < hello.ticket.size(); ++i) hello.ticket[i] = static_cast<uint8_t>(0xa0 + i);
  hello.results_base = 0x1122334455667788;
  hello.results_bytes = 0x99aabbccddeeff00;
  hello.results_key = 0xdeadbeef;
  const std::vector<uint8_t> expected = {'P',  'U',  'H',  'V',  1,    0,    0x02, 0x01,  //
                                         0xa0, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7,  //
                                         0xa8, 0xa9, 0xaa, 0xab, 0xac, 0xad, 0xae, 0xaf,  //
                                         0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11,  //
                                         0x00, 0xff, 0xee, 0xdd, 0xcc, 0xbb, 0xaa, 0x99,  //
                                         0xef, 0xbe, 0xad, 0xde, 0,    0,    0,    0};
  const auto bytes = hello_bytes(hello);
  ASSERT_EQ(bytes.size(), expected.size());
  EXPECT_EQ(std::memcmp(bytes.data(), expected.data(), bytes.size()), 0);
  const VerbsHello read = parse_verbs_hello(bytes);
  EXPECT_EQ(read.queue, hello.queue);
  EXPECT_EQ(read.ticket, hello.ticket);
  EXPECT_EQ(read.results_base, hello.results_base);
  EXPECT_EQ(read.results_bytes, hello.results_bytes);
  EXPECT_EQ(read.results_key, hello.results_key);
}

TEST(VerbsFormatTest, AHelloOfAnyShorterLengthIsRefused) {
  const auto bytes = hello_bytes();
  for (size_t length = 0; length < bytes.size(); ++length) {
    expect_error([&] { parse_verbs_hello(std::span(bytes).first(length)); }, ErrorCode::kInvalid,
                 "hello: " + std::to_string(length) + " bytes, at least 48 expected");
  }
}

// librdmacm pads with zeros up to what the connection carries.
TEST(VerbsFormatTest, WhatFollowsAHelloIsNotLookedAt) {
  auto bytes = hello_bytes();
  bytes.resize(56, std::byte{0xff});
  EXPECT_EQ(parse_verbs_hello(bytes).version, kVerbsVersion);
}

TEST(VerbsFormatTest, OthersMagicAndVersionAreRefused) {
  for (size_t bit = 0; bit < 32; ++bit) {
    VerbsHello hello;
    hello.magic ^= 1u << bit;
    expect_error([&] { parse_verbs_hello(hello_bytes(hello)); }, ErrorCode::kInvalid,
                 "not a phub peer");
  }
  for (const uint16_t version : {0, 2, 0x0100, 0xffff}) {
    VerbsHello hello;
    hello.version = version;
    expect_error([&] { parse_verbs_hello(hello_bytes(hello)); }, ErrorCode::kInvalid,
                 "protocol version " + std::to_string(version) + ", this side speaks 1");
  }
}

TEST(VerbsFormatTest, TicketsThereAndBack) {
  const std::string digits = "00112233445566778899aabbccddeeff";
  const auto bytes = ticket_bytes(digits);
  EXPECT_EQ(bytes[1], 0x11);
  EXPECT_EQ(bytes[15], 0xff);
  EXPECT_EQ(ticket_digits(bytes), digits);
  EXPECT_EQ(ticket_digits(ticket_bytes("00112233445566778899AABBCCDDEEFF")), digits);
}

TEST(VerbsFormatTest, WhatIsNoTicket) {
  const std::string good(32, '7');
  for (const std::string& bad :
       {std::string(), good.substr(1), good + "7", good + "77", std::string(32, 'g'),
        std::string(32, ' '), std::string(32, '\0')}) {
    expect_error([&] { ticket_bytes(bad); }, ErrorCode::kInvalid,
                 "a ticket of " + std::to_string(bad.size()) + " characters; 32");
  }
  // One wrong character at every place, signs and prefixes that number parsers like among them.
  for (size_t at = 0; at < good.size(); ++at) {
    for (const char wrong : {'g', '-', '+', 'x', ' ', '\0', '\x80'}) {
      std::string bad = good;
      bad[at] = wrong;
      expect_error([&] { ticket_bytes(bad); }, ErrorCode::kInvalid, "hexadecimal");
    }
  }
}

TEST(VerbsFormatTest, DevicesPortsAndGids) {
  const VerbsChoice device = parse_verbs_choice("mlx5_0");
  EXPECT_EQ(device.device, "mlx5_0");
  EXPECT_FALSE(device.port || device.gid_index);
  const VerbsChoice port = parse_verbs_choice("mlx5_0:2");
  EXPECT_EQ(port.port, 2);
  EXPECT_FALSE(port.gid_index);
  const VerbsChoice gid = parse_verbs_choice("rxe0:1:255");
  EXPECT_EQ(gid.port, 1);
  EXPECT_EQ(gid.gid_index, 255);
  for (const std::string bad : {"", ":", ":1", "a:", "a:x", "a:256", "a:-1", "a:1:", "a:1:x",
                                "a:1:2:3", "a:1:99999999999", "a::1", "a: 1", "a:+1"}) {
    expect_error([&] { parse_verbs_choice(bad); }, ErrorCode::kInvalid,
                 "must be DEVICE, DEVICE:PORT or DEVICE:PORT:GID, got '" + bad + "'");
  }
}

TEST(VerbsFormatTest, TheFirstPortOfADeviceHasItsName) {
  VerbsPort port;
  port.device = "mlx5_0";
  EXPECT_EQ(port.name(), "mlx5_0");
  port.port = 2;
  EXPECT_EQ(port.name(), "mlx5_0:2");
}

}  // namespace verbs_format_test
}  // namespace phub
