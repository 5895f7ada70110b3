// The request that a connection reads.
#pragma once

#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "phub/control/http_shared.h"
#include "phub/control/request_head.h"
#include "phub/control/router.h"

namespace phub {

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

// Parses a request from the bytes that have come, and says why it is refused: for its header, its
// sender, or the bytes of its body. It has no socket and no time limits: an HttpSession owns it,
// receives the bytes, and reads one request after the other with it. Control thread only.
class RequestReader {
 public:
  using SystemError = boost::system::error_code;

  // REQUIRES: `peer` outlives this.
  RequestReader(std::shared_ptr<HttpShared> shared, const HttpPeer& peer);

  // The next bytes begin a request.
  void begin();
  // Takes bytes from the buffer. `error` says how receiving ended; at the end of the bytes, whether
  // a request may end so, or what is wrong with it. Returns whether any were taken.
  bool take(boost::beast::flat_buffer& buffer, SystemError& error);
  bool has_header() const { return parser_ && parser_->is_header_done(); }
  bool is_complete() const { return parser_->is_done(); }
  // The answer to what is no request; nullopt: there is none, the connection is closed.
  std::optional<HeadRefusal> refuse_malformed(const SystemError& error) const;

  // REQUIRES of the functions below: has_header().
  // Why the request is refused before its body is read. Finds the caller.
  std::optional<HeadRefusal> refuse_header();
  // Whether the sender may still do what it asks.
  std::optional<HeadRefusal> refuse_caller();
  // Why the handler does not want the body of such a request.
  std::optional<HeadRefusal> refuse_unwanted() const;
  // Whether there is room for the bytes of the body that have come. A body is charged for the bytes
  // that came, not for those announced; but a part of a checkpoint is charged for as a whole, so
  // that those that have begun come to their end.
  bool charge();
  bool awaits_continue() const;  // the client sends the body once it is asked to
  bool keeps_alive() const { return parser_->get().keep_alive(); }
  std::string_view method() const;
  std::string_view target() const;
  uint64_t body_bytes() const { return parser_->content_length().value_or(0); }
  uint64_t received_bytes() const { return parser_->get().body().size(); }  // of the body

  HttpRequest release();  // REQUIRES: is_complete()
  void drop();            // the rest of the request is not read

  // Until the next begin(), also after release() or drop():
  bool takes_part() const { return takes_part_; }  // the body is a part or a piece: bytes
  bool is_head() const { return is_head_; }        // a HEAD request: the answer has no body
  const Caller& caller() const { return caller_; }

 private:
  std::string_view field(boost::beast::http::field name) const;
  RequestHead head() const;

  const std::shared_ptr<HttpShared> shared_;
  const HttpPeer& peer_;
  std::optional<boost::beast::http::request_parser<boost::beast::http::string_body>> parser_;
  std::shared_ptr<HttpBodyCharge> charge_;
  bool takes_part_ = false;
  bool is_head_ = false;
  Caller caller_;
};

}  // namespace phub
