// The frames of the functions of phub.h that take a worker: `body` gets what is behind the handle.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <type_traits>

#include "worker/c_abi/call.h"
#include "worker/c_abi/worker.h"

namespace phub::c_abi {

template <typename Body>
phub_code with(const char* function, const phub_worker* handle, Body body) {
  return call(function, [&] { body(object_of<WorkerObject>(handle)->worker); });
}

// `body` may wait: not within a completion.
template <typename Body>
phub_code waiting(const char* function, const phub_worker* handle, Body body) {
  return call(function, [&] {
    const auto object = object_of<WorkerObject>(handle);
    check_may_wait();
    body(object->worker);
  });
}

// What `body` returns goes to the caller's `out`, which must not be null.
template <typename T, typename Body>
phub_code get(const char* function, const phub_worker* handle, T* out, const char* name,
              Body body) {
  return with(function, handle, [&](Worker& worker) {
    need(out, name);
    *out = body(worker);
  });
}

// A change from round `*round` on, or from 0; `*round` becomes what `body` returns. Null: nobody
// asks for that.
template <typename Body>
phub_code decide(const char* function, phub_worker* handle, uint64_t* round, Body body) {
  return with(function, handle, [&](Worker& worker) {
    const uint64_t from = body(worker, round == nullptr ? 0 : *round);
    if (round != nullptr) *round = from;
  });
}

// Returns the key. Throws Error(kInvalid): there is no such key.
inline size_t key_in_range(const Worker& worker, size_t key) {
  if (key >= worker.keys()) {
    fail(ErrorCode::kInvalid, "key {} is out of range: job '{}' has {} keys", key,
         worker.spec().name, worker.keys());
  }
  return key;
}

}  // namespace phub::c_abi
