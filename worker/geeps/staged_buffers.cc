#include "worker/geeps/staged_buffers.h"

#include <iterator>
#include <utility>

namespace phub::geeps {

HostMemory StagingPool::take(size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = free_.lower_bound(bytes);
  if (found != free_.end()) return std::move(free_.extract(found).mapped());
  if (!free_.empty()) free_.erase(std::prev(free_.end()));  // it makes room for a larger one
  return {device_, bytes, "staging of rows"};
}

void StagingPool::give(HostMemory memory) {
  const std::lock_guard lock(mutex_);
  const size_t bytes = memory.bytes();
  free_.emplace(bytes, std::move(memory));
}

StagedBuffers::~StagedBuffers() {
  for (auto& [buffer, copy] : buffers_) {
    if (copy.memory.bytes() > 0) pool_.give(std::move(copy.memory));
  }
}

StagedBuffers::Copy StagedBuffers::copy_of(const float* buffer, size_t count, Stream& stream,
                                           Event& done) {
  const auto await_stream = [&] {
    stream.record(done);
    done.wait();
  };
  Buffer* copy = nullptr;
  {
    const std::lock_guard lock(mutex_);
    copy = &buffers_[buffer];
  }
  {
    const std::lock_guard lock(copy->mutex);
    if (copy->memory.bytes() == 0) {
      const size_t bytes = count * sizeof(float);
      HostMemory memory = pool_.take(bytes);
      stream.copy_to_host(memory.data(), buffer, bytes);
      await_stream();
      copy->memory = std::move(memory);
      return {copy->memory.floats().data(), bytes};
    }
  }
  await_stream();
  return {copy->memory.floats().data(), 0};
}

}  // namespace phub::geeps
