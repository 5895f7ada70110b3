#include "worker/any_error.h"

#include <pthread.h>

#include <boost/system/system_error.hpp>
#include <cerrno>
#include <new>
#include <system_error>

namespace phub {
namespace {

ErrorCode code_of_errno(int error) {
  const bool ran_out = error == EMFILE || error == ENFILE || error == ENOMEM || error == EAGAIN ||
                       error == ENOSPC || error == ENOBUFS;
  return ran_out ? ErrorCode::kFull : ErrorCode::kInternal;
}

// Made at start-up, while there is memory.
const Error kOutOfMemory(ErrorCode::kFull, "this process is out of memory");

Error error_in_flight_or_no_memory() {
  try {
    throw;
  } catch (const Error& error) {
    return {error.code(), error.what()};  // not a copy, which would share its text
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  } catch (const std::system_error& error) {
    return {code_of_errno(error.code().value()), error.what()};
  } catch (const boost::system::system_error& error) {
    return {code_of_errno(error.code().value()), error.what()};
  } catch (const std::exception& error) {
    return {ErrorCode::kInternal, error.what()};
  } catch (...) {
    return {ErrorCode::kInternal, "an exception of an unknown type"};
  }
}

}  // namespace

Error error_in_flight() {
  try {
    return error_in_flight_or_no_memory();
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

void fail_to_start_thread(const char* name, const std::exception& error) {
  fail(ErrorCode::kFull, "starting the thread {}: {}; raise ulimit -u or the cgroup's pids.max",
       name, error.what());
}

void name_this_thread(const char* name) { pthread_setname_np(pthread_self(), name); }

}  // namespace phub
