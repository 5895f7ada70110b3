// What the server's cores must not do between an arrival and the write back, and what the server
// must not use while it does so: allocations, system calls, processor time, memory.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <new>
#include <optional>
#include <thread>

#include "tests/worker/box.h"
#include "tests/worker/process.h"

// Counts what the threads named phub-core-* allocate while armed.
namespace {

std::atomic<bool> armed{false};
std::atomic<uint64_t> allocations{0};

bool is_core_thread() {
  thread_local const bool is_core = [] {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof(name));
    return std::strncmp(name, "phub-core-", 10) == 0;
  }();
  return is_core;
}

void* allocate(size_t bytes) {
  if (armed.load(std::memory_order_relaxed) && is_core_thread()) ++allocations;
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(size_t bytes) { return allocate(bytes); }
void* operator new[](size_t bytes) { return allocate(bytes); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return std::malloc(bytes); }
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept { return std::malloc(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace phub::testing {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

using std::chrono::milliseconds;
using std::chrono::seconds;

JobSpec spec_of(std::string name, uint32_t ranks, uint64_t elements) {
  JobSpec spec;
  spec.name = std::move(name);
  spec.keys = {{.name = "w", .elements = elements}};
  spec.world_size = ranks;
  spec.optimizer = "nesterov";
  spec.lease_ms = 30000;
  return spec;
}

// All ranks as threads; `between` runs in rank 0's thread when everybody has warmed up.
template <typename Measure>
void exchange(const std::string& server, const JobSpec& spec, int rounds, Measure measure) {
  each_rank(spec.world_size, [&](uint32_t r) {
    WorkerOptions options;
    options.server = server;
    options.spec = spec;
    options.rank = static_cast<int32_t>(r);
    Worker worker(options);
    worker.wait_all();
    const auto run = [&](int n) {
      for (int i = 0; i < n; ++i) worker.push_pull(0);
    };
    run(3);
    worker.barrier();
    if (r == 0) {
      measure([&] { run(rounds); });
    } else {
      run(rounds);
    }
    worker.barrier();
    worker.leave();
  });
}

TEST(HotPath, AllocatesNothing) {
  Box box;
  exchange(box.address(), spec_of("job", 3, 2'000'000), 50, [](auto run) {
    armed = true;
    run();
    armed = false;
  });
  EXPECT_EQ(allocations, 0u);
}

TEST(HotPath, TheTrapCatchesAllocations) {
  std::thread([] {
    pthread_setname_np(pthread_self(), "phub-core-0");
    armed = true;
    std::free(allocate(1));
    armed = false;
  }).join();
  EXPECT_EQ(allocations.exchange(0), 1u);
}

// bin/phub serve with two cores, in a process of its own.
class Server {
 public:
  Server()
      : folder_(std::filesystem::temp_directory_path() / ("phub-test-" + std::to_string(getpid()))),
        made_(std::filesystem::create_directory(folder_)),
        process_({PHUB_BINARY, "serve", "--listen", "127.0.0.1:0", "--topology",
                  "pack:1 core:2 pu:1", "--pin", "false"},
                 folder_ / "output") {
    EXPECT_TRUE(process_.printed("listening on", seconds(10))) << process_.output();
    const std::string output = process_.output();
    const size_t at = output.find("listening on ") + std::strlen("listening on ");
    address_ = output.substr(at, output.find('\n', at) - at);
  }
  ~Server() {
    process_.send(SIGTERM);
    EXPECT_EQ(process_.wait(seconds(10)), 0) << process_.output();
    std::filesystem::remove_all(folder_);
  }
  const std::string& address() const { return address_; }
  std::filesystem::path proc() const {
    return std::filesystem::path("/proc") / std::to_string(process_.pid());
  }
  std::vector<pid_t> core_threads() const {
    std::vector<pid_t> threads;
    for (const auto& entry : std::filesystem::directory_iterator(proc() / "task")) {
      std::string name;
      std::getline(std::ifstream(entry.path() / "comm") >> std::ws, name);
      if (name.starts_with("phub-core-")) threads.push_back(std::stoi(entry.path().filename()));
    }
    return threads;
  }
  uint64_t nanoseconds_on_cpu() const {
    uint64_t sum = 0, one = 0;
    for (const auto& entry : std::filesystem::directory_iterator(proc() / "task")) {
      if (std::ifstream(entry.path() / "schedstat") >> one) sum += one;
    }
    return sum;
  }
  // Resident memory in bytes, but for the gradients, which are the workers'.
  uint64_t resident() const {
    std::ifstream maps(proc() / "smaps");
    std::string line;
    uint64_t sum = 0;
    bool counted = true;
    while (std::getline(maps, line)) {
      uint64_t kib = 0;
      if (std::sscanf(line.c_str(), "Rss: %lu kB", &kib) == 1) {
        sum += counted ? kib << 10 : 0;
      } else if (line.find('-') < line.find(' ')) {
        counted = line.find("phub-gradients") == std::string::npos;
      }
    }
    return sum;
  }

 private:
  std::filesystem::path folder_;
  bool made_;
  Process process_;
  std::string address_;
};

// The system calls of some threads, counted from outside. One thread uses it from begin to end.
class SystemCalls {
 public:
  // Nothing if the kernel does not permit it.
  static std::optional<SystemCalls> of(const std::vector<pid_t>& threads) {
    SystemCalls calls;
    for (pid_t thread : threads) {
      if (ptrace(PTRACE_SEIZE, thread, nullptr, PTRACE_O_TRACESYSGOOD) != 0) return std::nullopt;
      ptrace(PTRACE_INTERRUPT, thread, nullptr, nullptr);
      calls.threads_.push_back(thread);
    }
    return calls;
  }
  // Follows them until `done`, then lets them go.
  std::map<uint64_t, uint64_t> count(const std::atomic<bool>& done) {
    std::map<uint64_t, uint64_t> counts;
    size_t left = threads_.size();
    bool told = false;
    while (left > 0) {
      if (done && !std::exchange(told, true)) {
        for (pid_t thread : threads_) ptrace(PTRACE_INTERRUPT, thread, nullptr, nullptr);
      }
      int status = 0;
      const pid_t thread = waitpid(-1, &status, __WALL | (told ? 0 : WNOHANG));
      if (thread <= 0) {
        std::this_thread::yield();
        continue;
      }
      if (!WIFSTOPPED(status)) {
        --left;
        continue;
      }
      if (WSTOPSIG(status) == (SIGTRAP | 0x80)) {
        __ptrace_syscall_info info{};
        ptrace(PTRACE_GET_SYSCALL_INFO, thread, sizeof(info), &info);
        if (info.op == PTRACE_SYSCALL_INFO_ENTRY && !told) ++counts[info.entry.nr];
      }
      if (told) {
        ptrace(PTRACE_DETACH, thread, nullptr, nullptr);
        --left;
      } else {
        ptrace(PTRACE_SYSCALL, thread, nullptr, nullptr);
      }
    }
    return counts;
  }

 private:
  std::vector<pid_t> threads_;
};

TEST(HotPath, MakesOneSystemCallPerWakeUpWhateverTheNumberOfChunks) {
  if (kSanitized) GTEST_SKIP() << "sanitizers make system calls of their own";
  constexpr int kRounds = 40;
  constexpr uint32_t kRanks = 3, kCores = 2;
  for (const uint64_t chunks : {16u, 1024u}) {
    SCOPED_TRACE(chunks);
    const Server server;
    std::atomic<bool> go{false}, done{false};
    std::thread job([&] {
      JobSpec spec = spec_of("job", kRanks, chunks * 32);
      spec.chunk_elements = 32;  // many chunks, little work
      exchange(server.address(), spec, kRounds, [&](auto run) {
        while (!go && !done) std::this_thread::sleep_for(milliseconds(1));
        run();
        done = true;
      });
    });
    // The threads are there from the start; they are followed from here on.
    auto threads = server.core_threads();
    for (int i = 0; threads.size() < kCores && i < 1000; ++i) {  // each names itself
      std::this_thread::sleep_for(milliseconds(10));
      threads = server.core_threads();
    }
    EXPECT_EQ(threads.size(), kCores);
    std::optional<SystemCalls> calls = SystemCalls::of(threads);
    if (!calls) {
      done = true;
      job.join();
      GTEST_SKIP() << "ptrace is not permitted here: " << std::strerror(errno);
    }
    go = true;
    const std::map<uint64_t, uint64_t> counts = calls->count(done);
    job.join();
    uint64_t all = 0;
    for (const auto& [number, count] : counts) {
      all += count;
      if (number == SYS_epoll_ctl && count <= 2 * kCores) continue;  // the job comes and goes
      EXPECT_TRUE(number == SYS_write || number == SYS_epoll_wait || number == SYS_restart_syscall)
          << "system call " << number << ", " << count << " times";
    }
    // A sleep and a wake-up per rank, core and round, twice over, and what joining takes.
    EXPECT_LE(all, uint64_t{kRounds} * kCores * (kRanks + 1) * 2 + 400);
    EXPECT_GE(all, uint64_t{kCores});
  }
}

TEST(Idle, TakesLessThanAPercentOfACore) {
  const Server server;
  WorkerOptions options;
  options.server = server.address();
  options.spec = spec_of("idle", 1, 1'000'000);
  options.spec.lease_ms = 3000;
  Worker worker(options);
  worker.push_pull(0);
  std::this_thread::sleep_for(milliseconds(300));
  const auto begin = std::chrono::steady_clock::now();
  const uint64_t before = server.nanoseconds_on_cpu();
  std::this_thread::sleep_for(seconds(3));
  const uint64_t used = server.nanoseconds_on_cpu() - before;
  const std::chrono::nanoseconds wall = std::chrono::steady_clock::now() - begin;
  const double percent = 100.0 * static_cast<double>(used) / static_cast<double>(wall.count());
  RecordProperty("percent_of_a_core", std::to_string(percent));
  std::printf("idle server with a job: %.3f%% of a core\n", percent);
  EXPECT_LT(percent, kSanitized ? 5.0 : 1.0);
}

TEST(Memory, IsParametersAndStateAndLittleElse) {
  if (kSanitized) GTEST_SKIP() << "sanitizers use memory of their own";
  const Server server;
  constexpr uint64_t kElements = 24 << 20;
  constexpr uint64_t kModel = kElements * sizeof(float);
  exchange(server.address(), spec_of("memory", 2, kElements), 2, [&](auto run) {
    run();
    const uint64_t resident = server.resident();
    std::printf("server with a model of %lu MiB and one state: %lu MiB\n", kModel >> 20,
                resident >> 20);
    EXPECT_LE(resident, 2 * kModel * 105 / 100 + (64u << 20));
    EXPECT_GE(resident, 2 * kModel);
  });
}

}  // namespace
}  // namespace phub::testing
