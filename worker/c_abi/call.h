// The frame of every function of the C interface: it turns exceptions into codes and messages.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string_view>
#include <type_traits>

#include "transport/error.h"
#include "worker/c_abi/handles.h"
#include "worker/phub.h"

namespace phub::c_abi {

phub_code code_of(ErrorCode code);

// Keeps the message for phub_last_error(); allocates nothing.
phub_code failed(const char* function, phub_code code, std::string_view message) noexcept;

template <typename Body>
phub_code call(const char* function, Body body) noexcept {
  try {
    body();
    return PHUB_OK;
  } catch (const Refusal& refusal) {
    return failed(function, refusal.code(), refusal.what());
  } catch (const Error& error) {
    return failed(function, code_of(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return failed(function, PHUB_FULL, "this process is out of memory");
  } catch (const std::exception& error) {
    return failed(function, PHUB_INTERNAL, error.what());
  } catch (...) {
    return failed(function, PHUB_INTERNAL, "an exception of an unknown type");
  }
}

inline void need(const void* argument, const char* name) {
  if (argument == nullptr) throw Refusal(PHUB_INVALID, fmt::format("{} is null", name));
}

template <typename T>
std::shared_ptr<T> object_of(const void* handle) {
  return std::static_pointer_cast<T>(Handles::instance().find(handle, T::kType));
}

// Structs grow at their end: the caller was compiled with their first `size` bytes. `least`: the
// bytes that must be there, so that no part of a pointer is read.
template <typename T>
void need_struct(const T* out, const char* name, size_t least = sizeof(size_t)) {
  static_assert(std::is_trivially_copyable_v<T> && offsetof(T, size) == 0);
  constexpr size_t kMostBytes = 4096;
  need(out, name);
  if (out->size < least || out->size > kMostBytes) {
    throw Refusal(PHUB_INVALID, fmt::format("the struct's size is {}: set it to sizeof of the "
                                            "struct, {} here",
                                            out->size, sizeof(T)));
  }
}

// Copies the members that the caller's struct has room for. REQUIRES: need_struct(out).
template <typename T>
void copy_struct(T* out, const T& value) {
  const size_t known = out->size < sizeof(T) ? out->size : sizeof(T);
  std::memcpy(reinterpret_cast<char*>(out) + sizeof(size_t),
              reinterpret_cast<const char*>(&value) + sizeof(size_t), known - sizeof(size_t));
}

// Copies `text` and its terminating zero, cut between two characters if it does not fit.
void copy_text(char* out, size_t size, std::string_view text);

}  // namespace phub::c_abi
