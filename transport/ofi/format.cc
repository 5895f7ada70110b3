#include "transport/ofi/format.h"

#include <string>

#include "transport/hello_sizes.h"

namespace phub {
namespace {

bool is_possible(const OfiHeader& header) {
  switch (header.type) {
    case OfiMessage::kHello:
      return header.bytes == sizeof(OfiHello) - sizeof(OfiHeader);
    case OfiMessage::kWelcome:
      return header.bytes == sizeof(OfiWelcome) - sizeof(OfiHeader);
    case OfiMessage::kRefusal:
      return header.bytes <= kMaxRefusalBytes;
  }
  return false;
}

void check_target(const char* name, const OfiTarget& target) {
  if (target.name_bytes >= 1 && target.name_bytes <= kOfiMaxNameBytes) return;
  fail(ErrorCode::kInvalid, "{}: an endpoint's name of {} bytes, 1 to {} are possible", name,
       target.name_bytes, kOfiMaxNameBytes);
}

}  // namespace

OfiHeader parse_ofi_header(std::span<const std::byte> message, const char* name) {
  const auto header = read_header<OfiHeader>(name, message);
  if (!is_possible(header)) {
    fail(ErrorCode::kInvalid, "{}: message type {} with {} bytes", name,
         static_cast<uint32_t>(header.type), header.bytes);
  }
  return header;
}

OfiHello parse_ofi_hello(std::span<const std::byte> message) {
  const OfiHeader header = parse_ofi_header(message, "hello");
  if (header.type != OfiMessage::kHello || message.size() != sizeof(OfiHello)) {
    fail(ErrorCode::kInvalid, "hello: message type {} with {} bytes",
         static_cast<uint32_t>(header.type), message.size());
  }
  const auto hello = read_as<OfiHello>(message);
  check_ticket(hello.ticket);
  check_target("hello", hello.results);
  return hello;
}

void check_ofi_hello(const OfiHello& hello, const LinkLayout& layout) {
  check_hello_sizes(hello, layout);
}

OfiWelcome parse_ofi_answer(std::span<const std::byte> message) {
  const OfiHeader header = parse_ofi_header(message, "welcome");
  if (header.type == OfiMessage::kHello || message.size() != sizeof(OfiHeader) + header.bytes) {
    fail(ErrorCode::kInvalid, "welcome: message type {} with {} bytes",
         static_cast<uint32_t>(header.type), message.size());
  }
  if (header.type == OfiMessage::kRefusal) throw parse_refusal(message.subspan(sizeof(OfiHeader)));
  const auto welcome = read_as<OfiWelcome>(message);
  check_target("welcome", welcome.slots);
  return welcome;
}

std::vector<std::byte> make_ofi_refusal(ErrorCode code, std::string_view reason) {
  const std::string text = refusal_text(code, reason);
  const OfiHeader header = {.type = OfiMessage::kRefusal,
                            .bytes = static_cast<uint32_t>(text.size())};
  return make_message(header, std::as_bytes(std::span(text)));
}

}  // namespace phub
