// Frames' bytes over TLS between two ends of a socket: however they are cut, over new keys, and how
// much a call may do.
#include <gtest/gtest.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "tests/seeds.h"
#include "tests/transport/tcp_tls_rig.h"
#include "transport/fd.h"
#include "transport/tcp/endpoint.h"
#include "transport/tcp/format.h"
#include "transport/tcp/tls.h"
#include "transport/tls/client.h"

namespace phub {
namespace tls_records_test {

class TlsRecords : public ::testing::Test {
 protected:
  void start(uint32_t records_per_key = TcpTls::kRecordsPerKey) {
    std::array<int, 2> ends;
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends.data()), 0);
    sender_end_ = Fd(ends[0]);
    receiver_end_ = Fd(ends[1]);
    Ssl server = context_.new_connection();
    Ssl client(SSL_new(client_context_.get()));
    client_ssl_ = client.get();
    ASSERT_TRUE(attach_socket(server.get(), receiver_end_.get()));
    ASSERT_TRUE(attach_socket(client.get(), sender_end_.get()));
    SSL_set_accept_state(server.get());
    SSL_set_connect_state(client.get());
    for (int i = 0; i < 10; ++i) {
      SSL_do_handshake(client.get());
      SSL_do_handshake(server.get());
    }
    ASSERT_TRUE(SSL_is_init_finished(server.get()) && SSL_is_init_finished(client.get()));
    sender_ = std::make_unique<TcpTls>(std::move(client), records_per_key);
    receiver_ = std::make_unique<TcpTls>(std::move(server));
  }
  static TlsContext client_context() {
    TlsContext context = make_tls_context(false);
    prepare_for_data(context.get());
    return context;
  }
  // Cuts into parts of random sizes, mostly short or of whole records.
  std::vector<iovec> cut(std::vector<std::byte>& bytes) {
    std::vector<iovec> parts;
    for (size_t at = 0; at < bytes.size();) {
      const std::array<size_t, 6> sizes = {0,
                                           1 + random_() % 40,
                                           24,
                                           TcpTls::kRecordBytes,
                                           1 + random_() % 70'000,
                                           2 * TcpTls::kRecordBytes};
      const size_t size = std::min(sizes[random_() % sizes.size()], bytes.size() - at);
      parts.push_back({bytes.data() + at, size});
      at += size;
    }
    return parts;
  }
  // What is left of the parts after so many bytes.
  static std::vector<iovec> after(std::vector<iovec> parts, size_t bytes) {
    std::vector<iovec> left;
    for (iovec part : parts) {
      const size_t gone = std::min(bytes, part.iov_len);
      bytes -= gone;
      if (gone == part.iov_len) continue;
      left.push_back({static_cast<std::byte*>(part.iov_base) + gone, part.iov_len - gone});
    }
    return left;
  }

  // What `body` writes as the client, in one piece: as small ones it would not fit into the buffer.
  void send_together(const std::function<void()>& body) {
    BIO* socket = SSL_get_rbio(client_ssl_);
    BIO* memory = BIO_new(BIO_s_mem());
    BIO_up_ref(memory);
    SSL_set0_wbio(client_ssl_, memory);
    body();
    char* data = nullptr;
    const long bytes = BIO_get_mem_data(memory, &data);
    ASSERT_EQ(::send(sender_end_.get(), data, static_cast<size_t>(bytes), 0), bytes);
    BIO_up_ref(socket);
    SSL_set0_wbio(client_ssl_, socket);
    BIO_free(memory);
  }
  // Of the receiver.
  void open_endpoint() {
    endpoint_ = std::make_unique<TcpEndpoint>(1, 1);
    endpoint_->watch(receiver_end_.get(), {0});
    endpoint_->list({0});
    endpoint_->open({0}, {.stream = {receiver_end_.get(), receiver_.get()},
                          .ring = ring_,
                          .source = target_,
                          .target = target_});
  }

  TcpTlsFiles files_;
  TlsServerContext context_{files_.server_, TlsServerContext::Use::kData};
  TlsContext client_context_ = client_context();
  Fd sender_end_, receiver_end_;
  SSL* client_ssl_ = nullptr;
  std::unique_ptr<TcpTls> sender_, receiver_;
  std::vector<Write> ring_ = std::vector<Write>(16);
  std::vector<std::byte> target_ = std::vector<std::byte>(100);
  std::unique_ptr<TcpEndpoint> endpoint_;
  std::mt19937_64 random_{testing::fresh_seeds(1).first};
};

TEST_F(TlsRecords, BytesArriveHoweverTheyAreCut) {
  for (const uint32_t records_per_key : {TcpTls::kRecordsPerKey, 3u}) {
    start(records_per_key);
    std::vector<std::byte> sent(3'000'000), received(sent.size());
    for (std::byte& byte : sent) byte = static_cast<std::byte>(random_());
    const std::vector<iovec> from = cut(sent), to = cut(received);
    size_t out = 0, in = 0;
    for (int i = 0; i < 1'000'000 && in < sent.size(); ++i) {
      if (out < sent.size()) {
        const TcpTls::Sent result = sender_->send(after(from, out));
        ASSERT_FALSE(result.ended);
        out += result.bytes;
      }
      const TcpTls::Received result = receiver_->receive(after(to, in));
      ASSERT_FALSE(result.ended);
      ASSERT_GE(result.work, result.bytes);
      in += result.bytes;
    }
    ASSERT_EQ(in, sent.size());
    EXPECT_EQ(sent, received);
  }
}

// A peer that sends them costs no more of a call than one that sends much.
TEST_F(TlsRecords, RecordsThatHoldLittleCount) {
  start();
  std::byte byte{7};
  send_together([&] {
    for (int i = 0; i < 1000; ++i) {
      ASSERT_EQ(SSL_write(client_ssl_, &byte, 1), 1);
    }
  });
  std::vector<std::byte> room(1000);
  const iovec part = {room.data(), room.size()};
  const TcpTls::Received first = receiver_->receive(std::span(&part, 1));
  EXPECT_LT(first.bytes, 600u);
  EXPECT_GT(first.work, 500u * 500);
  EXPECT_FALSE(first.drained) << "there is more";
  size_t in = first.bytes;
  for (int i = 0; i < 100 && in < 1000; ++i) {
    const iovec left = {room.data() + in, room.size() - in};
    in += receiver_->receive(std::span(&left, 1)).bytes;
  }
  EXPECT_EQ(in, 1000u);
}

// OpenSSL says that it waits for more at the end of what it has read ahead, though the socket has
// more, of which nothing would tell again. Where its buffer ends is its own affair: one of these
// lengths has the record without data there.
TEST_F(TlsRecords, ARecordWithoutDataIsNotTheLast) {
  start();
  std::vector<std::byte> sent(17'000), room(sent.size());
  const iovec part = {room.data(), room.size()};
  const auto write = [&](size_t bytes) {
    ASSERT_EQ(SSL_write(client_ssl_, sent.data(), static_cast<int>(bytes)),
              static_cast<int>(bytes));
  };
  for (size_t bytes = 15'800; bytes <= 16'384; ++bytes) {
    send_together([&] {
      write(400);
      write(bytes);
      ASSERT_EQ(SSL_key_update(client_ssl_, SSL_KEY_UPDATE_NOT_REQUESTED), 1);
      ASSERT_EQ(SSL_do_handshake(client_ssl_), 1);
      write(1);
    });
    const TcpTls::Received received = receiver_->receive(std::span(&part, 1));
    ASSERT_EQ(received.bytes, 400 + bytes + 1);
    EXPECT_TRUE(received.drained);
  }
}

// Else it would keep a core for as long as it likes.
TEST_F(TlsRecords, NewKeysWithoutEndEndTheConnection) {
  start();
  send_together([&] {
    for (int i = 0; i < 2000; ++i) {
      ASSERT_EQ(SSL_key_update(client_ssl_, SSL_KEY_UPDATE_NOT_REQUESTED), 1);
      ASSERT_EQ(SSL_do_handshake(client_ssl_), 1);
    }
  });
  open_endpoint();
  std::array<Arrival, 1> arrived;
  ASSERT_EQ(endpoint_->poll(arrived), 1u);
  EXPECT_FALSE(arrived[0].ok);
}

TEST_F(TlsRecords, NewKeysAgainAndAgainEndTheConnection) {
  start();
  open_endpoint();
  std::array<Arrival, 1> arrived;
  bool ended = false;
  for (int burst = 0; burst < 10 && !ended; ++burst) {
    send_together([&] {
      for (int i = 0; i < 20; ++i) {
        ASSERT_EQ(SSL_key_update(client_ssl_, SSL_KEY_UPDATE_NOT_REQUESTED), 1);
        ASSERT_EQ(SSL_do_handshake(client_ssl_), 1);
      }
    });
    ended = endpoint_->poll(arrived) == 1;
  }
  EXPECT_TRUE(ended && !arrived[0].ok);
}

// A result may come right behind the welcome: then the socket has nothing more when the queue pair
// opens.
TEST_F(TlsRecords, WhatCameWithTheWelcomeIsRead) {
  start();
  TcpWelcome welcome;
  TcpBatch batch = {.first = {.imm = 9, .bytes = 4, .remote_offset = 8}};
  std::array<char, 4> payload = {'d', 'a', 't', 'a'};
  const std::array<iovec, 3> all = {iovec{&welcome, sizeof welcome}, iovec{&batch, sizeof batch},
                                    iovec{payload.data(), payload.size()}};
  ASSERT_FALSE(sender_->send(all).ended);
  const iovec first = {&welcome, sizeof welcome};
  ASSERT_EQ(receiver_->receive(std::span(&first, 1)).bytes, sizeof welcome);

  open_endpoint();
  std::array<Arrival, 2> arrived;
  ASSERT_EQ(endpoint_->poll(arrived), 1u);
  EXPECT_TRUE(arrived[0].ok && arrived[0].imm == 9);
  EXPECT_EQ(target_[8], std::byte{'d'});
}

TEST_F(TlsRecords, TheEndComesAfterWhatWasSent) {
  for (const bool notice : {true, false}) {
    start();
    std::vector<std::byte> room(100);
    iovec part = {room.data(), 50};
    ASSERT_EQ(sender_->send(std::span(&part, 1)).bytes, 50u);
    if (notice) sender_.reset();
    sender_end_.reset();
    part.iov_len = 100;
    const TcpTls::Received data = receiver_->receive(std::span(&part, 1));
    EXPECT_EQ(data.bytes, 50u);
    EXPECT_FALSE(data.ended);
    EXPECT_TRUE(receiver_->receive(std::span(&part, 1)).ended);
    EXPECT_TRUE(receiver_->receive(std::span(&part, 1)).ended);
  }
}

}  // namespace tls_records_test
}  // namespace phub
