#include "phub/control/session.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/read_size.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/write.hpp>
#include <chrono>
#include <sstream>
#include <utility>

#include "phub/clock.h"
#include "transport/text.h"

namespace phub {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;

constexpr size_t kReadBytes = 4096;            // of what begins a request
constexpr size_t kMaxBufferBytes = 64u << 10;  // of a connection, without the body
constexpr uint64_t kFreeBodyBytes = 4096;      // not counted as long
constexpr uint64_t kFreeAnswerBytes = 64u << 10;
constexpr uint64_t kLargeBytes = 1u << 20;
// A browser may load the page's own files and nothing else. The icon is empty.
constexpr const char* kContentPolicy =
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
constexpr auto kLinger = std::chrono::seconds(2);

std::string to_string(beast::string_view text) { return {text.data(), text.size()}; }
std::string_view view_of(beast::string_view text) { return {text.data(), text.size()}; }

}  // namespace

HttpPeer HttpPeer::of(const tcp::socket& socket) {
  boost::system::error_code unknown, gone;
  const tcp::endpoint here = socket.local_endpoint(unknown);
  const tcp::endpoint from = socket.remote_endpoint(gone);
  return {.address = gone ? "-" : format_host_port(from.address().to_string(), from.port()),
          .over_loopback = !unknown && here.address().is_loopback()};
}

HttpBodyCharge::~HttpBodyCharge() {
  shared->long_body_bytes -= bytes;
  if (bytes > kLargeBytes) shared->large_message_is_over();
}

HttpSession::HttpSession(tcp::socket socket, HttpPeer peer, std::shared_ptr<HttpShared> shared)
    : shared_(std::move(shared)),
      stream_(std::move(socket)),
      peer_(std::move(peer)),
      buffer_(kMaxBufferBytes) {
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
  const std::array<asio::const_buffer, 2> bytes = {asio::buffer(answer_head_),
                                                   asio::buffer(answer_body_)};
  asio::async_write(stream_, bytes,
                    Handler([self = shared_from_this(), then](const SystemError& error, size_t) {
                      (self.get()->*then)(error);
                    }));
}

// What was received, as far as it goes; at its end, whether a request may end so. Whether it took
// any.
bool HttpSession::parse(SystemError& error) {
  if (error == asio::error::eof && parser_->got_some()) {
    error = {};
    parser_->put_eof(error);
  }
  if (error || buffer_.size() == 0) return false;
  const size_t taken = parser_->put(buffer_.data(), error);
  buffer_.consume(taken);
  if (error == http::error::need_more) error = {};
  return taken > 0;
}

void HttpSession::begin_header(const SystemError& error) {
  if (error) return refuse_malformed(error);
  read_header();
}

void HttpSession::read_header() {
  stream_.expires_after(std::chrono::milliseconds(shared_->options.request_timeout_ms));
  parser_.emplace();
  parser_->header_limit(shared_->options.max_header_bytes);
  parser_->body_limit(kMaxJoinBytes);
  go_on_with_header({});
}

void HttpSession::go_on_with_header(const SystemError& received) {
  SystemError error = received;
  parse(error);
  if (error || parser_->is_header_done()) return on_header(error);
  receive(kMaxBufferBytes, &HttpSession::go_on_with_header);
}

void HttpSession::on_header(const SystemError& error) {
  if (error) return refuse_malformed(error);
  const Message& message = parser_->get();
  takes_part_ = takes_bytes(view_of(message.method_string()), view_of(message.target()));
  if (shared_->done) {
    asked_ = fmt::format("{} {}", to_string(message.method_string()),
                         printable(view_of(message.target())));
  }
  caller_ = {};
  head_ = message.method() == http::verb::head;
  if (const auto refused = refuse_head(head_of(message), shared_->host_names)) {
    return refuse(refused->status, refused->code, refused->message);
  }
  if (shared_->handler == nullptr) return close();
  if (const auto refused = authorize_caller(message)) {
    return refuse(refused->status, refused->code, refused->message);
  }
  if (parser_->chunked()) {
    return refuse(411, ErrorCode::kInvalid,
                  "a body needs a Content-Length; chunked transfer is not supported");
  }
  const uint64_t bytes = parser_->content_length().value_or(0);
  const uint64_t limit =
      body_limit(to_string(message.method_string()), to_string(message.target()));
  if (bytes > limit) {
    return refuse(
        413, ErrorCode::kInvalid,
        fmt::format("the body has {} bytes; the limit of this request is {}", bytes, limit));
  }
  if (const auto refused =
          refuse_bytes(view_of(message.method_string()), view_of(message.target()),
                       view_of(message[http::field::authorization]), bytes, *shared_->handler)) {
    // A rank that sends what is not needed is to get the answer: it may write all before it reads.
    if (refused->code == ErrorCode::kNotFound || refused->code == ErrorCode::kTaken) {
      most_discarded_ = std::max(most_discarded_, bytes);
    }
    return refuse(refused->status, refused->code, refused->message);
  }
  if (bytes == 0 || !beast::iequals(message[http::field::expect], "100-continue")) {
    return read_body();
  }
  answer_head_ = "HTTP/1.1 100 Continue\r\n\r\n";
  answer_body_.clear();
  send(&HttpSession::on_continued);
}

void HttpSession::on_continued(const SystemError& error) {
  if (error) return close();
  read_body();
}

std::optional<HeadRefusal> HttpSession::authorize_caller(const Message& message) {
  caller_ = {};
  return authorize(view_of(message.method_string()), view_of(message.target()),
                   view_of(message[http::field::authorization]), shared_->options.access,
                   *shared_->handler, caller_);
}

RequestHead HttpSession::head_of(const Message& message) const {
  return {.host = view_of(message[http::field::host]),
          .origin = view_of(message[http::field::origin]),
          .content_type = view_of(message[http::field::content_type]),
          .hosts = message.count(http::field::host),
          .http_1_0 = message.version() == 10,
          .has_body = parser_->chunked() || parser_->content_length().value_or(0) > 0,
          .of_bytes = takes_part_,
          .reads = message.method() == http::verb::get || message.method() == http::verb::head,
          .over_loopback = peer_.over_loopback};
}

// Reads in pieces: a body is charged for the bytes that came, not for those announced.
void HttpSession::read_body() {
  SystemError error;
  if (parser_->is_done() || parse(error) || error) return on_body(error);
  receive(kMaxBufferBytes, &HttpSession::go_on_with_body);
}

void HttpSession::go_on_with_body(const SystemError& received) {
  SystemError error = received;
  parse(error);
  on_body(error);
}

void HttpSession::on_body(const SystemError& error) {
  if (error) return refuse_malformed(error);
  if (!charge_body()) {
    return refuse(503, ErrorCode::kUnavailable,
                  "too many long requests are in progress; try again in a second");
  }
  if (!parser_->is_done()) {
    if (takes_part_) {
      stream_.expires_after(std::chrono::milliseconds(shared_->options.request_timeout_ms));
    }
    return read_body();
  }
  stream_.expires_never();
  if (shared_->handler == nullptr) return close();
  // What held when its header came may have changed while its body did.
  if (const auto refused = authorize_caller(parser_->get())) {
    return refuse(refused->status, refused->code, refused->message);
  }
  dispatch();
}

void HttpSession::dispatch() {
  Message message = parser_->release();
  parser_.reset();
  reading_ = false;
  has_served_ = true;
  shared_->counters.request_bytes += message.body().size();
  was_large_ = message.body().size() > kLargeBytes;
  const bool keep_alive = message.keep_alive();
  HttpRequest request{to_string(message.method_string()),
                      to_string(message.target()),
                      to_string(message[http::field::authorization]),
                      caller_,
                      std::move(message.body()),
                      std::move(body_charge_)};
  waiting_ = true;
  self_ = shared_from_this();
  // The handler may call the reply function long after this connection has ended.
  Routed routed =
      route(std::move(request), *shared_->handler, shared_->counters, shared_->options.background,
            shared_->options.access, [weak = weak_from_this(), keep_alive](HttpResponse response) {
              const auto self = weak.lock();
              if (self && self->waiting_) self->respond(std::move(response), keep_alive);
            });
  if (routed.beats) beats_ = std::move(routed.beats);
  waits_ = std::move(routed.waits);
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
        if (got == 0) self->tell_of_end();
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK)) self->end_waiting();
      });
}

// The client is gone: nobody needs the answer.
void HttpSession::end_waiting() {
  const std::optional<Credential> who = std::exchange(waits_, {});
  close();
  if (who && shared_->handler != nullptr) shared_->handler->leave_barrier(*who);
}

// What changes something, and what strangers try. Heartbeats, news of racks, a shard's mail,
// barriers, checkpoints and their parts, and what is only shown, are not of interest.
void HttpSession::audit(const HttpResponse& response) {
  if (!shared_->done) return;
  const unsigned status = response.status;
  const bool refused = status == 401 || status == 403 || status == 415 || status == 421;
  const bool changes =
      asked_.starts_with("DELETE ") ||
      (asked_.starts_with("POST ") && !response.path.ends_with("/heartbeat") &&
       !response.path.ends_with("/rack") && !response.path.ends_with("/mail") &&
       !response.path.ends_with("/barrier") && !response.path.ends_with("/state") &&
       !response.path.ends_with("/state/end") && !response.path.ends_with("/checkpoint") &&
       !takes_part_);
  if (!refused && !changes) return;
  Notes& notes = status == 200 ? *shared_->done : *shared_->refused;
  notes.add(kSteadyClock.now_ms(),
            fmt::format("audit what=\"{}\" status={} who={} from={}{}{}", asked_, status,
                        caller_.name.empty() ? "-" : caller_.name, peer_.address,
                        response.about.empty() ? "" : " ", response.about));
}

void HttpSession::respond(HttpResponse response, bool keep_alive) {
  audit(response);
  if (!charge_answer(response.body.size())) {
    const std::string_view path = response.path;
    response = error_response(503, ErrorCode::kUnavailable,
                              "too many long answers are in progress; try again in a second");
    response.path = path;
  }
  const auto self = shared_from_this();
  self_.reset();
  waiting_ = false;
  reading_ = false;
  ++shared_->counters.answers[{response.path, response.status}];
  shared_->counters.response_bytes += response.body.size();
  http::response<http::empty_body> head(static_cast<http::status>(response.status), 11);
  head.set(http::field::server, "phub");
  head.set(http::field::content_type,
           beast::string_view(response.content_type.data(), response.content_type.size()));
  head.set(http::field::cache_control, "no-store");
  head.set("Content-Security-Policy", kContentPolicy);
  head.set("X-Content-Type-Options", "nosniff");
  head.set("Referrer-Policy", "no-referrer");
  if (response.status == 401) head.set(http::field::www_authenticate, "Bearer");
  if (!response.allow.empty()) {
    head.set(http::field::allow, beast::string_view(response.allow.data(), response.allow.size()));
  }
  head.keep_alive(keep_alive);
  head.content_length(response.body.size());
  std::ostringstream text;
  text << head.base();
  answer_head_ = std::move(text).str();
  answer_body_ = std::move(response.body);
  if (std::exchange(head_, false)) answer_body_ = {};
  stream_.expires_after(std::chrono::milliseconds(shared_->options.request_timeout_ms));
  send(keep_alive ? &HttpSession::on_written : &HttpSession::on_last_written);
}

// Whether the connection goes on.
bool HttpSession::end_answer(const SystemError& error) {
  answer_head_ = {};
  answer_body_ = {};
  release_answer();
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
  discard();
}

void HttpSession::discard() { receive(kMaxBufferBytes, &HttpSession::discarded); }

void HttpSession::discarded(const SystemError& error) {
  discarded_bytes_ += buffer_.size();
  buffer_.clear();
  if (error || discarded_bytes_ > most_discarded_) return close();
  discard();
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
    if (parser_ && parser_->is_header_done()) say_cut_off();
    // The timer has closed the stream: no answer is possible.
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

// Small packets came, and large ones did not: that is how a wrong MTU looks.
void HttpSession::say_cut_off() {
  if (!shared_->refused) return;
  shared_->refused->add(
      kSteadyClock.now_ms(),
      fmt::format("audit what=\"{}\" from={} detail=\"the rest of its body did not come within {} "
                  "ms: {} bytes did; if none ever comes, look at the MTU on the way\"",
                  asked_, peer_.address, shared_->options.request_timeout_ms,
                  parser_->get().body().size()));
}

// A connection that was closed, not reset or timed out, was closed by the peer's process, or by its
// kernel when that process ended.
void HttpSession::tell_of_end() {
  if (!beats_ || shared_->handler == nullptr) return;
  if (peer_.broken && peer_.broken->load()) return;
  const Credential who = *std::exchange(beats_, {});
  const auto beats_too = [&](const HttpSession* other) {
    return other->beats_ && other->beats_->job == who.job && other->beats_->rank == who.rank &&
           other->beats_->incarnation == who.incarnation && other->beats_->ticket == who.ticket;
  };
  if (std::none_of(shared_->sessions.begin(), shared_->sessions.end(), beats_too)) {
    shared_->handler->connection_ended(who);
  }
}

// A rank's part is charged for as a whole, so that those that have begun come to their end.
bool HttpSession::charge_body() {
  const uint64_t bytes =
      takes_part_ ? parser_->content_length().value_or(0) : parser_->get().body().size();
  if (bytes <= kFreeBodyBytes || (body_charge_ && bytes <= body_charge_->bytes)) return true;
  if (!body_charge_) body_charge_ = std::make_shared<HttpBodyCharge>(shared_);
  const uint64_t more = bytes - body_charge_->bytes;
  // Parts of checkpoints wait for a disk: they leave half of the room to joins.
  const uint64_t most = shared_->options.max_long_body_bytes >> (takes_part_ ? 1 : 0);
  if (shared_->long_body_bytes > most || more > most - shared_->long_body_bytes) return false;
  body_charge_->bytes = bytes;
  shared_->long_body_bytes += more;
  return true;
}

// The limit is for several answers: one alone may have any length.
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
