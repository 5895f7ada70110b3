// Cores, each with a thread, and a control thread decide who takes part in rounds.
#include "phub/core/quorum_gate.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "tests/seeds.h"

namespace phub {
namespace quorum_gate_test {

constexpr uint32_t kCores = 3, kRanks = 70, kQuorum = 40;
constexpr uint64_t kFirst = 5, kRounds = 15;

std::vector<uint64_t> all_ranks() { return {~uint64_t{0}, (uint64_t{1} << (kRanks - 64)) - 1}; }

// What the cores do with a rank's contribution, as Quorum does: here a rank has sent some of it to
// any number of cores when a round is decided.
class Core {
 public:
  Core(QuorumGate& gate, uint32_t core, uint64_t seed) : gate_(gate), core_(core), random_(seed) {}

  void run() {
    for (uint64_t round = kFirst; round < kFirst + kRounds; ++round) {
      while (!gate_.has_decided(round)) {
        const auto rank = static_cast<uint32_t>(random_() % kRanks);
        const bool is_slow = (rank + round) % 5 == 0;
        if (!sent_[rank] && (!is_slow || random_() % 200 == 0)) send(rank, round);
      }
      std::vector<bool>& late = late_.emplace_back(kRanks);
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        late[rank] = gate_.is_late(rank);
        if (late[rank]) continue;
        EXPECT_TRUE(sent_[rank]) << "rank " << rank << " of round " << round;
        sent_[rank] = false;
        gate_.took_here(rank);
      }
      if (gate_.completed_here(round)) try_all(round + 1);
    }
  }
  const std::vector<std::vector<bool>>& late() const { return late_; }

 private:
  void send(uint32_t rank, uint64_t round) {
    sent_[rank] = true;
    if (gate_.sent_here(rank)) try_all(round);
  }
  void try_all(uint64_t round) { gate_.decide(round, all_ranks(), kRanks, core_); }

  QuorumGate& gate_;
  const uint32_t core_;
  std::mt19937_64 random_;
  std::vector<bool> sent_ = std::vector<bool>(kRanks);
  std::vector<std::vector<bool>> late_;
};

TEST(QuorumGate, AllCoresSeeTheSameRanksAndNoneOfThemLacksAChunk) {
  const testing::Seeds seeds = testing::fresh_seeds(testing::scaled(10));
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(seed);
    CoreBells bells(kCores);
    QuorumGate gate(bells, kCores, kRanks, kQuorum, kFirst);
    std::vector<Core> cores;
    for (uint32_t core = 0; core < kCores; ++core) cores.emplace_back(gate, core, seed + core);
    std::vector<std::thread> threads;
    for (Core& core : cores) threads.emplace_back([&core] { core.run(); });
    // The grace is over at any time.
    std::mt19937_64 random(seed);
    std::map<uint64_t, std::vector<uint64_t>> told;
    while (!gate.has_decided(kFirst + kRounds - 1)) {
      std::vector<uint64_t> late;
      const uint64_t round = gate.collecting();
      if (random() % 2 == 0 && gate.decide(round, all_ranks(), kQuorum, ~0u, &late)) {
        told[round] = late;
      }
    }
    for (std::thread& thread : threads) thread.join();
    size_t late_rounds = 0;
    for (uint64_t round = 0; round < kRounds; ++round) {
      const std::vector<bool>& late = cores[0].late().at(round);
      for (const Core& core : cores) EXPECT_EQ(core.late().at(round), late) << round;
      const auto found = told.find(kFirst + round);
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        const bool said = found != told.end() && (found->second[rank / 64] >> rank % 64 & 1) != 0;
        EXPECT_EQ(said, late[rank]) << "rank " << rank << " of round " << kFirst + round;
      }
      const auto count = static_cast<uint32_t>(std::ranges::count(late, true));
      EXPECT_LE(count, kRanks - kQuorum);
      late_rounds += count > 0 ? 1 : 0;
    }
    EXPECT_GT(late_rounds, 0u);
  }
}

TEST(QuorumGate, ADecisionNeedsEnoughRanksAndTheRoundBefore) {
  CoreBells bells(1);
  QuorumGate gate(bells, 1, 3, 2, 1);
  const uint64_t all = 7, but_two = 3;
  EXPECT_FALSE(gate.decide(1, {&all, 1}, 2));
  gate.sent_here(0);
  EXPECT_FALSE(gate.decide(1, {&all, 1}, 2));
  EXPECT_TRUE(gate.arm(0, 1));
  gate.sent_here(2);
  EXPECT_FALSE(gate.decide(2, {&all, 1}, 2));
  EXPECT_TRUE(gate.decide(1, {&all, 1}, 2));
  pollfd bell = {bells.fd(0), POLLIN, 0};
  EXPECT_EQ(::poll(&bell, 1, 0), 1);
  EXPECT_FALSE(gate.arm(0, 1));
  EXPECT_TRUE(gate.is_late(1));
  EXPECT_FALSE(gate.is_late(0));
  EXPECT_FALSE(gate.decide(1, {&all, 1}, 2));
  gate.took_here(0), gate.took_here(2);
  gate.sent_here(0), gate.sent_here(1);
  EXPECT_FALSE(gate.decide(2, {&all, 1}, 2));  // round 1 is not complete
  EXPECT_TRUE(gate.completed_here(1));
  EXPECT_TRUE(gate.decide(2, {&but_two, 1}, 2));
  EXPECT_FALSE(gate.is_late(2));  // it is not expected
}

TEST(QuorumGates, TogetherNoneIsMoreThanARoundAhead) {
  const uint32_t cores[] = {1, 1};
  QuorumGates gates(1, cores, 3, 2, 4, true);
  const uint64_t all = 7;
  gates[0].sent_here(0);
  EXPECT_TRUE(gates[0].decide(4, {&all, 1}, 1));
  gates[0].took_here(0);
  EXPECT_TRUE(gates[0].completed_here(4));
  EXPECT_EQ(gates.lowest(), 4u);
  gates[0].sent_here(0);
  EXPECT_TRUE(gates[0].is_held(5));
  EXPECT_FALSE(gates[0].decide(5, {&all, 1}, 1));
  EXPECT_TRUE(gates[0].arm(0, 5));
  EXPECT_TRUE(gates[1].decide(4, {&all, 1}, 0));  // nobody has sent it
  pollfd bell = {gates.wake_fd(0), POLLIN, 0};
  EXPECT_EQ(::poll(&bell, 1, 0), 1);
  uint64_t rung = 0;
  EXPECT_EQ(::read(bell.fd, &rung, sizeof rung), 8);
  EXPECT_TRUE(gates[0].arm(0, 5));
  EXPECT_TRUE(gates[1].completed_here(4));
  EXPECT_EQ(::poll(&bell, 1, 0), 1);  // to look again
  EXPECT_FALSE(gates[0].is_held(5));
  EXPECT_TRUE(gates[0].decide(5, {&all, 1}, 1));
}

}  // namespace quorum_gate_test
}  // namespace phub
