#include "transport/control/token.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "transport/error.h"
#include "transport/text.h"

namespace phub {

std::string token_from_environment() {
  if (const char* token = std::getenv("PHUB_TOKEN")) return token;
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
  return token;
}

}  // namespace phub
