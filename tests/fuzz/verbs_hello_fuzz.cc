// The private data of RDMA connections as either side reads it, and the names of devices.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "transport/error.h"
#include "transport/greeting.h"
#include "transport/verbs/devices.h"
#include "transport/verbs/format.h"

using namespace phub;  // NOLINT: a fuzz target

namespace {

void check_hello(std::span<const std::byte> data) {
  const VerbsHello hello = parse_verbs_hello(data);
  PHUB_CHECK(hello.magic == kVerbsMagic && hello.version == kVerbsVersion);
  const std::string digits = ticket_digits(hello.ticket);
  PHUB_CHECK(digits.size() == kTicketDigits && ticket_bytes(digits) == hello.ticket);
}

void check_ticket_text(std::string_view text) {
  const auto bytes = ticket_bytes(text);
  PHUB_CHECK(text.size() == kTicketDigits && ticket_bytes(ticket_digits(bytes)) == bytes);
}

// What a stranger says is shown as it is: it must be fit for that, and survive being passed on.
void check_refusal(std::span<const std::byte> data) {
  const Error error = parse_refusal(data);
  const std::string_view text = error.what();
  PHUB_CHECK(std::all_of(text.begin(), text.end(), [](char c) {
    return static_cast<unsigned char>(c) >= ' ' && c != '\x7f';
  }));
  const std::string again = refusal_text(error.code(), error.what(), kVerbsMaxRefusalBytes);
  PHUB_CHECK(again.size() <= kVerbsMaxRefusalBytes);
  PHUB_CHECK(parse_refusal(std::as_bytes(std::span(again))).code() == error.code());
}

void check_choice(std::string_view text) {
  const VerbsChoice choice = parse_verbs_choice(text);
  PHUB_CHECK(!choice.device.empty() && choice.device.find(':') == choice.device.npos);
  PHUB_CHECK(choice.port || !choice.gid_index);
}

template <typename Check, typename Input>
void allow_errors(Check check, Input input) {
  try {
    check(input);
  } catch (const Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {  // NOLINT: its name
  const auto bytes = std::as_bytes(std::span(data, size));
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  allow_errors(check_hello, bytes);
  allow_errors(check_ticket_text, text);
  check_refusal(bytes);  // never throws
  allow_errors(check_choice, text);
  return 0;
}
