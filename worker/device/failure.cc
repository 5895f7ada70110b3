#include "worker/device/failure.h"

#include "transport/error.h"

namespace phub {

void Failure::raise(std::string_view device, std::string_view stream) {
  if (!reported_.exchange(true)) fail(ErrorCode::kInternal, "{}: {}", device, origin_);
  fail(ErrorCode::kUnavailable, "{}: stream '{}' takes no more work, since this failed earlier: {}",
       device, stream, origin_);
}

}  // namespace phub
