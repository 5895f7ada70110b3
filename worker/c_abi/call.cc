#include "worker/c_abi/call.h"

#include <algorithm>
#include <array>
#include <utility>

namespace phub::c_abi {
namespace {

constexpr std::array<std::pair<ErrorCode, phub_code>, 13> kCodes = {{
    {ErrorCode::kInvalid, PHUB_INVALID},
    {ErrorCode::kMismatch, PHUB_MISMATCH},
    {ErrorCode::kTaken, PHUB_TAKEN},
    {ErrorCode::kFull, PHUB_FULL},
    {ErrorCode::kNotFound, PHUB_NOT_FOUND},
    {ErrorCode::kUnauthorized, PHUB_UNAUTHORIZED},
    {ErrorCode::kFenced, PHUB_FENCED},
    {ErrorCode::kRankLost, PHUB_RANK_LOST},
    {ErrorCode::kNonFinite, PHUB_NON_FINITE},
    {ErrorCode::kTimeout, PHUB_TIMEOUT},
    {ErrorCode::kUnavailable, PHUB_UNAVAILABLE},
    {ErrorCode::kRewound, PHUB_REWOUND},
    {ErrorCode::kInternal, PHUB_INTERNAL},
}};

thread_local std::array<char, 2048> last_error = {};

bool continues_character(char c) { return (static_cast<unsigned char>(c) & 0xc0u) == 0x80u; }

}  // namespace

phub_code code_of(ErrorCode code) {
  for (const auto& [ours, theirs] : kCodes) {
    if (ours == code) return theirs;
  }
  return PHUB_INTERNAL;
}

void copy_text(char* out, size_t size, std::string_view text) {
  if (size == 0) return;
  size_t length = std::min(text.size(), size - 1);
  if (length < text.size()) {
    while (length > 0 && continues_character(text[length])) --length;
  }
  std::memcpy(out, text.data(), length);
  out[length] = 0;
}

phub_code failed(const char* function, phub_code code, std::string_view message) noexcept {
  char* out = last_error.data();
  copy_text(out, last_error.size(), function);
  size_t used = std::strlen(out);
  copy_text(out + used, last_error.size() - used, ": ");
  used += std::strlen(out + used);
  copy_text(out + used, last_error.size() - used, message);
  return code;
}

}  // namespace phub::c_abi

extern "C" {

const char* phub_last_error(void) { return phub::c_abi::last_error.data(); }

const char* phub_code_name(int code) {
  switch (code) {
    case PHUB_OK:
      return "ok";
    case PHUB_BAD_HANDLE:
      return "bad_handle";
    case PHUB_WRONG_THREAD:
      return "wrong_thread";
    default:
      break;
  }
  for (const auto& [ours, theirs] : phub::c_abi::kCodes) {
    if (theirs == code) return phub::name_of(ours).data();
  }
  return "unknown";
}

const char* phub_version(void) { return PHUB_VERSION; }

int phub_abi_version(void) { return PHUB_ABI_VERSION; }
}
