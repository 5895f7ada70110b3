// Whatever goes wrong on a thread of the library's, or in a call, is an Error: nothing ends the
// process. Exceptions are thrown where the library waits; threads and descriptors run out.
#include <dlfcn.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <future>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#include "tests/worker/box.h"
#include "tests/worker/server_process.h"
#include "transport/control/control_client.h"
#include "worker/completions.h"
#include "worker/device/host_device.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/device_group.h"
#include "worker/geeps/standalone_exchange.h"

namespace {

enum Thrown { kNothing, kSystemError, kRuntimeError, kBadAlloc, kInt };

std::atomic<Thrown> thrown{kNothing};
std::atomic<bool> was_thrown{false};
char victim[16] = "";  // the name of the thread; set while nothing is thrown

std::atomic<bool> slow_unlock{false};  // the thread of that name pauses after each
constexpr auto kPause = std::chrono::milliseconds(20);

// That can be started or opened from this process; negative: any number.
std::atomic<int> threads_left{-1};
std::atomic<int> sockets_left{-1};

// Unix sockets that, once connected, show nothing until the server has closed them.
std::atomic<int> slow_sockets{0};

// The resolver does not answer for a.slow.resolver until then.
std::atomic<bool> resolver_answers{false};
std::atomic<int> resolving{0};

bool take_one(std::atomic<int>& of) {
  int left = of;
  while (left > 0 && !of.compare_exchange_weak(left, left - 1)) {
  }
  return left != 0;
}

void maybe_throw() {
  if (thrown == kNothing) return;
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  if (std::strcmp(name, victim) != 0) return;
  was_thrown = true;
  switch (thrown.load()) {
    case kSystemError:
      throw std::system_error(EMFILE, std::generic_category(), "injected");
    case kRuntimeError:
      throw std::runtime_error("injected");
    case kBadAlloc:
      throw std::bad_alloc();
    case kInt:
      throw 17;
    case kNothing:
      break;
  }
}

template <typename Function>
Function* next_of(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// These take the place of libc's in this program.
int epoll_wait(int fd, epoll_event* events, int count, int timeout) {
  maybe_throw();
  static auto* const next = next_of<int(int, epoll_event*, int, int)>("epoll_wait");
  return next(fd, events, count, timeout);
}

int pthread_mutex_unlock(pthread_mutex_t* mutex) noexcept {
  static auto* const next = next_of<int(pthread_mutex_t*)>("pthread_mutex_unlock");
  const int result = next(mutex);
  char name[16] = "";
  if (slow_unlock && pthread_getname_np(pthread_self(), name, sizeof name) == 0 &&
      std::strcmp(name, victim) == 0) {
    std::this_thread::sleep_for(kPause);
  }
  return result;
}

int getaddrinfo(const char* name, const char* service, const addrinfo* hints, addrinfo** list) {
  static auto* const next =
      next_of<int(const char*, const char*, const addrinfo*, addrinfo**)>("getaddrinfo");
  if (std::string_view(name) != "a.slow.resolver") return next(name, service, hints, list);
  if ((hints->ai_flags & AI_NUMERICHOST) != 0) return EAI_AGAIN;
  ++resolving;
  while (!resolver_answers) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  --resolving;
  return EAI_AGAIN;
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                   void* argument) noexcept {
  static auto* const next =
      next_of<int(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>("pthread_create");
  return take_one(threads_left) ? next(thread, attributes, start, argument) : EAGAIN;
}

int connect(int fd, const sockaddr* address, socklen_t bytes) {
  static auto* const next = next_of<int(int, const sockaddr*, socklen_t)>("connect");
  const int result = next(fd, address, bytes);
  if (address->sa_family == AF_UNIX && slow_sockets > 0) {
    --slow_sockets;
    pollfd closed = {.fd = fd, .events = POLLIN, .revents = 0};
    poll(&closed, 1, 60'000);
  }
  return result;
}

int socket(int domain, int type, int protocol) noexcept {
  static auto* const next = next_of<int(int, int, int)>("socket");
  if (take_one(sockets_left)) return next(domain, type, protocol);
  errno = EMFILE;
  return -1;
}

namespace phub::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

JobSpec spec_of(const std::string& name, uint32_t ranks) {
  JobSpec spec;
  spec.name = name;
  spec.keys = {{.name = "w", .elements = 1000}};
  spec.world_size = ranks;
  spec.lease_ms = 3000;
  spec.progress_limit_ms = 600'000;
  return spec;
}

// While it lives, the thread of that name throws where it waits.
class Injected {
 public:
  Injected(const char* thread, Thrown what) {
    std::strncpy(victim, thread, sizeof victim - 1);
    was_thrown = false;
    thrown = what;
  }
  ~Injected() { thrown = kNothing; }
};

ErrorCode code_of(Thrown what) {
  return what == kSystemError || what == kBadAlloc ? ErrorCode::kFull : ErrorCode::kInternal;
}

// What calls give from now on, or nothing.
std::optional<Error> error_of_next_calls(Worker& worker) {
  for (int i = 0; i < 2000; ++i) {
    try {
      worker.test(0);
    } catch (const Error& error) {
      return error;
    }
    std::this_thread::sleep_for(milliseconds(5));
  }
  return std::nullopt;
}

class ThreadErrors : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { setenv("PHUB_TRANSPORT", GetParam(), 1); }
  void TearDown() override { unsetenv("PHUB_TRANSPORT"); }
};

TEST_P(ThreadErrors, WhatTheHeartbeatOrTheMoverThrowsIsTheErrorOfTheNextCall) {
  const ServerProcess server(PHUB_BINARY);
  int job = 0;
  for (const char* thread : {"phub-heartbeat", "phub-progress"}) {
    if (std::strcmp(thread, "phub-progress") == 0 && GetParam() != std::string("tcp")) continue;
    for (const Thrown what : {kSystemError, kRuntimeError, kBadAlloc, kInt}) {
      WorkerOptions options = server.options(spec_of("job" + std::to_string(job++), 1));
      options.spec.max_ranks = 2;
      Worker worker(options);
      worker.wait_all();
      WorkerOptions other_options = options;
      Worker other(other_options);  // never pushes: there is something to wait for
      other.wait_all();
      const Injected injected(thread, what);
      worker.push(0);
      const std::optional<Error> error = error_of_next_calls(worker);
      ASSERT_TRUE(error) << thread << " " << what << ", thrown: " << was_thrown;
      EXPECT_EQ(error->code(), code_of(what)) << error->what();
      EXPECT_THROW(worker.barrier(), Error);
    }
  }
}

TEST_P(ThreadErrors, WhatIsThrownInAWaitIsItsErrorAndTheWorkerGoesOn) {
  const ServerProcess server(PHUB_BINARY);
  pthread_setname_np(pthread_self(), "the-caller");
  for (const Thrown what : {kSystemError, kRuntimeError, kBadAlloc, kInt}) {
    const JobSpec spec = spec_of("wait" + std::to_string(what), 2);
    auto other = std::async(std::launch::async, [&] {
      WorkerOptions options = server.options(spec);
      options.rank = 1;
      return std::make_unique<Worker>(options);
    });
    WorkerOptions options = server.options(spec);
    options.rank = 0;
    options.spin_us = 0;
    Worker worker(options);
    worker.wait_all();
    const std::unique_ptr<Worker> second = other.get();
    second->wait_all();
    worker.push(0);
    for (int i = 0; i < 3; ++i) {
      const Injected injected("the-caller", what);
      try {
        worker.wait(0);
        ADD_FAILURE() << "nothing was thrown";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), code_of(what)) << error.what();
      }
    }
    // A barrier waits in the control client.
    {
      const Injected injected("the-caller", what);
      EXPECT_THROW(worker.barrier(), Error);
    }
    second->push(0);
    worker.wait(0);
    second->wait(0);
    EXPECT_EQ(worker.round(0), worker.first_round());
  }
}

TEST_P(ThreadErrors, WhatTheCompletionsThreadThrowsIsTheErrorOfWhatIsDue) {
  const ServerProcess server(PHUB_BINARY);
  for (const Thrown what : {kSystemError, kRuntimeError, kBadAlloc, kInt}) {
    WorkerOptions options = server.options(spec_of("due" + std::to_string(what), 1));
    options.spec.max_ranks = 2;
    options.spin_us = 0;
    Worker worker(options);
    worker.wait_all();
    Worker other(options);  // never pushes
    other.wait_all();
    std::promise<ErrorCode> code;
    Completions completions(worker);
    const Injected injected("phub-complete", what);
    completions.push(0, 0, [&](const Pushed&, const Error* error) {
      code.set_value(error == nullptr ? ErrorCode::kInvalid : error->code());
    });
    auto said = code.get_future();
    ASSERT_EQ(said.wait_for(seconds(20)), std::future_status::ready) << what;
    EXPECT_EQ(said.get(), code_of(what));
  }
}

// Wherever its thread is while another one ends the worker.
TEST_P(ThreadErrors, WhatIsDueIsCalledWhenTheWorkerEnds) {
  const ServerProcess server(PHUB_BINARY);
  for (int when = 0; when < 20; ++when) {
    WorkerOptions options = server.options(spec_of("ends" + std::to_string(when), 1));
    options.spec.max_ranks = 2;
    Worker worker(options);
    worker.wait_all();
    Worker other(options);  // never pushes
    other.wait_all();
    auto code = std::make_shared<std::promise<ErrorCode>>();
    auto said = code->get_future();
    Completions completions(worker);
    std::strncpy(victim, "phub-complete", sizeof victim - 1);
    slow_unlock = true;
    completions.push(0, 0, [code](const Pushed&, const Error* error) {
      code->set_value(error == nullptr ? ErrorCode::kInvalid : error->code());
    });
    std::this_thread::sleep_for(when * kPause / 5);
    worker.end("over");
    slow_unlock = false;
    ASSERT_EQ(said.wait_for(seconds(30)), std::future_status::ready) << when;
    EXPECT_EQ(said.get(), ErrorCode::kFenced);
  }
}

TEST(Resolver, ThatHangsIsNotWaitedFor) {
  WorkerOptions options;
  options.server = "a.slow.resolver:7717";
  options.spec = spec_of("nowhere", 1);
  options.connect_timeout_ms = 200;
  try {
    const Worker worker(options);
    ADD_FAILURE() << "there is no server";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTimeout) << error.what();
    EXPECT_THAT(error.what(), HasSubstr("looking up the name"));
  }
  EXPECT_GT(resolving, 0) << "it hangs still";
  resolver_answers = true;
  while (resolving > 0) std::this_thread::sleep_for(milliseconds(1));
}

TEST_P(ThreadErrors, AThreadThatCannotBeStartedIsAnError) {
  const ServerProcess server(PHUB_BINARY);
  const bool moves = GetParam() == std::string("tcp");
  // Two names are looked up, each on a thread: to join, and for the transport; then the heartbeat.
  int refused = 0;
  for (int left = 0;; ++left) {
    ASSERT_LT(left, 10);
    WorkerOptions options = server.options(spec_of("threads" + std::to_string(left), 1));
    options.server = "localhost:" + server.port();
    options.connect_timeout_ms = 5000;
    options.spec.lease_ms = 2000;
    threads_left = left;
    std::optional<Error> error;
    try {
      Worker worker(options);
      threads_left = -1;
      worker.wait_all();
      worker.push_pull(0);
      Completions completions(worker);
      threads_left = 0;
      EXPECT_THROW(completions.push(0, 0, [](const Pushed&, const Error*) {}), Error);
      threads_left = -1;
      break;
    } catch (const Error& caught) {
      error = caught;
    }
    threads_left = -1;
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kFull) << error->what();
    ++refused;
    // What was joined is out with its lease at the latest: to say goodbye takes a thread, too.
    const auto gone = [&] {
      for (const JobStatus& job : ControlClient(server.address()).status().jobs) {
        if (job.name == options.spec.name) return false;
      }
      return true;
    };
    for (int i = 0; i < 12000 && !gone(); ++i) std::this_thread::sleep_for(milliseconds(5));
    EXPECT_TRUE(gone());
  }
  EXPECT_GE(refused, moves ? 3 : 2);
}

// The server gives up a connection on which no ticket comes; the ticket stays good.
TEST(HalfOpen, AWorkerThatWasTooSlowToShowItsTicketComesAgain) {
  const ServerProcess server(PHUB_BINARY);
  WorkerOptions options = server.options(spec_of("slow", 1));
  options.transport = "shm";
  options.connect_timeout_ms = 60'000;
  slow_sockets = 1;
  Worker worker(options);
  EXPECT_EQ(slow_sockets, 0);
  worker.wait_all();
  worker.push_pull(0);
  EXPECT_EQ(worker.incarnation(), 1u);
}

TEST_P(ThreadErrors, ASocketThatCannotBeOpenedIsAnError) {
  const ServerProcess server(PHUB_BINARY);
  int refused = 0;
  for (bool worked = false; !worked;) {
    ASSERT_LT(refused, 10);
    WorkerOptions options = server.options(spec_of("sockets" + std::to_string(refused), 1));
    sockets_left = refused;
    try {
      ControlClient(server.address()).status();  // tries once
      Worker worker(options);
      worker.push_pull(0);
      worked = true;
    } catch (const Error& error) {
      ++refused;
      EXPECT_EQ(error.code(), ErrorCode::kFull) << error.what();
      EXPECT_THAT(error.what(), HasSubstr("open files"));
    }
    sockets_left = -1;
  }
  EXPECT_GT(refused, 0);
}

size_t open_descriptors() {
  const std::filesystem::directory_iterator fds("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(fds), end(fds))) - 1;
}

// The lowest descriptor that is free, and so the limit under which there is no other.
rlim_t first_free() {
  const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
  close(fd);
  return static_cast<rlim_t>(fd);
}

// With every number of descriptors a worker is made and works, or an Error says what is short.
TEST_P(ThreadErrors, WithFewDescriptorsEveryCallWorksOrIsAnError) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP()
      << "UBSan opens a pipe to look at an exception's type, and takes its failure for a fault";
#endif
  const ServerProcess server(PHUB_BINARY);
  rlimit before = {};
  getrlimit(RLIMIT_NOFILE, &before);
  const size_t open_at_first = open_descriptors();
  bool worked = false;
  int errors = 0;
  for (rlim_t more = 0; more < 64; ++more) {
    rlimit few = before;
    few.rlim_cur = first_free() + more;
    WorkerOptions options = server.options(spec_of("few" + std::to_string(more), 1));
    options.spec.lease_ms = 300;
    options.connect_timeout_ms = 5000;
    setrlimit(RLIMIT_NOFILE, &few);
    std::string message;
    try {
      Worker worker(options);
      worker.wait_all();
      worker.push_pull(0);
      std::this_thread::sleep_for(milliseconds(more % 4 == 0 ? 450 : 0));  // a heartbeat, a lease
      worker.missing_ranks();
      worker.barrier();
      worker.push_pull(0);
      worked = true;
    } catch (const Error& error) {
      ++errors;
      message = error.what();
    }
    setrlimit(RLIMIT_NOFILE, &before);
    if (!message.empty()) {
      EXPECT_THAT(message, ::testing::AnyOf(HasSubstr("open files"), HasSubstr("lease"),
                                            HasSubstr("descriptor")))
          << more;
    }
    if (worked) break;
  }
  EXPECT_TRUE(worked);
  EXPECT_GT(errors, 5);
  EXPECT_EQ(open_descriptors(), open_at_first) << "descriptors were left open";
}

// Nor is it one that has left: the others of its group wait for the next one.
TEST(CacheThreads, ACacheThatCannotStartIsAnError) {
  const std::vector<geeps::TableSpec> tables = {{"w", 4, geeps::dense(2)}};
  JobSpec job;
  job.name = "group";
  job.keys = geeps::keys_of(tables);
  geeps::StandaloneExchange exchange(job);
  geeps::DeviceGroup group(exchange, {.members = 2});
  const auto device = make_host_device({.budget_bytes = 1 << 20});
  const auto other = make_host_device({.budget_bytes = 1 << 20});
  const geeps::CacheOptions options{.budget_bytes = 1 << 18, .timeout = seconds(20)};
  geeps::Cache first(*device, group.member(0), tables, options);
  first.table_clock(0);
  std::optional<geeps::Cache> second;
  int refused = 0;
  while (!second) {
    ASSERT_LT(refused, 10);
    threads_left = refused;
    try {
      second.emplace(*other, group.member(1), tables, options);
    } catch (const Error& error) {
      ++refused;
      EXPECT_EQ(error.code(), ErrorCode::kFull) << error.what();
      EXPECT_THAT(error.what(), HasSubstr("starting the thread geeps-"));
    } catch (const std::exception& error) {
      ++refused;
      ADD_FAILURE() << error.what();
    }
    threads_left = -1;
  }
  EXPECT_EQ(refused, 4);
  second->table_clock(0);
  first.wait_all();
  second->wait_all();
}

INSTANTIATE_TEST_SUITE_P(Transports, ThreadErrors, ::testing::Values("shm", "tcp"),
                         [](const auto& transport) { return std::string(transport.param); });

}  // namespace
}  // namespace phub::testing
