// One connection of the control port. Control thread only. Its pending operations keep it alive,
// and it itself while it waits for an answer.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>

#include "phub/http_counters.h"
#include "phub/http_router.h"
#include "phub/http_server.h"

namespace phub {

class HttpSession;
struct HttpShared;

// What a long body takes of all of theirs, until it is decoded. Control thread only.
struct HttpBodyCharge {
  explicit HttpBodyCharge(std::shared_ptr<HttpShared> of) : shared(std::move(of)) {}
  ~HttpBodyCharge();
  HttpBodyCharge(const HttpBodyCharge&) = delete;
  HttpBodyCharge& operator=(const HttpBodyCharge&) = delete;

  const std::shared_ptr<HttpShared> shared;
  uint64_t bytes = 0;  // that are here
};

// What all connections of a server have in common. Outlives the server until the last of them ends.
struct HttpShared {
  HttpOptions options;
  ControlHandler* handler = nullptr;  // null once stopped
  std::unordered_set<HttpSession*> sessions;
  uint64_t long_body_bytes = 0;  // here and not decoded yet
  uint64_t unread_bytes = 0;     // of long answers that are on their way
  HttpCounters counters;
  std::function<void()> large_message_is_over = [] {};
};

class HttpSession : public std::enable_shared_from_this<HttpSession> {
 public:
  HttpSession(boost::asio::ip::tcp::socket socket, std::shared_ptr<HttpShared> shared);
  ~HttpSession();

  using Time = std::chrono::steady_clock::time_point;

  void start() { await_request(); }
  void close();

  // Nothing that was asked for over it is under way.
  bool idle() const { return reading_; }
  Time idle_since() const { return idle_since_; }  // or since the client began
  bool has_served() const { return has_served_; }

 private:
  using SystemError = boost::system::error_code;
  using Message = boost::beast::http::message<true, boost::beast::http::string_body,
                                              boost::beast::http::fields>;

  // In the order in which they happen.
  void await_request();
  void read_header();
  void on_header(const SystemError& error);
  void read_body();
  void on_body(const SystemError& error);
  void dispatch();
  void watch();  // whether the client goes away while the answer takes its time
  void respond(HttpResponse response, bool keep_alive);
  void on_written(const SystemError& error, bool keep_alive);
  void linger();
  void discard();

  void refuse(unsigned status, ErrorCode code, std::string_view message);
  void refuse_malformed(const SystemError& error);
  void tell_of_end();
  void end_waiting();
  bool charge_body();
  bool charge_answer(uint64_t bytes);
  void release_answer();

  std::shared_ptr<HttpShared> shared_;
  boost::beast::tcp_stream stream_;
  boost::beast::flat_buffer buffer_;
  std::optional<boost::beast::http::request_parser<boost::beast::http::string_body>> parser_;
  std::optional<boost::beast::http::response<boost::beast::http::string_body>> response_;
  std::shared_ptr<HttpBodyCharge> body_charge_;  // of the request that is being read
  uint64_t answer_charge_ = 0;                   // this connection's part of unread_bytes
  uint64_t discarded_bytes_ = 0;
  bool waiting_ = false;               // for the handler's answer
  std::shared_ptr<HttpSession> self_;  // while waiting
  std::optional<Credential> beats_;    // whose heartbeats come over this connection
  std::optional<Credential> waits_;    // in a barrier, for the handler's answer
  bool head_ = false;                  // the request's answer goes without its body
  bool fresh_ = true;                  // no request yet
  bool has_served_ = false;            // a whole request
  bool reading_ = true;                // a request, or waiting for one
  Time idle_since_ = std::chrono::steady_clock::now();
};

}  // namespace phub
