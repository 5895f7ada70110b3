// The server's answers, as a worker reads them.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "transport/control/messages_json.h"

using namespace phub;  // NOLINT: a fuzz target

namespace {

// What was accepted is encoded to a text that decodes and encodes to itself.
template <class Message>
void check(std::string_view text) {
  try {
    const std::string encoded = to_json(from_json<Message>(text));
    PHUB_CHECK(to_json(from_json<Message>(encoded)) == encoded);
  } catch (const Error& error) {
    PHUB_CHECK(error.code() == ErrorCode::kInvalid);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  check<JoinReply>(text);
  check<Offer>(text);
  check<Pulse>(text);
  check<LogPage>(text);
  check<HyperReply>(text);
  check<ServerStatus>(text);
  try {
    const Error error = parse_error(text);
    PHUB_CHECK(parse_error(error_json(error.code(), error.what())).code() == error.code());
  } catch (const Error& error) {
    PHUB_CHECK(error.code() == ErrorCode::kInvalid);
  }
  return 0;
}
