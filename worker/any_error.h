// Converts every exception inside the library to phub::Error, the only type that leaves it.
#pragma once

#include <exception>
#include <thread>
#include <utility>

#include "transport/error.h"

namespace phub {

// The exception that is being handled, as an Error: kFull if memory, descriptors or threads ran
// out, kInternal for any other type. REQUIRES: called in a catch block.
Error error_in_flight();

// Calls `body`. Every exception that it throws becomes an Error.
template <typename Body>
decltype(auto) only_errors(Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (const Error&) {
    throw;
  } catch (...) {
    throw error_in_flight();
  }
}

[[noreturn]] void fail_to_start_thread(const char* name, const std::exception& error);
void name_this_thread(const char* name);

// Starts a thread of the library, with a name of at most 15 characters that tools show. Throws
// Error(kFull) if no thread can be started. REQUIRES: `body(stop_token)` does not throw.
template <typename Body>
std::jthread start_thread(const char* name, Body body) {
  try {
    return std::jthread([name, body = std::move(body)](const std::stop_token& stop) {
      name_this_thread(name);
      body(stop);
    });
  } catch (const std::exception& error) {
    fail_to_start_thread(name, error);
  }
}

}  // namespace phub
