// The bodies of a rank's requests.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "transport/control/messages_json.h"

using namespace phub;  // NOLINT: a fuzz target

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const auto who = from_json<Credential>(text);
    PHUB_CHECK(from_json<Credential>(to_json(who)).incarnation == who.incarnation);
  } catch (const Error& error) {
    PHUB_CHECK(error.code() == ErrorCode::kInvalid);
  }
  try {
    const auto request = from_json<HyperRequest>(text);
    PHUB_CHECK(from_json<HyperRequest>(to_json(request)).values == request.values);
  } catch (const Error& error) {
    PHUB_CHECK(error.code() == ErrorCode::kInvalid);
  }
  return 0;
}
