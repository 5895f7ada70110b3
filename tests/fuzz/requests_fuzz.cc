// The bodies of a rank's requests.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "transport/control/messages_json.h"

using namespace phub;  // NOLINT: a fuzz target

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const Credential who = parse_credential(text);
    PHUB_CHECK(parse_credential(to_json(who)).incarnation == who.incarnation);
  } catch (const Error& error) {
    PHUB_CHECK(error.code() == ErrorCode::kInvalid);
  }
  try {
    const auto [who, values] = parse_hyper(text);
    PHUB_CHECK(parse_hyper(hyper_json(who, values)).second == values);
  } catch (const Error& error) {
    PHUB_CHECK(error.code() == ErrorCode::kInvalid);
  }
  return 0;
}
