// phub.h over worker.h: handles become objects, exceptions become codes.
#include <algorithm>
#include <cstring>
#include <map>
#include <string>

#include "kernels/products.h"
#include "transport/control/control_client.h"
#include "transport/control/token.h"
#include "worker/c_abi/call.h"
#include "worker/c_abi/options.h"
#include "worker/c_abi/worker.h"
#include "worker/worker.h"

namespace phub::c_abi {
namespace {

constexpr uint32_t kGoodbyeMs = 2000;
// The size of its first version: programs that were compiled with that go on to work.
constexpr size_t kLeastKeyMemory = 6 * sizeof(void*);
static_assert(PHUB_MOST_BRANCH_RUNS == kMostBranchRuns + 1);

template <typename Body>
phub_code with(const char* function, const phub_worker* handle, Body body) {
  return call(function, [&] {
    const auto object = object_of<WorkerObject>(handle);
    body(object->worker, *object);
  });
}

template <typename Body>
phub_code waiting(const char* function, const phub_worker* handle, Body body) {
  return call(function, [&] {
    const auto object = object_of<WorkerObject>(handle);
    check_may_wait();
    body(object->worker);
  });
}

// Refuses calls that are those of the worker's phub_geeps or phub_device_keys, if it has one.
template <typename Body>
phub_code exchanging(const char* function, const phub_worker* handle, Body body) {
  return with(function, handle, [&](Worker& worker, WorkerObject& object) {
    if (const Type other = object.exchanger; other != Type::kWorker) {
      throw Refusal(PHUB_INVALID,
                    fmt::format("the keys of this worker are exchanged by its {}", name_of(other)));
    }
    body(worker, object);
  });
}

phub_code change_branch(const char* function, phub_worker* worker,
                        uint64_t (Worker::*change)(uint32_t, uint64_t), uint32_t branch,
                        uint64_t* round) {
  return with(function, worker, [&](Worker& w, auto&) {
    const uint64_t got = (w.*change)(branch, round == nullptr ? 0 : *round);
    if (round != nullptr) *round = got;
  });
}

// With the element sizes of the job. REQUIRES: `key` is in range.
size_t key_in_range(const Worker& worker, size_t key) {
  if (key >= worker.keys()) {
    fail(ErrorCode::kInvalid, "key {} is out of range: job '{}' has {} keys", key,
         worker.spec().name, worker.keys());
  }
  return key;
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

JobStatus find_job(const char* server, const char* name) {
  need(server, "server");
  need(name, "job");
  return ControlClient(server, token_from_environment()).job_status(name);
}

}  // namespace
}  // namespace phub::c_abi

using namespace phub;         // NOLINT: the functions below are C's
using namespace phub::c_abi;  // NOLINT

phub_code phub_worker_create(const phub_options* options, phub_worker** worker) {
  return call(__func__, [&] {
    const auto given = object_of<OptionsObject>(options);
    need(worker, "worker");
    check_may_wait();
    WorkerOptions copy;
    std::shared_ptr<Object> memory_device;
    {
      const std::lock_guard lock(given->mutex);
      copy = given->options;
      memory_device = given->memory_device;
    }
    *worker = handle_of<phub_worker>(
        std::make_shared<WorkerObject>(std::make_unique<Worker>(copy), std::move(memory_device)),
        Type::kWorker);
  });
}

// The handle gets another object: calls in progress end with the error of the one before.
phub_code phub_rejoin(phub_worker* worker, uint64_t* first_round) {
  return call(__func__, [&] {
    const auto lost = object_of<WorkerObject>(worker);
    check_may_wait();
    const std::lock_guard one(lost->rejoining);
    if (object_of<WorkerObject>(worker) != lost) {
      throw Refusal(PHUB_INVALID, "another thread has called phub_rejoin for this worker");
    }
    if (const Type other = lost->exchanger; other != Type::kWorker) {
      throw Refusal(PHUB_INVALID,
                    fmt::format("the worker has a {}: destroy it first, and make another after",
                                name_of(other)));
    }
    const auto next = std::make_shared<WorkerObject>(lost->worker.rejoin(), lost->memory_device);
    lost->completions.stop();  // before: what they push is of the old worker
    Handles::instance().replace(worker, Type::kWorker, next);
    if (first_round != nullptr) *first_round = next->worker.first_round();
  });
}

// Calls in progress keep the object alive; leaving the job ends them.
phub_code phub_worker_destroy(phub_worker* worker) {
  return call(__func__, [&] {
    check_may_wait();
    const auto object =
        std::static_pointer_cast<WorkerObject>(Handles::instance().remove(worker, Type::kWorker));
    try {
      object->worker.leave(kGoodbyeMs);
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): then the rank's lease expires
    }
    object->completions.stop();
  });
}

phub_code phub_leave(phub_worker* worker) {
  return waiting(__func__, worker, [](Worker& w) { w.leave(); });
}

phub_code phub_abandon(phub_worker* worker) {
  return waiting(__func__, worker, [](Worker& w) { w.abandon(); });
}

phub_code phub_worker_info(const phub_worker* worker, phub_info* info) {
  return with(__func__, worker, [&](Worker& w, auto&) {
    need_struct(info, "info");
    copy_struct(info, {.size = 0,
                       .rank = w.rank(),
                       .incarnation = w.incarnation(),
                       .world_size = w.world_size(),
                       .initial_counts = w.initial_counts(),
                       .first_round = w.first_round(),
                       .keys = w.keys()});
  });
}

phub_code phub_worker_connection(const phub_worker* worker, char* text, size_t size) {
  return with(__func__, worker, [&](Worker& w, auto&) {
    need(text, "text");
    copy_text(text, size, w.connection());
  });
}

phub_code phub_waits_for(const phub_worker* worker, char* text, size_t size) {
  return with(__func__, worker, [&](Worker& w, auto&) {
    need(text, "text");
    copy_text(text, size, w.waits_for());
  });
}

phub_code phub_key_by_name(const phub_worker* worker, const char* name, size_t* key) {
  return with(__func__, worker, [&](Worker& w, auto&) {
    need(name, "name");
    need(key, "key");
    *key = w.key(name);
  });
}

phub_code phub_key_info(const phub_worker* worker, size_t key, const char** name,
                        uint64_t* elements) {
  return with(__func__, worker, [&](Worker& w, auto&) {
    const KeySpec& spec = w.spec().keys[key_in_range(w, key)];
    if (name != nullptr) *name = spec.name.c_str();
    if (elements != nullptr) *elements = spec.elements;
  });
}

phub_code phub_gradient(phub_worker* worker, size_t key, void** memory, size_t* bytes) {
  return with(__func__, worker, [&](Worker& w, auto&) {
    need(memory, "memory");
    const std::span<std::byte> all = w.gradient_bytes(key);
    *memory = all.data();
    if (bytes != nullptr) *bytes = all.size();
  });
}

phub_code phub_gradient_dtype(const phub_worker* worker, size_t key, const char** dtype) {
  return with(__func__, worker, [&](Worker& w, auto&) {
    need(dtype, "dtype");
    *dtype = gradient_memory_format(w.spec(), w.spec().keys[key_in_range(w, key)]).c_str();
  });
}

phub_code phub_parameters(const phub_worker* worker, size_t key, const void** memory,
                          size_t* bytes) {
  return with(__func__, worker, [&](Worker& w, auto&) {
    need(memory, "memory");
    const std::span<const std::byte> all = w.parameter_bytes(key);
    *memory = all.data();
    if (bytes != nullptr) *bytes = all.size();
  });
}

phub_code phub_add_products(const float* left, const float* right, size_t samples, size_t rows,
                            size_t columns, float* out) {
  return call(__func__, [&] {
    need(left, "left");
    need(right, "right");
    need(out, "out");
    kernels::add_products(left, right, samples, rows, columns, out);
  });
}

phub_code phub_use_memory(phub_worker* worker, size_t key, const void* gradient, void* parameters) {
  return exchanging(__func__, worker, [&](Worker& w, auto&) {
    w.register_memory(key, {.gradient = gradient, .parameters = parameters, .in_place = false});
  });
}

phub_code phub_register_memory(phub_worker* worker, size_t key, const phub_key_memory* memory) {
  return exchanging(__func__, worker, [&](Worker& w, auto&) {
    need_struct(memory, "memory", kLeastKeyMemory);
    phub_key_memory all = {};
    std::memcpy(&all, memory, std::min(memory->size, sizeof all));
    KeyMemory ours{.gradient = all.gradient, .parameters = all.parameters};
    if (all.gradient_dtype != nullptr) ours.gradient_dtype = all.gradient_dtype;
    if (all.parameter_dtype != nullptr) ours.parameter_dtype = all.parameter_dtype;
    if (all.gradient_scale != 0) ours.gradient_scale = all.gradient_scale;
    w.register_memory(key, ours);
  });
}

phub_code phub_broadcast(phub_worker* worker, const float* initial, size_t elements) {
  return waiting(__func__, worker, [&](Worker& w) {
    if (elements > 0) need(initial, "initial");
    w.broadcast({initial, elements});
  });
}

phub_code phub_broadcast_keys(phub_worker* worker, const float* const* initial, size_t keys) {
  return waiting(__func__, worker, [&](Worker& w) {
    if (keys > 0) need(initial, "initial");
    w.broadcast_keys({initial, keys});
  });
}

phub_code phub_push(phub_worker* worker, size_t key, int32_t priority) {
  return exchanging(__func__, worker, [&](Worker& w, auto&) { w.push(key, priority); });
}

phub_code phub_push_null(phub_worker* worker, size_t key) {
  return exchanging(__func__, worker, [&](Worker& w, auto&) { w.push_null(key); });
}

phub_code phub_push_factors(phub_worker* worker, size_t key, const float* left, const float* right,
                            uint32_t pairs, int32_t priority) {
  return exchanging(__func__, worker, [&](Worker& w, auto&) {
    const FactorPairs factors{left, right, pairs};
    w.push_factors(key, {&factors, 1}, {.priority = priority});
  });
}

phub_code phub_push_rows(phub_worker* worker, size_t key, const int64_t* indices,
                         const float* elements, size_t rows, int32_t priority) {
  return exchanging(__func__, worker, [&](Worker& w, auto&) {
    if (rows > 0) need(indices, "indices"), need(elements, "elements");
    const uint64_t columns = key < w.keys() && w.spec().keys[key].shape.size() == 2
                                 ? w.spec().keys[key].shape[1]
                                 : 0;  // then the key is refused
    if (columns > 0 && rows > kMaxElements / columns) {
      throw Refusal(PHUB_INVALID, fmt::format("{} rows are more than a job can have", rows));
    }
    w.push_rows(key, {{indices, rows}, {elements, rows * columns}}, {.priority = priority});
  });
}

phub_code phub_push_then(phub_worker* worker, size_t key, int32_t priority,
                         phub_completion completion, void* user_data) {
  return exchanging(__func__, worker, [&](Worker&, WorkerObject& object) {
    if (completion == nullptr) throw Refusal(PHUB_INVALID, "completion is null");
    object.has_completions = true;
    object.completions.push(key, priority,
                            [completion, user_data](const Pushed& pushed, const Error* error) {
                              completion(user_data, pushed.key, pushed.round,
                                         error != nullptr ? code_of(error->code()) : PHUB_OK,
                                         error != nullptr ? error->what() : "");
                            });
  });
}

phub_code phub_wait(phub_worker* worker, size_t key) {
  return waiting(__func__, worker, [&](Worker& w) { w.wait(key); });
}

phub_code phub_wait_all(phub_worker* worker) {
  return waiting(__func__, worker, [](Worker& w) { w.wait_all(); });
}

phub_code phub_try_wait(phub_worker* worker, size_t key, int* ready) {
  return with(__func__, worker, [&](Worker& w, auto&) {
    need(ready, "ready");
    *ready = w.test(key) ? 1 : 0;
  });
}

phub_code phub_poll(phub_worker* worker, size_t* outstanding) {
  return with(__func__, worker, [&](Worker& w, auto&) {
    need(outstanding, "outstanding");
    *outstanding = w.poll();
  });
}

phub_code phub_pull(phub_worker* worker, size_t key, void* into, size_t bytes) {
  return waiting(__func__, worker, [&](Worker& w) {
    need(into, "into");
    w.pull(key, {static_cast<std::byte*>(into), bytes});
  });
}

phub_code phub_verdict(const phub_worker* worker, phub_round_verdict* verdict) {
  return with(__func__, worker, [&](Worker& w, auto&) {
    need_struct(verdict, "verdict");
    const RoundVerdict latest = w.verdict().value_or(RoundVerdict());
    copy_struct(verdict,
                {.size = 0, .round = latest.round, .norm = latest.norm, .skipped = latest.skipped});
  });
}

phub_code phub_round(const phub_worker* worker, size_t key, uint64_t* round) {
  return with(__func__, worker, [&](Worker& w, auto&) {
    need(round, "round");
    *round = w.round(key);
  });
}

namespace {

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

}  // namespace

phub_code phub_set_hyper(phub_worker* worker, const char* const* names, const double* values,
                         size_t count, uint64_t* round) {
  return with(__func__, worker, [&](Worker& w, auto&) {
    need(names, "names");
    need(values, "values");
    const uint64_t got =
        w.set_hyper(values_of(names, values, count), round == nullptr ? 0 : *round);
    if (round != nullptr) *round = got;
  });
}

phub_code phub_fork(phub_worker* worker, uint32_t parent, const char* const* names,
                    const double* values, size_t count, uint64_t* round, uint32_t* child) {
  return with(__func__, worker, [&](Worker& w, auto&) {
    need(child, "child");
    const BranchReply made =
        w.fork(parent, values_of(names, values, count), round == nullptr ? 0 : *round);
    *child = made.branch;
    if (round != nullptr) *round = made.round;
  });
}

phub_code phub_schedule(phub_worker* worker, const uint32_t* branches, const uint64_t* rounds,
                        size_t turns, uint64_t* round) {
  return with(__func__, worker, [&](Worker& w, auto&) {
    need(branches, "branches");
    need(rounds, "rounds");
    if (turns > kMostBranchTurns) {
      fail(ErrorCode::kInvalid, "turns: at most {}, got {}", kMostBranchTurns, turns);
    }
    std::vector<BranchTurn> all;
    for (size_t i = 0; i < turns; ++i) all.push_back({branches[i], rounds[i]});
    const uint64_t got = w.schedule(all, round == nullptr ? 0 : *round);
    if (round != nullptr) *round = got;
  });
}

phub_code phub_discard(phub_worker* worker, uint32_t branch, uint64_t* round) {
  return change_branch(__func__, worker, &Worker::discard, branch, round);
}

phub_code phub_kill(phub_worker* worker, uint32_t branch, uint64_t* round) {
  return change_branch(__func__, worker, &Worker::kill, branch, round);
}

phub_code phub_revive(phub_worker* worker, uint32_t branch, uint64_t* round) {
  return change_branch(__func__, worker, &Worker::revive, branch, round);
}

phub_code phub_branch_in(phub_worker* worker, uint64_t round, uint32_t* branch) {
  return with(__func__, worker, [&](Worker& w, auto&) {
    need(branch, "branch");
    *branch = w.branch_in(round);
  });
}

phub_code phub_report_loss(phub_worker* worker, double loss, uint64_t round) {
  return with(__func__, worker, [&](Worker& w, auto&) { w.report_loss(loss, round); });
}

phub_code phub_batch_in(phub_worker* worker, uint64_t round, uint64_t* samples) {
  return with(__func__, worker, [&](Worker& w, auto&) {
    need(samples, "samples");
    *samples = w.batch_in(round);
  });
}

phub_code phub_branch_runs(phub_worker* worker, uint64_t* rounds, uint32_t* branches, size_t room,
                           size_t* count) {
  return with(__func__, worker, [&](Worker& w, auto&) {
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
  return with(__func__, worker, [&](Worker& w, auto&) {
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

phub_code phub_job_name(const phub_worker* worker, const char** name) {
  return with(__func__, worker, [&](Worker& w, auto&) {
    need(name, "name");
    *name = w.spec().name.c_str();
  });
}

phub_code phub_job_token(const phub_worker* worker, const char** token) {
  return with(__func__, worker, [&](Worker& w, auto&) {
    need(token, "token");
    *token = w.job_token().c_str();
  });
}

phub_code phub_state_name(const phub_worker* worker, size_t state, const char** name) {
  return with(__func__, worker, [&](Worker& w, auto&) {
    need(name, "name");
    const auto names = optimizer_states(w.spec());  // literals
    if (state >= names.size()) {
      throw Refusal(PHUB_NOT_FOUND, fmt::format("optimizer {} keeps {} states of a key",
                                                w.spec().optimizer, names.size()));
    }
    *name = names[state].data();
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

phub_code phub_barrier(phub_worker* worker) {
  return waiting(__func__, worker, [](Worker& w) { w.barrier(); });
}

phub_code phub_worker_stats(const phub_worker* worker, phub_stats* stats) {
  return with(__func__, worker, [&](Worker& w, auto&) {
    need_struct(stats, "stats");
    const WorkerStats all = w.stats();
    copy_struct(stats, {.size = 0,
                        .pushes = all.pushes,
                        .chunks_pushed = all.chunks_pushed,
                        .chunks_received = all.chunks_received,
                        .bytes_copied = all.bytes_copied,
                        .sleeps = all.sleeps,
                        .reconnections = all.reconnections,
                        .chunks_carried_over = all.chunks_carried_over});
  });
}

phub_code phub_job_status(const char* server, const char* job, phub_job* status) {
  return call(__func__, [&] {
    need_struct(status, "status");
    check_may_wait();
    const JobStatus found = find_job(server, job);
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
