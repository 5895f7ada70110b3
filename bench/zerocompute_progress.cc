#include "bench/zerocompute_progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

#include "bench/zerocompute_shared.h"

namespace phub {
namespace {

double now_s() { return static_cast<double>(monotonic_ns()) / 1e9; }

}  // namespace

Progress::Progress(bool enabled) : enabled_(enabled), terminal_(isatty(STDERR_FILENO) == 1) {}

void Progress::begin(std::string_view what) {
  clear();
  what_ = what;
  begun_s_ = now_s();
  last_s_ = 0;
}

void Progress::update(std::string_view how_far) {
  const double now = now_s();
  if (!enabled_ || now - begun_s_ < 1 || now - last_s_ < (terminal_ ? 0.2 : 5.0)) return;
  last_s_ = now;
  const std::string line = fmt::format("{}: {}, {:.0f} s", what_, how_far, now - begun_s_);
  std::fprintf(stderr, terminal_ ? "\r\033[K%s" : "%s\n", line.c_str());
  std::fflush(stderr);
  shown_ = terminal_;
}

void Progress::clear() {
  if (shown_) std::fputs("\r\033[K", stderr);
  shown_ = false;
}

}  // namespace phub
