#include "worker/link/switch_link.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/fixed_point.h"
#include "transport/error.h"
#include "transport/switch/generation.h"
#include "transport/switch/sender.h"
#include "transport/switch/socket.h"
#include "transport/switch/stream.h"
#include "transport/wire.h"
#include "transport/wrapped_link.h"

namespace phub {
namespace {

constexpr uint32_t kPackets = 4 * SwitchSocket::kBatch;  // taken in one poll
constexpr uint64_t kNever = ~uint64_t{0};

struct SwitchedChunk {
  uint64_t gradient_offset = 0;
  uint32_t elements = 0;
  uint32_t queue = 0, index = 0;
  uint64_t round = 0;  // of the latest post, or before the first
  Write write = {};    // that, if it is
  enum State : uint8_t {
    kIdle,     // posted directly, or its result is here
    kWaits,    // for its turn
    kThrough,  // the switch
    kDirect    // its generation has ended: it is to be posted
  } state = kIdle;
};

// What one core of the box takes.
class Stream final : public SwitchOwner {
 public:
  Stream(const Layout& layout, const SwitchStream& stream, const JoinReply& reply,
         const SwitchPatience& patience, Datagrams& datagrams, std::span<const std::byte> gradients)
      : box_(switch_address(stream.address)),
        first_slot_(stream.first_slot),
        slots_(stream.slots),
        first_generation_(reply.through_switch.generation),
        first_round_(reply.first_round),
        datagrams_(datagrams),
        gradients_(gradients) {
    for (const uint32_t id : switch_chunks(layout, stream.queues)) {
      const ChunkLayout& chunk = layout.chunks[id];
      chunks_.push_back({.gradient_offset = chunk.gradient_offset,
                         .elements = chunk.elements,
                         .queue = chunk.queue,
                         .index = chunk.index,
                         .round = reply.first_round - 1});
    }
    sender_.emplace(
        SwitchSenderOptions{.worker = static_cast<uint8_t>(reply.rank),
                            .workers = switch_workers(reply.through_switch.workers),
                            .generation = reply.through_switch.generation,
                            .first_slot = static_cast<uint16_t>(stream.first_slot),
                            .slots = static_cast<uint16_t>(stream.slots),
                            .max_chunks = static_cast<uint32_t>(chunks_.size()) + stream.slots + 1,
                            .retry_ns = patience.retry_ns,
                            .give_up_ns = patience.silence_ns,
                            .probe_ns = patience.probe_ns},
        *this);
    if (reply.through_switch.later) leave();
  }

  std::vector<SwitchedChunk>& chunks() { return chunks_; }
  SwitchSender& sender() { return *sender_; }
  // Nothing goes through the switch until another generation begins. False: so it was.
  bool leave() {
    sender_->end();
    return !std::exchange(has_left_, true);
  }
  bool has_left() const { return has_left_; }
  // For good: the program's order would hold up another generation as well.
  void stay_away() { stays_away_ = true; }
  bool stays_away() const { return stays_away_; }
  // Whether this round goes through the switch.
  bool takes(uint64_t round) const { return !has_left_ && round >= first_round_; }

  // Another generation. REQUIRES: has_left(), and no chunk waits or is on its way.
  void begin(const SwitchBeginning& beginning) {
    sender_->begin(switch_generation(first_generation_, first_slot_, beginning.index));
    index_ = beginning.index;
    first_round_ = beginning.round;
    next_ = waiting_ = 0;
    has_left_ = false;
  }
  uint32_t index() const { return index_; }  // of the generation
  // That a generation can begin with: nothing of it is posted.
  bool is_before(uint64_t round) const {
    return std::ranges::all_of(chunks_, [round](const auto& each) { return each.round < round; });
  }
  bool has(uint32_t slot) const { return slot >= first_slot_ && slot - first_slot_ < slots_; }
  // Since when chunks wait for one that this worker has not posted; kNever: none does.
  uint64_t misses_one_since_ns() const {
    return waiting_ > 0 && chunks_[next_].state == SwitchedChunk::kIdle ? moved_ns_ : kNever;
  }

  void take(SwitchedChunk& chunk, const Write& write, uint64_t now) {
    ++chunk.round;
    chunk.write = write;
    chunk.state = SwitchedChunk::kWaits;
    if (waiting_++ == 0) moved_ns_ = now;
    advance(now);
  }
  void answered(SwitchedChunk& chunk, uint64_t now) {
    if (chunk.state == SwitchedChunk::kWaits) --waiting_;
    chunk.state = SwitchedChunk::kIdle;
    moved_ns_ = now;
  }

  // Sends what may go now.
  void advance(uint64_t now) {
    while (chunks_[next_].state == SwitchedChunk::kWaits && !sender_->full() && !sender_->ended()) {
      SwitchedChunk& chunk = chunks_[next_];
      chunk.state = SwitchedChunk::kThrough;
      --waiting_;
      moved_ns_ = now;
      const bool null = decode(chunk.write.imm).kind == ImmKind::kNull;
      const int exponent =
          null ? kSwitchNothing
               : kernels::exponent_of(gradients_.data() + chunk.gradient_offset, chunk.elements);
      const uint32_t number = next_;
      next_ = next_ + 1 < chunks_.size() ? next_ + 1 : 0;
      sender_->push({.handle = chunk.round << 32 | number,
                     .round = static_cast<uint32_t>(chunk.round),
                     .chunk = number,
                     .elements = chunk.elements,
                     .exponent = static_cast<int16_t>(exponent)},
                    now);
    }
  }

  // Of a chunk whose result is here nobody takes the numbers any more, and its gradient may be
  // another one.
  void fill(uint64_t handle, uint32_t first, int exponent, std::span<int32_t> codes) override {
    const SwitchedChunk& chunk = chunks_[static_cast<uint32_t>(handle)];
    const bool there = chunk.state == SwitchedChunk::kThrough &&
                       static_cast<uint32_t>(chunk.round) == handle >> 32;
    const bool null = decode(chunk.write.imm).kind == ImmKind::kNull;
    if (!there || null) return void(std::ranges::fill(codes, 0));
    kernels::align(gradients_.data() + chunk.gradient_offset, chunk.elements, exponent, first,
                   codes);
  }
  void send(const SwitchPacket& packet) override {
    datagrams_.send(std::as_bytes(std::span(&packet, 1)), box_);
  }

 private:
  const sockaddr_in box_;
  const uint32_t first_slot_, slots_;
  const uint64_t first_generation_;
  uint64_t first_round_;  // of this one
  uint32_t index_ = 0;
  bool has_left_ = false;  // it
  bool stays_away_ = false;
  Datagrams& datagrams_;
  const std::span<const std::byte> gradients_;
  std::vector<SwitchedChunk> chunks_;
  std::optional<SwitchSender> sender_;
  uint32_t next_ = 0;
  uint32_t waiting_ = 0;
  uint64_t moved_ns_ = 0;  // when a chunk was taken, or began to wait, last
};

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
      streams_.push_back(std::make_unique<Stream>(layout, stream, reply, patience,
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
    Stream* stream = nullptr;
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
    Stream* const stream = stream_of_queue_[arrival.queue];
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
  void end(Stream& stream) {
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
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<std::vector<Place>> at_;    // by queue and index
  std::vector<Stream*> stream_of_queue_;  // null: none
  std::vector<SwitchedChunk*> direct_;    // after an end: to be posted
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
