#include "phub/control/tls_opening.h"

#include <fmt/format.h>

#include <cctype>
#include <utility>

#include "transport/control/messages_json.h"

namespace phub {

TlsPortOpening::TlsPortOpening(const Shared& shared, const Opened& opened, Descriptor client,
                               Descriptor session, std::shared_ptr<std::atomic<bool>> broken,
                               std::string from)
    : TlsOpening(shared, std::move(client), std::move(from)),
      opened_(opened),
      session_(std::move(session)),
      broken_(std::move(broken)) {}

void TlsPortOpening::open() {
  wait(session_, Descriptor::wait_error, &TlsPortOpening::give_up);
  start();
}

void TlsPortOpening::opened(Ssl ssl) {
  const int client = client_.release(), session = session_.release();
  opened_(std::move(ssl), client, session, broken_);
}

std::string_view TlsPortOpening::plain_answer(char first) const {
  static const std::string text = [] {
    const std::string body =
        error_json(400, ErrorCode::kInvalid, "this port speaks TLS: ask it as https://HOST:PORT");
    return fmt::format(
        "HTTP/1.1 400 Bad Request\r\nContent-Type: application/problem+json\r\n"
        "Content-Length: {}\r\nConnection: close\r\n\r\n{}",
        body.size(), body);
  }();
  if (std::isupper(static_cast<unsigned char>(first)) == 0) return {};  // no GET, no POST
  return text;
}

void TlsPortOpening::closed() {
  boost::system::error_code ignored;
  session_.close(ignored);
}

}  // namespace phub
