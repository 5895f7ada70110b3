// One queue pair over libfabric: an endpoint of its own at either end, with a completion queue, and
// the ring of writes that are waiting. A completion does not name the writer; the endpoint
// does, since it belongs to one incarnation and queue. Closing it is the fence.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "transport/ofi/format.h"
#include "transport/ofi/resources.h"
#include "transport/transport.h"

namespace phub {

// Made and connected by the thread that sets up (the control thread of a box), then used by the
// thread that polls it. close() is any thread's, connect() may come at the same time.
class OfiPair {
 public:
  // `target`: where the peer writes. `chunks`: of the queue. Throws Error(kFull).
  OfiPair(std::shared_ptr<const OfiDomain> domain, std::span<const std::byte> source,
          std::span<std::byte> target, uint32_t chunks);
  ~OfiPair() { close(); }

  // The peer must know this to write.
  OfiTarget here() const { return here_; }
  // Throws Error: kInvalid, no endpoint has that name; kUnauthorized, it is closed.
  void connect(const OfiTarget& there);
  // Nothing that the peer writes arrives any more. A closed pair does not open again.
  void close() noexcept;

  // Only the owner calls the rest, while the pair is connected and not closed.
  bool push(const Write& write);  // false: no room
  void publish() { published_ = tail_; }
  // Hands over the published writes, as far as the provider takes them.
  void send();
  // Takes arrivals from the completion queue, as many as fit, and the completions of writes. False:
  // the pair is broken.
  bool receive(std::span<uint32_t> imms, size_t& count);

  bool waiting() const { return head_ != published_; }  // for the provider to take more
  bool outstanding() const { return free_.size() < contexts_.size(); }
  uint64_t held_bytes() const { return held_bytes_; }  // bytes of writes that are not completed
  uint64_t sent() const { return head_count_; }
  uint64_t posted_batches() const { return batches_; }
  int wake_fd() const { return wake_fd_; }  // -1: the provider cannot wake anybody
  // Whether the owner may sleep on wake_fd(): there is nothing to receive.
  bool may_sleep() const;

 private:
  void open_queue(uint32_t chunks);
  void open_endpoint();
  void check_name(const OfiTarget& there) const;  // throws Error(kInvalid)
  void cut_off_peer() noexcept;

  const std::shared_ptr<const OfiDomain> domain_;
  const std::span<const std::byte> source_;
  OfiTarget here_, there_;
  fi_addr_t peer_ = FI_ADDR_UNSPEC;

  std::mutex closing_;  // against connect()
  OfiOwned<fid_av> addresses_;
  OfiOwned<fid_cq> completions_;
  OfiOwned<fid_ep> endpoint_;
  OfiRegion target_region_, source_region_;
  int wake_fd_ = -1;

  std::vector<Write> ring_;                       // a power of two
  uint32_t head_ = 0, published_ = 0, tail_ = 0;  // count writes, wrap at 2^32
  std::vector<fi_context2> contexts_;             // contexts for the writes that the provider has
  std::vector<fi_context2*> free_;
  std::vector<uint32_t> context_bytes_;  // by context: the bytes of its write
  uint64_t held_bytes_ = 0;
  fi_context2 cut_ = {};  // the context of the write that cuts off the peer
  uint64_t head_count_ = 0, batches_ = 0;
  bool broken_ = false;
};

}  // namespace phub
