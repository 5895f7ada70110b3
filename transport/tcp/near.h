// A worker and a box of one host have this instead of a TCP connection: a Unix socket for the
// frames, and memory that both map for their payloads. README.md ("Near") describes it.
//
// The box copies, both ways, as a NIC would: from the worker's gradients into its own slots when a
// frame is taken, and from its results into the worker's memory before it sends a frame. So the
// slots are the box's, and everything else is as over TCP.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "transport/fd.h"
#include "transport/sealed_memory.h"

namespace phub {

// The memory that one side of a near connection copies from and to. At the box it is the peer's
// memory. At the worker both are empty, and it has the memory that it shows: only payloads that lie
// elsewhere (InPlace) are copied there before their frame is sent, and from there when their frame
// is taken.
struct TcpPeerMemory {
  std::span<const std::byte> source;  // the peer sends from here
  std::span<std::byte> target;        // frames to the peer land here
  std::span<std::byte> shown;         // this side sends from here, and the peer reads it
};

// A worker's memory, mapped by the box.
class TcpNearMemory {
 public:
  static constexpr size_t kDescriptors = 2;  // those of gradients and results

  // Throws Error: these are not files of that many bytes whose size is sealed, or there is no room.
  TcpNearMemory(std::span<const Fd> descriptors, uint64_t gradients_bytes, uint64_t results_bytes);
  const TcpPeerMemory& memory() const { return memory_; }

 private:
  SealedMemory gradients_, results_;
  TcpPeerMemory memory_;
};

// A name that nobody guesses. It is of Linux's abstract namespace, which belongs to a network
// namespace: only there somebody listens at it.
std::string new_near_name();
// A listening, non-blocking stream socket. Throws Error.
Fd listen_near(const std::string& name);
// Returns a connected, non-blocking socket, or none if nobody listens: the name is of another host.
Fd connect_near(const std::string& name);
bool is_near(int socket);  // it is such a socket, not TCP's

}  // namespace phub
