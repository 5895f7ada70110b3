#include "phub/control/request_reader.h"

#include <fmt/format.h>

#include <boost/asio/error.hpp>
#include <string>
#include <utility>

namespace phub {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;

constexpr uint64_t kFreeBodyBytes = 4096;  // not counted as long

std::string_view view_of(beast::string_view text) { return {text.data(), text.size()}; }

}  // namespace

HttpBodyCharge::~HttpBodyCharge() {
  shared->long_body_bytes -= bytes;
  if (bytes > kLargeMessageBytes) shared->large_message_is_over();
}

RequestReader::RequestReader(std::shared_ptr<HttpShared> shared, const HttpPeer& peer)
    : shared_(std::move(shared)), peer_(peer) {}

void RequestReader::begin() {
  parser_.emplace();
  parser_->header_limit(shared_->options.max_header_bytes);
  parser_->body_limit(kMaxJoinBytes);
  takes_part_ = false;
  is_head_ = false;
  caller_ = {};
}

bool RequestReader::take(beast::flat_buffer& buffer, SystemError& error) {
  if (error == asio::error::eof && parser_->got_some()) {
    error = {};
    parser_->put_eof(error);
  }
  if (error || buffer.size() == 0) return false;
  const size_t taken = parser_->put(buffer.data(), error);
  buffer.consume(taken);
  if (error == http::error::need_more) error = {};
  return taken > 0;
}

std::optional<HeadRefusal> RequestReader::refuse_malformed(const SystemError& error) const {
  if (error == http::error::header_limit || error == http::error::buffer_overflow) {
    return HeadRefusal{
        431, ErrorCode::kInvalid,
        fmt::format("the header has more than {} bytes", shared_->options.max_header_bytes)};
  }
  if (error == http::error::body_limit) {
    return HeadRefusal{413, ErrorCode::kInvalid,
                       fmt::format("no body may have more than {} bytes", kMaxJoinBytes)};
  }
  const bool is_parse_error =
      error.category() == http::make_error_code(http::error::bad_method).category();
  if (!is_parse_error || error == http::error::end_of_stream ||
      error == http::error::partial_message) {
    return std::nullopt;
  }
  return HeadRefusal{400, ErrorCode::kInvalid,
                     fmt::format("this is not HTTP/1.1: {}", error.message())};
}

std::optional<HeadRefusal> RequestReader::refuse_header() {
  takes_part_ = takes_bytes(method(), target());
  is_head_ = parser_->get().method() == http::verb::head;
  if (auto refused = refuse_head(head(), shared_->host_names)) return refused;
  if (auto refused = refuse_caller()) return refused;
  if (parser_->chunked()) {
    return HeadRefusal{411, ErrorCode::kInvalid,
                       "a body needs a Content-Length; chunked transfer is not supported"};
  }
  const uint64_t limit = body_limit(method(), target());
  if (body_bytes() <= limit) return std::nullopt;
  return HeadRefusal{
      413, ErrorCode::kInvalid,
      fmt::format("the body has {} bytes; the limit of this request is {}", body_bytes(), limit)};
}

std::optional<HeadRefusal> RequestReader::refuse_caller() {
  caller_ = {};
  return authorize(method(), target(), field(http::field::authorization), shared_->options.access,
                   *shared_->handler, caller_);
}

std::optional<HeadRefusal> RequestReader::refuse_unwanted() const {
  return refuse_bytes(method(), target(), field(http::field::authorization), body_bytes(),
                      *shared_->handler);
}

RequestHead RequestReader::head() const {
  const auto& message = parser_->get();
  return {.host = field(http::field::host),
          .origin = field(http::field::origin),
          .content_type = field(http::field::content_type),
          .hosts = message.count(http::field::host),
          .http_1_0 = message.version() == 10,
          .has_body = parser_->chunked() || body_bytes() > 0,
          .of_bytes = takes_part_,
          .reads = is_head_ || message.method() == http::verb::get,
          .over_loopback = peer_.over_loopback};
}

bool RequestReader::charge() {
  const uint64_t bytes = takes_part_ ? body_bytes() : received_bytes();
  if (bytes <= kFreeBodyBytes || (charge_ && bytes <= charge_->bytes)) return true;
  if (!charge_) charge_ = std::make_shared<HttpBodyCharge>(shared_);
  const uint64_t more = bytes - charge_->bytes;
  // Parts of checkpoints wait for a disk: they leave half of the room to joins.
  const uint64_t most = shared_->options.max_long_body_bytes >> (takes_part_ ? 1 : 0);
  if (shared_->long_body_bytes > most || more > most - shared_->long_body_bytes) return false;
  charge_->bytes = bytes;
  shared_->long_body_bytes += more;
  return true;
}

bool RequestReader::awaits_continue() const {
  return body_bytes() > 0 && beast::iequals(parser_->get()[http::field::expect], "100-continue");
}

std::string_view RequestReader::method() const { return view_of(parser_->get().method_string()); }
std::string_view RequestReader::target() const { return view_of(parser_->get().target()); }
std::string_view RequestReader::field(http::field name) const {
  return view_of(parser_->get()[name]);
}

HttpRequest RequestReader::release() {
  auto message = parser_->release();
  parser_.reset();
  return {.method = std::string(view_of(message.method_string())),
          .target = std::string(view_of(message.target())),
          .authorization = std::string(view_of(message[http::field::authorization])),
          .caller = caller_,
          .body = std::move(message.body()),
          .charge = std::move(charge_)};
}

void RequestReader::drop() {
  charge_.reset();
  parser_.reset();
}

}  // namespace phub
