#include "transport/tcp/tls.h"

#include <openssl/err.h>
#include <openssl/ssl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace phub {
namespace {

constexpr size_t kLeastWork = 512;       // of a record, however short
constexpr size_t kMostWork = 256 << 10;  // in one call
// Of the peer. Nobody honest takes new keys more often than this: each costs a derivation of keys.
constexpr uint64_t kFreeKeys = 64;
constexpr uint64_t kBytesPerKey = 4 << 10;
// In one call of OpenSSL, which reads on where a record holds no data: its buffer.
constexpr size_t kAllowance = 17 << 10;

}  // namespace

TcpTls::TcpTls(Ssl connection, uint32_t records_per_key)
    : connection_(std::move(connection)),
      socket_(socket_of(connection_.get())),
      records_per_key_(records_per_key) {
  SSL_set_msg_callback(connection_.get(),
                       [](int written, int, int type, const void*, size_t, SSL*, void* self) {
                         if (written == 0 && type == SSL3_RT_HANDSHAKE)
                           ++static_cast<TcpTls*>(self)->new_keys_;
                       });
  SSL_set_msg_callback_arg(connection_.get(), this);
}

TcpTls::~TcpTls() {
  if (broken_) return;
  ERR_clear_error();
  socket_.more = false;
  SSL_shutdown(connection_.get());
}

bool TcpTls::holds_more() const { return SSL_has_pending(connection_.get()) == 1; }

TcpTls::Received TcpTls::receive(std::span<const iovec> parts) {
  Received received;
  size_t read = 0;  // of the socket
  waits_for_room_ = false;
  if (broken_) return {.ended = true};
  for (const iovec& part : parts) {
    for (size_t done = 0; done < part.iov_len;) {
      if (received.work >= kMostWork) return received;
      ERR_clear_error();
      socket_.allowance = kAllowance;
      size_t got = 0;
      const int result =
          SSL_read_ex(connection_.get(), static_cast<std::byte*>(part.iov_base) + done,
                      part.iov_len - done, &got);
      received.work += std::max(got, kLeastWork);
      read += kAllowance - socket_.allowance;
      done += got;
      received.bytes += got;
      received_ += got;
      // New keys without end would keep this thread from others.
      if (read >= 2 * received.bytes + kAllowance ||
          new_keys_ > kFreeKeys + received_ / kBytesPerKey) {
        broken_ = true;
        received.ended = received.bytes == 0;
        return received;
      }
      if (result == 1) continue;
      switch (SSL_get_error(connection_.get(), result)) {
        case SSL_ERROR_WANT_READ:
          if (!socket_.drained) continue;  // it was a record without data
          received.drained = true;
          return received;
        case SSL_ERROR_WANT_WRITE:  // new keys, as the peer asked for: goes on when there is room
          received.drained = waits_for_room_ = true;
          return received;
        default:  // also an end without close_notify: somebody may have cut the rest off
          broken_ = true;
          received.ended = received.bytes == 0;
          return received;
      }
    }
  }
  return received;
}

// The record that begins `done` bytes into a part: a long part goes in whole records, from where it
// is; short ones, and the rest of a long one, are gathered. The same again for the same parts.
std::span<const std::byte> TcpTls::next_record(std::span<const iovec> parts, size_t part,
                                               size_t done) {
  size_t bytes = 0;
  for (; part < parts.size(); ++part, done = 0) {
    const auto* begin = static_cast<const std::byte*>(parts[part].iov_base) + done;
    const size_t left = parts[part].iov_len - done;
    if (bytes == 0 && left >= kRecordBytes) return {begin, kRecordBytes};
    const size_t rest = left % kRecordBytes;
    const size_t taken = std::min(rest, kRecordBytes - bytes);
    std::memcpy(gathered_.data() + bytes, begin, taken);
    bytes += taken;
    if (taken < left) break;
  }
  return std::span(gathered_).first(bytes);
}

TcpTls::Sent TcpTls::send(std::span<const iovec> parts) {
  Sent sent;
  if (broken_) return {.ended = true};
  size_t all = 0, part = 0, done = 0;
  for (const iovec& each : parts) all += each.iov_len;
  while (sent.bytes < all) {
    if (!retrying_ && records_ >= records_per_key_) {
      SSL_key_update(connection_.get(), SSL_KEY_UPDATE_NOT_REQUESTED);
      records_ = 0;
    }
    const std::span<const std::byte> record = next_record(parts, part, done);
    socket_.more = sent.bytes + record.size() < all;
    ERR_clear_error();
    size_t written = 0;
    const int result = SSL_write_ex(connection_.get(), record.data(), record.size(), &written);
    ++sent.records;
    retrying_ = result != 1;
    if (result != 1) {
      if (SSL_get_error(connection_.get(), result) == SSL_ERROR_WANT_WRITE) return sent;
      broken_ = sent.ended = true;
      return sent;
    }
    ++records_;
    sent.bytes += written;
    for (done += written; part < parts.size() && done >= parts[part].iov_len; ++part) {
      done -= parts[part].iov_len;
    }
  }
  return sent;
}

int send_greeting(TcpTls& tls, std::span<const std::byte> message) {
  const iovec part = {const_cast<std::byte*>(message.data()), message.size()};
  const TcpTls::Sent sent = tls.send(std::span(&part, 1));
  if (sent.ended) return EPIPE;
  return sent.bytes == message.size() ? 0 : EAGAIN;
}

}  // namespace phub
