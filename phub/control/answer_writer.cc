#include "phub/control/answer_writer.h"

#include <algorithm>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/beast/http/write.hpp>
#include <sstream>
#include <utility>

namespace phub {
namespace {

namespace beast = boost::beast;
namespace http = beast::http;

constexpr uint64_t kFreeAnswerBytes = 64u << 10;
// A browser may load the page's own files and nothing else. The icon is empty.
constexpr const char* kContentPolicy =
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

std::string head_of_answer(const HttpResponse& response, bool keep_alive) {
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
  return std::move(text).str();
}

}  // namespace

void AnswerWriter::begin(HttpResponse response, bool keep_alive, bool has_body) {
  if (!charge(response.body.size())) {
    const std::string_view path = response.path;
    response = error_response(503, ErrorCode::kUnavailable,
                              "too many long answers are in progress; try again in a second");
    response.path = path;
  }
  ++shared_.counters.answers[{response.path, response.status}];
  shared_.counters.response_bytes += response.body.size();
  head_ = head_of_answer(response, keep_alive);
  body_ = has_body ? std::move(response.body) : std::string();
}

void AnswerWriter::begin_continue() {
  head_ = "HTTP/1.1 100 Continue\r\n\r\n";
  body_.clear();
}

std::array<boost::asio::const_buffer, 2> AnswerWriter::bytes() const {
  return {boost::asio::buffer(head_), boost::asio::buffer(body_)};
}

void AnswerWriter::end() {
  head_ = {};
  body_ = {};
  shared_.unread_bytes -= charged_;
  if (std::exchange(charged_, 0) > kLargeMessageBytes) shared_.large_message_is_over();
}

// The limit is for several answers: one alone may have any length.
bool AnswerWriter::charge(uint64_t bytes) {
  if (bytes <= kFreeAnswerBytes) return true;
  const uint64_t others = shared_.unread_bytes;
  const uint64_t most = shared_.options.max_unread_bytes;
  if (others > 0 && bytes > most - std::min(most, others)) return false;
  charged_ = bytes;
  shared_.unread_bytes += bytes;
  return true;
}

}  // namespace phub
