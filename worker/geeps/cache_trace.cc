#include "worker/geeps/cache_trace.h"

#include <fmt/format.h>

#include <array>
#include <cstdio>
#include <exception>

namespace phub::geeps {
namespace {

constexpr size_t kEvents = 200'000;  // the latest are kept

}  // namespace

CacheTrace::CacheTrace(const std::string& path, uint32_t rank, std::vector<std::string> tables)
    : writer_(path, fmt::format("cache of rank {}", rank)),
      log_(kEvents),
      rank_(rank),
      tables_(std::move(tables)) {
  constexpr std::array<const char*, 6> kTracks = {"compute",     "waiting", "to the device",
                                                  "to the host", "push",    "pull"};
  uint16_t track = 0;
  for (const char* name : kTracks) writer_.name_thread(track++, name);
}

CacheTrace::~CacheTrace() {
  try {
    writer_.write(log_, {.subject =
                             [&](const TraceEvent& event) {
                               return event.subject < tables_.size() ? tables_[event.subject]
                                                                     : std::string();
                             },
                         .job = {}});
    writer_.close();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "phub: the trace of the cache: %s\n", e.what());
  }
}

void CacheTrace::add(CacheTrack track, const char* name, uint32_t table, uint64_t clock,
                     uint64_t begin_ns) {
  const std::lock_guard lock(mutex_);
  log_.add({.name = name,
            .begin_ns = begin_ns,
            .duration_ns = trace_now_ns() - begin_ns,
            .round = clock,
            .subject = table,
            .rank = rank_,
            .thread = static_cast<uint16_t>(track),
            .kind = TraceEvent::Kind::kOverlapping});
}

}  // namespace phub::geeps
