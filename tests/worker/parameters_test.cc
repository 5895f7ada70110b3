// What parameters and gradients are, on every transport: parameters can be read and not written,
// and nothing can be touched once the worker is gone. Each case ends a process of its own. And what
// of the C interface C cannot ask: whether every field of a job is an option.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "tests/worker/server_process.h"
#include "transport/control/message_fields.h"
#include "worker/phub.h"

namespace phub::testing {
namespace parameters_test {

constexpr size_t kElements = 50'000;
constexpr int kWorked = 7;

enum class Touch {
  kAllowed,
  kWriteParameters,
  kReadAfter,
  kReadGradientAfter,
  kWriteGradientAfter
};

// A round of a job of one; then what is tried. Runs in a process of its own.
int try_it(const std::string& server, const char* transport, Touch touch) {
  const auto need = [](phub_code code) {
    if (code != PHUB_OK) {
      std::fprintf(stderr, "%s\n", phub_last_error());
      _exit(1);
    }
  };
  phub_options* options = nullptr;
  phub_worker* worker = nullptr;
  need(phub_options_create(&options));
  need(phub_options_set(options, "server", server.c_str()));
  need(phub_options_set(options, "transport", transport));
  need(phub_options_set(options, "job", ("touch" + std::to_string(getpid())).c_str()));
  need(phub_options_add_key(options, "w", kElements));
  need(phub_worker_create(options, &worker));
  void* memory = nullptr;
  const void* results = nullptr;
  size_t bytes = 0;
  need(phub_gradient(worker, 0, &memory, &bytes));
  need(phub_parameters(worker, 0, &results, &bytes));
  auto* gradient = static_cast<volatile float*>(memory);
  const auto* parameters = static_cast<const volatile float*>(results);
  for (int round = 1; round <= 3; ++round) {
    need(phub_wait(worker, 0));
    for (size_t e = 0; e < kElements; ++e) gradient[e] = static_cast<float>(e % 1000 + round);
    need(phub_push(worker, 0, 0));
    need(phub_wait(worker, 0));
    for (size_t e = 0; e < kElements; ++e) {
      if (parameters[e] != static_cast<float>(e % 1000 + round)) _exit(2);
    }
  }
  if (touch == Touch::kAllowed) {
    need(phub_worker_destroy(worker));
    return phub_parameters(worker, 0, &results, &bytes) == PHUB_BAD_HANDLE ? kWorked : 3;
  }
  if (touch == Touch::kWriteParameters) {
    const_cast<volatile float*>(parameters)[kElements - 1] = 1;
    return 4;
  }
  need(phub_worker_destroy(worker));
  // The addresses are not given to what is made next.
  for (int i = 0; i < 100; ++i) {
    mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
  if (touch == Touch::kReadAfter) return parameters[kElements / 2] == 0 ? 5 : 6;
  if (touch == Touch::kReadGradientAfter) return gradient[kElements / 2] == 0 ? 5 : 6;
  gradient[0] = 1;
  return 4;
}

// The exit status of the process, minus the signal that ended it.
int outcome(const std::string& server, const char* transport, Touch touch) {
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL);  // not a sanitizer's
    _exit(try_it(server, transport, touch));
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

class Parameters : public ::testing::TestWithParam<const char*> {};

TEST_P(Parameters, CanBeReadAndNotWrittenAndAreGoneWithTheWorker) {
  const ServerProcess server(PHUB_BINARY);
  EXPECT_EQ(outcome(server.address(), GetParam(), Touch::kAllowed), kWorked);
  EXPECT_EQ(outcome(server.address(), GetParam(), Touch::kWriteParameters), -SIGSEGV);
  EXPECT_EQ(outcome(server.address(), GetParam(), Touch::kReadAfter), -SIGSEGV);
  EXPECT_EQ(outcome(server.address(), GetParam(), Touch::kReadGradientAfter), -SIGSEGV);
  EXPECT_EQ(outcome(server.address(), GetParam(), Touch::kWriteGradientAfter), -SIGSEGV);
}

INSTANTIATE_TEST_SUITE_P(Transports, Parameters, ::testing::Values("shm", "tcp"),
                         [](const auto& transport) { return std::string(transport.param); });

// Takes the names of a message's fields.
struct FieldNames {
  template <class M>
  void required(std::string_view name, M JobSpec::*, json::Bounds = {}) {
    constexpr bool option = std::is_same_v<M, std::string> || std::is_same_v<M, uint32_t>;
    if (option) names.emplace_back(name);
  }
  template <class M>
  void optional(std::string_view name, M JobSpec::*member, json::Bounds = {}) {
    required(name, member);
  }
  std::vector<std::string> names;
};

TEST(CAbi, EveryFieldOfAJobIsAnOption) {
  FieldNames fields_of_job;
  fields(fields_of_job, static_cast<const JobSpec*>(nullptr));
  EXPECT_GT(fields_of_job.names.size(), 10u);
  phub_options* options = nullptr;
  ASSERT_EQ(phub_options_create(&options), PHUB_OK);
  for (std::string& name : fields_of_job.names) {
    if (name == "name") name = "job";
    EXPECT_EQ(phub_options_set(options, name.c_str(), "1"), PHUB_OK) << phub_last_error();
  }
  EXPECT_EQ(phub_options_destroy(options), PHUB_OK);
}

}  // namespace parameters_test
}  // namespace phub::testing
