#include <algorithm>
#include <cctype>

#include "transport/error.h"
#include "transport/ofi/providers.h"
#include "transport/text.h"

namespace phub {
namespace {

constexpr size_t kMaxProviderBytes = 64;

}  // namespace

void check_ofi_provider_name(std::string_view name) {
  const auto fits = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == ';' || c == '_' || c == '-';
  };
  if (!name.empty() && name.size() <= kMaxProviderBytes &&
      std::all_of(name.begin(), name.end(), fits)) {
    return;
  }
  fail(ErrorCode::kInvalid, "'{}' is not the name of a provider of libfabric", printable(name));
}

}  // namespace phub
