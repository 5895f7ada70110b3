#include "tests/sim/rack_switch.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "tests/sim/virtual_clock.h"
#include "transport/error.h"

namespace phub::sim {
namespace {

constexpr size_t kMostWaiting = 300;  // packets that a socket holds
constexpr const char* kBox = "10.0.0.1:7718";
constexpr const char* kEverybody = "10.0.0.255:7718";

}  // namespace

// The box's end: one for each of its streams.
class SimSwitch::Box final : public Datagrams {
 public:
  Box(SimSwitch& net, const sockaddr_in& own) : net_(net), own_(own) {
    inbox_->is_box = true;
    net_.inboxes_[address_of(own)] = inbox_;
  }
  void send(std::span<const std::byte> bytes, const sockaddr_in& to) override {
    net_.send_from_box(bytes, own_, to);
  }
  void flush() override {}
  std::optional<Datagram> receive() override { return take(*inbox_, taken_); }
  int fd() const override { return -1; }

  static std::optional<Datagram> take(Inbox& inbox, Packet& taken) {
    if (inbox.packets.empty()) return std::nullopt;
    taken = std::move(inbox.packets.front());
    inbox.packets.pop_front();
    return Datagram{taken.bytes, taken.from};
  }

 private:
  SimSwitch& net_;
  const sockaddr_in own_;
  const std::shared_ptr<Inbox> inbox_ = std::make_shared<Inbox>();
  Packet taken_;
};

class SimSwitch::Port final : public SwitchPort, public Datagrams {
 public:
  Port(SimSwitch& net, const sockaddr_in& own, std::shared_ptr<Inbox> inbox)
      : net_(net), own_(own), inbox_(std::move(inbox)) {}
  Datagrams& datagrams() override { return *this; }
  uint64_t now_ns() const override { return net_.net_.now_ns(); }
  bool arm(uint64_t due_ns) override {
    if (!inbox_->packets.empty() && !inbox_->closed) return false;
    const uint64_t now = now_ns();
    const bool set = inbox_->timer_ns > now && inbox_->timer_ns <= due_ns;
    if (due_ns == ~uint64_t{0} || set) return true;
    inbox_->timer_ns = std::max(due_ns, now);
    net_.net_.after(inbox_->timer_ns - now, [] {});
    return true;
  }
  int wake_fd() const override { return -1; }
  void listen(bool listens) override { inbox_->closed = !listens; }
  void give_up() override { listen(false); }

  void send(std::span<const std::byte> bytes, const sockaddr_in& to) override {
    if (now_ns() >= inbox_->mute_until_ns) net_.send_from_worker(bytes, own_, to);
  }
  void flush() override {}
  std::optional<Datagram> receive() override { return Box::take(*inbox_, taken_); }
  int fd() const override { return -1; }

 private:
  SimSwitch& net_;
  const sockaddr_in own_;
  const std::shared_ptr<Inbox> inbox_;
  Packet taken_;
};

SimSwitch::SimSwitch(SimNet& net, const SwitchPlan& plan)
    : net_(net), plan_(plan), adder_(plan.slots) {}

SimSwitch::Address SimSwitch::address_of(const sockaddr_in& address) {
  return {address.sin_addr.s_addr, address.sin_port};
}

SwitchOptions SimSwitch::of_box() {
  return {.address = kBox,
          .slots = plan_.told,
          .answers_go_to = kEverybody,
          .rounds_between = plan_.rounds_between,
          .open = [this](const sockaddr_in& own) { return std::make_unique<Box>(*this, own); }};
}

std::unique_ptr<SwitchPort> SimSwitch::open_port(const std::shared_ptr<Inbox>& inbox) {
  if (net_.random().chance(plan_.no_port)) fail(ErrorCode::kUnavailable, "the port is in use");
  ++workers_;
  const sockaddr_in own = switch_address(
      fmt::format("10.1.{}.{}:{}", workers_ / 250, 1 + workers_ % 250, uint32_t{kSwitchPort}));
  inboxes_[address_of(own)] = inbox;
  return std::make_unique<Port>(*this, own, inbox);
}

bool SimSwitch::wakes_box() const {
  return std::ranges::any_of(inboxes_, [](const auto& entry) {
    const auto inbox = entry.second.lock();
    return inbox && inbox->is_box && !inbox->packets.empty();
  });
}

void SimSwitch::harm(const SwitchFault& fault) {
  const uint64_t until = net_.now_ns() + fault.ms * kMs;
  if (fault.kind == SwitchFault::kForgets) adder_.forget();
  if (fault.kind == SwitchFault::kPasses) passes_until_ns_ = until;
  if (fault.kind == SwitchFault::kSilent) silent_until_ns_ = until;
}

template <typename Action>
void SimSwitch::over_link(const Action& action) {
  SimRandom& random = net_.random();
  if (random.chance(plan_.loss)) return;
  for (int copies = random.chance(plan_.twice) ? 2 : 1; copies > 0; --copies) {
    const uint64_t more = random.chance(plan_.late) ? random.below(20 * kMs) : 0;
    net_.after(net_.some_delay() + more, action);
  }
}

void SimSwitch::send_from_box(std::span<const std::byte> bytes, const sockaddr_in& from,
                              const sockaddr_in& to) {
  const Packet packet{{bytes.begin(), bytes.end()}, from};
  over_link([this, packet, to] {
    if (net_.now_ns() < silent_until_ns_) return;
    const bool to_all = to.sin_addr.s_addr == switch_address(kEverybody).sin_addr.s_addr;
    if (!to_all) return pass_on(packet, to);
    for (const auto& [address, inbox] : inboxes_) {
      const auto open = inbox.lock();
      if (!open || open->is_box) continue;
      sockaddr_in worker = to;
      worker.sin_addr.s_addr = address.first;
      worker.sin_port = address.second;
      pass_on(packet, worker);
    }
  });
}

void SimSwitch::send_from_worker(std::span<const std::byte> bytes, const sockaddr_in& from,
                                 const sockaddr_in& to) {
  over_link([this, packet = Packet{{bytes.begin(), bytes.end()}, from}, to] {
    if (net_.now_ns() >= silent_until_ns_) take_part(packet, to);
  });
}

void SimSwitch::take_part(Packet packet, const sockaddr_in& to) {
  if (net_.now_ns() >= passes_until_ns_) {
    SwitchPacket part;
    PHUB_CHECK(packet.bytes.size() == sizeof part);
    std::memcpy(&part, packet.bytes.data(), sizeof part);
    const SwitchVerdict verdict = adder_.take(part);
    net_.trace("part", part.header.worker, part.header.slot, verdict);
    if (verdict == kSwitchComplete) generations_.insert(part.header.generation);
    if (verdict == kSwitchAdded || verdict == kSwitchLate) return;
    std::memcpy(packet.bytes.data(), &part, sizeof part);
  }
  pass_on(packet, to);
}

void SimSwitch::pass_on(const Packet& packet, const sockaddr_in& to) {
  over_link([this, packet, to] {
    const auto at = inboxes_.find(address_of(to));
    const auto inbox = at == inboxes_.end() ? nullptr : at->second.lock();
    if (!inbox || net_.now_ns() < inbox->deaf_until_ns) return;
    if (inbox->packets.size() < kMostWaiting) inbox->packets.push_back(packet);
  });
}

}  // namespace phub::sim
