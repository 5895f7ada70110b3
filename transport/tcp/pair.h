// One queue pair: one connection receives and sends straight between the socket and the memory of
// gradients and results. Plain state machines, each owned by an endpoint's thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "transport/in_place.h"
#include "transport/slot_window.h"
#include "transport/tcp/format.h"
#include "transport/tcp/near.h"
#include "transport/tcp/tls.h"
#include "transport/transport.h"

namespace phub {

// Frames go through these.
struct TcpStream {
  int socket = -1;
  TcpTls* tls = nullptr;                // over the socket; null: plain
  const TcpPeerMemory* peer = nullptr;  // payloads go through it; null: through the socket
  bool is_local = false;                // both ends are on this host
};

// Counts the calls of an endpoint's thread to the kernel, and their chunks.
struct TcpCounters {
  uint64_t receives = 0;
  uint64_t sends = 0;
  uint64_t waits = 0;  // epoll_wait()
  uint64_t empty = 0;  // receives and waits that found nothing
  uint64_t posted = 0;
  uint64_t chunks_received = 0;
  uint64_t chunks_sent = 0;
};

// Where frames land at a box with a window (slot_window.h).
struct TcpLanding {
  SlotWindow* window = nullptr;  // null: in the target
  QueuePair pair;

  bool fits(const TcpFrame& frame) const {
    return frame.bytes == 0 ||
           window->fits(pair.queue, decode(frame.imm).chunk, frame.remote_offset, frame.bytes);
  }
  // Null: there is no place now.
  std::byte* take(const TcpFrame& frame) const {
    return window->take(pair.rank, pair.queue, decode(frame.imm).chunk, frame.remote_offset);
  }
  // The frame's place, where a part of it was, is somebody else's: its chunk was summed, which had
  // an earlier copy of it.
  bool has_lost(const TcpFrame& frame) const {
    return window != nullptr && !window->has_place(pair.rank, pair.queue, decode(frame.imm).chunk);
  }
  void drop(const TcpFrame& frame) const {
    window->drop(pair.rank, pair.queue, decode(frame.imm).chunk);
  }
  bool has_room(const TcpFrame& frame) const {
    return window == nullptr || frame.bytes == 0 ||
           window->has_room(pair.rank, pair.queue, decode(frame.imm).chunk);
  }
};

// Reads batches of frames into `target`. A call asks for the payloads of a batch and the header
// behind them, so that many chunks that have arrived cost one. Payloads in memory of the peer's are
// copied when their frame is taken.
class TcpReceiver {
 public:
  enum class Result {
    kMore,     // as much as was asked for: there may be more
    kDrained,  // nothing more is there now
    kEnded,    // by the peer, or an error of the connection
  };

  // `moved` may be null, as `peer`: the stream's; both outlive this.
  void start(std::span<std::byte> target, const MovedRanges* moved, const TcpPeerMemory* peer,
             const TcpLanding& landing);
  // Makes one system call; over TLS, one for each record that is asked for. Adds the received bytes
  // to `bytes`, and over TLS more for records that hold little. REQUIRES: neither landed() nor
  // violated() nor waits_for_place().
  Result receive(const TcpStream& stream, uint64_t& bytes);

  bool landed() const {
    return taken_ < filled_ && (peer_ == nullptr || landing_.has_room(batch_[taken_]));
  }
  // The next payload has no place, at a box with a window.
  bool waits_for_place() const;
  void make_place() const { landing_.window->grow(landing_.pair.rank, 1); }
  TcpFrame take();  // the next frame that landed
  // The peer announced a batch that is too large, or a write that does not lie within the target.
  bool violated() const { return violated_; }

 private:
  struct Parts;
  std::byte* place_of(const TcpFrame& frame) const;
  uint32_t table_size() const;
  bool waits_for_table() const { return frames_ > 0 && table_bytes_ < table_size(); }
  void add_table(Parts& parts);
  void add_parts(Parts& parts);
  Result receive_tls(TcpTls& tls, const Parts& parts, uint64_t& bytes);
  void came(size_t bytes);
  void open_batch();
  void open_frames(uint32_t end);
  void find_sources();
  void fill(size_t& bytes);

  std::span<std::byte> target_;
  const MovedRanges* moved_ = nullptr;
  const TcpPeerMemory* peer_ = nullptr;
  TcpLanding landing_;
  bool violated_ = false;
  // These are about the batch that is being read; all zero between two.
  uint32_t frames_ = 0;  // 0: its header is awaited
  uint32_t known_ = 0;   // frames read and checked
  uint32_t filled_ = 0;  // frames whose payload is here
  uint32_t taken_ = 0;
  uint32_t payload_bytes_ = 0;  // here, of the frame that is being filled
  bool spoiled_ = false;        // a part of these is lost
  uint32_t table_bytes_ = 0;    // here, of the frames behind the first, and of the sources
  uint32_t header_bytes_ = 0;   // here, of the next header
  TcpBatch header_;
  std::array<TcpFrame, kTcpMaxBatch> batch_ = {};
  std::array<uint64_t, kTcpMaxBatch> sources_ = {};  // by frame: its source in memory of the peer's
};

// A ring of posted writes, sent from `source` as far as the socket takes them.
class TcpSender {
 public:
  enum class Result {
    kSent,   // all that was published
    kFull,   // the socket takes no more now
    kEnded,  // an error of the connection
  };

  // `ring` has a power of two of entries and lives as long as the queue pair, as `moved`, which
  // may be null.
  void start(std::span<Write> ring, std::span<const std::byte> source, const MovedRanges* moved);
  bool push(const Write& write);  // false: no room
  void publish() { published_ = tail_; }
  bool pending() const { return head_ != published_; }
  uint64_t held_bytes() const { return held_bytes_; }  // bytes of the writes that are not sent
  Result send(const TcpStream& stream, TcpCounters& counters);

 private:
  const Write& at(uint32_t position) const { return ring_[position & (ring_.size() - 1)]; }
  void copy_batch(const TcpPeerMemory& peer) const;

  std::span<Write> ring_;
  std::span<const std::byte> source_;
  const MovedRanges* moved_ = nullptr;
  uint32_t head_ = 0, published_ = 0, tail_ = 0;  // count writes, wrap at 2^32
  uint64_t held_bytes_ = 0;
  uint32_t batch_ = 0;     // writes in the batch that is being sent
  size_t batch_sent_ = 0;  // bytes of it
};

}  // namespace phub
