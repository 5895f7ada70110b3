// The digits example on real processes: bin/phub, and bin/digits per rank. Whatever happens to the
// ranks, the final parameters are those of the reference that recomputes the run from the log.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "tests/temporary_directory.h"
#include "tests/worker/digits_reference.h"
#include "tests/worker/process.h"
#include "transport/control/control_client.h"
#include "transport/control/messages_json.h"

namespace phub::digits {
namespace digits_run_test {

using phub::testing::Process;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

constexpr auto kLimit = 200s;

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class DigitsRun : public ::testing::Test {
 protected:
  void SetUp() override { serve("127.0.0.1:0"); }
  void TearDown() override {
    ranks_.clear();
    if (server_) {
      server_->send(SIGTERM);
      EXPECT_EQ(server_->wait(kLimit), 0) << server_->output();
    }
  }

  void serve(const std::string& listen) {
    server_ = std::make_unique<Process>(
        std::vector<std::string>{PHUB_BIN "/phub", "serve", "--listen", listen, "--checkpoints",
                                 folder_ + "/checkpoints", "--checkpoint-every", "50"},
        folder_ + "/server");
    address_ = server_->listening_address();
  }
  // Killed, and started again where it was.
  void server_dies() {
    server_->send(SIGKILL);
    ASSERT_EQ(server_->wait(kLimit), -SIGKILL);
    for (;;) {
      try {
        return serve(address_);
      } catch (const std::runtime_error& error) {  // for a moment the port may be somebody else's
        if (std::string(error.what()).find("is in use") == std::string::npos) throw;
      }
      std::this_thread::sleep_for(100ms);
    }
  }

  // A process for `rank`; its files are called `name`.
  std::unique_ptr<Process> start(const std::string& name, int rank, bool replace = false) {
    std::vector<std::string> command = {PHUB_BIN "/digits", "--server", address_, "--data",
                                        PHUB_DIGITS_CSV};
    auto add = [&](const char* option, auto value) {
      command.insert(command.end(), {option, fmt::format("{}", value)});
    };
    add("--job", job_);
    add("--rank", rank);
    add("--out", file_of(name));
    add("--delay-ms", delay_ms_);
    add("--report-every", kReportEvery);
    add("--world", training_.world);
    add("--rounds", training_.rounds);
    add("--hidden", training_.hidden);
    add("--chunk-elements", training_.chunk_elements);
    if (rank == 0) add("--log", folder_ + "/log");
    if (replace) command.emplace_back("--replace");
    return std::make_unique<Process>(command, folder_ + "/" + name + "-output");
  }
  void start_all() {
    for (uint32_t rank = 0; rank < training_.world; ++rank) {
      ranks_[fmt::format("rank{}", rank)] =
          start(fmt::format("rank{}", rank), static_cast<int>(rank));
    }
  }
  ::testing::AssertionResult reached(uint64_t round) {
    if (ranks_["rank0"]->printed(fmt::format("round {:>6} ", round), kLimit)) {
      return ::testing::AssertionSuccess();
    }
    return ::testing::AssertionFailure() << "rank 0: " << ranks_["rank0"]->output();
  }
  std::string file_of(const std::string& name) const { return folder_ + "/" + name; }

  // All of ranks_ end well and have the parameters that the log says.
  void expect_reference() {
    for (auto& [name, process] : ranks_) {
      EXPECT_EQ(process->wait(kLimit), 0) << name << ": " << process->output();
    }
    const std::vector<float> expected =
        recompute(training_, load(PHUB_DIGITS_CSV).train,
                  from_json<LogPage>(read_file(folder_ + "/log")).records);
    const std::string bytes(reinterpret_cast<const char*>(expected.data()),
                            expected.size() * sizeof(float));
    for (auto& [name, process] : ranks_) {
      EXPECT_TRUE(read_file(file_of(name)) == bytes) << name << " has other parameters";
    }
  }
  // What rank 0 has reported. A round that was done twice counts once if both reports are the same.
  std::set<std::string> reports() const {
    std::set<std::string> reports;
    std::istringstream output(ranks_.at("rank0")->output());
    for (std::string line; std::getline(output, line);) {
      if (line.starts_with("round ")) reports.insert(line);
    }
    return reports;
  }
  size_t records(LogRecord::Kind kind) const {
    size_t count = 0;
    for (const LogRecord& record : from_json<LogPage>(read_file(folder_ + "/log")).records) {
      count += record.kind == kind;
    }
    return count;
  }

  static constexpr uint64_t kReportEvery = 20;
  const Training training_ = {.world = 3, .rounds = 400, .hidden = 64, .chunk_elements = 256};
  uint32_t delay_ms_ = 2;  // of a round, at least
  std::string job_ = "digits";
  const TemporaryDirectory directory_ = TemporaryDirectory::in_memory();
  const std::string folder_ = directory_.path();
  std::string address_;
  std::unique_ptr<Process> server_;
  std::map<std::string, std::unique_ptr<Process>> ranks_;
};

TEST_F(DigitsRun, RanksAreKilledAndNewOnesJoin) {
  delay_ms_ = 15;  // the last one must be there before the last round
  start_all();
  for (const uint64_t round : {20, 60, 100}) {
    ASSERT_TRUE(reached(round));
    ranks_["rank2"]->send(SIGKILL);
    ASSERT_EQ(ranks_["rank2"]->wait(kLimit), -SIGKILL);
    ASSERT_TRUE(reached(round + kReportEvery));
    ranks_["rank2"] = start("rank2", -1);
    ASSERT_TRUE(ranks_["rank2"]->printed("rank 2 ", kLimit)) << ranks_["rank2"]->output();
  }
  expect_reference();
  EXPECT_EQ(records(LogRecord::Kind::kLost), 3u);
  EXPECT_EQ(records(LogRecord::Kind::kAdmitted), 6u);
}

// Twice; the ranks wait for it, and end as those to whom nothing happened.
TEST_F(DigitsRun, TheServerIsKilledAndStartedAgain) {
  delay_ms_ = 0;
  start_all();
  expect_reference();
  const std::set<std::string> undisturbed = reports();
  EXPECT_EQ(undisturbed.size(), training_.rounds / kReportEvery);
  const std::string parameters = read_file(file_of("rank0"));
  ranks_.clear();
  job_ = "disturbed";
  delay_ms_ = 20;  // the server must die before the last round
  start_all();
  for (const uint64_t round : {60, 160}) {
    ASSERT_TRUE(reached(round));
    while (ControlClient(address_).job_status(job_).durable_round == 0) {
      std::this_thread::sleep_for(5ms);
    }
    server_dies();
  }
  expect_reference();
  EXPECT_EQ(reports(), undisturbed);
  EXPECT_TRUE(read_file(file_of("rank0")) == parameters);
  for (auto& [name, process] : ranks_) {
    EXPECT_THAT(process->output(), HasSubstr("the server is gone; waiting for it")) << name;
    EXPECT_THAT(process->output(), HasSubstr("joins in round ")) << name;
  }
}

}  // namespace digits_run_test
}  // namespace phub::digits
