#include "transport/verbs_format.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "transport/text.h"

namespace phub {

uint64_t verbs_locked_bytes(const LinkLayout& layout) {
  return layout.all_egress_bytes() + layout.max_ranks * layout.ingress_bytes;
}

VerbsHello parse_verbs_hello(std::span<const std::byte> private_data) {
  VerbsHello hello;
  if (private_data.size() < sizeof hello) {
    fail(ErrorCode::kInvalid, "hello: {} bytes of private data, {} expected", private_data.size(),
         sizeof hello);
  }
  std::memcpy(&hello, private_data.data(), sizeof hello);
  if (hello.magic != kVerbsMagic) {
    fail(ErrorCode::kInvalid, "hello: magic {:#x}: not a worker of phub", hello.magic);
  }
  if (hello.version != kVerbsVersion) {
    fail(ErrorCode::kMismatch, "hello: this server speaks version {} over RDMA, the worker {}",
         kVerbsVersion, hello.version);
  }
  return hello;
}

std::array<uint8_t, kVerbsTicketBytes> ticket_bytes(std::string_view digits) {
  std::array<uint8_t, kVerbsTicketBytes> bytes = {};
  bool good = digits.size() == 2 * bytes.size();
  for (size_t i = 0; good && i < bytes.size(); ++i) {
    const char* first = digits.data() + 2 * i;
    const auto [end, error] = std::from_chars(first, first + 2, bytes[i], 16);
    good = error == std::errc() && end == first + 2;
  }
  if (!good) {
    fail(ErrorCode::kInvalid, "a ticket of {} characters; {} hexadecimal digits expected",
         digits.size(), 2 * bytes.size());
  }
  return bytes;
}

std::string ticket_digits(std::span<const uint8_t, kVerbsTicketBytes> bytes) {
  std::string digits;
  for (const uint8_t byte : bytes) digits += fmt::format("{:02x}", byte);
  return digits;
}

std::string verbs_refusal(const Error& error) {
  return fmt::format("{}: {}", name_of(error.code()), error.what())
      .substr(0, kVerbsMaxRefusalBytes);
}

Error parse_verbs_refusal(std::span<const std::byte> private_data) {
  std::string text(reinterpret_cast<const char*>(private_data.data()),
                   std::min(private_data.size(), kVerbsMaxRefusalBytes));
  text.resize(std::min(text.size(), text.find('\0')));
  const size_t colon = text.find(": ");
  if (colon == text.npos) {
    return {ErrorCode::kUnavailable, "the server refused the connection and did not say why"};
  }
  return {parse_error_code(text.substr(0, colon)), printable(text.substr(colon + 2))};
}

}  // namespace phub
