#include "bench/roofline.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <thread>

#include "bench/zerocompute/measures.h"
#include "numa/memory.h"
#include "numa/topology.h"
#include "transport/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/roofline.cc"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#ifndef PHUB_BENCH_ROOFLINE_STREAMS
#define PHUB_BENCH_ROOFLINE_STREAMS
namespace phub {
// The arrays of a mix, as bytes.
struct MixStreams {
  std::vector<std::byte*> gradients;
  std::vector<std::byte*> updates;
  std::byte* result = nullptr;
};
}  // namespace phub
#endif

HWY_BEFORE_NAMESPACE();
namespace phub::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<uint32_t>;

template <bool kStreaming>
HWY_INLINE void put(hn::Vec<D> value, std::byte* to) {
  uint32_t* lanes = reinterpret_cast<uint32_t*>(to);
  if constexpr (kStreaming) {
    hn::Stream(value, D(), lanes);
  } else {
    hn::Store(value, D(), lanes);
  }
}

// For `bytes` of gradient from `offset`: adds four vectors of every gradient, and updates and
// writes the other arrays. kRatio: f32 vectors per gradient vector. It computes with integers, so
// that the time does not depend on values.
template <uint32_t kRatio, bool kStreaming>
void mix_block(const MixStreams& streams, uint32_t result_ratio, size_t offset, size_t bytes) {
  constexpr size_t kUnroll = 4;
  const D d;
  const size_t width = hn::Lanes(d) * sizeof(uint32_t);
  const auto load = [d](const std::byte* from)
                        HWY_ATTR { return hn::Load(d, reinterpret_cast<const uint32_t*>(from)); };
  for (size_t at = offset; at < offset + bytes; at += kUnroll * width) {
    const std::byte* first = streams.gradients[0] + at;
    auto a0 = load(first), a1 = load(first + width);
    auto a2 = load(first + 2 * width), a3 = load(first + 3 * width);
    for (size_t w = 1; w < streams.gradients.size(); ++w) {
      const std::byte* next = streams.gradients[w] + at;
      a0 = hn::Add(a0, load(next));
      a1 = hn::Add(a1, load(next + width));
      a2 = hn::Add(a2, load(next + 2 * width));
      a3 = hn::Add(a3, load(next + 3 * width));
    }
    const hn::Vec<D> sums[kUnroll] = {a0, a1, a2, a3};
    for (std::byte* update : streams.updates) {
      for (size_t v = 0; v < kUnroll * kRatio; ++v) {
        std::byte* place = update + at * kRatio + v * width;
        put<kStreaming>(hn::Add(load(place), sums[v / kRatio]), place);
      }
    }
    for (size_t v = 0; v < kUnroll * result_ratio; ++v) {
      put<kStreaming>(sums[v / result_ratio], streams.result + at * result_ratio + v * width);
    }
  }
}

void mix_streams(const MixStreams& streams, uint32_t ratio, uint32_t result_ratio, bool streaming,
                 size_t offset, size_t bytes) {
  if (ratio == 1) {
    streaming ? mix_block<1, true>(streams, result_ratio, offset, bytes)
              : mix_block<1, false>(streams, result_ratio, offset, bytes);
  } else {
    streaming ? mix_block<2, true>(streams, result_ratio, offset, bytes)
              : mix_block<2, false>(streams, result_ratio, offset, bytes);
  }
}

}  // namespace phub::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace phub {
HWY_EXPORT(mix_streams);

namespace {

constexpr size_t kBlockElements = 8192;  // assigned to the threads in turn, as chunks to cores
constexpr uint64_t kMaxBytes = 2ull << 30;

// A shared mapping of a memfd, as the arena of a job is.
class SharedArray {
 public:
  explicit SharedArray(size_t bytes) : bytes_(bytes) {
    const int fd = memfd_create("roofline", MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0) {
      data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    const int error = errno;
    if (fd >= 0) close(fd);
    if (data_ == MAP_FAILED) {
      fail(ErrorCode::kFull, "{} bytes of shared memory to measure the limit on: {}", bytes,
           std::strerror(error));
    }
  }
  SharedArray(const SharedArray&) = delete;
  SharedArray& operator=(const SharedArray&) = delete;
  ~SharedArray() { munmap(data_, bytes_); }
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = MAP_FAILED;
  size_t bytes_;
};

double now_us() {
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

MemoryMix mix_of_exchange(uint64_t elements, uint32_t workers, kernels::Optimizer optimizer,
                          const kernels::Hyper& hyper, kernels::DType gradients,
                          kernels::DType results) {
  MemoryMix mix{.elements = elements,
                .gradients = workers,
                .gradient_bytes = static_cast<uint32_t>(kernels::bytes_of(gradients))};
  if (optimizer != kernels::Optimizer::kNone) {
    mix.updates = 1 + static_cast<uint32_t>(kernels::state_arrays(optimizer, hyper));
  }
  if (optimizer == kernels::Optimizer::kNone || results != kernels::DType::kF32) {
    mix.result_bytes = static_cast<uint32_t>(kernels::bytes_of(results));
  }
  return mix;
}

uint64_t bytes_moved(const MemoryMix& mix) {
  return mix.elements * (mix.gradients * mix.gradient_bytes + mix.updates * 8 + mix.result_bytes);
}

struct Roofline::Arrays {
  size_t blocks = 0;
  std::vector<numa::Core> cores = numa::this_machine().cores;
  std::unique_ptr<SharedArray> shared;  // gradients, parameters, results
  std::vector<numa::Memory> states;
  MixStreams streams;
};

Roofline::Roofline(const MemoryMix& mix, uint32_t threads)
    : mix_(mix), threads_(std::max(threads, 1u)), arrays_(std::make_unique<Arrays>()) {
  PHUB_CHECK(mix.elements > 0 && mix.gradients > 0);
  PHUB_CHECK(mix.gradient_bytes == 2 || mix.gradient_bytes == 4);
  PHUB_CHECK(mix.result_bytes == 0 || mix.result_bytes == mix.gradient_bytes);
  const uint64_t element_bytes =
      mix.gradients * mix.gradient_bytes + mix.updates * 4 + mix.result_bytes;
  const uint64_t whole = (mix.elements + kBlockElements - 1) / kBlockElements;
  const uint64_t most = std::max<uint64_t>(1, kMaxBytes / (element_bytes * kBlockElements));
  arrays_->blocks = std::min(whole, most);
  scale_ =
      static_cast<double>(mix.elements) / static_cast<double>(arrays_->blocks * kBlockElements);
  // An odd number of cache lines lies between the arrays, so that they use different cache sets.
  const size_t elements = arrays_->blocks * kBlockElements;
  constexpr size_t kSkew = 4096 + 3 * 64;
  const size_t gradient_stride = elements * mix.gradient_bytes + kSkew;
  const size_t update_stride = elements * 4 + kSkew;
  arrays_->shared =
      std::make_unique<SharedArray>(gradient_stride * (mix.gradients + 1) + update_stride);
  std::byte* next = arrays_->shared->data();
  for (uint32_t w = 0; w < mix.gradients; ++w, next += gradient_stride) {
    arrays_->streams.gradients.push_back(next);
  }
  arrays_->streams.result = next;
  next += gradient_stride;
  for (uint32_t u = 0; u < mix.updates; ++u) {
    if (u > 0) next = arrays_->states.emplace_back(elements * 4, 0).bytes().data();
    arrays_->streams.updates.push_back(next);
  }
}

Roofline::~Roofline() = default;

double Roofline::pass(bool streaming) {
  const uint32_t ratio = 4 / mix_.gradient_bytes;
  const uint32_t result_ratio = mix_.result_bytes > 0 ? 1 : 0;
  const size_t block_bytes = kBlockElements * mix_.gradient_bytes;
  std::vector<double> starts(threads_), ends(threads_);
  std::atomic<uint32_t> ready{0};
  const auto work = [&](uint32_t thread) {
    if (threads_ <= arrays_->cores.size()) numa::pin_thread(arrays_->cores[thread].os_cpu);
    for (size_t block = thread; block < arrays_->blocks; block += threads_) {
      for (std::byte* gradient : arrays_->streams.gradients) {
        std::memset(gradient + block * block_bytes, static_cast<int>(block), block_bytes);
      }
    }
    ready.fetch_add(1);
    while (ready.load() < threads_) std::this_thread::yield();
    starts[thread] = now_us();
    for (size_t block = thread; block < arrays_->blocks; block += threads_) {
      HWY_DYNAMIC_DISPATCH(mix_streams)
      (arrays_->streams, ratio, result_ratio, streaming, block * block_bytes, block_bytes);
    }
    hwy::FlushStream();
    ends[thread] = now_us();
  };
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < threads_; ++t) threads.emplace_back(work, t);
  for (std::thread& thread : threads) thread.join();
  return *std::max_element(ends.begin(), ends.end()) -
         *std::min_element(starts.begin(), starts.end());
}

void Roofline::measure(uint32_t passes) {
  // The very first pass touches the state's pages.
  if (cached_us_.empty()) pass(false);
  for (uint32_t i = 0; i < passes; ++i) {
    cached_us_.push_back(pass(false) * scale_);
    streaming_us_.push_back(pass(true) * scale_);
  }
}

double Roofline::limit_us() const {
  if (cached_us_.empty()) return std::numeric_limits<double>::quiet_NaN();
  return std::min(median(cached_us_), median(streaming_us_));
}

double Roofline::gigabytes_per_s() const {
  return static_cast<double>(bytes_moved(mix_)) / limit_us() / 1e3;
}

}  // namespace phub
#endif
