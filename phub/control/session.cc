#include "phub/control/session.h"

#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/write.hpp>
#include <boost/beast/core/read_size.hpp>
#include <cerrno>
#include <chrono>
#include <utility>

namespace phub {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;

constexpr size_t kReadBytes = 4096;            // of what begins a request
constexpr size_t kMaxBufferBytes = 64u << 10;  // of a connection, without the body
constexpr auto kLinger = std::chrono::seconds(2);

}  // namespace

HttpSession::HttpSession(tcp::socket socket, HttpPeer peer, std::shared_ptr<HttpShared> shared)
    : shared_(std::move(shared)),
      stream_(std::move(socket)),
      peer_(std::move(peer)),
      buffer_(kMaxBufferBytes),
      reader_(shared_, peer_),
      answer_(*shared_),
      audit_(*shared_, peer_),
      rank_(*shared_, peer_) {
  shared_->sessions.insert(this);
  ++shared_->counters.accepted;
  ++shared_->counters.connections;
}

HttpSession::~HttpSession() {
  shared_->sessions.erase(this);
  --shared_->counters.connections;
}

void HttpSession::close() {
  const auto self = std::move(self_);
  waiting_ = false;
  reading_ = false;
  stream_.close();
}

// The first byte of a request has the idle timeout, the rest the request timeout; on a new
// connection the first byte has the latter, too.
void HttpSession::await_request() {
  if (!reading_) idle_since_ = std::chrono::steady_clock::now();
  reading_ = true;
  if (buffer_.size() > 0) return read_header();
  buffer_.shrink_to_fit();
  const auto& options = shared_->options;
  stream_.expires_after(
      std::chrono::milliseconds(fresh_ ? options.request_timeout_ms : options.idle_timeout_ms));
  fresh_ = false;
  receive(kReadBytes, &HttpSession::begin_header);
}

void HttpSession::receive(size_t most, Step then) {
  const size_t room = beast::read_size(buffer_, most);
  if (room == 0) return (this->*then)(http::make_error_code(http::error::buffer_overflow));
  stream_.async_read_some(
      buffer_.prepare(room),
      Handler([self = shared_from_this(), then](const SystemError& error, size_t bytes) {
        self->buffer_.commit(bytes);
        (self.get()->*then)(error);
      }));
}

void HttpSession::send(Step then) {
  asio::async_write(stream_, answer_.bytes(),
                    Handler([self = shared_from_this(), then](const SystemError& error, size_t) {
                      (self.get()->*then)(error);
                    }));
}

void HttpSession::begin_header(const SystemError& error) {
  if (error) return refuse_malformed(error);
  read_header();
}

void HttpSession::read_header() {
  stream_.expires_after(std::chrono::milliseconds(shared_->options.request_timeout_ms));
  reader_.begin();
  audit_.begin();
  go_on_with_header({});
}

void HttpSession::go_on_with_header(const SystemError& received) {
  SystemError error = received;
  reader_.take(buffer_, error);
  if (error || reader_.has_header()) return on_header(error);
  receive(kMaxBufferBytes, &HttpSession::go_on_with_header);
}

void HttpSession::on_header(const SystemError& error) {
  if (error) return refuse_malformed(error);
  if (shared_->handler == nullptr) return close();
  const auto refused = reader_.refuse_header();
  audit_.has_header(reader_.method(), reader_.target(), reader_.takes_part());
  if (refused) return refuse(*refused);
  if (const auto unwanted = reader_.refuse_unwanted()) {
    // A rank that sends what is not needed is to get the answer: it may write all before it reads.
    if (unwanted->code == ErrorCode::kNotFound || unwanted->code == ErrorCode::kTaken) {
      most_discarded_ = std::max(most_discarded_, reader_.body_bytes());
    }
    return refuse(*unwanted);
  }
  if (!reader_.awaits_continue()) return read_body();
  answer_.begin_continue();
  send(&HttpSession::on_continued);
}

void HttpSession::on_continued(const SystemError& error) {
  if (error) return close();
  read_body();
}

// Reads in pieces, each of which is charged when it is here.
void HttpSession::read_body() {
  SystemError error;
  if (reader_.is_complete() || reader_.take(buffer_, error) || error) return on_body(error);
  receive(kMaxBufferBytes, &HttpSession::go_on_with_body);
}

void HttpSession::go_on_with_body(const SystemError& received) {
  SystemError error = received;
  reader_.take(buffer_, error);
  on_body(error);
}

void HttpSession::on_body(const SystemError& error) {
  if (error) return refuse_malformed(error);
  if (!reader_.charge()) {
    return refuse({503, ErrorCode::kUnavailable,
                   "too many long requests are in progress; try again in a second"});
  }
  if (!reader_.is_complete()) {
    if (reader_.takes_part()) {
      stream_.expires_after(std::chrono::milliseconds(shared_->options.request_timeout_ms));
    }
    return read_body();
  }
  stream_.expires_never();
  if (shared_->handler == nullptr) return close();
  // What held when its header came may have changed while its body did.
  if (const auto refused = reader_.refuse_caller()) return refuse(*refused);
  dispatch();
}

void HttpSession::dispatch() {
  const bool keep_alive = reader_.keeps_alive();
  HttpRequest request = reader_.release();
  reading_ = false;
  has_served_ = true;
  shared_->counters.request_bytes += request.body.size();
  was_large_ = request.body.size() > kLargeMessageBytes;
  waiting_ = true;
  self_ = shared_from_this();
  // The handler may call the reply function long after this connection has ended.
  rank_.asked(route(std::move(request), *shared_->handler, shared_->counters,
                    shared_->options.background, shared_->options.access,
                    [weak = weak_from_this(), keep_alive](HttpResponse response) {
                      const auto self = weak.lock();
                      if (self && self->waiting_) self->respond(std::move(response), keep_alive);
                    }));
  if (shared_->options.after_request) shared_->options.after_request();
  if (waiting_) watch();
}

// The socket becomes readable when the client closes it, or when it sends its next request before
// the answer; in the second case its end is noticed later, with the answer.
void HttpSession::watch() {
  stream_.socket().async_wait(
      tcp::socket::wait_read, [self = shared_from_this()](const SystemError& error) {
        if (error || !self->waiting_) return;
        char byte = 0;
        const ssize_t got =
            recv(self->stream_.socket().native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        if (got == 0) self->rank_.closed();
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK)) self->end_waiting();
      });
}

// The client is gone: nobody needs the answer.
void HttpSession::end_waiting() {
  close();
  rank_.waits_no_more();
}

void HttpSession::respond(HttpResponse response, bool keep_alive) {
  audit_.answered(response, reader_.caller());
  const auto self = shared_from_this();
  self_.reset();
  waiting_ = false;
  reading_ = false;
  answer_.begin(std::move(response), keep_alive, !reader_.is_head());
  stream_.expires_after(std::chrono::milliseconds(shared_->options.request_timeout_ms));
  send(keep_alive ? &HttpSession::on_written : &HttpSession::on_last_written);
}

// Whether the connection goes on.
bool HttpSession::end_answer(const SystemError& error) {
  answer_.end();
  // What was decoded of it is gone now.
  if (std::exchange(was_large_, false)) shared_->large_message_is_over();
  if (!error && shared_->handler != nullptr) return true;
  close();
  return false;
}

void HttpSession::on_written(const SystemError& error) {
  if (end_answer(error)) await_request();
}

void HttpSession::on_last_written(const SystemError& error) {
  if (end_answer(error)) linger();
}

// Closing with unread bytes would reset the connection, and the client might lose the answer. So
// what it still sends is read and dropped for a while.
void HttpSession::linger() {
  SystemError ignored;
  stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
  stream_.expires_after(kLinger);
  buffer_.clear();
  receive(kMaxBufferBytes, &HttpSession::discarded);
}

void HttpSession::discarded(const SystemError& error) {
  discarded_bytes_ += buffer_.size();
  buffer_.clear();
  if (error || discarded_bytes_ > most_discarded_) return close();
  receive(kMaxBufferBytes, &HttpSession::discarded);
}

void HttpSession::refuse(const HeadRefusal& refusal) {
  reader_.drop();
  respond(error_response(refusal.status, refusal.code, refusal.message), false);
}

void HttpSession::refuse_malformed(const SystemError& error) {
  if (error == beast::error::timeout) {
    ++shared_->counters.timed_out;
    if (reader_.has_header()) audit_.cut_off(reader_.received_bytes());
    // The timer has closed the stream: no answer is possible.
    return close();
  }
  if (error == asio::error::eof || error == http::error::end_of_stream) rank_.closed();
  const auto refused = reader_.refuse_malformed(error);
  refused ? refuse(*refused) : close();
}

}  // namespace phub
