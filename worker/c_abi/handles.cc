#include "worker/c_abi/handles.h"

#include <fmt/format.h>
#include <pthread.h>

#include <array>
#include <bit>
#include <cstddef>
#include <utility>

namespace phub::c_abi {
namespace {

// A handle is the object's number, counted from 1, and its type.
constexpr unsigned kTypeBits = 4;
Type type_in(uint64_t handle) { return static_cast<Type>(handle & ((1u << kTypeBits) - 1)); }
constexpr std::array<const char*, 14> kNames = {
    nullptr,      "phub_options",      "phub_worker",      "phub_device",      "phub_geeps_options",
    "phub_geeps", "phub_state",        "phub_device_keys", "phub_by_branch",   "phub_store_options",
    "phub_store", "phub_store_thread", "phub_host_stream", "phub_device_group"};
bool is_type(Type type) { return type >= Type::kOptions && type <= Type::kDeviceGroup; }

}  // namespace

const char* name_of(Type type) { return kNames.at(static_cast<size_t>(type)); }

Handles& Handles::instance() {
  static auto& handles = *new Handles;
  return handles;
}

// After fork() the table is whole in the child, but its entries belong to the parent's threads.
Handles::Handles() {
  pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                 [] {
                   ++instance().forks_;
                   instance().mutex_.unlock();
                 });
}

const void* Handles::add(Type type, std::shared_ptr<Object> object) {
  const std::lock_guard lock(mutex_);
  const uint64_t handle = (last_ + 1) << kTypeBits | static_cast<uint64_t>(type);
  entries_.emplace(handle, Entry{.object = std::move(object), .forks = forks_});
  ++last_;
  return std::bit_cast<const void*>(handle);
}

// REQUIRES: the lock is held.
Handles::Entries::iterator Handles::at(const void* handle, Type type) {
  const auto number = std::bit_cast<uint64_t>(handle);
  const char* wanted = name_of(type);
  if (handle == nullptr) throw Refusal(PHUB_BAD_HANDLE, fmt::format("the {} is null", wanted));
  const auto entry = entries_.find(number);
  const Type actual = type_in(number);
  const bool given_out =
      number >> kTypeBits >= 1 && number >> kTypeBits <= last_ && is_type(actual);
  if (entry == entries_.end()) {
    throw Refusal(PHUB_BAD_HANDLE,
                  given_out
                      ? fmt::format("this {} was destroyed", name_of(actual))
                      : fmt::format("{} is no {}: the library has never made it", handle, wanted));
  }
  if (actual != type) {
    throw Refusal(PHUB_BAD_HANDLE,
                  fmt::format("this is a {}, a {} is needed", name_of(actual), wanted));
  }
  if (entry->second.forks != forks_) {
    throw Refusal(PHUB_WRONG_THREAD,
                  fmt::format("this {} belongs to the process that called fork(); make one in this "
                              "process",
                              wanted));
  }
  return entry;
}

std::shared_ptr<Object> Handles::find(const void* handle, Type type) {
  const std::lock_guard lock(mutex_);
  return at(handle, type)->second.object;
}

std::shared_ptr<Object> Handles::replace(const void* handle, Type type,
                                         std::shared_ptr<Object> object) {
  const std::lock_guard lock(mutex_);
  return std::exchange(at(handle, type)->second.object, std::move(object));
}

std::shared_ptr<Object> Handles::remove(const void* handle, Type type) {
  const std::lock_guard lock(mutex_);
  const auto entry = at(handle, type);
  std::shared_ptr<Object> object = std::move(entry->second.object);
  entries_.erase(entry);
  return object;
}

}  // namespace phub::c_abi
