// The server's answers, as a worker reads them.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "transport/control/messages_json.h"

using namespace phub;  // NOLINT: a fuzz target

namespace {

// What was accepted is encoded to a text that decodes and encodes to itself.
template <class Message>
void check(std::string_view text, Message (*parse)(std::string_view)) {
  try {
    const std::string encoded = to_json(parse(text));
    PHUB_CHECK(to_json(parse(encoded)) == encoded);
  } catch (const Error& error) {
    PHUB_CHECK(error.code() == ErrorCode::kInvalid);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  check(text, parse_join_reply);
  check(text, parse_offer);
  check(text, parse_pulse);
  check(text, parse_log_page);
  check(text, parse_hyper_reply);
  check(text, parse_status);
  try {
    const Error error = parse_error(text);
    PHUB_CHECK(parse_error(error_json(error.code(), error.what())).code() == error.code());
  } catch (const Error& error) {
    PHUB_CHECK(error.code() == ErrorCode::kInvalid);
  }
  return 0;
}
