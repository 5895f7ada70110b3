#include "phub/http_session.h"

#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/beast/core/bind_handler.hpp>
#include <chrono>
#include <utility>

#include "transport/text.h"

namespace phub {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;

constexpr size_t kReadBytes = 4096;
constexpr size_t kMaxBufferBytes = 64u << 10;  // of one connection, besides its request's body
constexpr uint64_t kMaxDiscardedBytes = 4u << 20;
constexpr uint64_t kFreeBodyBytes = 4096;  // not counted as long
constexpr uint64_t kFreeAnswerBytes = 64u << 10;
constexpr uint64_t kLargeBytes = 1u << 20;
// The page is the only thing here that a browser shows: its own files, and nothing else's. Its icon
// is empty.
constexpr const char* kContentPolicy =
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
constexpr auto kLinger = std::chrono::seconds(2);

std::string to_string(beast::string_view text) { return {text.data(), text.size()}; }

}  // namespace

HttpBodyCharge::~HttpBodyCharge() {
  shared->long_body_bytes -= bytes;
  if (bytes > kLargeBytes) shared->large_message_is_over();
}

HttpSession::HttpSession(tcp::socket socket, std::shared_ptr<HttpShared> shared)
    : shared_(std::move(shared)), stream_(std::move(socket)), buffer_(kMaxBufferBytes) {
  shared_->sessions.insert(this);
  ++shared_->counters.accepted;
  ++shared_->counters.connections;
}

HttpSession::~HttpSession() {
  release_answer();
  shared_->sessions.erase(this);
  --shared_->counters.connections;
}

void HttpSession::close() {
  const auto self = std::move(self_);
  waiting_ = false;
  reading_ = false;
  stream_.close();
}

// The first byte of a request may take its time, except on a new connection; the rest may not.
void HttpSession::await_request() {
  if (!reading_) idle_since_ = std::chrono::steady_clock::now();
  reading_ = true;
  if (buffer_.size() > 0) return read_header();
  buffer_.shrink_to_fit();
  const auto& options = shared_->options;
  stream_.expires_after(
      std::chrono::milliseconds(fresh_ ? options.request_timeout_ms : options.idle_timeout_ms));
  fresh_ = false;
  stream_.async_read_some(buffer_.prepare(kReadBytes),
                          [self = shared_from_this()](const SystemError& error, size_t bytes) {
                            if (error) return self->refuse_malformed(error);
                            self->buffer_.commit(bytes);
                            self->read_header();
                          });
}

void HttpSession::read_header() {
  stream_.expires_after(std::chrono::milliseconds(shared_->options.request_timeout_ms));
  parser_.emplace();
  parser_->header_limit(shared_->options.max_header_bytes);
  parser_->body_limit(kMaxJoinBytes);
  http::async_read_header(
      stream_, buffer_, *parser_,
      [self = shared_from_this()](const SystemError& error, size_t) { self->on_header(error); });
}

void HttpSession::on_header(const SystemError& error) {
  if (error) return refuse_malformed(error);
  const Message& message = parser_->get();
  if (parser_->chunked()) {
    return refuse(411, ErrorCode::kInvalid, "a body needs a Content-Length, not chunks");
  }
  const uint64_t bytes = parser_->content_length().value_or(0);
  const uint64_t limit =
      body_limit(to_string(message.method_string()), to_string(message.target()));
  if (bytes > limit) {
    return refuse(413, ErrorCode::kInvalid,
                  fmt::format("the body has {} bytes; here it may have {}", bytes, limit));
  }
  if (bytes == 0 || !beast::iequals(message[http::field::expect], "100-continue")) {
    return read_body();
  }
  response_.emplace(http::status::continue_, 11);
  http::async_write(stream_, *response_,
                    [self = shared_from_this()](const SystemError& failed, size_t) {
                      if (failed) return self->close();
                      self->read_body();
                    });
}

// Piece by piece: a body counts as far as it has come, whatever was announced.
void HttpSession::read_body() {
  if (parser_->is_done()) return on_body({});
  http::async_read_some(
      stream_, buffer_, *parser_,
      [self = shared_from_this()](const SystemError& error, size_t) { self->on_body(error); });
}

void HttpSession::on_body(const SystemError& error) {
  if (error) return refuse_malformed(error);
  if (!charge_body()) {
    return refuse(503, ErrorCode::kUnavailable,
                  "too many long requests at the same time; try again in a second");
  }
  if (!parser_->is_done()) return read_body();
  stream_.expires_never();
  if (shared_->handler == nullptr) return close();
  dispatch();
}

void HttpSession::dispatch() {
  Message message = parser_->release();
  parser_.reset();
  reading_ = false;
  has_served_ = true;
  shared_->counters.request_bytes += message.body().size();
  const bool keep_alive = message.keep_alive();
  head_ = message.method() == http::verb::head;
  HttpRequest request{to_string(message.method_string()), to_string(message.target()),
                      to_string(message[http::field::authorization]), std::move(message.body()),
                      std::move(body_charge_)};
  waiting_ = true;
  self_ = shared_from_this();
  // The handler may keep the answer's function for long, and longer than this connection lives.
  Routed routed =
      route(std::move(request), *shared_->handler, shared_->counters, shared_->options.background,
            [weak = weak_from_this(), keep_alive](HttpResponse response) {
              const auto self = weak.lock();
              if (self && self->waiting_) self->respond(std::move(response), keep_alive);
            });
  if (routed.beats) beats_ = std::move(routed.beats);
  waits_ = std::move(routed.waits);
  if (shared_->options.after_request) shared_->options.after_request();
  if (waiting_) watch();
}

// The socket becomes readable when the client closes it, or sends its next request ahead of the
// answer: then its end is noticed at the answer.
void HttpSession::watch() {
  stream_.socket().async_wait(
      tcp::socket::wait_read, [self = shared_from_this()](const SystemError& error) {
        if (error || !self->waiting_) return;
        char byte = 0;
        const ssize_t got =
            recv(self->stream_.socket().native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        if (got == 0) self->tell_of_end();
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK)) self->end_waiting();
      });
}

// Nobody is there for the answer any more.
void HttpSession::end_waiting() {
  const std::optional<Credential> who = std::exchange(waits_, {});
  close();
  if (who && shared_->handler != nullptr) shared_->handler->leave_barrier(*who);
}

void HttpSession::respond(HttpResponse response, bool keep_alive) {
  if (!charge_answer(response.body.size())) {
    const std::string_view path = response.path;
    response = error_response(503, ErrorCode::kUnavailable,
                              "too many long answers are on their way; try again in a second");
    response.path = path;
  }
  const auto self = shared_from_this();
  self_.reset();
  waiting_ = false;
  reading_ = false;
  ++shared_->counters.answers[{response.path, response.status}];
  shared_->counters.response_bytes += response.body.size();
  response_.emplace(static_cast<http::status>(response.status), 11);
  response_->set(http::field::server, "phub");
  response_->set(http::field::content_type,
                 beast::string_view(response.content_type.data(), response.content_type.size()));
  response_->set(http::field::cache_control, "no-store");
  response_->set("Content-Security-Policy", kContentPolicy);
  response_->set("X-Content-Type-Options", "nosniff");
  response_->set("Referrer-Policy", "no-referrer");
  if (response.status == 401) response_->set(http::field::www_authenticate, "Bearer");
  if (!response.allow.empty()) {
    response_->set(http::field::allow,
                   beast::string_view(response.allow.data(), response.allow.size()));
  }
  response_->keep_alive(keep_alive);
  response_->body() = std::move(response.body);
  response_->prepare_payload();
  if (std::exchange(head_, false)) response_->body().clear();  // its length stays said
  stream_.expires_after(std::chrono::milliseconds(shared_->options.request_timeout_ms));
  http::async_write(stream_, *response_, [self, keep_alive](const SystemError& error, size_t) {
    self->on_written(error, keep_alive);
  });
}

void HttpSession::on_written(const SystemError& error, bool keep_alive) {
  response_.reset();
  release_answer();
  if (error || shared_->handler == nullptr) return close();
  if (keep_alive) return await_request();
  linger();
}

// Closing with unread bytes would reset the connection, and the client might never see the answer:
// what it still sends is thrown away for a while.
void HttpSession::linger() {
  SystemError ignored;
  stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
  stream_.expires_after(kLinger);
  buffer_.clear();
  discard();
}

void HttpSession::discard() {
  stream_.async_read_some(buffer_.prepare(kMaxBufferBytes),
                          [self = shared_from_this()](const SystemError& error, size_t bytes) {
                            self->discarded_bytes_ += bytes;
                            if (error || self->discarded_bytes_ > kMaxDiscardedBytes) {
                              return self->close();
                            }
                            self->discard();
                          });
}

void HttpSession::refuse(unsigned status, ErrorCode code, std::string_view message) {
  body_charge_.reset();
  parser_.reset();
  respond(error_response(status, code, message), false);
}

void HttpSession::refuse_malformed(const SystemError& error) {
  const auto& options = shared_->options;
  if (error == beast::error::timeout) {
    ++shared_->counters.timed_out;
    // The stream is closed by its timer; there is nobody to answer to.
    return close();
  }
  if (error == asio::error::eof || error == http::error::end_of_stream) tell_of_end();
  if (error == http::error::header_limit || error == http::error::buffer_overflow) {
    return refuse(431, ErrorCode::kInvalid,
                  fmt::format("the header has more than {} bytes", options.max_header_bytes));
  }
  if (error == http::error::body_limit) {
    return refuse(413, ErrorCode::kInvalid,
                  fmt::format("no body may have more than {} bytes", kMaxJoinBytes));
  }
  const bool is_parse_error =
      error.category() == http::make_error_code(http::error::bad_method).category();
  if (!is_parse_error || error == http::error::end_of_stream ||
      error == http::error::partial_message) {
    return close();
  }
  refuse(400, ErrorCode::kInvalid, fmt::format("this is not HTTP/1.1: {}", error.message()));
}

// A connection that is closed, not reset or timed out, was closed by the process at its other end,
// or by the kernel when that process ended.
void HttpSession::tell_of_end() {
  if (!beats_ || shared_->handler == nullptr) return;
  const Credential who = *std::exchange(beats_, {});
  const auto beats_too = [&](const HttpSession* other) {
    return other->beats_ && other->beats_->job == who.job && other->beats_->rank == who.rank &&
           other->beats_->incarnation == who.incarnation && other->beats_->ticket == who.ticket;
  };
  if (std::none_of(shared_->sessions.begin(), shared_->sessions.end(), beats_too)) {
    shared_->handler->connection_ended(who);
  }
}

bool HttpSession::charge_body() {
  const uint64_t bytes = parser_->get().body().size();
  if (bytes <= kFreeBodyBytes) return true;
  if (!body_charge_) body_charge_ = std::make_shared<HttpBodyCharge>(shared_);
  const uint64_t more = bytes - body_charge_->bytes;
  if (more > shared_->options.max_long_body_bytes - shared_->long_body_bytes) return false;
  body_charge_->bytes = bytes;
  shared_->long_body_bytes += more;
  return true;
}

// One answer may be as long as it likes.
bool HttpSession::charge_answer(uint64_t bytes) {
  if (bytes <= kFreeAnswerBytes) return true;
  const uint64_t others = shared_->unread_bytes;
  const uint64_t most = shared_->options.max_unread_bytes;
  if (others > 0 && bytes > most - std::min(most, others)) return false;
  answer_charge_ = bytes;
  shared_->unread_bytes += bytes;
  return true;
}

void HttpSession::release_answer() {
  shared_->unread_bytes -= answer_charge_;
  if (std::exchange(answer_charge_, 0) > kLargeBytes) shared_->large_message_is_over();
}

}  // namespace phub
