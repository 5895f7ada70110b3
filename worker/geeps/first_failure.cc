#include "worker/geeps/first_failure.h"

namespace phub::geeps {

bool FirstFailure::keep(const std::exception_ptr& error) {
  if (happened()) return false;
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    code_ = e.code();
    message_ = e.what();
  } catch (const std::exception& e) {
    message_ = e.what();
  } catch (...) {  // "unknown"
  }
  if (message_.empty()) message_ = "unknown";
  return true;
}

}  // namespace phub::geeps
