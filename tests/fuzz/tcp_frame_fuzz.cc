// What comes over a TCP connection: the hello and its answer as either side reads them, and frames,
// cut into pieces, against a reader that has the whole stream before it.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "transport/error.h"
#include "transport/tcp/endpoint.h"
#include "transport/tcp/format.h"

using namespace phub;  // NOLINT: a fuzz target

namespace {

constexpr size_t kMemory = 300, kGuard = 64;
constexpr std::byte kUntouched{0xa5};

void read_greetings(std::span<const std::byte> message) {
  LinkLayout layout;
  layout.queue_chunks = {4, 4};
  layout.slots_bytes = layout.results_bytes = 1000;
  try {
    const TcpHello hello = parse_tcp_hello(message);
    for (const char digit : hello.ticket) PHUB_CHECK(digit >= '0' && digit <= 'f');
    check_tcp_hello(hello, layout);
    PHUB_CHECK(hello.queue < layout.queue_chunks.size());
  } catch (const Error&) {
  }
  try {
    parse_tcp_answer(message);
  } catch (const Error&) {
  }
}

// The immediates that must arrive and the memory that must come out. False: the stream breaks.
struct Expected {
  std::vector<uint32_t> imms;
  std::vector<std::byte> memory = std::vector<std::byte>(kMemory, kUntouched);
};
// Takes sizeof(T) bytes from the front of the stream; false: they are not there.
template <typename T>
bool take(std::span<const std::byte>& stream, T& value) {
  if (stream.size() < sizeof(T)) return false;
  std::memcpy(&value, stream.data(), sizeof(T));
  stream = stream.subspan(sizeof(T));
  return true;
}

Expected read_whole(std::span<const std::byte> stream) {
  struct Frame {
    uint32_t imm, bytes;
    uint64_t offset;
  };
  Expected expected;
  for (;;) {
    uint32_t more = 0, zero = 0;
    std::vector<Frame> frames(1);
    if (!take(stream, more) || !take(stream, zero) || !take(stream, frames[0])) break;
    if (more > 31 || zero != 0) break;
    bool good = true;
    for (uint32_t i = 0; i < more && good; ++i) {
      frames.emplace_back();
      good = take(stream, frames.back());
    }
    for (const Frame& frame : frames) {
      good = good && frame.bytes <= kMemory && frame.offset <= kMemory - frame.bytes;
    }
    if (!good) break;
    for (const Frame& frame : frames) {
      const size_t there = std::min<size_t>(frame.bytes, stream.size());
      std::copy_n(stream.begin(), there,
                  expected.memory.begin() + static_cast<ptrdiff_t>(frame.offset));
      stream = stream.subspan(there);
      if (there < frame.bytes) return expected;
      expected.imms.push_back(frame.imm);
    }
  }
  return expected;
}

void read_frames(std::span<const std::byte> stream, size_t piece) {
  std::array<int, 2> ends = {};
  PHUB_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends.data()) == 0);
  const Fd peer(ends[0]), own(ends[1]);
  std::vector<std::byte> memory(kMemory + 2 * kGuard, kUntouched);
  std::vector<Write> ring(8);
  TcpEndpoint endpoint(1, 1);
  endpoint.watch(own.get(), {});
  endpoint.list({});
  endpoint.open({}, {.stream = {own.get(), nullptr},
                     .ring = ring,
                     .source = {},
                     .target = std::span(memory).subspan(kGuard, kMemory)});
  std::vector<uint32_t> imms;
  int broken = 0;
  const auto poll = [&] {
    std::array<Arrival, 2> some;
    const size_t taken = endpoint.poll(some);
    for (size_t i = 0; i < taken; ++i) {
      PHUB_CHECK(broken == 0);
      if (some[i].ok) imms.push_back(some[i].imm);
      broken += !some[i].ok;
    }
    return taken > 0;
  };
  for (std::span<const std::byte> rest = stream; !rest.empty();) {
    const std::span<const std::byte> next = rest.first(std::min(piece, rest.size()));
    const ssize_t sent = send(peer.get(), next.data(), next.size(), MSG_NOSIGNAL);
    if (sent < 0) break;  // broken off
    rest = rest.subspan(static_cast<size_t>(sent));
    poll();
  }
  while (poll()) {
  }
  shutdown(peer.get(), SHUT_WR);
  while (poll()) {
  }
  const Expected expected = read_whole(stream);
  PHUB_CHECK(imms == expected.imms);
  PHUB_CHECK(broken == 1);
  PHUB_CHECK(std::equal(expected.memory.begin(), expected.memory.end(), memory.begin() + kGuard));
  const auto untouched = [](std::byte byte) { return byte == kUntouched; };
  PHUB_CHECK(std::all_of(memory.begin(), memory.begin() + kGuard, untouched));
  PHUB_CHECK(std::all_of(memory.end() - kGuard, memory.end(), untouched));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {  // NOLINT: its name
  const auto message = std::as_bytes(std::span(data, size));
  read_greetings(message);
  if (size > 0) read_frames(message.subspan(1), 1 + data[0]);
  return 0;
}
