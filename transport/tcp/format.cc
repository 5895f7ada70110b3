#include "transport/tcp/format.h"

#include <string>

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
  check_same("queues", hello.queues, layout.queues_in_all());
  if (!layout.has_queue(hello.queue)) {
    fail(ErrorCode::kInvalid, "hello: queue {} of {}; this box has {} from queue {} on",
         hello.queue, layout.queues_in_all(), layout.queue_chunks.size(), layout.first_queue);
  }
  check_same(fmt::format("chunks of queue {}", hello.queue), hello.queue_chunks,
             layout.queue_chunks[hello.queue - layout.first_queue]);
  check_same("bytes of gradients", hello.gradient_bytes, layout.gradients_at_worker());
  check_same("bytes of results", hello.result_bytes, layout.results_at_worker());
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
