#include "transport/tcp/format.h"

#include "transport/hello.h"

namespace phub {

TcpHeader parse_tcp_header(std::span<const std::byte> message, const char* name) {
  return parse_greeting_header<TcpHello, TcpWelcome>(message, name);
}

TcpHello parse_tcp_hello(std::span<const std::byte> message) {
  return parse_hello<TcpHello, TcpWelcome>(message);
}

void check_tcp_hello(const TcpHello& hello, const LinkLayout& layout) {
  check_hello_sizes(hello, layout);
}

TcpWelcome parse_tcp_answer(std::span<const std::byte> message) {
  return parse_answer<TcpHello, TcpWelcome>(message);
}

std::vector<std::byte> make_tcp_refusal(ErrorCode code, std::string_view reason) {
  return make_refusal<TcpHeader>(code, reason);
}

}  // namespace phub
