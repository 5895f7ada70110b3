// Workers and their box are killed and stopped, again and again, at any moment, and the network
// between them is cut. All that anybody saw is compared with the replay of the log.
//
// PHUB_TEST_SCALE multiplies the number of kills. PHUB_KILLS_FILE: a file that gets a line for
// each, once the job that it was in has been found whole. PHUB_KILLS_NETWORK=1: box and workers are
// hosts of the network of kills_network, and this process forwards between them what it likes.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/seeds.h"
#include "tests/worker/network.h"
#include "tests/worker/server_process.h"
#include "tests/worker/training.h"

namespace phub::testing {
namespace kills_test {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using ::testing::HasSubstr;

constexpr size_t kRanks = 3;

// What goes on when somebody is killed, as one sees it from outside.
//   idle        the box has no workers
//   restoring   workers have come, and there is no job yet
//   assembling  not all of them are there
//   running
//   waiting     for a worker that is stopped
//   paused      policy wait: a rank is missing
//   snapshot    a round is to be saved: the boundary for it, or the cores copy
//   writing     the files of a checkpoint
//   naming      they are durable, and have no manifest yet
const std::vector<std::string> kStates = {"idle",   "restoring", "assembling", "running", "waiting",
                                          "paused", "snapshot",  "writing",    "naming"};

// One job, its box and its workers, from their first life to the last.
class Chaos {
 public:
  Chaos(std::mt19937_64& random, const std::string& optimizer, const std::string& on_loss,
        uint64_t every)
      : random_(random),
        every_(every),
        spec_(spec_of(optimizer, on_loss)),
        flags_(server_flags(directory_.path(), every)) {
    serve();
  }

  void disturb() {
    const uint64_t dice = random_() % 20;
    if (!started_) {
      if (dice < 3) return kill_box(SIGKILL, state());
      if (dice < 9) return kill_soon(dice < 6 ? "" : "assembling");
      start_workers();
    }
    EXPECT_TRUE(settles());
    if (has_network() && random_() % 2 == 0) cut_network();
    if (dice < 4) return stop_box();
    if (dice < 7) return stop_worker();
    const std::string state = dice < 14 ? wait_for_rarest() : wait_a_while();
    if (dice < 13) return kill_box(random_() % 8 == 0 ? SIGTERM : SIGKILL, state);
    kill_worker(state);
  }

  // All go on to the end, and what they saw was right.
  void finish() {
    if (!started_) start_workers();
    EXPECT_TRUE(settles());
    note_first_round();
    for (const Rank& rank : ranks_) rank.worker->send(SIGTERM);
    for (const Rank& rank : ranks_) EXPECT_TRUE(left(*rank.worker)) << rank.worker->output();
    training_->check();
  }

  const std::vector<std::string>& done() const { return done_; }  // "kill-9 box writing"

 private:
  static JobSpec spec_of(const std::string& optimizer, const std::string& on_loss) {
    JobSpec spec = fault_spec("chaos", kRanks, optimizer);
    spec.on_loss = on_loss;
    spec.lease_ms = 10'000;  // who is stopped here is replaced, or goes on
    spec.progress_limit_ms = 30'000;
    return spec;
  }
  static Flags server_flags(const std::string& folder, uint64_t every) {
    Flags flags = {"--checkpoints", folder + "/checkpoints", "--checkpoint-every",
                   std::to_string(every)};
    if (has_network()) flags.emplace_back("--insecure");
    return flags;
  }

  // For the first time, or again where workers look for it.
  void serve() {
    const auto begins = [&](const std::string& listen) {
      try {
        server_.emplace(PHUB_BINARY, flags_, listen, "pack:1 core:2 pu:1", on_host(kBoxHost));
        return true;
      } catch (const std::runtime_error& error) {  // for a moment the port may be somebody else's
        if (std::string(error.what()).find("is in use") == std::string::npos) throw;
        return false;
      }
    };
    if (!training_) {
      ASSERT_TRUE(begins(has_network() ? kBoxAddress + std::string(":0") : "127.0.0.1:0"));
      training_.emplace(server_->address(), spec_);
    } else {
      training_->end_lives();
      ASSERT_TRUE(becomes([&, at = server_->address()] { return begins(at); }));
    }
    first_round_ = ~uint64_t{0};
    started_ = false;
  }
  // Ranks without a worker get one, up to `but`, which are left out.
  void start_workers(size_t but = 0) {
    size_t missing = missing_workers();
    for (size_t rank = 0; rank < kRanks && missing > but; ++rank) {
      if (ranks_[rank].worker != nullptr) continue;
      start(rank, {"--rejoin", "--patient"});
      --missing;
    }
    started_ = true;
  }
  size_t missing_workers() const {
    return static_cast<size_t>(
        std::ranges::count_if(ranks_, [](const Rank& rank) { return rank.worker == nullptr; }));
  }
  void start_again(size_t rank) {
    note_first_round();
    start(rank, {"--rejoin", "--patient", "--replace"});
  }
  void start(size_t rank, const Flags& flags) {
    ranks_[rank] = {
        .worker = &training_->start(static_cast<int32_t>(rank), flags, on_host(hosts_[rank]))};
  }

  // The rounds with which a worker has begun: of its first life, and of those after it rejoined.
  static std::vector<uint64_t> beginnings(const Process& worker) {
    std::vector<uint64_t> rounds;
    std::istringstream output(worker.output());
    for (std::string line; std::getline(output, line);) {
      unsigned rank = 0, incarnation = 0;
      unsigned long long round = 0;
      if (std::sscanf(line.c_str(), "joined rank %u incarnation %u round %llu", &rank, &incarnation,
                      &round) == 3) {
        rounds.push_back(round);
      }
    }
    return rounds;
  }
  // The lowest round that anybody of this life begins with is the one after what was restored.
  void note_first_round() {
    for (const Rank& rank : ranks_) {
      if (rank.worker == nullptr) continue;
      const std::vector<uint64_t> rounds = beginnings(*rank.worker);
      if (rounds.size() > rank.before) first_round_ = std::min(first_round_, rounds[rank.before]);
    }
    training_->undo_from(first_round_);
  }

  // Everybody has joined, and the job goes on.
  bool settles() {
    const bool all = becomes(
        [&] {
          bool joined = true;
          for (size_t rank = 0; rank < kRanks; ++rank) {
            const bool ended = ranks_[rank].worker->wait(milliseconds(0)).has_value();
            if (ended) {
              expect_good_end(*ranks_[rank].worker);
              start_again(rank);
            }
            joined &= !ended && beginnings(*ranks_[rank].worker).size() > ranks_[rank].before;
          }
          return joined || ::testing::Test::HasFailure();
        },
        2 * kLong);
    note_first_round();
    return all && training_->goes_on(2);
  }
  // Nobody has ended this worker: it may end only because the job did.
  static void expect_good_end(Process& worker) {
    EXPECT_EQ(worker.wait(milliseconds(0)), 3) << worker.output();
    EXPECT_THAT(worker.output(), HasSubstr("rank_lost: ")) << "it ended for another reason";
  }

  bool folder_has(const std::function<bool(const std::filesystem::path&)>& what) const {
    std::error_code error;  // folders come and go meanwhile
    const std::string folder = directory_.path() + "/checkpoints/chaos";
    std::filesystem::directory_iterator at(folder, error), end;
    while (!error && at != end) {
      if (what(at->path())) return true;
      at.increment(error);
    }
    return false;
  }
  bool is_writing() const {
    return folder_has(
        [](const auto& path) { return path.filename().string().starts_with("writ"); });
  }
  bool is_naming() const {
    return folder_has([](const auto& path) {
      return path.filename().string().starts_with("round-") &&
             std::filesystem::exists(path / "manifest.json.new");
    });
  }
  std::string state() const {
    const JobStatus job = training_->status();
    if (job.name.empty()) return missing_workers() < kRanks ? "restoring" : "idle";
    if (job.state != "running") return job.state;
    if (is_naming()) return "naming";
    if (is_writing()) return "writing";
    if (!stopped_.empty() && !job.waiting_for.empty()) return "waiting";
    return job.completed_round >= job.durable_round + every_ ? "snapshot" : "running";
  }
  std::string wait_a_while() {
    std::this_thread::sleep_for(microseconds(random_() % 40'000));
    return state();
  }
  std::string wait_for_rarest() {
    static const std::vector<std::string> wanted = {"running", "snapshot", "writing", "naming"};
    const std::string& rarest = *std::ranges::min_element(
        wanted, {}, [](const std::string& name) { return counts()[name]; });
    std::string now;
    becomes([&] { return (now = state()) == rarest; }, milliseconds(300));
    return now;
  }

  void note(const std::string& what, const std::string& whom, const std::string& state) {
    ++counts()[state];
    ++counts()[what + " " + whom];
    done_.push_back(fmt::format("{} {} {}", what, whom, state));
  }

  void kill_box(int signal, std::string state) {
    note_first_round();
    if (signal == SIGTERM) {
      const bool ended_well = server_->end(SIGTERM) == 0;
      // A machine that is busy with other things may not save it in time.
      EXPECT_TRUE(ended_well || server_->output().find(" ms are over") != std::string::npos)
          << server_->output();
    } else {
      EXPECT_EQ(server_->end(SIGKILL), -SIGKILL) << server_->output();
      if (is_writing()) state = "writing";  // what it has left says it better
      if (is_naming()) state = "naming";
    }
    note(signal == SIGTERM ? "term" : "kill-9", "box", state);
    // Workers go with it, all or some; who is left waits for the next one.
    const uint64_t dice = random_() % 4;
    for (Rank& rank : ranks_) {
      if (rank.worker == nullptr) continue;
      const bool goes = dice == 0 || (dice == 1 && random_() % 2);
      rank.worker->send(goes ? SIGKILL : SIGCONT);
      if (goes) {
        EXPECT_TRUE(rank.worker->wait(kLong));
      }
    }
    note_first_round();
    for (Rank& rank : ranks_) {
      if (rank.worker == nullptr) continue;
      rank.before = beginnings(*rank.worker).size();
      if (rank.worker->wait(milliseconds(0)) == -SIGKILL) rank = {};
    }
    stopped_.clear();
    serve();
  }
  void kill_worker(const std::string& state) {
    size_t rank = random_() % kRanks;
    while (ranks_[rank].worker == nullptr) rank = (rank + 1) % kRanks;
    ranks_[rank].worker->send(SIGKILL);
    EXPECT_TRUE(ranks_[rank].worker->wait(kLong));
    note("kill-9", "worker", state);
    // Policy wait: whoever is killed now finds the job paused.
    if (spec_.on_loss == "wait" && random_() % 2 &&
        becomes([&] { return state_is("paused"); }, milliseconds(500))) {
      return kill_box(SIGKILL, "paused");
    }
    start_again(rank);
  }
  bool state_is(const std::string& wanted) const { return state() == wanted; }
  // Somebody is killed while the job is being restored, or one of its workers is not there yet.
  void kill_soon(const std::string& wanted) {
    const bool assembles = !wanted.empty() && missing_workers() > 0;
    start_workers(assembles ? 1 : 0);
    if (!assembles) {
      std::this_thread::sleep_for(microseconds(random_() % 15'000));
    } else {
      becomes([&] { return state_is(wanted); });
    }
    const std::string now = state();
    if (random_() % 3 > 0) return kill_box(SIGKILL, now);
    kill_worker(now);
    start_workers();
  }

  void stop_box() {
    const std::string now = wait_a_while();
    server_->stop();
    std::this_thread::sleep_for(milliseconds(random_() % 1'000));
    note("stop", "box", now);
    if (random_() % 3 == 0) return kill_box(SIGKILL, now);  // end() continues it
    server_->go_on();
    EXPECT_TRUE(settles());
  }
  // Stopped, then it goes on; or it is replaced, and goes on to find that out; or the box is killed
  // while all wait.
  void stop_worker() {
    const size_t rank = random_() % kRanks;
    Process& old = *ranks_[rank].worker;
    const std::string before = wait_a_while();
    old.send(SIGSTOP);
    stopped_.push_back(&old);
    note("stop", "worker", before);
    becomes([&] { return state_is("waiting"); }, milliseconds(1'000));
    const uint64_t dice = random_() % 4;
    if (dice < 2) return kill_box(SIGKILL, state());
    if (dice == 2) start_again(rank);
    std::this_thread::sleep_for(milliseconds(random_() % 100));
    old.send(SIGCONT);
    stopped_.clear();
    EXPECT_TRUE(settles());
    if (dice == 2) {
      EXPECT_EQ(old.wait(kLong), 3) << old.output();
    }
  }

  // Nothing, or not everything, comes through one way or both, of one worker or of all. One that is
  // cut off may be replaced by a worker on another host, before its lease is over or after: what it
  // sends when it is back changes nothing.
  void cut_network() {
    static const std::array<Cut, 4> cuts = {{{"cut-to-box", true, false},
                                             {"cut-from-box", false, true},
                                             {"cut-both-ways", true, true},
                                             {"lose-20%", true, true, "numgen random mod 5 == 0"}}};
    const Cut& cut = cuts[random_() % cuts.size()];
    const size_t rank = random_() % kRanks;
    const bool one = random_() % 3 > 0;
    const uint64_t dice = one && cut.which.empty() ? random_() % 4 : 0;
    const std::string now = wait_a_while();
    CutWire wire(cut, one ? hosts_[rank] : kBoxHost);
    EXPECT_TRUE(becomes([&] { return wire.dropped_packets() > 0; })) << cut.name << " hit nothing";
    if (dice < 2) {
      std::this_thread::sleep_for(milliseconds(50 + random_() % 1'000));
      wire.heal();
    } else {
      replace_behind(wire, rank, dice == 3);
    }
    note(cut.name, !one ? "all" : dice < 2 ? "one" : dice < 3 ? "replaced" : "lost", now);
    EXPECT_TRUE(settles());
  }
  void replace_behind(CutWire& wire, size_t rank, bool when_lost) {
    Process& old = *ranks_[rank].worker;
    const size_t before = expired_leases_of(rank);
    EXPECT_TRUE(!when_lost || becomes([&] { return expired_leases_of(rank) > before; }));
    std::swap(hosts_[rank], spare_host_);
    start_again(rank);
    EXPECT_TRUE(settles());
    wire.heal();
    EXPECT_EQ(old.wait(kLong), 3) << old.output();
  }
  size_t expired_leases_of(size_t rank) const {
    return static_cast<size_t>(
        std::ranges::count_if(training_->log(), [&](const LogRecord& record) {
          return record.rank == rank && record.reason.starts_with("its lease of ");
        }));
  }

 public:
  // How often each state was hit in this process, and how often each of what was done hit.
  static std::map<std::string, uint64_t>& counts() {
    static std::map<std::string, uint64_t> counts;
    return counts;
  }

 private:
  std::mt19937_64& random_;
  const TemporaryDirectory directory_ = TemporaryDirectory::in_memory();
  const uint64_t every_;
  const JobSpec spec_;
  const Flags flags_;
  std::optional<ServerProcess> server_;
  std::optional<Training> training_;
  struct Rank {
    Process* worker = nullptr;  // null: it has none now
    size_t before = 0;          // beginnings of it before this life of the box
  };
  std::array<Rank, kRanks> ranks_;
  std::array<std::string, kRanks> hosts_ = {"worker0", "worker1", "worker2"};  // of the ranks
  std::string spare_host_ = "worker3";
  bool started_ = false;  // in this life of the box
  std::vector<Process*> stopped_;
  uint64_t first_round_ = ~uint64_t{0};  // of this life of the box
  std::vector<std::string> done_;
};

void add_to_file(const std::vector<std::string>& lines) {
  const char* path = std::getenv("PHUB_KILLS_FILE");
  if (path == nullptr) return;
  const char* transport = std::getenv("PHUB_TRANSPORT");
  std::ofstream file(path, std::ios::app);
  for (const std::string& line : lines)
    file << (transport ? transport : "shm") << ' ' << line << '\n';
}

TEST(Kills, OfWorkersAndTheirBox) {
  const Seeds seeds = fresh_seeds(1);
  std::mt19937_64 random(seeds.first);
  const uint64_t jobs = scaled(2);
  for (uint64_t job = 0; job < jobs && !::testing::Test::HasFailure(); ++job) {
    constexpr uint64_t kEvery[] = {1, 10, 200};
    const std::string optimizer = random() % 2 ? "adam" : "nesterov";
    const std::string on_loss = random() % 2 ? "shrink" : "wait";
    const uint64_t every = kEvery[random() % 3];
    SCOPED_TRACE(fmt::format("{}, {}, saved every {} rounds", optimizer, on_loss, every));
    Chaos chaos(random, optimizer, on_loss, every);
    while (chaos.done().size() < 15 && !::testing::Test::HasFailure()) chaos.disturb();
    if (::testing::Test::HasFailure()) break;
    chaos.finish();
    if (!::testing::Test::HasFailure()) add_to_file(chaos.done());
  }
  for (const std::string& state : kStates) Chaos::counts()[state];
  for (const auto& [what, count] : Chaos::counts()) fmt::print("{:26} {}\n", what, count);
}

}  // namespace kills_test
}  // namespace phub::testing
