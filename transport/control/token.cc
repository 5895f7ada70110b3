#include "transport/control/token.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "transport/error.h"
#include "transport/text.h"

namespace phub {

namespace {

// A header holds it. Another byte is a sign of what is easily taken for a token.
std::string alone(std::string token, const std::string& from) {
  const bool is_one = std::ranges::all_of(token, [](char c) { return c > ' ' && c < 0x7f; });
  if (is_one) return token;
  fail(
      ErrorCode::kInvalid,
      "{} is not a token alone: of what 'phub token new' prints, it must hold the line that begins "
      "with 'phub-', and nothing else",
      from);
}

}  // namespace

std::string token_from_environment() {
  if (const char* token = std::getenv("PHUB_TOKEN")) return alone(token, "PHUB_TOKEN");
  const char* path = std::getenv("PHUB_TOKEN_FILE");
  if (path == nullptr || *path == 0) return "";
  struct stat facts {};
  if (stat(path, &facts) != 0) {
    fail(ErrorCode::kInvalid, "PHUB_TOKEN_FILE={}: {}", printable(path), std::strerror(errno));
  }
  if ((facts.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    fail(ErrorCode::kInvalid,
         "PHUB_TOKEN_FILE={}: others may use it (mode {:04o}); run chmod 600 on it",
         printable(path), facts.st_mode & 07777);
  }
  std::string token = first_line(path);
  if (token.ends_with('\r')) token.pop_back();
  if (token.empty()) {
    fail(ErrorCode::kInvalid, "PHUB_TOKEN_FILE={}: its first line holds no token", printable(path));
  }
  return alone(std::move(token),
               fmt::format("PHUB_TOKEN_FILE={}: its first line", printable(path)));
}

}  // namespace phub
