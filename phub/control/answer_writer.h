// The answer that a connection sends.
#pragma once

#include <array>
#include <boost/asio/buffer.hpp>
#include <cstdint>
#include <string>

#include "phub/control/http_shared.h"
#include "phub/control/router.h"

namespace phub {

// The bytes of an answer, and their part of HttpShared::unread_bytes. An HttpSession owns it, sends
// the bytes, and sends one answer after the other with it. Control thread only.
class AnswerWriter {
 public:
  // REQUIRES: `shared` outlives this.
  explicit AnswerWriter(HttpShared& shared) : shared_(shared) {}
  ~AnswerWriter() { end(); }
  AnswerWriter(const AnswerWriter&) = delete;
  AnswerWriter& operator=(const AnswerWriter&) = delete;

  // Counts the answer. If there are too many bytes of long answers, it is 503 in its place.
  void begin(HttpResponse response, bool keep_alive, bool has_body);
  void begin_continue();  // the client may send its request's body
  std::array<boost::asio::const_buffer, 2> bytes() const;
  void end();  // it is sent, or nobody gets it

 private:
  bool charge(uint64_t bytes);

  HttpShared& shared_;
  std::string head_, body_;
  uint64_t charged_ = 0;  // of unread_bytes
};

}  // namespace phub
