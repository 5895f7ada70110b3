// The life of a worker, and what it says of itself, of phub.h over worker.h.
#include "worker/c_abi/worker.h"

#include <mutex>
#include <string>
#include <utility>

#include "worker/c_abi/options.h"
#include "worker/c_abi/with_worker.h"

namespace phub::c_abi {
namespace {

constexpr uint32_t kGoodbyeMs = 2000;

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
  return with(__func__, worker, [&](Worker& w) {
    need_struct(info, "info");
    copy_struct(info, {.size = 0,
                       .rank = w.rank(),
                       .incarnation = w.incarnation(),
                       .world_size = w.world_size(),
                       .initial_counts = w.initial_counts(),
                       .first_round = w.first_round(),
                       .keys = w.keys(),
                       .queues = w.queues()});
  });
}

phub_code phub_worker_connection(const phub_worker* worker, char* text, size_t size) {
  return with(__func__, worker, [&](Worker& w) {
    need(text, "text");
    copy_text(text, size, w.connection());
  });
}

phub_code phub_waits_for(const phub_worker* worker, char* text, size_t size) {
  return with(__func__, worker, [&](Worker& w) {
    need(text, "text");
    copy_text(text, size, w.waits_for());
  });
}

phub_code phub_key_by_name(const phub_worker* worker, const char* name, size_t* key) {
  return get(__func__, worker, key, "key", [&](Worker& w) {
    need(name, "name");
    return w.key(name);
  });
}

phub_code phub_key_info(const phub_worker* worker, size_t key, const char** name,
                        uint64_t* elements) {
  return with(__func__, worker, [&](Worker& w) {
    const KeySpec& spec = w.spec().keys[key_in_range(w, key)];
    if (name != nullptr) *name = spec.name.c_str();
    if (elements != nullptr) *elements = spec.elements;
  });
}

phub_code phub_job_name(const phub_worker* worker, const char** name) {
  return get(__func__, worker, name, "name", [&](Worker& w) { return w.spec().name.c_str(); });
}

phub_code phub_job_token(const phub_worker* worker, const char** token) {
  return get(__func__, worker, token, "token", [&](Worker& w) { return w.job_token().c_str(); });
}

phub_code phub_worker_stats(const phub_worker* worker, phub_stats* stats) {
  return with(__func__, worker, [&](Worker& w) {
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
