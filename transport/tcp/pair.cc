#include "transport/tcp/pair.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/error.h"

namespace phub {
namespace {

// Read in one call: few enough that what all peers sent is still in the cache when it is summed.
constexpr size_t kReadBytes = 256 << 10;

const std::byte* place_of(const Write& write, const std::byte* source, const MovedRanges* moved) {
  if (moved == nullptr) return source + write.local_offset;
  return moved->find(source, write.local_offset, write.bytes);
}

}  // namespace

struct TcpReceiver::Parts {
  std::array<iovec, kTcpMaxBatch + 2> of;
  size_t count = 0;
  size_t bytes = 0;

  void add(void* data, size_t size) {
    of[count++] = {data, size};
    bytes += size;
  }
};

void TcpReceiver::start(std::span<std::byte> target, const MovedRanges* moved,
                        const TcpPeerMemory* peer, const TcpLanding& landing) {
  *this = {};
  target_ = target;
  moved_ = moved;
  peer_ = peer;
  landing_ = landing;
}

// Null: there is none now.
std::byte* TcpReceiver::place_of(const TcpFrame& frame) const {
  if (landing_.window != nullptr) return landing_.take(frame);
  if (moved_ == nullptr) return target_.data() + frame.remote_offset;
  return moved_->find(target_.data(), frame.remote_offset, frame.bytes);
}

bool TcpReceiver::waits_for_place() const {
  if (landing_.window == nullptr) return false;
  if (peer_ != nullptr) return taken_ < filled_ && !landing_.has_room(batch_[taken_]);
  return known_ == frames_ && filled_ < frames_ && !landing_.has_room(batch_[filled_]);
}

uint32_t TcpReceiver::table_size() const {
  const uint32_t frames = (frames_ - 1) * sizeof(TcpFrame);
  return peer_ == nullptr ? frames : frames + frames_ * sizeof(uint64_t);
}

void TcpReceiver::add_table(Parts& parts) {
  const uint32_t frames = (frames_ - 1) * sizeof(TcpFrame);
  if (table_bytes_ < frames) {
    parts.add(reinterpret_cast<std::byte*>(&batch_[1]) + table_bytes_, frames - table_bytes_);
  }
  if (peer_ == nullptr) return;
  const uint32_t done = std::max(table_bytes_, frames) - frames;
  parts.add(reinterpret_cast<std::byte*>(sources_.data()) + done,
            frames_ * sizeof(uint64_t) - done);
}

// What comes next in the stream, as far as its place is known.
void TcpReceiver::add_parts(Parts& parts) {
  if (waits_for_table()) {
    add_table(parts);
    if (peer_ == nullptr) return;  // the payloads' places are in it
  }
  uint32_t done = payload_bytes_;
  spoiled_ = spoiled_ || (done > 0 && landing_.has_lost(batch_[filled_]));
  for (uint32_t i = filled_; i < frames_ && peer_ == nullptr; ++i, done = 0) {
    if (parts.bytes >= kReadBytes) return;
    const uint32_t left = batch_[i].bytes - done;
    if (left == 0) continue;
    std::byte* const place = place_of(batch_[i]);
    if (place == nullptr) return;
    parts.add(place + done, left);
  }
  parts.add(reinterpret_cast<std::byte*>(&header_) + header_bytes_,
            sizeof(header_) - header_bytes_);
}

TcpReceiver::Result TcpReceiver::receive(const TcpStream& stream, uint64_t& bytes) {
  PHUB_CHECK(!landed() && !violated_);
  Parts parts;
  add_parts(parts);
  if (stream.tls != nullptr) return receive_tls(*stream.tls, parts, bytes);
  msghdr message = {};
  message.msg_iov = parts.of.data();
  message.msg_iovlen = parts.count;
  ssize_t received = -1;
  do {
    received = recvmsg(stream.socket, &message, MSG_DONTWAIT);
  } while (received < 0 && errno == EINTR);
  if (received < 0) return errno == EAGAIN ? Result::kDrained : Result::kEnded;
  if (received == 0) return Result::kEnded;
  const auto size = static_cast<size_t>(received);
  bytes += size;
  came(size);
  return size == parts.bytes ? Result::kMore : Result::kDrained;
}

TcpReceiver::Result TcpReceiver::receive_tls(TcpTls& tls, const Parts& parts, uint64_t& bytes) {
  const TcpTls::Received received = tls.receive(std::span(parts.of).first(parts.count));
  if (received.ended) return Result::kEnded;
  if (received.bytes > 0) came(received.bytes);
  if (received.bytes > 0 || !received.drained) bytes += received.work;
  return received.drained ? Result::kDrained : Result::kMore;
}

// So many bytes have come into the parts, in their order.
void TcpReceiver::came(size_t bytes) {
  if (waits_for_table()) {
    const size_t more = std::min<size_t>(bytes, table_size() - table_bytes_);
    table_bytes_ += static_cast<uint32_t>(more);
    bytes -= more;
    if (!waits_for_table()) open_frames(frames_);
    if (!waits_for_table() && peer_ != nullptr) find_sources();
  }
  fill(bytes);
  header_bytes_ += static_cast<uint32_t>(bytes);
  open_batch();
}

// Counts bytes to the frames whose payload is awaited; frames without payload land at once.
void TcpReceiver::fill(size_t& bytes) {
  while (filled_ < known_ && known_ == frames_ && peer_ == nullptr) {
    const auto more =
        static_cast<uint32_t>(std::min<size_t>(bytes, batch_[filled_].bytes - payload_bytes_));
    payload_bytes_ += more;
    bytes -= more;
    if (payload_bytes_ < batch_[filled_].bytes) return;
    if (std::exchange(spoiled_, false)) landing_.drop(batch_[filled_]);
    ++filled_;
    payload_bytes_ = 0;
  }
}

// A complete header begins a batch, once the batch before has been taken.
void TcpReceiver::open_batch() {
  if (frames_ > 0 || header_bytes_ < sizeof(header_)) return;
  header_bytes_ = table_bytes_ = 0;
  if (header_.more >= kTcpMaxBatch || header_.reserved != 0) {
    violated_ = true;
    return;
  }
  frames_ = header_.more + 1;
  batch_[0] = header_.first;
  open_frames(1);
  size_t none = 0;
  fill(none);
}

void TcpReceiver::open_frames(uint32_t end) {
  for (; known_ < end; ++known_) {
    violated_ = landing_.window != nullptr ? !landing_.fits(batch_[known_])
                                           : !lies_within(batch_[known_], target_.size());
    if (violated_) return;
  }
}

// All frames of a batch whose payloads are in memory of the peer's have landed with its table.
void TcpReceiver::find_sources() {
  const uint64_t all = peer_->source.size();
  for (uint32_t i = 0; i < frames_ && all > 0; ++i) {
    const uint64_t bytes = batch_[i].bytes;
    violated_ = violated_ || (bytes > 0 && (bytes > all || sources_[i] > all - bytes));
  }
  if (!violated_) filled_ = frames_;
}

TcpFrame TcpReceiver::take() {
  PHUB_CHECK(landed());
  const TcpFrame frame = batch_[taken_];
  if (peer_ != nullptr && frame.bytes > 0) {
    const std::byte* const from = peer_->source.empty() ? target_.data() + frame.remote_offset
                                                        : peer_->source.data() + sources_[taken_];
    std::byte* const to = place_of(frame);
    if (to != from) std::memcpy(to, from, frame.bytes);
  }
  ++taken_;
  if (taken_ == frames_) {
    frames_ = known_ = filled_ = taken_ = 0;
    open_batch();  // the header behind it may have come with it
  }
  return frame;
}

void TcpSender::start(std::span<Write> ring, std::span<const std::byte> source,
                      const MovedRanges* moved) {
  PHUB_CHECK(std::has_single_bit(ring.size()));
  *this = {};
  ring_ = ring;
  source_ = source;
  moved_ = moved;
}

bool TcpSender::push(const Write& write) {
  PHUB_CHECK(write.bytes <= source_.size() && write.local_offset <= source_.size() - write.bytes);
  if (tail_ - head_ == ring_.size()) return false;
  ring_[tail_++ & (ring_.size() - 1)] = write;
  held_bytes_ += write.bytes;
  return true;
}

// The payloads of a batch, to where the peer finds them.
void TcpSender::copy_batch(const TcpPeerMemory& peer) const {
  for (uint32_t i = 0; i < batch_; ++i) {
    const Write& write = at(head_ + i);
    if (write.bytes == 0) continue;
    const bool shows = peer.target.empty();
    const std::span<std::byte> memory = shows ? peer.shown : peer.target;
    const uint64_t offset = shows ? write.local_offset : write.remote_offset;
    PHUB_CHECK(write.bytes <= memory.size() && offset <= memory.size() - write.bytes);
    const std::byte* const from = place_of(write, source_.data(), moved_);
    std::byte* const to = memory.data() + offset;
    if (to != from) std::memcpy(to, from, write.bytes);
  }
}

TcpSender::Result TcpSender::send(const TcpStream& stream, TcpCounters& counters) {
  TcpBatch header;
  std::array<TcpFrame, kTcpMaxBatch> table;
  std::array<uint64_t, kTcpMaxBatch> sources;
  std::array<iovec, kTcpMaxBatch + 2> parts;
  while (pending()) {
    // The header at the beginning of a batch says how many writes it has: it grows no more.
    if (batch_ == 0) {
      batch_ = std::min<uint32_t>(published_ - head_, kTcpMaxBatch);
      if (stream.peer != nullptr) copy_batch(*stream.peer);
    }
    size_t count = 0, asked = 0, skip = batch_sent_;
    const auto add = [&](const void* data, size_t bytes) {
      const size_t skipped = std::min(skip, bytes);
      skip -= skipped;
      if (skipped == bytes) return;
      const auto* begin = static_cast<const std::byte*>(data) + skipped;
      parts[count++] = {const_cast<std::byte*>(begin), bytes - skipped};
      asked += bytes - skipped;
    };
    for (uint32_t i = 0; i < batch_; ++i) {
      const Write& write = at(head_ + i);
      table[i] = {write.imm, write.bytes, write.remote_offset};
      sources[i] = write.local_offset;
    }
    header = {.more = batch_ - 1, .first = table[0]};
    add(&header, sizeof(header));
    add(&table[1], header.more * sizeof(TcpFrame));
    if (stream.peer != nullptr) add(sources.data(), batch_ * sizeof(uint64_t));
    for (uint32_t i = 0; i < batch_ && stream.peer == nullptr; ++i) {
      const Write& write = at(head_ + i);
      add(place_of(write, source_.data(), moved_), write.bytes);
    }
    ssize_t sent = 0;
    if (stream.tls != nullptr) {
      const TcpTls::Sent records = stream.tls->send(std::span(parts).first(count));
      counters.sends += records.records;
      if (records.ended) return Result::kEnded;
      sent = static_cast<ssize_t>(records.bytes);
    } else {
      msghdr message = {};
      message.msg_iov = parts.data();
      message.msg_iovlen = count;
      ++counters.sends;
      sent = sendmsg(stream.socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0) {
        if (errno == EINTR) continue;
        return errno == EAGAIN ? Result::kFull : Result::kEnded;
      }
    }
    batch_sent_ += static_cast<size_t>(sent);
    // The kernel has noted that room is wanted: an event will say when there is some.
    if (static_cast<size_t>(sent) < asked) return Result::kFull;
    for (uint32_t i = 0; i < batch_; ++i) held_bytes_ -= at(head_ + i).bytes;
    head_ += batch_;
    counters.chunks_sent += batch_;
    batch_ = 0;
    batch_sent_ = 0;
  }
  return Result::kSent;
}

}  // namespace phub
