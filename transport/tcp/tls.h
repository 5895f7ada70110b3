// TLS under the frames of a data connection. Records are decrypted to where the payload goes and
// encrypted from where it is, without a copy but OpenSSL's own, within its buffer of one record.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "transport/tls/socket.h"

namespace phub {

// Used by one thread at a time: after the handshake by the owner of the connection's queue pair.
class TcpTls {
 public:
  static constexpr size_t kRecordBytes = 16u << 10;
  // AES-GCM must not see more than 2^24.5 records of one key.
  static constexpr uint32_t kRecordsPerKey = 1u << 22;

  // REQUIRES: its handshake is done.
  explicit TcpTls(Ssl connection, uint32_t records_per_key = kRecordsPerKey);
  ~TcpTls();  // tells the peer of the end; before the socket is closed
  TcpTls(const TcpTls&) = delete;
  TcpTls& operator=(const TcpTls&) = delete;

  struct Received {
    size_t bytes = 0;
    // The bytes of work: records that hold little or nothing take time, too.
    size_t work = 0;
    // The socket holds nothing more now. All that OpenSSL holds has been taken.
    bool drained = false;
    bool ended = false;  // by the peer or an error; bytes is 0
  };
  Received receive(std::span<const iovec> parts);
  // Whether receive() may find something that the socket does not show: OpenSSL reads ahead.
  bool holds_more() const;
  // Whether the latest receive() could not go on because the socket takes no more.
  bool waits_for_room() const { return waits_for_room_; }

  struct Sent {
    size_t bytes = 0;  // fewer than all: the socket takes no more now
    uint32_t records = 0;
    bool ended = false;
  };
  // Parts that were not sent must be the beginning of the next call's parts.
  Sent send(std::span<const iovec> parts);

 private:
  std::span<const std::byte> next_record(std::span<const iovec> parts, size_t part, size_t done);

  const Ssl connection_;
  TlsSocket& socket_;
  const uint32_t records_per_key_;
  uint32_t records_ = 0;   // sent with the present key
  bool retrying_ = false;  // a record is encrypted and not sent
  uint64_t received_ = 0;
  uint64_t new_keys_ = 0;  // those that the peer took: messages other than data
  bool waits_for_room_ = false;
  bool broken_ = false;
  std::array<std::byte, kRecordBytes> gathered_;  // parts that are shorter than a record
};

// Sends all of a short message, first. Returns 0 or an errno.
int send_greeting(TcpTls& tls, std::span<const std::byte> message);

}  // namespace phub
