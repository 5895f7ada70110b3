// How close the kernels come to the limits of the machine. Each benchmark alternates a kernel and a
// loop to compare it with, so that both see the same load, and reports the median of the ratios of
// each pair. Times are the processor time of the slowest thread: the loops never wait, and on a
// busy machine the rest of the wall time belongs to other programs.
//
//   Memory/…  sum and optimizer chunk by chunk, as the server does, over far more than the caches
//             hold: "of_memory" is its share of the bandwidth of a plain mix of the same reads and
//             writes (goal: 0.90).
//   Groups/…  the same with 8 ranks that are added in groups: "vs_flat" is the time over that of
//             rank order.
//   Cache/…   8 slots of 32 KiB in the L2 cache: "vs_by_hand" is the time over that of intrinsics
//             (goal: 1.15).
//   Store/…   the write-back with streaming stores, "streaming_vs_cached" of the time with cached
//             ones; with a reader afterwards, as the workers are, or without.
//   State8/…  one gradient and the optimizer with states of 8 bits: "vs_f32" is the time over that
//             with f32 states, of a chunk in the cache or of a model far larger than the caches.
//
//   Muon/…    the direction of a matrix's step, on one core: "GFLOP/s" of its products.
//
//   Encode/…  gradient and residual into slots of a coded format, chunk by chunk, and
//   Decode/…  the sum of such slots: "of_memory" as above, of all bytes read and written
//             (goal: 0.90), "f32_GB/s" of the gradient alone.
//
// --tiny runs everything small, to see that it works.
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/kernels_baseline.h"
#include "kernels/encode.h"
#include "kernels/kernels.h"
#include "kernels/state8.h"
#include "kernels/whole_key.h"
#include "phub/core/tree_sum.h"

namespace phub::bench {
namespace {

using kernels::DType;
using kernels::Optimizer;
using kernels::Store;

constexpr size_t kChunk = 8192;  // elements, the server's default

bool tiny = false;

// Anonymous memory, on huge pages if the kernel has them, as the server's.
class Floats {
 public:
  explicit Floats(size_t count) : bytes_(count * sizeof(float)) {
    void* memory =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
      throw std::runtime_error("mmap of " + std::to_string(bytes_) + " bytes");
    madvise(memory, bytes_, MADV_HUGEPAGE);
    data_ = static_cast<float*>(memory);
    for (size_t i = 0; i < count; ++i) data_[i] = static_cast<float>(i % 1000) * 1e-3f + 1e-3f;
  }
  Floats(Floats&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  ~Floats() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  float* get() const { return data_; }

 private:
  float* data_;
  size_t bytes_;
};

double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Runs body(thread) on `count` threads. Returns the processor time of the slowest.
double on_threads(size_t count, const std::function<void(size_t)>& body) {
  std::vector<double> times(count);
  const auto timed = [&](size_t thread) {
    const double begin = thread_seconds();
    body(thread);
    times[thread] = thread_seconds() - begin;
  };
  {
    std::vector<std::jthread> others;
    for (size_t t = 1; t < count; ++t) others.emplace_back(timed, t);
    timed(0);
  }
  return *std::max_element(times.begin(), times.end());
}

double seconds(const std::function<void()>& body) {
  return on_threads(1, [&](size_t) { body(); });
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Two bodies that return their times, run in turns.
struct Turns {
  using Body = std::function<double()>;
  void run(benchmark::State& state, const Body& a, const Body& b) {
    a();
    b();
    for (auto _ : state) {
      a_seconds.push_back(a());
      b_seconds.push_back(b());
      ratios.push_back(a_seconds.back() / b_seconds.back());
      state.SetIterationTime(a_seconds.back());
    }
  }
  double a() const { return median(a_seconds); }
  double b() const { return median(b_seconds); }
  double ratio() const { return median(ratios); }

  std::vector<double> a_seconds, b_seconds, ratios;
};

// Slots, parameters and state of one model, and its chunks divided among threads.
struct Job {
  Job(Optimizer o, size_t ranks, size_t threads, size_t bytes)
      : optimizer(o),
        states(kernels::state_arrays(o, kernels::default_hyper(o))),
        threads(threads) {
    const size_t arrays = ranks + 1 + states;
    chunks = std::max(bytes / arrays / (kChunk * sizeof(float)) / threads, size_t{1}) * threads;
    for (size_t i = 0; i < arrays; ++i) memory.emplace_back(elements() + kSkew * arrays);
    for (size_t i = 0; i < ranks; ++i) slots.push_back(array(i));
    for (size_t i = ranks; i < arrays; ++i) updated.push_back(array(i));
  }

  size_t elements() const { return chunks * kChunk; }
  size_t read_bytes() const { return memory.size() * elements() * sizeof(float); }
  size_t written_bytes() const { return updated.size() * elements() * sizeof(float); }

  double kernel(const RankTree& tree = {}) const {
    const kernels::Step step = kernels::make_step(optimizer, kernels::default_hyper(optimizer), 2);
    return on_threads(threads, [&](size_t thread) {
      alignas(64) float scratch[kChunk];
      TreeSum sum(tree, kChunk, false);
      std::vector<const void*> chunk(slots.size());
      std::vector<uint32_t> ranks(slots.size());
      std::iota(ranks.begin(), ranks.end(), 0u);
      const size_t share = elements() / threads;
      for (size_t at = thread * share; at < (thread + 1) * share; at += kChunk) {
        for (size_t s = 0; s < slots.size(); ++s) chunk[s] = slots[s] + at;
        sum.add({chunk, ranks}, {.elements = kChunk}, 1.0f / 4, scratch);
        kernels::optimize(step, scratch, updated[0] + at, states > 0 ? updated[1] + at : nullptr,
                          states > 1 ? updated[2] + at : nullptr, kChunk, nullptr, DType::kF32,
                          Store::kCached);
      }
    });
  }

  double mix() const {
    return on_threads(threads, [&](size_t thread) {
      const size_t share = elements() / threads;
      std::vector<const float*> reads;
      std::vector<float*> updates;
      for (const float* slot : slots) reads.push_back(slot + thread * share);
      for (float* array : updated) updates.push_back(array + thread * share);
      mix_streams(reads, updates, share);
    });
  }

  // The arrays begin some cache lines apart, so that the streams use different cache sets.
  static constexpr size_t kSkew = 5 * 16;
  float* array(size_t i) const { return memory[i].get() + i * kSkew; }

  Optimizer optimizer;
  size_t states, threads, chunks;
  std::vector<Floats> memory;
  std::vector<float*> slots, updated;
};

void memory_bound(benchmark::State& state, Optimizer optimizer, size_t ranks, size_t threads) {
  const Job job(optimizer, ranks, threads, tiny ? size_t{1} << 20 : size_t{5} << 28);
  Turns turns;
  turns.run(
      state, [&] { return job.kernel(); }, [&] { return job.mix(); });
  const auto bytes = static_cast<double>(job.read_bytes() + job.written_bytes());
  state.counters["GB/s"] = bytes / turns.a() * 1e-9;
  state.counters["mix_GB/s"] = bytes / turns.b() * 1e-9;
  state.counters["of_memory"] = 1 / turns.ratio();
}

void in_groups(benchmark::State& state, const char* groups) {
  constexpr uint32_t kRanks = 8;
  const Job job(Optimizer::kNesterov, kRanks, 1, tiny ? size_t{1} << 20 : size_t{5} << 28);
  const RankTree tree(groups, kRanks);
  Turns turns;
  turns.run(
      state, [&] { return job.kernel(tree); }, [&] { return job.kernel(); });
  state.counters["vs_flat"] = turns.ratio();
}

void in_cache(benchmark::State& state, Sum8 by_hand, const char* target) {
  kernels::force_target(target);
  constexpr size_t kRepeat = 200;
  std::vector<Floats> memory;
  std::vector<const void*> slots;
  std::vector<const float*> floats;
  for (size_t s = 0; s < 8; ++s) {
    memory.emplace_back(kChunk + 1024);
    floats.push_back(memory[s].get() + s * 80);
    slots.push_back(floats.back());
  }
  alignas(64) float out[kChunk];
  const auto repeat = [&](const auto& body) {
    return seconds([&] {
      for (size_t i = 0; i < kRepeat; ++i) benchmark::DoNotOptimize(body());
    });
  };
  Turns turns;
  turns.run(
      state,
      [&] { return repeat([&] { return kernels::sum(slots, DType::kF32, 0.125f, out, kChunk); }); },
      [&] { return repeat([&] { return by_hand(floats.data(), 0.125f, out, kChunk); }); });
  state.counters["ns/chunk"] = turns.a() / kRepeat * 1e9;
  state.counters["by_hand_ns"] = turns.b() / kRepeat * 1e9;
  state.counters["vs_by_hand"] = turns.ratio();
  kernels::force_target("");
}

// The whole work of a chunk, with write-back to `out`, which is as large as the model.
void write_back(benchmark::State& state, Optimizer optimizer, DType out_type, size_t bytes,
                bool then_read) {
  const Job job(optimizer, 4, 1, tiny ? size_t{1} << 20 : bytes);
  const Floats out(job.elements());
  const kernels::Step step = kernels::make_step(optimizer, kernels::default_hyper(optimizer), 2);
  alignas(64) float scratch[kChunk];
  const auto run = [&](Store store) {
    for (size_t at = 0; at < job.elements(); at += kChunk) {
      const void* chunk[] = {job.slots[0] + at, job.slots[1] + at, job.slots[2] + at,
                             job.slots[3] + at};
      kernels::sum(chunk, DType::kF32, 0.25f, scratch, kChunk);
      kernels::optimize(
          step, scratch, job.updated[0] + at, job.states > 0 ? job.updated[1] + at : nullptr,
          job.states > 1 ? job.updated[2] + at : nullptr, kChunk,
          reinterpret_cast<char*>(out.get()) + at * bytes_of(out_type), out_type, store);
    }
  };
  // As a worker does next, read the result.
  const auto read = [&] {
    float sum = 0;
    for (size_t i = 0; i < job.elements() * bytes_of(out_type) / sizeof(float); i += 16) {
      sum += out.get()[i];
    }
    benchmark::DoNotOptimize(sum);
  };
  const auto timed = [&](Store store, bool then_read) {
    return [&, store, then_read] {
      return seconds([&] {
        run(store);
        if (then_read) read();
      });
    };
  };
  Turns turns;
  turns.run(state, timed(Store::kStreaming, then_read), timed(Store::kCached, then_read));
  state.counters["streaming_vs_cached"] = turns.ratio();
}

void in_8_bits(benchmark::State& state, Optimizer optimizer, size_t bytes) {
  const Job job(optimizer, 1, 1, tiny ? size_t{1} << 20 : bytes);
  const size_t chunks = job.elements() / kChunk;
  const uint64_t room = kernels::state8_bytes(job.elements(), chunks);
  std::vector<Floats> memory;
  kernels::State8 states[2];
  for (size_t i = 0; i < job.states; ++i) {
    memory.emplace_back(room / sizeof(float));
    states[i] = kernels::state8_in(memory[i].get(), job.elements(), optimizer, i);
    for (size_t c = 0; c < chunks; ++c) {
      kernels::encode_state(job.updated[1 + i] + c * kChunk, kChunk, states[i].from(c * kChunk));
    }
  }
  const kernels::Step step = kernels::make_step(optimizer, kernels::default_hyper(optimizer), 2);
  const size_t repeat = std::max(size_t{400} / chunks, size_t{1});
  const auto each_chunk = [&](const auto& body) {
    return seconds([&] {
      for (size_t at = 0; at < repeat * job.elements(); at += kChunk) body(at % job.elements());
    });
  };
  Turns turns;
  turns.run(
      state,
      [&] {
        return each_chunk([&](size_t at) {
          kernels::optimize(step, job.slots[0] + at, job.updated[0] + at, states[0].from(at),
                            job.states > 1 ? states[1].from(at) : kernels::State8(), kChunk,
                            nullptr, DType::kF32, Store::kCached);
        });
      },
      [&] {
        return each_chunk([&](size_t at) {
          kernels::optimize(step, job.slots[0] + at, job.updated[0] + at, job.updated[1] + at,
                            job.states > 1 ? job.updated[2] + at : nullptr, kChunk, nullptr,
                            DType::kF32, Store::kCached);
        });
      });
  const double steps = static_cast<double>(repeat) * static_cast<double>(job.elements());
  state.counters["ns/element"] = turns.a() / steps * 1e9;
  state.counters["f32_ns"] = turns.b() / steps * 1e9;
  state.counters["vs_f32"] = turns.ratio();
}

// Gradients of one model, a residual, and its slots in a coded format, of which each chunk's begins
// behind the one before.
struct CodedJob {
  CodedJob(DType format, size_t ranks, size_t elements)
      : format(format),
        elements(std::max(elements / kChunk, size_t{1}) * kChunk),
        gradient(this->elements),
        residual(this->elements) {
    uint32_t random = 1;
    for (size_t i = 0; i < this->elements; ++i) {
      random = random * 1664525 + 1013904223;
      const float x = static_cast<float>(static_cast<int32_t>(random)) * 0x1p-31f;
      gradient.get()[i] = x * x * x;  // of many magnitudes
      residual.get()[i] = 0;
    }
    for (size_t r = 0; r < ranks; ++r) {
      slots.emplace_back(this->elements / kChunk * stride() / sizeof(float) + r * 80);
    }
    encode({});
    for (Floats& slot : slots)
      std::memcpy(at(slot), at(slots[0]), this->elements / kChunk * stride());
  }

  // The scale fits into a cache line of its own, as if the slots were aligned.
  size_t stride() const { return (slot_bytes(format, kChunk) + 63) / 64 * 64; }
  std::byte* at(const Floats& slot) const { return reinterpret_cast<std::byte*>(slot.get()); }

  void encode(const kernels::Rounding& rounding) const {
    for (size_t chunk = 0; chunk < elements / kChunk; ++chunk) {
      const size_t first = chunk * kChunk;
      benchmark::DoNotOptimize(kernels::encode(gradient.get() + first, residual.get() + first,
                                               format, rounding, at(slots[0]) + chunk * stride(),
                                               kChunk));
    }
  }
  void sum() const {
    std::vector<const void*> chunk(slots.size());
    for (size_t c = 0; c < elements / kChunk; ++c) {
      for (size_t s = 0; s < slots.size(); ++s) chunk[s] = at(slots[s]) + c * stride();
      benchmark::DoNotOptimize(
          kernels::sum(chunk, format, 0.25f, residual.get() + c * kChunk, kChunk));
    }
  }

  DType format;
  size_t elements;
  Floats gradient, residual;
  std::vector<Floats> slots;
};

constexpr size_t kMixFloats = kMixElements * sizeof(float);

void report(benchmark::State& state, const Turns& turns, double bytes, double gradient_bytes) {
  state.counters["GB/s"] = bytes / turns.a() * 1e-9;
  state.counters["mix_GB/s"] = bytes / turns.b() * 1e-9;
  state.counters["of_memory"] = 1 / turns.ratio();
  state.counters["f32_GB/s"] = gradient_bytes / turns.a() * 1e-9;
}

void encode_chunks(benchmark::State& state, DType format, bool stochastic) {
  const CodedJob job(format, 1, tiny ? kChunk : size_t{1} << 26);
  const size_t slot_bytes = kernels::slot_bytes(format, kMixElements) / 32 * 32;
  const MixStream reads[] = {{job.at(job.gradient), kMixFloats}};
  const MixStream updates[] = {{job.at(job.residual), kMixFloats}};
  const MixStream writes[] = {{job.at(job.slots[0]), slot_bytes}};
  Turns turns;
  turns.run(
      state, [&] { return seconds([&] { job.encode({.stochastic = stochastic}); }); },
      [&] {
        const double time = seconds([&] { mix_bytes(reads, updates, writes, job.elements); });
        std::memset(job.residual.get(), 0, job.elements * sizeof(float));
        return time;
      });
  const auto n = static_cast<double>(job.elements);
  report(state, turns, n * (12 + static_cast<double>(slot_bytes) / kMixElements), n * 4);
}

void sum_coded(benchmark::State& state, DType format, size_t ranks) {
  const CodedJob job(format, ranks, tiny ? kChunk : size_t{1} << 26);
  const size_t slot_bytes = kernels::slot_bytes(format, kMixElements) / 32 * 32;
  std::vector<MixStream> reads;
  for (const Floats& slot : job.slots) reads.push_back({job.at(slot), slot_bytes});
  const MixStream writes[] = {{job.at(job.residual), kMixFloats}};
  Turns turns;
  turns.run(
      state, [&] { return seconds([&] { job.sum(); }); },
      [&] { return seconds([&] { mix_bytes(reads, {}, writes, job.elements); }); });
  const auto n = static_cast<double>(job.elements);
  const double read = static_cast<double>(ranks * slot_bytes) / kMixElements;
  report(state, turns, n * (4 + read), n * 4);
}

// A whole matrix by Muon, on one core, of which the products of its iteration are most.
void orthogonalize(benchmark::State& state, size_t rows, size_t columns) {
  kernels::WholeKey key;
  key.rule = kernels::KeyRule::kOrthogonal;
  key.rows = rows, key.columns = columns;
  const kernels::Hyper hyper = kernels::default_hyper(Optimizer::kMuon);
  std::vector<float> gradient(key.elements()), before(key.elements()), after(key.elements());
  std::vector<float> matrix, scratch(kernels::scratch_elements(key));
  for (size_t i = 0; i < gradient.size(); ++i) {
    gradient[i] = static_cast<float>(i * 7919 % 2001) / 1000 - 1;
  }
  double seconds_of_all = 0, steps = 0;
  for (auto _ : state) {
    matrix = gradient;
    const double of_step = seconds([&] {
      kernels::step_of_key(key, hyper, 2, 1, before.data(), matrix.data(), after.data(),
                           scratch.data());
    });
    state.SetIterationTime(of_step);
    seconds_of_all += of_step;
    ++steps;
  }
  state.counters["GFLOP/s"] = 2e-9 * kernels::products_of(key, hyper) * steps / seconds_of_all;
}

void register_all() {
  const auto add = [](const std::string& name, auto... arguments) {
    auto* benchmark = benchmark::RegisterBenchmark(name.c_str(), arguments...);
    benchmark->UseManualTime()->Unit(benchmark::kMillisecond);
    if (tiny) benchmark->Iterations(2);
    return benchmark;
  };
  if (has_avx2()) {
    for (const Optimizer o : {Optimizer::kSgd, Optimizer::kNesterov, Optimizer::kAdam}) {
      for (const size_t ranks : {2, 4, 8}) {
        for (const size_t threads : {1, 2}) {
          const std::string name = "Memory/" + std::string(name_of(o)) +
                                   "/ranks:" + std::to_string(ranks) +
                                   "/threads:" + std::to_string(threads);
          add(name, memory_bound, o, ranks, threads);
        }
      }
    }
    for (const char* groups : {"4,4", "2,2,2,2", "(2,2),(2,2)"}) {
      add(std::string("Groups/") + groups, in_groups, groups);
    }
    for (size_t format = kernels::kPlainFormats; format < kernels::kFormats.size(); ++format) {
      const auto type = static_cast<DType>(format);
      const std::string name(name_of(type));
      add("Encode/" + name, encode_chunks, type, false);
      add("Encode/" + name + "/stochastic", encode_chunks, type, true);
      for (const size_t ranks : {1, 2, 4, 8}) {
        add("Decode/" + name + "/ranks:" + std::to_string(ranks), sum_coded, type, ranks);
      }
    }
    add("Cache/AVX2", in_cache, sum8_avx2, "AVX2");
  }
  if (has_avx512()) add("Cache/AVX3", in_cache, sum8_avx512, "AVX3");
  for (const Optimizer o : {Optimizer::kNone, Optimizer::kNesterov}) {
    for (const DType type : {DType::kF32, DType::kBF16}) {
      for (const size_t mib : {8, 1024}) {
        for (const bool then_read : {false, true}) {
          const std::string name = "Store/" + std::string(name_of(o)) + "/" +
                                   std::string(name_of(type)) + "/MiB:" + std::to_string(mib) +
                                   (then_read ? "/and_read" : "");
          add(name, write_back, o, type, mib << 20, then_read);
        }
      }
    }
  }
  for (const auto& [rows, columns] :
       std::initializer_list<std::pair<size_t, size_t>>{{128, 128}, {768, 768}, {3072, 768}}) {
    if (tiny && rows > 128) continue;
    add("Muon/" + std::to_string(rows) + "x" + std::to_string(columns), orthogonalize, rows,
        columns);
  }
  for (const Optimizer o : {Optimizer::kAdam, Optimizer::kAdamW, Optimizer::kMomentum}) {
    const std::string name = "State8/" + std::string(name_of(o));
    add(name + "/cached", in_8_bits, o, 1);
    add(name + "/MiB:1024", in_8_bits, o, size_t{1} << 30);
  }
}

}  // namespace
}  // namespace phub::bench

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--tiny") == 0) {
      phub::bench::tiny = true;
      std::rotate(argv + i, argv + i + 1, argv + argc);
      --argc;
      break;
    }
  }
  phub::bench::register_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
}
