#include "transport/tcp_format.h"

#include <cstring>
#include <string>

namespace phub {
namespace {

template <typename T>
T take(std::span<const std::byte> message) {
  T value;
  std::memcpy(&value, message.data(), sizeof(T));
  return value;
}

[[noreturn]] void throw_refusal(std::span<const std::byte> message) {
  const std::span<const std::byte> tail = message.subspan(sizeof(TcpHeader));
  std::string text(reinterpret_cast<const char*>(tail.data()), tail.size());
  for (char& c : text) {
    if (c < ' ' || c > '~') c = '?';
  }
  const size_t colon = text.find(": ");
  if (colon == std::string::npos) fail(ErrorCode::kInternal, "refused by the server: {}", text);
  fail(parse_error_code(text.substr(0, colon)), "refused by the server: {}",
       text.substr(colon + 2));
}

bool is_possible(const TcpHeader& header) {
  switch (header.type) {
    case TcpMessage::kHello:
      return header.bytes == sizeof(TcpHello) - sizeof(TcpHeader);
    case TcpMessage::kWelcome:
      return header.bytes == sizeof(TcpWelcome) - sizeof(TcpHeader);
    case TcpMessage::kRefusal:
      return header.bytes <= kTcpMaxRefusalBytes;
  }
  return false;
}

}  // namespace

TcpHeader parse_tcp_header(std::span<const std::byte> message, const char* name) {
  if (message.size() < sizeof(TcpHeader)) {
    fail(ErrorCode::kInvalid, "{}: {} bytes, at least {} expected", name, message.size(),
         sizeof(TcpHeader));
  }
  const auto header = take<TcpHeader>(message);
  if (header.magic != kTcpMagic) {
    fail(ErrorCode::kInvalid, "{}: magic {:#x}, {:#x} expected: not a phub peer", name,
         header.magic, kTcpMagic);
  }
  if (header.version != kTcpVersion) {
    fail(ErrorCode::kInvalid, "{}: protocol version {}, this side speaks {}; upgrade the older one",
         name, header.version, kTcpVersion);
  }
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
  const auto hello = take<TcpHello>(message);
  for (const char c : hello.ticket) {
    if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'))) {
      fail(ErrorCode::kUnauthorized, "hello: the ticket is not {} hexadecimal digits",
           kTicketDigits);
    }
  }
  return hello;
}

void check_tcp_hello(const TcpHello& hello, const LinkLayout& layout) {
  const auto expect = [](const std::string& name, uint64_t there, uint64_t here) {
    if (here == there) return;
    fail(ErrorCode::kMismatch,
         "{}: {} by the worker's plan and {} at the server; do both run the same version?", name,
         there, here);
  };
  expect("queues", hello.queues, layout.queue_chunks.size());
  if (hello.queue >= layout.queue_chunks.size()) {
    fail(ErrorCode::kInvalid, "hello: queue {} of {}", hello.queue, layout.queue_chunks.size());
  }
  expect(fmt::format("chunks of queue {}", hello.queue), hello.queue_chunks,
         layout.queue_chunks[hello.queue]);
  expect("bytes of gradients", hello.gradient_bytes, layout.gradients_at_worker());
  expect("bytes of results", hello.result_bytes, layout.results_at_worker());
}

TcpWelcome parse_tcp_answer(std::span<const std::byte> message) {
  const TcpHeader header = parse_tcp_header(message, "welcome");
  if (header.type == TcpMessage::kHello || message.size() != sizeof(TcpHeader) + header.bytes) {
    fail(ErrorCode::kInvalid, "welcome: message type {} with {} bytes",
         static_cast<uint32_t>(header.type), message.size());
  }
  if (header.type == TcpMessage::kRefusal) throw_refusal(message);
  return take<TcpWelcome>(message);
}

std::vector<std::byte> make_tcp_refusal(ErrorCode code, std::string_view reason) {
  const std::string text =
      fmt::format("{}: {}", name_of(code), reason).substr(0, kTcpMaxRefusalBytes);
  const TcpHeader header = {.type = TcpMessage::kRefusal,
                            .bytes = static_cast<uint32_t>(text.size())};
  std::vector<std::byte> message(sizeof(header) + text.size());
  std::memcpy(message.data(), &header, sizeof(header));
  std::memcpy(message.data() + sizeof(header), text.data(), text.size());
  return message;
}

}  // namespace phub
