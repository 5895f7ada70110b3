// The configuration file of `phub serve`.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "phub/commands/config.h"
#include "transport/error.h"

using namespace phub;  // NOLINT: a fuzz target

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const GivenOptions given =
        parse_config_file(std::string_view(reinterpret_cast<const char*>(data), size), "input");
    // What the file's parser accepts can be used.
    load_config(given, [](const char*) { return nullptr; });
  } catch (const Error& error) {
    PHUB_CHECK(error.code() == ErrorCode::kInvalid);
  }
  return 0;
}
