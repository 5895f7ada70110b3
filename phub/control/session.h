// A connection of the control port. Control thread only. It is kept alive by its pending operations
// and, while it waits for the handler's answer, by itself.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <chrono>
#include <functional>
#include <memory>

#include "phub/control/answer_writer.h"
#include "phub/control/audit.h"
#include "phub/control/connected_rank.h"
#include "phub/control/http_shared.h"
#include "phub/control/request_reader.h"

namespace phub {

// Receives and sends, within its time limits: one request, its answer, the next request.
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
  void discarded(const SystemError& error);

  // All operations have this one type: for each type Asio compiles them anew.
  using Handler = std::function<void(const SystemError&, size_t)>;
  using Step = void (HttpSession::*)(const SystemError&);
  void receive(size_t most, Step then);  // appends to buffer_
  void send(Step then);                  // answer_
  bool end_answer(const SystemError& error);

  void refuse(const HeadRefusal& refusal);
  void refuse_malformed(const SystemError& error);
  void end_waiting();

  const std::shared_ptr<HttpShared> shared_;
  boost::beast::tcp_stream stream_;
  const HttpPeer peer_;
  boost::beast::flat_buffer buffer_;
  RequestReader reader_;
  AnswerWriter answer_;
  RequestAudit audit_;
  ConnectedRank rank_;
  bool was_large_ = false;  // the request that is being answered
  uint64_t discarded_bytes_ = 0;
  uint64_t most_discarded_ = 4u << 20;
  bool waiting_ = false;               // for the handler's answer
  std::shared_ptr<HttpSession> self_;  // while waiting
  bool fresh_ = true;                  // no request yet
  bool has_served_ = false;            // has completed a request
  bool reading_ = true;                // reads a request, or waits for one
  Time idle_since_ = std::chrono::steady_clock::now();
};

}  // namespace phub
