// The join request: what is accepted is valid and comes back as it is.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "transport/control/messages_json.h"

using namespace phub;  // NOLINT: a fuzz target

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const JoinRequest request =
        from_json<JoinRequest>(std::string_view(reinterpret_cast<const char*>(data), size));
    validate(request.spec);
    const JoinRequest back = from_json<JoinRequest>(to_json(request));
    PHUB_CHECK(back.spec == request.spec);
    PHUB_CHECK(back.rank == request.rank && back.replace == request.replace);
    PHUB_CHECK(difference(back.spec, request.spec).empty());
  } catch (const Error& error) {
    PHUB_CHECK(error.code() == ErrorCode::kInvalid);
  }
  return 0;
}
