// A worker and a box greet each other on the socket of one queue: a hello, then a welcome or a
// refusal. The transports over sockets (tcp, ofi) have structures of their own for them, each with
// a header first whose `type` and `bytes` tell its kind; the checks are the same.
//
// All parsers throw Error that names the field; nothing is used before it is checked.
#pragma once

#include <fmt/format.h>

#include <span>
#include <string_view>
#include <vector>

#include "transport/error.h"
#include "transport/greeting.h"
#include "transport/transport.h"

namespace phub {

template <typename Message>
using HeaderOf = decltype(Message::header);

template <typename Header>
[[noreturn]] void fail_message(const char* name, const Header& header) {
  fail(ErrorCode::kInvalid, "{}: message type {} with {} bytes", name,
       static_cast<uint32_t>(header.type), header.bytes);
}

// The header of a hello or of its answer; `bytes` is in the type's bounds.
template <typename Hello, typename Welcome>
HeaderOf<Hello> parse_greeting_header(std::span<const std::byte> message, const char* name) {
  using Header = HeaderOf<Hello>;
  using Type = decltype(Header::type);
  const auto header = read_header<Header>(name, message);
  const bool is_possible =
      (header.type == Type::kHello && header.bytes == sizeof(Hello) - sizeof(Header)) ||
      (header.type == Type::kWelcome && header.bytes == sizeof(Welcome) - sizeof(Header)) ||
      (header.type == Type::kRefusal && header.bytes <= kMaxRefusalBytes);
  if (!is_possible) fail_message(name, header);
  return header;
}

template <typename Hello, typename Welcome>
Hello parse_hello(std::span<const std::byte> message) {
  const auto header = parse_greeting_header<Hello, Welcome>(message, "hello");
  if (header.type != decltype(header.type)::kHello || message.size() != sizeof(Hello)) {
    fail_message("hello", header);
  }
  const auto hello = read_as<Hello>(message);
  check_ticket(hello.ticket);
  return hello;
}

// If the answer is a refusal, throws the Error that it carries.
template <typename Hello, typename Welcome>
Welcome parse_answer(std::span<const std::byte> message) {
  const auto header = parse_greeting_header<Hello, Welcome>(message, "welcome");
  using Type = decltype(header.type);
  if (header.type == Type::kHello || message.size() != sizeof(header) + header.bytes) {
    fail_message("welcome", header);
  }
  if (header.type == Type::kRefusal) throw parse_refusal(message.subspan(sizeof(header)));
  return read_as<Welcome>(message);
}

template <typename Header>
std::vector<std::byte> make_refusal(ErrorCode code, std::string_view reason) {
  const std::string text = refusal_text(code, reason);
  return make_message(
      Header{.type = decltype(Header::type)::kRefusal, .bytes = static_cast<uint32_t>(text.size())},
      std::as_bytes(std::span(text)));
}

// Checks that the sizes in a hello are those of the box. Throws Error that names the first
// difference.
template <typename Hello>
void check_hello_sizes(const Hello& hello, const LinkLayout& layout) {
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

}  // namespace phub
