#include "worker/geeps/host_rows.h"

#include <algorithm>
#include <cstring>

#include "transport/error.h"
#include "worker/device/add_rows.h"

namespace phub::geeps {
namespace {

constexpr size_t kLongRunBytes = 16 * 1024;  // as long as it takes to start a copy
constexpr size_t kFewRuns = 4;

size_t rows_in(std::span<const Run> runs) {
  size_t rows = 0;
  for (const Run& run : runs) rows += run.rows;
  return rows;
}

size_t bytes_in(std::span<const Run> runs, uint32_t row_floats) {
  return rows_in(runs) * row_floats * sizeof(float);
}

}  // namespace

bool HostRows::staged(std::span<const Run> runs, uint32_t row_floats) {
  const size_t bytes = bytes_in(runs, row_floats);
  return runs.size() > kFewRuns && bytes < runs.size() * kLongRunBytes;
}

HostRows::HostRows(Device& device, Stream& stream)
    : device_(device), stream_(stream), staged_copies_(device.make_event()) {}

HostRows::~HostRows() {
  try {
    staged_copies_->wait();
  } catch (...) {  // the device failed: nothing is in progress any more
  }
}

float* HostRows::staging(size_t floats) {
  staged_copies_->wait();
  const size_t bytes = floats * sizeof(float);
  if (staging_.bytes() < bytes) {
    staging_ = HostMemory();
    staging_ = HostMemory(device_, bytes, "staging of rows");
  }
  staged_ += bytes;
  return staging_.floats().data();
}

void HostRows::fetch(float* buffer, const float* memory, const float* log,
                     std::span<const Run> runs, uint32_t row_floats) {
  moved_ += bytes_in(runs, row_floats);
  const auto for_runs = [&](auto use) {
    for (const Run& run : runs) {
      use(size_t{run.first} * row_floats, size_t{run.source} * row_floats,
          size_t{run.rows} * row_floats);
    }
  };
  if (log == nullptr && !staged(runs, row_floats)) {
    for_runs([&](size_t first, size_t source, size_t floats) {
      stream_.copy_to_device(buffer + first, memory + source, floats * sizeof(float));
    });
    return;
  }
  float* const copy = staging(rows_in(runs) * row_floats);
  float* next = copy;
  for_runs([&](size_t, size_t source, size_t floats) {
    std::memcpy(next, memory + source, floats * sizeof(float));
    if (log != nullptr) add_scaled_floats(next, -1, log + source, floats);
    next += floats;
  });
  // Neighbours in the buffer are one copy, wherever they come from.
  size_t begin = 0, end = 0, taken = 0;
  const auto flush = [&] {
    stream_.copy_to_device(buffer + begin, copy + taken, (end - begin) * sizeof(float));
    taken += end - begin;
  };
  for_runs([&](size_t first, size_t, size_t floats) {
    if (first != end) {
      flush();
      begin = first;
    }
    end = first + floats;
  });
  flush();
  stream_.record(*staged_copies_);
}

void HostRows::store(const StoredBuffer& buffer, float* memory, std::span<const Run> runs,
                     uint32_t row_floats) {
  moved_ += bytes_in(runs, row_floats);
  if (!staged(runs, row_floats)) {
    for (const Run& run : runs) {
      stream_.copy_to_host(memory + size_t{run.source} * row_floats,
                           buffer.rows + size_t{run.first} * row_floats,
                           size_t{run.rows} * row_floats * sizeof(float));
    }
    return;
  }
  through_staging(buffer, runs, row_floats, [&](size_t row, const float* from, size_t floats) {
    std::memcpy(memory + row * row_floats, from, floats * sizeof(float));
  });
}

void HostRows::store_add(const StoredBuffer& buffer, float* memory, std::span<const Run> runs,
                         uint32_t row_floats) {
  moved_ += bytes_in(runs, row_floats);
  through_staging(buffer, runs, row_floats, [&](size_t row, const float* from, size_t floats) {
    add_floats(memory + row * row_floats, from, floats);
  });
}

template <class Use>
void HostRows::through_staging(const StoredBuffer& buffer, std::span<const Run> runs,
                               uint32_t row_floats, Use use) {
  if (runs.empty()) return;
  const auto [begin, rows] = buffer.stretch;
  const StagedBuffers::Copy copy =
      buffer.staged.copy_of(buffer.rows + size_t{begin} * row_floats, size_t{rows} * row_floats,
                            stream_, *staged_copies_);
  staged_ += copy.copied_bytes;
  for (const Run& run : runs) {
    use(run.source, copy.floats + size_t{run.first - begin} * row_floats,
        size_t{run.rows} * row_floats);
  }
}

}  // namespace phub::geeps
