// Key tables in files.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "phub/plan/models.h"
#include "transport/error.h"

using namespace phub;  // NOLINT: a fuzz target

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const KeyTable table =
        parse_key_table(std::string_view(reinterpret_cast<const char*>(data), size), "input");
    PHUB_CHECK(!table.keys.empty() && table.keys.size() <= kMaxKeys);
    PHUB_CHECK(total_elements(table) >= table.keys.size());
    PHUB_CHECK(total_elements(table) <= kMaxElements);
  } catch (const Error& error) {
    PHUB_CHECK(error.code() == ErrorCode::kInvalid);
  }
  return 0;
}
