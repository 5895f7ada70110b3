// The handles of the C interface: numbers that name objects in a table of the process. A number is
// never used twice, so null, destroyed handles, and those of another type are always recognised.
//
// A call keeps its object alive until it returns: an object that is removed meanwhile is destroyed
// by the last such call.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#include "worker/phub.h"

namespace phub::c_abi {

// An error that the C interface itself reports: a wrong argument, handle or thread.
class Refusal : public std::runtime_error {
 public:
  Refusal(phub_code code, const std::string& what) : std::runtime_error(what), code_(code) {}
  phub_code code() const { return code_; }

 private:
  phub_code code_;
};

struct Object {
  virtual ~Object() = default;
};

enum class Type : uint8_t {
  kOptions = 1,
  kWorker,
  kDevice,
  kGeepsOptions,
  kGeeps,
  kState,
  kDeviceKeys,
  kByBranch,
  kStoreOptions,
  kStore,
  kStoreThread,
  kHostStream,
  kDeviceGroup
};
// "phub_worker".
const char* name_of(Type type);

// Thread-safe. The only instance is made at its first use and never destroyed, since threads of the
// library may outlive main().
class Handles {
 public:
  static Handles& instance();

  const void* add(Type type, std::shared_ptr<Object> object);
  // Throw Refusal(PHUB_BAD_HANDLE), or PHUB_WRONG_THREAD in a child of the process that made it.
  std::shared_ptr<Object> find(const void* handle, Type type);
  std::shared_ptr<Object> remove(const void* handle, Type type);
  // From now on the handle is that of `object`. Returns the one before.
  std::shared_ptr<Object> replace(const void* handle, Type type, std::shared_ptr<Object> object);

 private:
  struct Entry {
    std::shared_ptr<Object> object;
    uint32_t forks = 0;
  };
  using Entries = std::unordered_map<uint64_t, Entry>;

  Handles();
  Entries::iterator at(const void* handle, Type type);

  std::mutex mutex_;
  Entries entries_;
  uint64_t last_ = 0;
  uint32_t forks_ = 0;  // from the process that loaded the library to this one
};

// Adds the object, as the caller sees it.
template <typename Handle>
Handle* handle_of(std::shared_ptr<Object> object, Type type) {
  const void* handle = Handles::instance().add(type, std::move(object));
  return static_cast<Handle*>(const_cast<void*>(handle));
}

}  // namespace phub::c_abi
