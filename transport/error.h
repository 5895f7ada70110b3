// The one exception type of set-up and control, and the check that stops the program.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace phub {

// An error, in words that name the object and the way out. `code` is for programs and travels in
// the control port's answers.
enum class ErrorCode {
  kInvalid,       // the request is wrong: bad key, option, length
  kMismatch,      // ranks of one job disagree
  kTaken,         // rank or name in use
  kFull,          // memory, ranks or another limit is hit
  kNotFound,      // no such job, rank, key
  kUnauthorized,  // wrong ticket
  kFenced,        // this incarnation was replaced or declared lost
  kRankLost,      // another rank is missing and the job's policy is to fail
  kNonFinite,     // NaN or Inf in a gradient and the job's policy is to stop
  kTimeout,
  kUnavailable,  // the server is not there
  kRewound,      // the server died, and the job goes on from a checkpoint: join again
  kInternal,
};
std::string_view name_of(ErrorCode code);
ErrorCode parse_error_code(std::string_view name);  // unknown: kInternal

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& what) : std::runtime_error(what), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

template <typename... Args>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

[[noreturn]] void check_failed(const char* file, int line, const char* condition);

// A broken invariant of ours stops the program. Always on; per chunk, never per element.
#define PHUB_CHECK(condition) \
  ((condition) ? (void)0 : ::phub::check_failed(__FILE__, __LINE__, #condition))

}  // namespace phub
