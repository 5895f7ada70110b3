#include "phub/server_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace phub {

ServerTrace::ServerTrace(uint32_t cores, size_t events_per_core) {
  logs_.reserve(cores);
  for (uint32_t i = 0; i < cores; ++i) logs_.emplace_back(events_per_core);
}

uint32_t ServerTrace::add_job(const Job& job) {
  Names names{.number = next_job_++, .job = job.spec().name, .keys = {}, .first_chunk = {}};
  for (const KeySpec& key : job.spec().keys) names.keys.push_back(key.name);
  const std::vector<ChunkLayout>& chunks = job.plan().chunks;
  for (uint32_t c = 0; c < chunks.size(); ++c) {
    if (chunks[c].key_element == 0) names.first_chunk.push_back(c);
  }
  jobs_.push_back(std::move(names));
  if (jobs_.size() > kJobs) jobs_.pop_front();
  return jobs_.back().number;
}

const ServerTrace::Names* ServerTrace::names_of(uint32_t job) const {
  if (jobs_.empty() || job < jobs_.front().number) return nullptr;
  return &jobs_[job - jobs_.front().number];
}

// "conv1.weight[3]": the fourth chunk of the key.
std::string ServerTrace::chunk_name(const Names& names, uint32_t chunk) {
  const auto after = std::upper_bound(names.first_chunk.begin(), names.first_chunk.end(), chunk);
  if (after == names.first_chunk.begin()) return "";
  const auto key = static_cast<size_t>(std::distance(names.first_chunk.begin(), after)) - 1;
  return fmt::format("{}[{}]", names.keys[key], chunk - names.first_chunk[key]);
}

void ServerTrace::write(TraceWriter& writer) const {
  const TraceNames meaning{.subject =
                               [this](const TraceEvent& event) {
                                 const Names* names = names_of(event.job);
                                 return names ? chunk_name(*names, event.subject) : "";
                               },
                           .job =
                               [this](const TraceEvent& event) {
                                 const Names* names = names_of(event.job);
                                 return names ? names->job : "";
                               }};
  for (uint32_t core = 0; core < logs_.size(); ++core) {
    writer.name_thread(static_cast<uint16_t>(core), fmt::format("core {}", core));
    writer.write(logs_[core], meaning);
  }
}

}  // namespace phub
