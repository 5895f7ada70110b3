// A connection of the control port. Control thread only. It is kept alive by its pending operations
// and, while it waits for the handler's answer, by itself.
#pragma once

#include <atomic>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>

#include "phub/control/metrics.h"
#include "phub/control/port.h"
#include "phub/control/request_head.h"
#include "phub/control/router.h"
#include "phub/notes.h"

namespace phub {

class HttpSession;
struct HttpShared;

// The part of HttpShared::long_body_bytes that one body takes, until it is decoded. Control thread
// only.
struct HttpBodyCharge {
  explicit HttpBodyCharge(std::shared_ptr<HttpShared> of) : shared(std::move(of)) {}
  ~HttpBodyCharge();
  HttpBodyCharge(const HttpBodyCharge&) = delete;
  HttpBodyCharge& operator=(const HttpBodyCharge&) = delete;

  const std::shared_ptr<HttpShared> shared;
  uint64_t bytes = 0;  // received so far
};

// Shared by all connections of a server. Lives until the last of them ends, after the server.
struct HttpShared {
  HttpOptions options;
  HostNames host_names;
  ControlHandler* handler = nullptr;  // null once stopped
  std::unordered_set<HttpSession*> sessions;
  uint64_t long_body_bytes = 0;  // received and not decoded yet
  uint64_t unread_bytes = 0;     // bytes of long answers that are being sent
  HttpCounters counters;
  std::function<void()> large_message_is_over = [] {};
  // Lines of the audit. Refused requests take no room from those that are done.
  std::optional<Notes> done, refused;
};

// The peer of a connection.
struct HttpPeer {
  static HttpPeer of(const boost::asio::ip::tcp::socket& socket);

  std::string address;         // "-": it is gone
  bool over_loopback = false;  // the address that it asked for is a loopback address
  std::shared_ptr<const std::atomic<bool>> broken = nullptr;  // from TlsFront::open()
};

class HttpSession : public std::enable_shared_from_this<HttpSession> {
 public:
  HttpSession(boost::asio::ip::tcp::socket socket, HttpPeer peer,
              std::shared_ptr<HttpShared> shared);
  ~HttpSession();

  using Time = std::chrono::steady_clock::time_point;

  void start() { await_request(); }
  void close();

  // No request is being answered.
  bool idle() const { return reading_; }
  Time idle_since() const { return idle_since_; }
  bool has_served() const { return has_served_; }

 private:
  using SystemError = boost::system::error_code;
  using Message = boost::beast::http::message<true, boost::beast::http::string_body,
                                              boost::beast::http::fields>;

  // In the order of a request's steps.
  void await_request();
  void begin_header(const SystemError& error);
  void read_header();
  void go_on_with_header(const SystemError& received);
  void on_header(const SystemError& error);
  void on_continued(const SystemError& error);
  void read_body();
  void go_on_with_body(const SystemError& received);
  void on_body(const SystemError& error);
  void dispatch();
  void watch();  // notices a client that closes while its request is being answered
  void respond(HttpResponse response, bool keep_alive);
  void on_written(const SystemError& error);
  void on_last_written(const SystemError& error);
  void linger();
  void discard();
  void discarded(const SystemError& error);

  // All operations have this one type: for each type Asio compiles them anew.
  using Handler = std::function<void(const SystemError&, size_t)>;
  using Step = void (HttpSession::*)(const SystemError&);
  void receive(size_t most, Step then);  // appends to buffer_
  void send(Step then);                  // answer_head_ and answer_body_
  bool parse(SystemError& error);
  bool end_answer(const SystemError& error);

  std::optional<HeadRefusal> authorize_caller(const Message& message);
  void audit(const HttpResponse& response);
  void refuse(unsigned status, ErrorCode code, std::string_view message);
  void refuse_malformed(const SystemError& error);
  void say_cut_off();
  void tell_of_end();
  void end_waiting();
  RequestHead head_of(const Message& message) const;
  bool charge_body();
  bool charge_answer(uint64_t bytes);
  void release_answer();

  std::shared_ptr<HttpShared> shared_;
  boost::beast::tcp_stream stream_;
  const HttpPeer peer_;
  boost::beast::flat_buffer buffer_;
  std::optional<boost::beast::http::request_parser<boost::beast::http::string_body>> parser_;
  std::string answer_head_, answer_body_;        // those that are being sent
  std::shared_ptr<HttpBodyCharge> body_charge_;  // that of the request that is being read
  bool takes_part_ = false;                      // it brings a part or a piece: bytes
  bool was_large_ = false;                       // the request that is being answered
  uint64_t answer_charge_ = 0;                   // this connection's part of unread_bytes
  uint64_t discarded_bytes_ = 0;
  uint64_t most_discarded_ = 4u << 20;
  bool waiting_ = false;               // for the handler's answer
  std::shared_ptr<HttpSession> self_;  // while waiting
  std::optional<Credential> beats_;    // the sender of heartbeats over this connection
  std::optional<Credential> waits_;    // the sender of a barrier call in progress
  std::string asked_;                  // method and path of that request, for the audit
  Caller caller_;                      // that of the request that is being read
  bool head_ = false;                  // a HEAD request: the answer has no body
  bool fresh_ = true;                  // no request yet
  bool has_served_ = false;            // has completed a request
  bool reading_ = true;                // reads a request, or waits for one
  Time idle_since_ = std::chrono::steady_clock::now();
};

}  // namespace phub
