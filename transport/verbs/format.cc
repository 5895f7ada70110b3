#include "transport/verbs/format.h"

#include <charconv>

#include "transport/greeting.h"

namespace phub {

uint64_t verbs_locked_bytes(const LinkLayout& layout) {
  return layout.all_results_bytes() + layout.max_ranks * layout.slots_bytes;
}

VerbsHello parse_verbs_hello(std::span<const std::byte> private_data) {
  return read_header<VerbsHello>("hello", private_data);
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

}  // namespace phub
