#include "worker/link/switch_link.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "transport/error.h"
#include "transport/switch/generation.h"
#include "transport/switch/sender.h"
#include "transport/switch/socket.h"
#include "transport/switch/stream.h"
#include "transport/wire.h"
#include "transport/wrapped_link.h"
#include "worker/link/switched_stream.h"

namespace phub {
namespace {

constexpr uint32_t kPackets = 4 * SwitchSocket::kBatch;  // taken in one poll
constexpr uint64_t kNever = SwitchedStream::kNever;

// The session's thread, but for describe().
class SwitchEndpoint final : public Endpoint {
 public:
  SwitchEndpoint(WorkerLink& link, std::unique_ptr<SwitchPort> port, const JoinReply& reply,
                 const SwitchPatience& patience)
      : endpoint_(link.endpoint()), patience_(patience), port_(std::move(port)) {
    const Layout layout = layout_of(reply);
    at_.resize(layout.queue_chunks.size());
    for (size_t q = 0; q < at_.size(); ++q) at_[q].resize(layout.queue_chunks[q].size());
    size_t chunks = 0;
    stream_of_queue_.resize(at_.size());
    for (const SwitchStream& stream : reply.through_switch.streams) {
      streams_.push_back(std::make_unique<SwitchedStream>(layout, stream, reply, patience,
                                                          port_->datagrams(), link.gradients()));
      for (SwitchedChunk& chunk : streams_.back()->chunks()) {
        at_[chunk.queue][chunk.index] = {streams_.back().get(), &chunk};
        ++chunks;
      }
      for (const uint32_t queue : stream.queues) stream_of_queue_[queue] = streams_.back().get();
    }
    direct_.reserve(chunks);
    note_change();
  }

  size_t poll(std::span<Arrival> out) override {
    const size_t polled = endpoint_.poll(out);
    const uint64_t now = port_->now_ns();
    size_t taken = 0;  // but for what is of the switch alone
    for (const Arrival& arrival : out.first(polled)) {
      if (take_beginning(arrival)) continue;
      take_result(arrival, now);
      out[taken++] = arrival;
    }
    if (in_use()) {
      receive_answers(now);
      advance(now);
      port_->datagrams().flush();
    }
    post_direct();
    return taken;
  }

  bool post(QueuePair to, const Write& write) override {
    const Imm imm = decode(write.imm);
    const Place place = place_of(to.queue, imm.chunk);
    const bool gradient = imm.kind == ImmKind::kData || imm.kind == ImmKind::kNull;
    if (place.chunk == nullptr || !gradient) return endpoint_.post(to, write);
    SwitchedChunk& chunk = *place.chunk;
    const auto ahead = static_cast<int8_t>(low8(imm.round - low8(chunk.round)));
    const uint64_t round = chunk.round + static_cast<uint64_t>(int64_t{ahead});
    if (place.stream->takes(round)) {
      if (ahead == 1 && chunk.state == SwitchedChunk::kIdle) {
        through_.fetch_add(1, std::memory_order_relaxed);
        place.stream->take(chunk, write, port_->now_ns());
        return true;
      }
      end(*place.stream);
    }
    if (!endpoint_.post(to, write)) return false;
    chunk.round = round;
    if (chunk.state == SwitchedChunk::kDirect) chunk.state = SwitchedChunk::kIdle;
    return true;
  }

  void flush() override {
    port_->datagrams().flush();
    endpoint_.flush();
  }

  bool arm(std::span<const uint32_t> wake_after) override {
    const uint64_t due = due_ns();
    if (!port_->arm(due)) return false;
    if (!endpoint_.arm(direct_.empty() ? wake_after : std::span<const uint32_t>())) return false;
    return due > port_->now_ns();
  }
  void disarm() override { endpoint_.disarm(); }
  int wake_fd() const override { return port_->wake_fd(); }
  bool crosses_nic(QueuePair to) const override { return endpoint_.crosses_nic(to); }
  uint64_t refused_for_ns() const override { return endpoint_.refused_for_ns(); }
  EndpointCounters counters() const override { return endpoint_.counters(); }

  // The connections are made anew, and the session posts everything again.
  void give_up() {
    for (const auto& stream : streams_) end(*stream);
    for (SwitchedChunk* const chunk : direct_) chunk->state = SwitchedChunk::kIdle;
    direct_.clear();
  }
  void give_up_port() { port_->give_up(); }
  // Any thread.
  uint64_t through() const { return through_.load(std::memory_order_relaxed); }
  bool in_use() const { return in_use_.load(std::memory_order_relaxed); }

 private:
  struct Place {
    SwitchedStream* stream = nullptr;
    SwitchedChunk* chunk = nullptr;
  };

  Place place_of(uint32_t queue, uint32_t index) const {
    if (queue >= at_.size() || index >= at_[queue].size()) return {};
    return at_[queue][index];
  }

  // False: it is something else.
  bool take_beginning(const Arrival& arrival) {
    const Imm imm = decode(arrival.imm);
    if (!arrival.ok || !is_switch_beginning(imm) || arrival.queue >= at_.size()) return false;
    SwitchedStream* const stream = stream_of_queue_[arrival.queue];
    if (stream == nullptr) return true;
    const SwitchBeginning beginning = switch_beginning(imm, stream->chunks().front().round);
    // It comes on every queue. One that comes too late is none: what this rank has sent ends it.
    if (beginning.index <= stream->index() || !stream->is_before(beginning.round)) return true;
    if (stream->stays_away()) return true;  // so it does, too
    end(*stream);
    stream->begin(beginning);
    note_change();
    return true;
  }

  void take_result(const Arrival& arrival, uint64_t now) {
    const Imm imm = decode(arrival.imm);
    if (!arrival.ok || (imm.kind != ImmKind::kData && imm.kind != ImmKind::kNull)) return;
    const Place place = place_of(arrival.queue, imm.chunk);
    if (place.chunk == nullptr || place.chunk->state == SwitchedChunk::kIdle) return;
    if (imm.round == low8(place.chunk->round)) place.stream->answered(*place.chunk, now);
  }

  void receive_answers(uint64_t now) {
    SwitchHeader header;
    for (uint32_t taken = 0; taken < kPackets; ++taken) {
      const std::optional<Datagram> got = port_->datagrams().receive();
      if (!got) return;
      if (got->bytes.size() != sizeof header) continue;
      std::memcpy(&header, got->bytes.data(), sizeof header);
      for (const auto& stream : streams_) {
        if (header.kind == kSwitchEnded || stream->has(header.slot)) {
          stream->sender().receive(header, now);
        }
      }
    }
  }

  void advance(uint64_t now) {
    for (const auto& stream : streams_) {
      if (stream->has_left()) continue;
      SwitchSender& sender = stream->sender();
      if (sender.due_ns() <= now) sender.poll(now);
      stream->advance(now);
      const uint64_t since = stream->misses_one_since_ns();
      const bool out_of_order = since != kNever && now > since + patience_.order_ns;
      if (sender.ended() || out_of_order) end(*stream);
      if (out_of_order) stream->stay_away();
    }
  }

  uint64_t due_ns() const {
    uint64_t due = kNever;
    for (const auto& stream : streams_) {
      if (stream->has_left()) continue;
      const uint64_t since = stream->misses_one_since_ns();
      due = std::min(due, stream->sender().due_ns());
      if (since != kNever) due = std::min(due, since + patience_.order_ns + 1);
    }
    return due;
  }

  // What has no result goes directly.
  void end(SwitchedStream& stream) {
    if (!stream.leave()) return;
    for (SwitchedChunk& chunk : stream.chunks()) {
      const bool open =
          chunk.state == SwitchedChunk::kWaits || chunk.state == SwitchedChunk::kThrough;
      if (!open) continue;
      chunk.state = SwitchedChunk::kDirect;
      direct_.push_back(&chunk);
    }
    note_change();
  }

  void note_change() {
    const bool use =
        std::ranges::any_of(streams_, [](const auto& each) { return !each->has_left(); });
    in_use_.store(use, std::memory_order_relaxed);
    port_->listen(use);
  }

  void post_direct() {
    if (direct_.empty()) return;
    std::erase_if(direct_, [this](SwitchedChunk* chunk) {
      if (chunk->state != SwitchedChunk::kDirect) return true;  // its result has come meanwhile
      if (!endpoint_.post({chunk->queue}, chunk->write)) return false;
      chunk->state = SwitchedChunk::kIdle;
      return true;
    });
    endpoint_.flush();
  }

  Endpoint& endpoint_;
  const SwitchPatience patience_;
  const std::unique_ptr<SwitchPort> port_;
  std::vector<std::unique_ptr<SwitchedStream>> streams_;
  std::vector<std::vector<Place>> at_;            // by queue and index
  std::vector<SwitchedStream*> stream_of_queue_;  // null: none
  std::vector<SwitchedChunk*> direct_;            // after an end: to be posted
  std::atomic<uint64_t> through_{0};
  std::atomic<bool> in_use_{true};
};

class SwitchWorkerLink final : public WrappedLink {
 public:
  SwitchWorkerLink(std::unique_ptr<WorkerLink> link, std::unique_ptr<SwitchPort> port,
                   const JoinReply& reply, const SwitchPatience& patience)
      : WrappedLink(std::move(link)),
        box_(reply.through_switch.streams.front().address),
        endpoint_(*link_, std::move(port), reply, patience) {}

  Endpoint& endpoint() override { return endpoint_; }
  std::string describe() const override {
    return fmt::format("{}; {} chunks through a switch to {}{}", link_->describe(),
                       endpoint_.through(), box_,
                       endpoint_.in_use() ? "" : ", which is not used now");
  }
  void reconnect(const Offer& offer) override {
    endpoint_.give_up();
    link_->reconnect(offer);
  }
  void give_up_ports() override {
    endpoint_.give_up();
    endpoint_.give_up_port();
    link_->give_up_ports();
  }

 private:
  const std::string box_;
  SwitchEndpoint endpoint_;
};

void check_offer(const JoinReply& reply) {
  const SwitchOffer& offer = reply.through_switch;
  const Layout layout = layout_of(reply);
  std::vector<bool> seen(layout.queue_chunks.size());
  bool fits = offer.workers <= kSwitchWorkers && reply.rank < offer.workers &&
              offer.port <= 65535 && reply.spec.consistency == "bsp";
  for (const SwitchStream& stream : offer.streams) {
    fits = fits && stream.slots >= 1 && stream.slots <= kMostSwitchSlots &&
           stream.first_slot <= kMostSwitchSlots - stream.slots;
    for (const uint32_t queue : stream.queues) {
      fits = fits && queue < seen.size() && !seen[queue];
      if (fits) seen[queue] = true;
    }
    fits = fits && !switch_chunks(layout, stream.queues).empty();
  }
  if (fits) return;
  fail(ErrorCode::kInternal,
       "the server's answer contradicts itself: its switch does not fit rank {} of a job with {} "
       "queues",
       reply.rank, seen.size());
}

}  // namespace

std::unique_ptr<WorkerLink> through_switch(std::unique_ptr<WorkerLink> link, const JoinReply& reply,
                                           const SwitchPatience& patience,
                                           const OpenSwitchPort& open) {
  if (reply.through_switch.streams.empty()) return link;
  check_offer(reply);
  if (link->zero_copy()) return link;  // it sends directly, and so will all
  std::unique_ptr<SwitchPort> port;
  try {
    port = open(switch_address(reply.through_switch.streams.front().address),
                static_cast<uint16_t>(reply.through_switch.port), link->endpoint().wake_fd());
  } catch (const Error& error) {
    fmt::print(stderr,
               "phub: job '{}': rank {} sends directly, and so will all: {} (each rank behind a "
               "switch has a host of its own)\n",
               reply.spec.name, reply.rank, error.what());
    return link;
  }
  return std::make_unique<SwitchWorkerLink>(std::move(link), std::move(port), reply, patience);
}

}  // namespace phub
