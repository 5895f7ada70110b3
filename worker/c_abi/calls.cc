// The calls to the control port, of phub.h over worker.h.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "kernels/hyper.h"
#include "transport/control/control_client.h"
#include "transport/control/token.h"
#include "worker/c_abi/with_worker.h"

namespace phub::c_abi {
namespace {

static_assert(PHUB_MOST_BRANCH_RUNS == kMostBranchRuns + 1);

std::map<std::string, double> values_of(const char* const* names, const double* values,
                                        size_t count) {
  std::map<std::string, double> all;
  if (count == 0) return all;
  need(names, "names");
  need(values, "values");
  for (size_t i = 0; i < count; ++i) {
    need(names[i], "a name");
    all[names[i]] = values[i];
  }
  return all;
}

// What the caller's pointers mean.
std::vector<KeyState> key_states(const Worker& worker, const size_t* keys, size_t count,
                                 const float* const* arrays) {
  need(keys, "keys");
  need(arrays, "arrays");
  const size_t of_key = 1 + worker.state_names().size();
  std::vector<KeyState> states(count);
  for (size_t i = 0; i < count; ++i) {
    states[i].key = key_in_range(worker, keys[i]);
    const uint64_t elements = worker.spec().keys[keys[i]].elements;
    for (size_t a = 0; a < of_key; ++a) {
      const float* array = arrays[i * of_key + a];
      need(array, "an array");
      states[i].arrays.emplace_back(const_cast<float*>(array), elements);
    }
  }
  return states;
}

}  // namespace
}  // namespace phub::c_abi

using namespace phub;         // NOLINT: the functions below are C's
using namespace phub::c_abi;  // NOLINT

phub_code phub_set_hyper(phub_worker* worker, const char* const* names, const double* values,
                         size_t count, uint64_t* round) {
  return decide(__func__, worker, round, [&](Worker& w, uint64_t from) {
    need(names, "names");
    need(values, "values");
    return w.set_hyper(values_of(names, values, count), from);
  });
}

phub_code phub_fork(phub_worker* worker, uint32_t parent, const char* const* names,
                    const double* values, size_t count, uint64_t* round, uint32_t* child) {
  return decide(__func__, worker, round, [&](Worker& w, uint64_t from) {
    need(child, "child");
    const BranchReply made = w.fork(parent, values_of(names, values, count), from);
    *child = made.branch;
    return made.round;
  });
}

phub_code phub_schedule(phub_worker* worker, const uint32_t* branches, const uint64_t* rounds,
                        size_t turns, uint64_t* round) {
  return decide(__func__, worker, round, [&](Worker& w, uint64_t from) {
    need(branches, "branches");
    need(rounds, "rounds");
    if (turns > kMostBranchTurns) {
      fail(ErrorCode::kInvalid, "turns: at most {}, got {}", kMostBranchTurns, turns);
    }
    std::vector<BranchTurn> all;
    for (size_t i = 0; i < turns; ++i) all.push_back({branches[i], rounds[i]});
    return w.schedule(all, from);
  });
}

phub_code phub_discard(phub_worker* worker, uint32_t branch, uint64_t* round) {
  return decide(__func__, worker, round,
                [&](Worker& w, uint64_t from) { return w.discard(branch, from); });
}

phub_code phub_kill(phub_worker* worker, uint32_t branch, uint64_t* round) {
  return decide(__func__, worker, round,
                [&](Worker& w, uint64_t from) { return w.kill(branch, from); });
}

phub_code phub_revive(phub_worker* worker, uint32_t branch, uint64_t* round) {
  return decide(__func__, worker, round,
                [&](Worker& w, uint64_t from) { return w.revive(branch, from); });
}

phub_code phub_branch_in(phub_worker* worker, uint64_t round, uint32_t* branch) {
  return get(__func__, worker, branch, "branch", [&](Worker& w) { return w.branch_in(round); });
}

phub_code phub_report_loss(phub_worker* worker, double loss, uint64_t round) {
  return with(__func__, worker, [&](Worker& w) { w.report_loss(loss, round); });
}

phub_code phub_report_named_loss(phub_worker* worker, const char* name, double loss,
                                 uint64_t round) {
  return with(__func__, worker, [&](Worker& w) {
    need(name, "name");
    w.report_loss(loss, round, name);
  });
}

phub_code phub_batch_in(phub_worker* worker, uint64_t round, uint64_t* samples) {
  return get(__func__, worker, samples, "samples", [&](Worker& w) { return w.batch_in(round); });
}

phub_code phub_branch_runs(phub_worker* worker, uint64_t* rounds, uint32_t* branches, size_t room,
                           size_t* count) {
  return with(__func__, worker, [&](Worker& w) {
    if (room > 0) need(rounds, "rounds");
    if (room > 0) need(branches, "branches");
    need(count, "count");
    const std::vector<BranchRun> runs = w.branches().runs;
    *count = runs.size();
    for (size_t i = 0; i < std::min(room, runs.size()); ++i) {
      rounds[i] = runs[i].round;
      branches[i] = runs[i].branch;
    }
  });
}

phub_code phub_branches(phub_worker* worker, phub_branch* branches, size_t room, size_t* count) {
  return with(__func__, worker, [&](Worker& w) {
    if (room > 0) need(branches, "branches");
    need(count, "count");
    const std::vector<BranchStatus> all = w.branches().branches;
    *count = all.size();
    for (size_t i = 0; i < std::min(room, all.size()); ++i) {
      branches[i] = {.round = all[i].round,
                     .rounds = all[i].rounds,
                     .branch = all[i].branch,
                     .parent = all[i].parent,
                     .runs = all[i].runs,
                     .killed = all[i].on_disk      ? 2u
                               : all[i].killed > 0 ? 1u
                                                   : 0u,
                     .batch = all[i].batch};
    }
  });
}

phub_code phub_branch_values(phub_worker* worker, uint32_t branch, const char** names,
                             double* values, size_t room, size_t* count) {
  return with(__func__, worker, [&](Worker& w) {
    if (room > 0) need(names, "names");
    if (room > 0) need(values, "values");
    need(count, "count");
    const std::map<std::string, double> all = w.branch_values(branch);
    *count = 0;
    for (const auto& [name, value] : all) {
      const size_t field = kernels::hyper_field(name);
      if (field == kernels::kHyperFields.size()) continue;  // a newer server's
      const size_t at = (*count)++;
      if (at >= room) continue;
      names[at] = kernels::kHyperFields[field].name;
      values[at] = value;
    }
  });
}

phub_code phub_state_name(const phub_worker* worker, size_t state, const char** name) {
  return get(__func__, worker, name, "name", [&](Worker& w) {
    const auto names = optimizer_states(w.spec());  // literals
    if (state < names.size()) return names[state].data();
    throw Refusal(PHUB_NOT_FOUND, fmt::format("optimizer {} keeps {} states of a key",
                                              w.spec().optimizer, names.size()));
  });
}

phub_code phub_get_state(phub_worker* worker, const size_t* keys, size_t count,
                         float* const* arrays, uint64_t* steps, uint64_t* round) {
  return waiting(__func__, worker, [&](Worker& w) {
    auto states = key_states(w, keys, count, arrays);
    const uint64_t got = w.get_state(states);
    for (size_t i = 0; i < count && steps != nullptr; ++i) steps[i] = states[i].step;
    if (round != nullptr) *round = got;
  });
}

phub_code phub_set_state(phub_worker* worker, const size_t* keys, size_t count,
                         const float* const* arrays, const uint64_t* steps, uint64_t* round) {
  return waiting(__func__, worker, [&](Worker& w) {
    need(steps, "steps");
    auto states = key_states(w, keys, count, arrays);
    for (size_t i = 0; i < count; ++i) states[i].step = steps[i];
    const uint64_t from = w.set_state(states);
    if (round != nullptr) *round = from;
  });
}

phub_code phub_checkpoint(phub_worker* worker, uint64_t* round) {
  return waiting(__func__, worker, [&](Worker& w) {
    need(round, "round");
    *round = w.checkpoint();
  });
}

phub_code phub_await_checkpoint(phub_worker* worker, uint64_t round, uint32_t timeout_ms) {
  return waiting(__func__, worker, [&](Worker& w) { w.await_checkpoint(round, timeout_ms); });
}

phub_code phub_remark(phub_worker* worker, const char* subject, const char* text) {
  return with(__func__, worker, [&](Worker& w) {
    need(subject, "subject");
    need(text, "text");
    w.remark(subject, text);
  });
}

phub_code phub_barrier(phub_worker* worker) {
  return waiting(__func__, worker, [](Worker& w) { w.barrier(); });
}

phub_code phub_job_status(const char* server, const char* job, phub_job* status) {
  return call(__func__, [&] {
    need_struct(status, "status");
    check_may_wait();
    need(server, "server");
    need(job, "job");
    const JobStatus found = ControlClient(server, token_from_environment()).job_status(job);
    const auto ranks = [&](const char* state) {
      return static_cast<uint32_t>(
          std::count_if(found.ranks.begin(), found.ranks.end(),
                        [&](const RankStatus& rank) { return rank.state == state; }));
    };
    phub_job all = {.size = 0,
                    .state = {},
                    .keys = found.keys,
                    .chunks = found.chunks,
                    .elements = found.elements,
                    .memory_bytes = found.memory_bytes,
                    .completed_round = found.completed_round,
                    .rounds_per_s = found.rounds_per_s,
                    .ranks_live = ranks("live"),
                    .ranks_lost = ranks("lost"),
                    .ranks_waited_for = static_cast<uint32_t>(found.waiting_for.size()),
                    .reserved = 0,
                    .error = {}};
    copy_text(all.state, sizeof all.state, found.state);
    copy_text(all.error, sizeof all.error, found.error);
    copy_struct(status, all);
  });
}

phub_code phub_job_remove(const char* server, const char* job) {
  return call(__func__, [&] {
    need(server, "server");
    need(job, "job");
    check_may_wait();
    check_job_name(job);
    ControlClient(server, token_from_environment()).remove(job);
  });
}
