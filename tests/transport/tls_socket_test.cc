// The socket under a connection of OpenSSL: what one call may read is bounded, and ends are told
// apart.
#include <gtest/gtest.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <array>

#include "tests/phub/tls_certificates.h"
#include "transport/fd.h"
#include "transport/tls/files.h"
#include "transport/tls/socket.h"

namespace phub::testing {
namespace tls_socket_test {

class TlsSocketTest : public ::testing::Test {
 protected:
  TlsSocketTest() {
    std::array<int, 2> ends;
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends.data()), 0);
    client_end_ = Fd(ends[0]);
    server_end_ = Fd(ends[1]);
    const Certificate own = Authority("the authority").issue();
    load_certificate(context_.get(), {"cert", files_.write("cert.pem", own.pem)},
                     {"key", files_.write("key.pem", own.key)});
    server_.reset(SSL_new(context_.get()));
    client_.reset(SSL_new(client_context_.get()));
    EXPECT_TRUE(attach_socket(server_.get(), server_end_.get()));
    EXPECT_TRUE(attach_socket(client_.get(), client_end_.get()));
    SSL_set_accept_state(server_.get());
    SSL_set_connect_state(client_.get());
    for (int i = 0; i < 10; ++i) {
      SSL_do_handshake(client_.get());
      SSL_do_handshake(server_.get());
    }
    EXPECT_TRUE(SSL_is_init_finished(server_.get()) && SSL_is_init_finished(client_.get()));
  }
  // What the server's next read returns; negative: the error.
  int read() {
    ERR_clear_error();
    std::array<char, 64> data;
    const int got = SSL_read(server_.get(), data.data(), data.size());
    return got > 0 ? got : -SSL_get_error(server_.get(), got);
  }

  const Files files_;
  const TlsContext context_ = make_tls_context(true), client_context_ = make_tls_context(false);
  Fd client_end_, server_end_;
  Ssl server_, client_;
};

TEST_F(TlsSocketTest, OneCallReadsNoMoreThanItMay) {
  SSL_set_mode(server_.get(), SSL_MODE_AUTO_RETRY);  // the worst case: it reads until there is data
  for (int i = 0; i < 100; ++i) {
    ASSERT_EQ(SSL_key_update(client_.get(), SSL_KEY_UPDATE_NOT_REQUESTED), 1);
    ASSERT_EQ(SSL_do_handshake(client_.get()), 1);
  }
  ASSERT_EQ(SSL_write(client_.get(), "x", 1), 1);
  TlsSocket& socket = socket_of(server_.get());
  int calls = 1, got = 0;
  for (socket.allowance = 200; (got = read()) < 0 && calls < 1000; ++calls) {
    ASSERT_EQ(got, -SSL_ERROR_WANT_READ);
    ASSERT_EQ(socket.allowance, 0u);
    ASSERT_FALSE(socket.drained) << "there is more";
    socket.allowance = 200;
  }
  EXPECT_EQ(got, 1);
  EXPECT_GE(calls, 10) << "each takes more than 20 bytes";
  EXPECT_EQ(read(), -SSL_ERROR_WANT_READ);
  EXPECT_TRUE(socket.drained);
}

// Of a server, which has others to serve.
TEST_F(TlsSocketTest, ARecordWithoutDataEndsARead) {
  ASSERT_EQ(SSL_key_update(client_.get(), SSL_KEY_UPDATE_NOT_REQUESTED), 1);
  ASSERT_EQ(SSL_do_handshake(client_.get()), 1);
  ASSERT_EQ(SSL_write(client_.get(), "x", 1), 1);
  socket_of(server_.get()).allowance = 1000;
  EXPECT_EQ(read(), -SSL_ERROR_WANT_READ);
  EXPECT_EQ(read(), 1);
}

TEST_F(TlsSocketTest, AnEndWithoutANoticeIsAnErrorWhereItIsAskedFor) {
  SSL_clear_options(server_.get(), SSL_OP_IGNORE_UNEXPECTED_EOF);
  shutdown(client_end_.get(), SHUT_WR);
  EXPECT_EQ(read(), -SSL_ERROR_SSL);
}

TEST_F(TlsSocketTest, AnEndWithANoticeIsOne) {
  SSL_clear_options(server_.get(), SSL_OP_IGNORE_UNEXPECTED_EOF);
  SSL_shutdown(client_.get());
  shutdown(client_end_.get(), SHUT_WR);
  EXPECT_EQ(read(), -SSL_ERROR_ZERO_RETURN);
}

TEST_F(TlsSocketTest, WritingToAPeerThatIsGoneRaisesNoSignal) {
  client_end_.reset();
  EXPECT_LE(SSL_write(server_.get(), "x", 1), 0);
}

}  // namespace tls_socket_test
}  // namespace phub::testing
