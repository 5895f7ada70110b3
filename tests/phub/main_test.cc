// The phub binary as a person or a script meets it: output, exit codes, signals.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/file_size_limit.h"
#include "tests/temporary_directory.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/process.h"
#include "transport/control/control_client.h"
#include "transport/ofi/providers.h"

namespace phub {
namespace main_test {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::HasSubstr;

// A running phub with its output and errors in files of a directory of its own.
class Phub {
 public:
  explicit Phub(std::vector<std::string> arguments) {
    const std::string script = "export XDG_RUNTIME_DIR=\"$0\"; exec \"$@\" 2> \"$0/err\"";
    arguments.insert(arguments.begin(), {"/bin/sh", "-c", script, folder_.path(), PHUB_BINARY});
    process_.emplace(arguments, folder_.path() + "/out");
  }

  std::string out() const { return process_->output(); }
  std::string err() const {
    std::ifstream file(folder_.path() + "/err");
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // The errors, once they hold this text.
  std::string says(const char* text) const {
    for (int i = 0; i < 12000 && err().find(text) == std::string::npos; ++i) {
      std::this_thread::sleep_for(milliseconds(5));
    }
    return err();
  }
  void signal(int number) { process_->send(number); }
  // The exit code; -1 if it runs longer than this or dies of a signal.
  int exit_code(int limit_ms = 60000) {
    return std::max(process_->wait(milliseconds(limit_ms)).value_or(-1), -1);
  }
  std::string address() { return process_->listening_address(); }

 private:
  const TemporaryDirectory folder_;
  std::optional<testing::Process> process_;
};

struct Outcome {
  int code;
  std::string out, err;
};
Outcome run(const std::vector<std::string>& arguments) {
  Phub phub(arguments);
  const int code = phub.exit_code();
  return {code, phub.out(), phub.err()};
}

size_t lines(const std::string& text) { return std::count(text.begin(), text.end(), '\n'); }

TEST(Main, HelpGoesToStdoutAndIsNoError) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"--help"}, {"serve", "--help"}, {"status", "--help"}}) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.code, 0);
    EXPECT_THAT(outcome.out, HasSubstr("Usage: phub"));
    EXPECT_EQ(outcome.err, "");
  }
}

TEST(Main, WrongCommandLinesAreOneLineAndTwo) {
  for (const std::vector<std::string>& arguments : {std::vector<std::string>{},
                                                    {"sreve"},
                                                    {"serve", "--prot", "1"},
                                                    {"serve", "--cores", "x"},
                                                    {"serve", "--config", "/does/not/exist.toml"},
                                                    {"status", "extra"}}) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    EXPECT_THAT(outcome.err, ::testing::StartsWith("phub: "));
    EXPECT_EQ(lines(outcome.err), 1u) << outcome.err;
  }
}

TEST(Main, ErrorsWhileItRunsAreOneLineAndOne) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"status", "--server", "127.0.0.1:1"},
        {"serve", "--listen", "192.0.2.1:0"},
        {"serve", "--listen", "[fe80::1]:0", "--insecure"},
        {"serve", "--listen", "[fe80::1%lo]:0", "--insecure", "--transports", "shm"},
        {"serve", "--join", "127.0.0.1:1", "--listen", "[fe80::1%lo]:0"},
        {"serve", "--parent", "127.0.0.1:1", "--join", "127.0.0.1:1"},
        {"serve", "--parent", "127.0.0.1:1", "--checkpoints", "/does/not/exist"},
        {"serve", "--listen", "127.0.0.1:0", "--parent-budget", "1gbit"},
        {"serve", "--join", "127.0.0.1:1", "--parent-budget", "1gbit"},
        {"serve", "--listen", "127.0.0.1:0", "--topology", "/does/not/exist.xml"}}) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.code, 1) << outcome.err;
    EXPECT_THAT(outcome.err, ::testing::StartsWith("phub: "));
    EXPECT_EQ(lines(outcome.err), 1u) << outcome.err;
  }
}

TEST(Main, AnAddressOfAnotherMachineIsNamedWithItsOption) {
  EXPECT_THAT(
      run({"serve", "--listen", "192.0.2.1:7717", "--insecure"}).err,
      AllOf(HasSubstr("listening for data at 192.0.2.1:"), HasSubstr("--listen must have")));
}

TEST(Main, ServesSaysWhereAndEndsWhenTold) {
  for (const int number : {SIGTERM, SIGINT}) {
    Phub server({"serve", "--listen", "127.0.0.1:0"});
    const std::string address = server.address();
    EXPECT_THAT(server.out(), HasSubstr("this machine"));
    EXPECT_EQ(ControlClient(address).status().topology, "this machine");

    const Outcome table = run({"status", "--server", address});
    EXPECT_EQ(table.code, 0);
    EXPECT_THAT(table.out, HasSubstr("no jobs"));
    const Outcome json = run({"status", "--server", address, "--json"});
    EXPECT_THAT(json.out, ::testing::StartsWith("{\"version\":1,"));

    EXPECT_EQ(run({"status", "--server", "127.0.0.1:1," + address}).out.substr(0, 12),
              "this machine");
    const Outcome none = run({"status", "--server", "127.0.0.1:1,127.0.0.1:2"});
    EXPECT_THAT(none.err, HasSubstr("no phub server at 127.0.0.1:2"));

    const Outcome second = run({"serve", "--listen", address});
    EXPECT_EQ(second.code, 1);
    EXPECT_THAT(second.err, HasSubstr("is in use"));

    const std::string printed = server.out();
    const auto begin = steady_clock::now();
    server.signal(number);
    EXPECT_EQ(server.exit_code(), 0);
    EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(20));
    EXPECT_EQ(server.out(), printed);  // quiet after the start
    EXPECT_EQ(server.err(), "");
  }
}

TEST(Main, WarnsOfALimitAboveTheMachinesMemory) {
  Phub server({"serve", "--listen", "127.0.0.1:0", "--memory-limit", "4096T"});
  EXPECT_NE(server.address(), "");
  EXPECT_THAT(server.err(), HasSubstr("--memory-limit is 4.00 PiB, and "));
}

TEST(Main, AShardSaysThatItServesWhenItDoes) {
  Phub shard({"serve", "--join", "127.0.0.1:1", "--listen", "127.0.0.1:0"});
  EXPECT_THAT(shard.says("not serving under"), HasSubstr("not serving under 127.0.0.1:1 yet"));
  shard.signal(SIGTERM);
  EXPECT_EQ(shard.exit_code(), 0);
  EXPECT_THAT(shard.err() + shard.out(), ::testing::Not(HasSubstr(" serving under 127.0.0.1:1\n")));
}

// As with ulimit -u or a container's limit of processes, which do not bind root.
TEST(Main, AThreadThatCannotBeStartedIsNamed) {
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_STACK, &before), 0);
  const rlimit huge = {.rlim_cur = rlim_t{1} << 46, .rlim_max = before.rlim_max};
  if (setrlimit(RLIMIT_STACK, &huge) != 0) GTEST_SKIP() << "the limit of stacks cannot be raised";
  Phub server({"serve", "--listen", "127.0.0.1:0"});
  setrlimit(RLIMIT_STACK, &before);
  EXPECT_EQ(server.exit_code(), 1);
  EXPECT_THAT(server.err(), HasSubstr("phub: starting a thread: Resource temporarily unavailable"));
  EXPECT_THAT(server.err(), HasSubstr("pids.max"));
}

TEST(Main, ARackSaysWhatItsNicsSend) {
  Phub rack({"serve", "--listen", "127.0.0.1:0", "--transports", "tcp", "--parent", "127.0.0.1:1",
             "--nic-budget", "50mbit", "--parent-budget", "25mbit"});
  const std::string address = rack.address();
  EXPECT_THAT(rack.out(), HasSubstr("tcp: "));
  EXPECT_THAT(rack.out(), HasSubstr("at most 50 Mbit/s from each NIC\n"));
  EXPECT_THAT(rack.out(), HasSubstr("a rack of 127.0.0.1:1, at most 25 Mbit/s from each NIC\n"));
  EXPECT_THAT(run({"status", "--server", address}).out,
              HasSubstr("a rack of 127.0.0.1:1, to which each NIC sends at most 25 Mbit/s\n"));
  EXPECT_THAT(rack.says("yet"), HasSubstr("the parent does not take this rack yet: no phub server "
                                          "at 127.0.0.1:1"));
  rack.signal(SIGTERM);
  EXPECT_EQ(rack.exit_code(), 0);
}

// A variable for the processes that are started meanwhile.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    setenv(name, value.c_str(), 1);
  }
  ~Variable() { unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* const name_;
};

TEST(Main, DoesNotListenToOtherHostsByAccident) {
  for (const char* address : {"0.0.0.0:0", "*:0", ":0"}) {
    const Outcome outcome = run({"serve", "--listen", "127.0.0.1:0", "--listen", address});
    EXPECT_EQ(outcome.code, 1) << address;
    EXPECT_THAT(outcome.err, HasSubstr("other hosts can reach 0.0.0.0:"));
    EXPECT_THAT(outcome.err, HasSubstr("--insecure"));
    EXPECT_EQ(lines(outcome.err), 1u) << outcome.err;
  }
  for (const std::vector<std::string>& insecure :
       {std::vector<std::string>{"--insecure"}, {"--insecure=true"}}) {
    std::vector<std::string> words = {"serve", "--listen", "0.0.0.0:0"};
    words.insert(words.end(), insecure.begin(), insecure.end());
    Phub server(words);
    EXPECT_THAT(server.address(), HasSubstr("0.0.0.0:"));
  }
  EXPECT_EQ(run({"serve", "--listen", "0.0.0.0:0", "--insecure=false"}).code, 1);
}

// The file, the environment, and SIGHUP, as an operator uses them.
TEST(Main, TokensFromFileToStatus) {
  const TemporaryDirectory directory;
  const std::string& folder = directory.path();
  const std::string tokens = folder + "/tokens.toml", mine = folder + "/mine";
  const Outcome made = run({"token", "new", "--name", "me", "--role", "observe", "--days", "1"});
  ASSERT_EQ(made.code, 0) << made.err;
  const size_t begin = made.out.find("phub-");
  const std::string token = made.out.substr(begin, made.out.find('\n', begin) - begin);
  std::ofstream(tokens) << made.out.substr(made.out.find("[[token]]"));
  std::ofstream(mine) << token << "\n";

  const Outcome open = run({"serve", "--listen", "127.0.0.1:0", "--tokens", tokens});
  EXPECT_EQ(open.code, 1);
  EXPECT_THAT(open.err, HasSubstr("chmod 600"));
  chmod(tokens.c_str(), 0600);
  Phub server({"serve", "--listen", "127.0.0.1:0", "--tokens", tokens});
  const std::vector<std::string> status = {"status", "--server", server.address()};
  const Outcome nobody = run(status);
  EXPECT_EQ(nobody.code, 1);
  EXPECT_THAT(nobody.err, HasSubstr("PHUB_TOKEN"));
  {
    const Variable variable("PHUB_TOKEN", token);
    EXPECT_EQ(run(status).code, 0);
  }
  {
    const Variable variable("PHUB_TOKEN_FILE", mine);
    const Outcome others = run(status);
    EXPECT_EQ(others.code, 1);
    EXPECT_THAT(others.err, HasSubstr("others may use it"));
    chmod(mine.c_str(), 0600);
    EXPECT_EQ(run(status).code, 0);

    const std::string printed = folder + "/printed";  // all that 'phub token new' prints
    std::ofstream(printed) << made.out;
    chmod(printed.c_str(), 0600);
    const Variable wrong("PHUB_TOKEN_FILE", printed);
    EXPECT_THAT(run(status).err,
                HasSubstr("PHUB_TOKEN_FILE=" + printed + ": its first line is not"));
  }
  {
    const Variable variable("PHUB_TOKEN_FILE", mine);
    std::ofstream(tokens) << "nonsense";  // changes nothing
    server.signal(SIGHUP);
    EXPECT_THAT(server.says("stay as they were"), HasSubstr("the tokens stay as they were"));
    EXPECT_EQ(run(status).code, 0);
    std::ofstream(tokens) << "";
    server.signal(SIGHUP);
    EXPECT_THAT(server.says("read again"), HasSubstr("the tokens were read again"));
    EXPECT_THAT(server.says("holds no token"), HasSubstr("everybody is refused"));
    const Outcome revoked = run(status);
    EXPECT_EQ(revoked.code, 1);
    EXPECT_THAT(revoked.err, HasSubstr("not a token of this server"));
    EXPECT_EQ(revoked.err.find(token), std::string::npos);
  }
  EXPECT_EQ(server.err().find(token), std::string::npos);
}

// libfabric loads libraries of its providers, and one of them would take the signals.
TEST(Main, EndsWhenToldOverLibfabric) {
  if (find_ofi_providers().empty()) GTEST_SKIP() << "no libfabric, or no provider";
  unsetenv("IPATH_NO_BACKTRACE");  // the server has to see to it
  for (const int number : {SIGTERM, SIGINT}) {
    Phub server({"serve", "--listen", "127.0.0.1:0", "--transports", "ofi"});
    ControlClient idle(server.address());
    EXPECT_THAT(idle.status().transports, ::testing::ElementsAre("ofi"));
    server.signal(number);
    EXPECT_EQ(server.exit_code(20000), 0) << number;
    EXPECT_EQ(server.err(), "");
  }
}

// Batch systems set it. Memory that a worker on this host shares with the box is a file, too.
TEST(Main, RefusesAJobThatTheLimitOfAFilesSizeForbids) {
  Phub server = [] {
    const FileSizeLimit limit(1 << 20);
    return Phub({"serve", "--listen", "127.0.0.1:0"});
  }();
  const std::string address = server.address();
  JoinRequest request;
  request.spec.name = "large";
  request.spec.keys = {{"w", 4 << 20}};
  request.transport = "shm";
  testing::expect_error(ErrorCode::kFull, "is 1048576 bytes, raise it with LimitFSIZE or ulimit -f",
                        [&] { ControlClient(address).join(request, 20000); });
  EXPECT_THAT(ControlClient(address).status().jobs, ::testing::IsEmpty());
  server.signal(SIGTERM);
  EXPECT_EQ(server.exit_code(), 0);
}

// A request that is being answered, a half request and an idle connection do not hold it up.
TEST(Main, EndsWithConnectionsOpen) {
  Phub server({"serve", "--listen", "127.0.0.1:0"});
  ControlClient idle(server.address());
  idle.status();
  server.signal(SIGTERM);
  EXPECT_EQ(server.exit_code(20000), 0);
}

// A launcher sends the signal to its child, which is in the group that got it, too.
TEST(Main, EndsWhenToldAgainAndAgain) {
  Phub server({"serve", "--listen", "127.0.0.1:0"});
  const std::string address = server.address();
  JoinRequest request;  // memory that takes a while to be given back
  request.spec.name = "large";
  request.spec.keys = {{"w", 64 << 20}};
  request.transport = "shm";
  ControlClient client(address);
  client.join(request, 20000);
  int code = -1;
  for (int i = 0; i < 20000 && code == -1; ++i) {
    server.signal(SIGTERM);
    code = server.exit_code(1);
  }
  EXPECT_EQ(code, 0);
}

// Whoever needs it holds the other end, and it ends with the last of them.
TEST(Main, EndsWithItsInput) {
  std::array<int, 2> pipe{};
  ASSERT_EQ(pipe2(pipe.data(), O_CLOEXEC), 0);
  const int own = dup(STDIN_FILENO);
  dup2(pipe[0], STDIN_FILENO);
  Phub server({"serve", "--listen", "127.0.0.1:0", "--end-with-input"});
  dup2(own, STDIN_FILENO);
  close(own);
  close(pipe[0]);
  const std::string address = server.address();
  ASSERT_EQ(write(pipe[1], "x", 1), 1);  // is read, and nothing else
  EXPECT_THAT(ControlClient(address).status().jobs, ::testing::IsEmpty());
  close(pipe[1]);
  EXPECT_EQ(server.exit_code(20000), 0);
}

}  // namespace main_test
}  // namespace phub
