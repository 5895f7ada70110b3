// The tokens file of `phub serve`.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "phub/control/tokens.h"
#include "transport/error.h"

using namespace phub;  // NOLINT: a fuzz target

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    for (const Token& token :
         parse_tokens(std::string_view(reinterpret_cast<const char*>(data), size), "input")) {
      PHUB_CHECK(!token.name.empty() && !token.jobs.empty());
      for (const std::string& pattern : token.jobs) check_pattern(pattern);
      token.covers("a-name_of.a-job");
      PHUB_CHECK(!token.expires_s || token.expired(*token.expires_s));
    }
  } catch (const Error& error) {
    PHUB_CHECK(error.code() == ErrorCode::kInvalid);
  }
  return 0;
}
