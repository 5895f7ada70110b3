// A connection after its handshake: moves bytes between client and session. Used by the io_context
// of both descriptors, which has one thread. Kept alive by its pending operations.
#pragma once

#include <array>
#include <atomic>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <memory>
#include <string>
#include <string_view>

#include "transport/tls/socket.h"

namespace phub {

inline constexpr size_t kTlsRecordBytes = 16u << 10;

class TlsTunnel : public std::enable_shared_from_this<TlsTunnel> {
 public:
  using Descriptor = boost::asio::posix::stream_descriptor;
  using Scratch = std::array<char, kTlsRecordBytes>;  // shared by all of a thread

  TlsTunnel(Ssl ssl, Descriptor client, Descriptor session,
            std::shared_ptr<std::atomic<bool>> broken, Scratch& scratch);
  void start();

 private:
  using Step = void (TlsTunnel::*)();

  void wait(Descriptor& descriptor, Descriptor::wait_type what, Step next);
  void again(Step next);

  // These move bytes to the session.
  void read_client();
  void write_session();
  bool give_session(std::string_view bytes);
  void end_of_client();

  // These move bytes to the client.
  void read_session();
  void write_client();
  bool give_client(std::string_view bytes);
  void end_of_session();

  void session_is_gone();
  void break_off();
  void close();

  const Ssl ssl_;
  Descriptor client_, session_;
  const std::shared_ptr<std::atomic<bool>> broken_;
  Scratch& scratch_;
  boost::asio::steady_timer last_words_;
  std::string to_session_, to_client_;  // bytes that could not be written at once
  bool client_is_told_ = false;         // the client was told of the end
  bool session_gone_ = false;
};

}  // namespace phub
