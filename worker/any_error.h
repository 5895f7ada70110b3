// Whatever is thrown inside the library, as the one type that comes out of it.
#pragma once

#include <exception>
#include <thread>
#include <utility>

#include "transport/error.h"

namespace phub {

// The exception that is being handled: an Error as it is; what says that memory, descriptors or
// threads ran out is kFull; everything else kInternal. REQUIRES: called in a catch block.
Error error_in_flight();

// Runs `body`; what comes out of it is an Error.
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

// Starts a thread of the library's with a name that tools show (15 characters at most). Throws
// Error(kFull) when there can be no more threads. REQUIRES: `body`, which takes a stop token,
// throws nothing.
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
