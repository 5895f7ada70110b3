#include "worker/progress/worker_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "transport/error.h"

namespace phub {

std::string trace_path_of(const std::string& path, uint32_t rank, uint32_t world_size) {
  const size_t at = path.find("%r");
  if (at == path.npos) return world_size > 1 ? fmt::format("{}.{}", path, rank) : path;
  return fmt::format("{}{}{}", path.substr(0, at), rank, path.substr(at + 2));
}

WorkerTrace::WorkerTrace(const std::string& path, const JoinReply& reply, size_t events)
    : writer_(trace_path_of(path, reply.rank, reply.spec.world_size),
              fmt::format("rank {} of {}", reply.rank, reply.spec.name)),
      log_(events),
      job_(reply.spec.name) {
  for (const KeySpec& key : reply.spec.keys) keys_.push_back(key.name);
}

WorkerTrace::~WorkerTrace() {
  try {
    for (size_t t = 0; t < threads_.size(); ++t) {
      writer_.name_thread(static_cast<uint16_t>(t), fmt::format("thread {}", t));
    }
    writer_.write(log_, {.subject = [this](const TraceEvent& e) { return keys_[e.subject]; },
                         .job = [this](const TraceEvent&) { return job_; }});
    writer_.close();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "phub: %s\n", error.what());
  }
}

TraceEvent WorkerTrace::event(const char* name, size_t key, uint64_t round) {
  return {.name = name,
          .round = round,
          .subject = key < keys_.size() ? static_cast<uint32_t>(key) : TraceEvent::kNone,
          .thread = this_thread()};
}

void WorkerTrace::add(const char* name, size_t key, uint64_t round, uint64_t begin_ns) {
  TraceEvent span = event(name, key, round);
  span.begin_ns = begin_ns;
  span.duration_ns = trace_now_ns() - begin_ns;
  log_.add(span);
}

uint16_t WorkerTrace::this_thread() {
  const std::thread::id id = std::this_thread::get_id();
  const auto at = std::find(threads_.begin(), threads_.end(), id);
  const auto number = static_cast<uint16_t>(at - threads_.begin());
  if (at == threads_.end()) threads_.push_back(id);
  return number;
}

}  // namespace phub
