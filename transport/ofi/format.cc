#include "transport/ofi/format.h"

#include "transport/hello.h"

namespace phub {
namespace {

void check_target(const char* name, const OfiTarget& target) {
  if (target.name_bytes >= 1 && target.name_bytes <= kOfiMaxNameBytes) return;
  fail(ErrorCode::kInvalid, "{}: an endpoint's name of {} bytes, 1 to {} are possible", name,
       target.name_bytes, kOfiMaxNameBytes);
}

}  // namespace

OfiHeader parse_ofi_header(std::span<const std::byte> message, const char* name) {
  return parse_greeting_header<OfiHello, OfiWelcome>(message, name);
}

OfiHello parse_ofi_hello(std::span<const std::byte> message) {
  const auto hello = parse_hello<OfiHello, OfiWelcome>(message);
  check_target("hello", hello.results);
  return hello;
}

void check_ofi_hello(const OfiHello& hello, const LinkLayout& layout) {
  check_hello_sizes(hello, layout);
}

OfiWelcome parse_ofi_answer(std::span<const std::byte> message) {
  const auto welcome = parse_answer<OfiHello, OfiWelcome>(message);
  check_target("welcome", welcome.slots);
  return welcome;
}

std::vector<std::byte> make_ofi_refusal(ErrorCode code, std::string_view reason) {
  return make_refusal<OfiHeader>(code, reason);
}

}  // namespace phub
