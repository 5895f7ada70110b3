// The state of keys that ranks get and set: a set is in the job's log with its round, and every get
// must be what the replay has after its round.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "tests/sim/rack_logs.h"
#include "tests/sim/rack_oracle.h"
#include "tests/sim/values.h"
#include "transport/error.h"

namespace phub::sim {
namespace {

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::ranges::equal(std::as_bytes(std::span(a)), std::as_bytes(std::span(b)));
}

bool same_arrays(const Replay::State& a, const Replay::State& b) {
  return same_bits(a.parameters, b.parameters) && same_bits(a.state0, b.state0) &&
         same_bits(a.state1, b.state1);
}

}  // namespace

// Key by key, of each its parameters and then the optimizer's states, which are positive.
std::vector<float> Oracle::state_of(const SetCall& call) const {
  const size_t arrays = 1 + optimizer_states(job_.spec).size();
  std::vector<float> all;
  for (const uint32_t key : call.keys) {
    const uint64_t stream = mix(mix(mix(job_.seed, 0x736574 + call.who.rank), call.who.incarnation),
                                mix(call.nth, key));
    for (uint64_t i = 0; i < arrays * job_.spec.keys[key].elements; ++i) {
      const float value = value_of(mix(stream, i));
      all.push_back(i < job_.spec.keys[key].elements ? value : std::fabs(value));
    }
  }
  return all;
}

void Oracle::did_set(const SetCall& call, uint64_t round) {
  for (SetCall& mine : sets_) {
    if (mine.who == call.who && mine.nth == call.nth) mine.round = round;
  }
}

// The chunk's part of a key's state.
Replay::State Oracle::slice(uint32_t chunk, std::span<const float> key) const {
  const ChunkLayout& c = plan_.chunks[chunk];
  const size_t arrays = 1 + optimizer_states(job_.spec).size();
  Replay::State state;
  std::vector<float>* const into[] = {&state.parameters, &state.state0, &state.state1};
  for (size_t array = 0; array < arrays; ++array) {
    const auto part =
        key.subspan(array * job_.spec.keys[c.key].elements + c.key_element, c.elements);
    into[array]->assign(part.begin(), part.end());
  }
  return state;
}

void Oracle::got(const std::vector<uint32_t>& keys, const StateReply& reply, std::string_view bytes,
                 size_t sets) {
  std::vector<float> all(bytes.size() / sizeof(float));
  std::memcpy(all.data(), bytes.data(), bytes.size());
  std::span<const float> rest(all);
  for (size_t i = 0; i < keys.size(); ++i) {
    const size_t elements =
        job_.spec.keys[keys[i]].elements * (1 + optimizer_states(job_.spec).size());
    for (uint32_t c = first_chunk_[keys[i]]; c < first_chunk_[keys[i] + 1]; ++c) {
      SeenState seen{.round = reply.round,
                     .sets = sets,
                     .key = seen_keys_,
                     .state = slice(c, rest.first(elements))};
      seen.state.steps = reply.steps.at(i);
      seen_states_[c].push_back(std::move(seen));
      ++states_;
    }
    ++seen_keys_;
    rest = rest.subspan(elements);
  }
}

// The sets that were carried out, in their order. Throws Error where log and ranks differ.
std::vector<Oracle::SetCall> Oracle::sets_in(const std::vector<LogRecord>& log) const {
  std::vector<SetCall> all;
  size_t told = 0;
  for (const LogRecord& record : log) {
    if (record.kind != LogRecord::Kind::kSet) continue;
    const Member who{record.rank, record.incarnation};
    const SetCall* found = nullptr;
    for (const SetCall& call : sets_) {
      if (at_root(job_.spec, job_.levels, call.who) != who ||
          (call.round && *call.round != record.round))
        continue;
      if (found == nullptr || call.round) found = &call;
    }
    if (found == nullptr) {
      fail(ErrorCode::kInvalid, "{}: the log has a set of rank {} (incarnation {}) in round {}",
           job_.spec.name, who.rank, who.incarnation, record.round);
    }
    told += found->round && !found->is_void;
    all.push_back(*found);
    all.back().round = record.round;
    std::vector<ChunkSpan> chunks;
    for (uint32_t c = 0; c < plan_.chunks.size(); ++c) {
      if (std::ranges::find(found->keys, plan_.chunks[c].key) == found->keys.end()) continue;
      if (chunks.empty() || chunks.back().last + 1 != c) chunks.push_back({c, c});
      chunks.back().last = c;
    }
    if (chunks != record.chunks) {
      fail(ErrorCode::kInvalid, "{}: a set in round {} has other chunks in the log", job_.spec.name,
           record.round);
    }
  }
  const auto answered = static_cast<size_t>(std::ranges::count_if(
      sets_, [](const SetCall& call) { return call.round && !call.is_void; }));
  if (answered != told) {
    fail(ErrorCode::kInvalid, "{}: {} sets were answered, the log has {} of them", job_.spec.name,
         answered, told);
  }
  return all;
}

Replay::State Oracle::state_of(const SetCall& call, uint32_t chunk) const {
  const uint32_t key = plan_.chunks[chunk].key;
  SetCall alone = call;
  alone.keys = {key};
  Replay::State state = slice(chunk, state_of(alone));
  state.steps = call.steps(key);
  return state;
}

void Oracle::set_before_next(Replay& replay, uint32_t chunk,
                             const std::vector<SetCall>& sets) const {
  for (const SetCall& call : sets) {
    if (*call.round != replay.round() + 1) continue;
    if (std::ranges::find(call.keys, plan_.chunks[chunk].key) == call.keys.end()) continue;
    replay.set(state_of(call, chunk));
  }
}

// A get sees also what was set before it for the next round.
void Oracle::check_states(uint32_t chunk, const Replay& replay, const std::vector<SetCall>& sets,
                          MostSteps& most_steps) const {
  for (const SeenState& seen : seen_states_[chunk]) {
    if (seen.round != replay.round()) continue;
    Replay next = replay;
    set_before_next(
        next, chunk,
        {sets.begin(), sets.begin() + static_cast<ptrdiff_t>(std::min(seen.sets, sets.size()))});
    uint64_t& most = most_steps[seen.key];
    most = std::max(most, next.state().steps);
    if (same_arrays(seen.state, next.state())) continue;
    fail(ErrorCode::kInvalid,
         "{} chunk {}: a get after round {} (and {} sets) has other values than the reference",
         job_.spec.name, chunk, seen.round, seen.sets);
  }
}

// The steps of a key are those of the chunk with the most. REQUIRES: all chunks were checked.
void Oracle::check_steps(const MostSteps& most_steps) const {
  for (uint32_t chunk = 0; chunk < seen_states_.size(); ++chunk) {
    for (const SeenState& seen : seen_states_[chunk]) {
      const auto most = most_steps.find(seen.key);
      if (most == most_steps.end() || most->second == seen.state.steps) continue;
      fail(ErrorCode::kInvalid, "{} key {}: a get after round {} has {} steps, the reference {}",
           job_.spec.name, plan_.chunks[chunk].key, seen.round, seen.state.steps, most->second);
    }
  }
}

}  // namespace phub::sim
