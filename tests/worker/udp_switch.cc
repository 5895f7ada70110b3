#include "tests/worker/udp_switch.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "transport/error.h"

namespace phub::testing {
namespace {

// Below those that the kernel gives out.
uint16_t some_port(std::mt19937_64& random) {
  return static_cast<uint16_t>(12000 + random() % 20000);
}

// So many free ports, one after another.
std::vector<SwitchSocket> consecutive(std::mt19937_64& random, uint32_t count) {
  for (int tries = 0;; ++tries) {
    std::vector<SwitchSocket> sockets;
    const uint16_t first = some_port(random);
    try {
      for (uint32_t i = 0; i < count; ++i) {
        sockets.emplace_back(static_cast<uint16_t>(first + i));
      }
      return sockets;
    } catch (const Error&) {
      if (tries == 100) throw;
    }
  }
}

sockaddr_in here(uint16_t port) { return switch_address(fmt::format("127.0.0.1:{}", port)); }

bool same(const sockaddr_in& a, const sockaddr_in& b) {
  return a.sin_port == b.sin_port && a.sin_addr.s_addr == b.sin_addr.s_addr;
}

}  // namespace

UdpSwitch::UdpSwitch(const UdpSwitchOptions& options)
    : options_(options),
      random_(options.seed ^ static_cast<uint64_t>(getpid()) << 32),
      adder_(options.slots) {
  // The second half is left to the box.
  std::vector<SwitchSocket> sockets = consecutive(random_, 2 * options.cores);
  const uint16_t first = sockets.front().port();
  const auto of_box = static_cast<uint16_t>(first + options.cores);
  for (uint32_t i = 0; i < options.cores; ++i) {
    sockets_.push_back(std::move(sockets[i]));
    box_.push_back(here(static_cast<uint16_t>(of_box + i)));
  }
  sockets.clear();
  random_.seed(options.seed);
  of_box_ = {.address = fmt::format("127.0.0.1:{}", of_box),
             .slots = options.slots,
             .worker_port = 0,
             .workers_send_to = fmt::format("127.0.0.1:{}", first),
             .answers_go_to = fmt::format("127.0.0.1:{}", first)};
  thread_ = std::thread([this] { run(); });
}

UdpSwitch::~UdpSwitch() {
  stops_ = true;
  thread_.join();
}

void UdpSwitch::run() {
  std::vector<pollfd> waits;
  for (const SwitchSocket& socket : sockets_) waits.push_back({socket.fd(), POLLIN, 0});
  while (!stops_) {
    const bool some_left =
        std::ranges::any_of(sockets_, [](const SwitchSocket& each) { return each.holds_some(); });
    poll(waits.data(), waits.size(), some_left ? 0 : held_.empty() ? 50 : 1);
    if (forgets_.exchange(false)) adder_.forget();
    for (size_t port = 0; port < sockets_.size(); ++port) {
      for (int i = 0; i < 64 && take(port); ++i) {
      }
    }
    send_late();
    for (SwitchSocket& socket : sockets_) socket.flush();
  }
}

// A header alone is the box's, for all workers.
bool UdpSwitch::take(size_t port) {
  const std::optional<Datagram> got = sockets_[port].receive();
  if (!got) return false;
  if (state_ == State::kSilent) return true;
  SwitchPacket packet;
  if (got->bytes.size() == sizeof packet.header) {
    for (const sockaddr_in& worker : workers_) send(port, got->bytes, worker);
    return true;
  }
  if (got->bytes.size() != sizeof packet) return true;
  std::memcpy(&packet, got->bytes.data(), sizeof packet);
  if (std::ranges::none_of(workers_, [&](const sockaddr_in& w) { return same(w, got->from); })) {
    workers_.push_back(got->from);
  }
  // What a link loses and doubles, the switch has never, or twice.
  if (chance(options_.loss)) return true;
  take_part(port, packet);
  if (chance(options_.twice)) take_part(port, packet);
  return true;
}

void UdpSwitch::take_part(size_t port, SwitchPacket packet) {
  if (state_ == State::kAdds) {
    const SwitchVerdict verdict = adder_.take(packet);
    if (verdict == kSwitchAdded || verdict == kSwitchLate) return;
    if (verdict == kSwitchComplete || verdict == kSwitchRepeated) ++sums_;
  }
  send(port, std::as_bytes(std::span(&packet, 1)), box_[port]);
}

void UdpSwitch::send(size_t port, std::span<const std::byte> bytes, const sockaddr_in& to) {
  if (chance(options_.loss)) return;
  for (int copies = chance(options_.twice) ? 2 : 1; copies > 0; --copies) {
    if (chance(options_.late)) {
      held_.push_back(
          {port, {bytes.begin(), bytes.end()}, to, static_cast<uint32_t>(1 + random_() % 30)});
    } else {
      sockets_[port].send(bytes, to);
    }
  }
}

void UdpSwitch::send_late() {
  std::erase_if(held_, [this](Held& held) {
    if (--held.turns > 0) return false;
    sockets_[held.port].send(held.bytes, held.to);
    return true;
  });
}

}  // namespace phub::testing
