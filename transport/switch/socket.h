// UDP over IPv4 as the switch needs it: without checksums, which its program does not make anew.
#pragma once

#include <netinet/in.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "transport/fd.h"

namespace phub {

// Throws Error(kInvalid): it is not an IPv4 address with a port, as 10.0.0.1:7718.
sockaddr_in switch_address(const std::string& text);

struct Datagram {
  std::span<const std::byte> bytes;  // if it is longer than a SwitchPacket, more bytes than that
  sockaddr_in from{};
};

// Datagrams from one address, as the box and its workers send and take them: at most a SwitchPacket
// each, in batches. A datagram that does not go out is lost; its sender repeats it. One thread.
class Datagrams {
 public:
  virtual ~Datagrams() = default;
  // Copies the bytes. They go out with flush(), or before it. REQUIRES: at most a SwitchPacket.
  virtual void send(std::span<const std::byte> bytes, const sockaddr_in& to) = 0;
  virtual void flush() = 0;
  // Returns a datagram that came, valid until the next call; nullopt if none came.
  virtual std::optional<Datagram> receive() = 0;
  // Readable when something has come; -1: the creator of this wakes its thread.
  virtual int fd() const = 0;
};
// Opens datagrams that come to this address; port 0: to any free one. Throws Error(kUnavailable).
using OpenDatagrams = std::function<std::unique_ptr<Datagrams>(const sockaddr_in& own)>;

// A system call sends or takes up to kBatch datagrams. Nothing allocates after construction.
class SwitchSocket final : public Datagrams {
 public:
  static constexpr uint32_t kBatch = 64;
  static uint64_t bytes();  // memory that one holds

  // Takes datagrams that come to this port on every address of the host; 0: to any free one. Throws
  // Error(kUnavailable), with the port and the system's reason.
  explicit SwitchSocket(uint16_t port);
  // Takes datagrams that come to this address.
  explicit SwitchSocket(const sockaddr_in& own);
  ~SwitchSocket() override;
  SwitchSocket(SwitchSocket&&) noexcept;

  void send(std::span<const std::byte> bytes, const sockaddr_in& to) override;
  void flush() override;
  std::optional<Datagram> receive() override;
  // Does the same, and waits for a datagram so long.
  std::optional<Datagram> receive(int timeout_ms);
  // receive() has something that fd() does not tell of.
  bool holds_some() const;

  // From now on takes only datagrams that come over the interface by which this address is reached:
  // answers are broadcast, which a socket with an address of its own does not hear. If the kernel
  // (before 5.7) allows that only to root, all goes on as before.
  void take_from_side_of(const sockaddr_in& peer);

  int fd() const override { return fd_.get(); }
  uint16_t port() const;
  void close();  // nothing is sent or comes any more

 private:
  struct Batch;

  Fd fd_;
  std::unique_ptr<Batch> in_, out_;
};

// The broadcast address of the interface that has this address, with the port. Throws
// Error(kNotFound): no interface here has it, or it has none.
sockaddr_in broadcast_of(const sockaddr_in& own, uint16_t port);

}  // namespace phub
