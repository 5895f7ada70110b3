// A rank's own state, over the C interface.
#include <fmt/format.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "worker/c_abi/call.h"
#include "worker/c_abi/options.h"
#include "worker/c_abi/worker.h"
#include "worker/worker.h"

namespace phub::c_abi {
namespace {

// The object behind phub_state, during one call of a saver.
struct StateObject : Object {
  static constexpr Type kType = Type::kState;
  std::mutex mutex;
  RankState state;  // guarded by mutex
};

RankState call_saver(phub_saver saver, void* user_data, uint64_t round) {
  Handles& handles = Handles::instance();
  const auto object = std::make_shared<StateObject>();
  const void* handle = handles.add(Type::kState, object);
  const phub_code code =
      saver(user_data, round, static_cast<phub_state*>(const_cast<void*>(handle)));
  handles.remove(handle, Type::kState);
  if (code != PHUB_OK) {
    fail(ErrorCode::kInvalid,
         "the saver failed with {} ({}): there is no checkpoint of round {} with its state",
         static_cast<int>(code), phub_code_name(code), round);
  }
  const std::lock_guard lock(object->mutex);
  return std::move(object->state);
}

}  // namespace
}  // namespace phub::c_abi

using namespace phub;         // NOLINT: the functions below are C's
using namespace phub::c_abi;  // NOLINT

phub_code phub_options_set_saver(phub_options* options, phub_saver saver, void* user_data) {
  return call(__func__, [&] {
    const auto object = object_of<OptionsObject>(options);
    const std::lock_guard lock(object->mutex);
    if (saver == nullptr) {
      object->options.saver = nullptr;
    } else {
      object->options.saver = [saver, user_data](uint64_t round) {
        return call_saver(saver, user_data, round);
      };
    }
  });
}

phub_code phub_save(phub_state* state, const char* name, const void* bytes, size_t size) {
  return call(__func__, [&] {
    const auto object = object_of<StateObject>(state);
    need(name, "name");
    if (size > 0) need(bytes, "bytes");
    if (size > kMaxStateBytes) {
      throw Refusal(PHUB_INVALID,
                    fmt::format("'{}' has {} bytes, the limit of a rank's state is {}", name, size,
                                kMaxStateBytes));
    }
    const auto* begin = static_cast<const std::byte*>(bytes);
    const std::lock_guard lock(object->mutex);
    if (!object->state.emplace(name, std::vector(begin, begin + size)).second) {
      throw Refusal(PHUB_TAKEN, fmt::format("'{}' is saved already", name));
    }
  });
}

phub_code phub_restored(const phub_worker* worker, const char* name, const void** bytes,
                        size_t* size) {
  return call(__func__, [&] {
    const auto object = object_of<WorkerObject>(worker);
    need(name, "name");
    need(bytes, "bytes");
    need(size, "size");
    const auto found = object->worker.restored(name);
    if (!found) {
      throw Refusal(PHUB_NOT_FOUND, fmt::format("nothing was restored as '{}'", name));
    }
    *bytes = found->data();
    *size = found->size();
  });
}

phub_code phub_save_point(phub_worker* worker, uint64_t round) {
  return call(__func__, [&] {
    const auto object = object_of<WorkerObject>(worker);
    check_may_wait();
    const Type by = object->exchanger;
    if (by == Type::kGeeps || by == Type::kDeviceGroup) {
      throw Refusal(PHUB_INVALID,
                    fmt::format("the worker has a {}: call phub_geeps_save_point", name_of(by)));
    }
    Worker& saving = object->worker;
    if (!saving.saves()) return;
    saving.save_by_call(true);
    if (round < saving.next_saved()) return;
    saving.wait_all();
    saving.save({});
  });
}
