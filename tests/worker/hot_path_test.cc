// What the server's cores must not do between an arrival and the write back, and what the server
// must not use while it does so: allocations, system calls, processor time, memory.
#include <gtest/gtest.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
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
#include <functional>
#include <map>
#include <optional>
#include <string_view>
#include <thread>

#include "tests/worker/allocation_trap.h"
#include "tests/worker/box.h"
#include "tests/worker/process.h"

namespace phub::testing {
namespace hot_path_test {

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
void exchange(const std::string& server, const std::string& transport, const JobSpec& spec,
              int rounds, Measure measure) {
  each_rank(spec.world_size, [&](uint32_t r) {
    WorkerOptions options;
    options.server = server;
    options.transport = transport;
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

class HotPath : public ::testing::TestWithParam<const char*> {};

// In lock-step and not; with a mean, 16 bits, a state; many chunks and few.
TEST_P(HotPath, AllocatesNothing) {
  JobSpec wide = spec_of("wide", 3, 2'000'000), many = spec_of("many", 3, 64 * 1024);
  wide.reduction = "mean";
  wide.optimizer = "adam";
  many.chunk_elements = 32;
  many.gradient_dtype = many.parameter_dtype = "bf16";
  JobSpec ssp = spec_of("ssp", 3, 200'000);
  ssp.consistency = "ssp";
  ssp.slack = 1;
  for (const JobSpec& spec : {wide, many, ssp}) {
    SCOPED_TRACE(spec.name);
    Box box;
    uint64_t calls = ~uint64_t{0};
    exchange(box.address(), GetParam(), spec, 30, [&](auto run) {
      const AllocationTrap trap;
      run();
      calls = trap.calls();
    });
    EXPECT_EQ(calls, 0u);
  }
}

TEST(AllocationTrap, CatchesWhateverAsksForMemory) {
  const std::pair<const char*, std::function<void*()>> kinds[] = {
      {"malloc", [] { return std::malloc(1); }},
      {"calloc", [] { return std::calloc(1, 1); }},
      {"realloc", [] { return std::realloc(nullptr, 1); }},
      {"aligned_alloc", [] { return std::aligned_alloc(64, 64); }},
      {"memalign", [] { return memalign(64, 64); }},
      {"posix_memalign",
       [] {
         void* memory = nullptr;
         return posix_memalign(&memory, 64, 64) == 0 ? memory : nullptr;
       }},
      {"new", [] { return operator new(1); }},
      {"strdup", [] { return static_cast<void*>(strdup("inside of the C library")); }},
  };
  for (const auto& [kind, allocate] : kinds) {
    SCOPED_TRACE(kind);
    for (const char* name : {"phub-core-0", "somebody"}) {
      uint64_t asked = 0, given_back = 0;
      std::thread([&, kind = kind, allocate = allocate] {
        pthread_setname_np(pthread_self(), name);
        const AllocationTrap trap;
        void* volatile memory = allocate();
        asked = trap.calls();
        if (kind == std::string_view("new")) {
          operator delete(memory);
        } else {
          std::free(memory);
        }
        given_back = trap.calls() - asked;
      }).join();
      const uint64_t expected = std::strcmp(name, "somebody") != 0;
      EXPECT_EQ(asked, expected);
      EXPECT_EQ(given_back, expected);
    }
  }
}

TEST(AllocationTrap, CatchesMappings) {
  if (!AllocationTrap::sees_mappings()) GTEST_SKIP() << "sanitizers have no hook for mappings";
  uint64_t calls = 0;
  std::thread([&] {
    pthread_setname_np(pthread_self(), "phub-core-0");
    const AllocationTrap trap;
    void* memory = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memory = mremap(memory, 4096, 8192, MREMAP_MAYMOVE);
    munmap(memory, 8192);
    calls = trap.calls();
  }).join();
  EXPECT_EQ(calls, 3u);
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
    address_ = process_.listening_address();
  }
  ~Server() {
    process_.send(SIGTERM);
    EXPECT_EQ(process_.wait(seconds(60)), 0) << process_.output();
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

// Over shared memory a core sleeps and wakes others, and nothing else. Over TCP it also asks which
// sockets have something, reads, and sends, many chunks at a time.
bool permitted(const std::string& transport, uint64_t number) {
  if (number == SYS_epoll_wait || number == SYS_restart_syscall || number == SYS_write) return true;
  return transport == "tcp" && (number == SYS_recvmsg || number == SYS_sendmsg);
}

TEST_P(HotPath, MakesNoSystemCallPerChunk) {
  if (kSanitized) GTEST_SKIP() << "sanitizers make system calls of their own";
  const std::string transport = GetParam();
  constexpr int kRounds = 40;
  constexpr uint32_t kRanks = 3, kCores = 2;
  for (const uint64_t chunks : {16u, 512u}) {
    SCOPED_TRACE(chunks);
    const Server server;
    std::atomic<bool> go{false}, done{false};
    std::thread job([&] {
      JobSpec spec = spec_of("job", kRanks, chunks * 32);
      spec.chunk_elements = 32;  // many chunks, little work
      exchange(server.address(), transport, spec, kRounds, [&](auto run) {
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
      if (number == SYS_epoll_ctl && count < uint64_t{kRounds}) continue;  // a job begins
      EXPECT_TRUE(permitted(transport, number))
          << "system call " << number << ", " << count << " times";
    }
    // A sleep and a wake-up per rank, core and round, twice over, and what joining takes.
    uint64_t limit = uint64_t{kRounds} * kCores * (kRanks + 1) * 2 + 400;
    // Over TCP a wake-up is three calls (which sockets, read, nothing more), and at most every
    // fourth chunk, not each, is received or sent by a call of its own.
    if (transport == "tcp") limit = 3 * limit + kRounds * kRanks * chunks * 2 / 4;
    std::printf("%s, %lu chunks: %lu system calls of the cores in %d rounds, at most %lu\n",
                transport.c_str(), chunks, all, kRounds, limit);
    EXPECT_LE(all, limit);
    EXPECT_GE(all, uint64_t{kCores});
  }
}
INSTANTIATE_TEST_SUITE_P(Over, HotPath, ::testing::Values("shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

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
  exchange(server.address(), "shm", spec_of("memory", 2, kElements), 2, [&](auto run) {
    run();
    const uint64_t resident = server.resident();
    std::printf("server with a model of %lu MiB and one state: %lu MiB\n", kModel >> 20,
                resident >> 20);
    EXPECT_LE(resident, 2 * kModel * 105 / 100 + (64u << 20));
    EXPECT_GE(resident, 2 * kModel);
  });
}

}  // namespace hot_path_test
}  // namespace phub::testing
