// The scopes of buffers. An error at the end of one is thrown by the next call: after a failure of
// the device or of the exchange, every call throws it.
#include <exception>

#include "transport/error.h"
#include "worker/geeps/cache.h"

namespace phub::geeps {
namespace {

template <class GiveBack>
void at_end_of_scope(GiveBack give_back) {
  try {
    give_back();
  } catch (...) {  // said again by the next call
  }
}

}  // namespace

ReadBuffer::~ReadBuffer() {
  at_end_of_scope([&] { cache_.post_read(buffer_.handle); });
}

void UpdateBuffer::update() {
  cache_.update(buffer_.handle);
  given_back_ = true;
}

UpdateBuffer::~UpdateBuffer() {
  if (given_back_) return;
  at_end_of_scope([&] { cache_.discard(buffer_.handle); });
}

LocalBuffer::LocalBuffer(Cache& cache, uint32_t table, std::span<const uint64_t> keys, Fetch fetch,
                         Save save)
    : cache_(cache),
      buffer_(cache.local_access(table, keys, fetch)),
      save_(save),
      exceptions_(std::uncaught_exceptions()) {}

LocalBuffer::~LocalBuffer() {
  const bool saves = save_ == Save::kYes && std::uncaught_exceptions() == exceptions_;
  at_end_of_scope(
      [&] { cache_.post_local_access(buffer_.handle, saves ? Save::kYes : Save::kNo); });
}

}  // namespace phub::geeps
