#include "transport/tcp/format.h"

#include <string>

#include "transport/hello_sizes.h"

namespace phub {
namespace {

bool is_possible(const TcpHeader& header) {
  switch (header.type) {
    case TcpMessage::kHello:
      return header.bytes == sizeof(TcpHello) - sizeof(TcpHeader);
    case TcpMessage::kWelcome:
      return header.bytes == sizeof(TcpWelcome) - sizeof(TcpHeader);
    case TcpMessage::kRefusal:
      return header.bytes <= kMaxRefusalBytes;
  }
  return false;
}

}  // namespace

TcpHeader parse_tcp_header(std::span<const std::byte> message, const char* name) {
  const auto header = read_header<TcpHeader>(name, message);
  if (!is_possible(header)) {
    fail(ErrorCode::kInvalid, "{}: message type {} with {} bytes", name,
         static_cast<uint32_t>(header.type), header.bytes);
  }
  return header;
}

TcpHello parse_tcp_hello(std::span<const std::byte> message) {
  const TcpHeader header = parse_tcp_header(message, "hello");
  if (header.type != TcpMessage::kHello || message.size() != sizeof(TcpHello)) {
    fail(ErrorCode::kInvalid, "hello: message type {} with {} bytes",
         static_cast<uint32_t>(header.type), message.size());
  }
  const auto hello = read_as<TcpHello>(message);
  check_ticket(hello.ticket);
  return hello;
}

void check_tcp_hello(const TcpHello& hello, const LinkLayout& layout) {
  check_hello_sizes(hello, layout);
}

TcpWelcome parse_tcp_answer(std::span<const std::byte> message) {
  const TcpHeader header = parse_tcp_header(message, "welcome");
  if (header.type == TcpMessage::kHello || message.size() != sizeof(TcpHeader) + header.bytes) {
    fail(ErrorCode::kInvalid, "welcome: message type {} with {} bytes",
         static_cast<uint32_t>(header.type), message.size());
  }
  if (header.type == TcpMessage::kRefusal) throw parse_refusal(message.subspan(sizeof(TcpHeader)));
  return read_as<TcpWelcome>(message);
}

std::vector<std::byte> make_tcp_refusal(ErrorCode code, std::string_view reason) {
  const std::string text = refusal_text(code, reason);
  const TcpHeader header = {.type = TcpMessage::kRefusal,
                            .bytes = static_cast<uint32_t>(text.size())};
  return make_message(header, std::as_bytes(std::span(text)));
}

}  // namespace phub
