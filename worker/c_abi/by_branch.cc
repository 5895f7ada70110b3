// A rank's own state of each branch, of phub.h, over worker/by_branch.h.
#include "worker/by_branch.h"

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include "worker/c_abi/call.h"
#include "worker/c_abi/worker.h"

namespace phub::c_abi {
namespace {

struct ByBranchObject : Object {
  static constexpr Type kType = Type::kByBranch;
  explicit ByBranchObject(ByBranch made) : own(std::move(made)) {}
  std::mutex mutex;  // guards what follows
  ByBranch own;
  ByBranch::State saved;  // the caller's, until the next round begins
};

void check(phub_code code, const char* what) {
  if (code == PHUB_OK) return;
  fail(ErrorCode::kInvalid, "{} of the state failed with {} ({})", what, static_cast<int>(code),
       phub_code_name(code));
}

template <typename Body>
phub_code with(const char* function, phub_by_branch* handle, Body body) {
  return call(function, [&] {
    const auto object = object_of<ByBranchObject>(handle);
    const std::lock_guard lock(object->mutex);
    body(*object);
  });
}

}  // namespace
}  // namespace phub::c_abi

using namespace phub;         // NOLINT: the functions below are C's
using namespace phub::c_abi;  // NOLINT

phub_code phub_by_branch_create(phub_state_saver save, phub_state_loader load, void* user_data,
                                phub_by_branch** by_branch) {
  return call(__func__, [&] {
    need(reinterpret_cast<const void*>(save), "save");
    need(reinterpret_cast<const void*>(load), "load");
    need(by_branch, "by_branch");
    const auto saved = [save, user_data] {
      const void* bytes = nullptr;
      size_t size = 0;
      check(save(user_data, &bytes, &size), "save");
      if (size > 0) need(bytes, "what save gave");
      const auto* begin = static_cast<const std::byte*>(bytes);
      return ByBranch::State(begin, begin + size);
    };
    const auto loaded = [load, user_data](std::span<const std::byte> state) {
      check(load(user_data, state.data(), state.size()), "load");
    };
    *by_branch = handle_of<phub_by_branch>(
        std::make_shared<ByBranchObject>(ByBranch(saved, loaded)), Type::kByBranch);
  });
}

phub_code phub_by_branch_destroy(phub_by_branch* by_branch) {
  return call(__func__, [&] { Handles::instance().remove(by_branch, Type::kByBranch); });
}

phub_code phub_by_branch_begin(phub_by_branch* by_branch, phub_worker* worker, uint64_t round,
                               uint32_t* branch) {
  return with(__func__, by_branch, [&](ByBranchObject& object) {
    const uint32_t runs = object.own.begin(object_of<WorkerObject>(worker)->worker, round);
    if (branch != nullptr) *branch = runs;
    object.saved = {};
  });
}

phub_code phub_by_branch_saved(phub_by_branch* by_branch, const void** bytes, size_t* size) {
  return with(__func__, by_branch, [&](ByBranchObject& object) {
    need(bytes, "bytes");
    need(size, "size");
    object.saved = object.own.saved();
    *bytes = object.saved.data();
    *size = object.saved.size();
  });
}

phub_code phub_by_branch_restore(phub_by_branch* by_branch, const void* bytes, size_t size) {
  return with(__func__, by_branch, [&](ByBranchObject& object) {
    if (size > 0) need(bytes, "bytes");
    object.own.restore({static_cast<const std::byte*>(bytes), size});
  });
}
