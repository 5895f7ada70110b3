// What a worker with a ticket of its own can do to others over RDMA. Runs as root in a machine of
// its own with a device (scripts/rdma-vm): it reads the server's memory and the kernel's list of
// keys.
//   verbs_attacker [--attempts N] [--seed N] [GoogleTest's options]
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <set>

#include "tests/transport/verbs_raw_worker.h"
#include "tests/transport/verbs_victims.h"
#include "transport/error.h"
#include "transport/greeting.h"

namespace phub::testing {
namespace {

using std::chrono::duration;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

uint64_t attempts_wanted = 300;
uint64_t seed = std::random_device{}();

const std::vector<ibv_wr_opcode> kOpcodes = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
                                             IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP,
                                             IBV_WR_ATOMIC_FETCH_AND_ADD};
bool is_atomic(ibv_wr_opcode opcode) {
  return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

struct Attempt {
  std::string what;
  RawRequest request;
};

// A worker of a job of its own, which connects again after each attempt.
class Attacker {
 public:
  explicit Attacker(const VerbsServer& server) : server_(server) { join(false); }

  void join(bool replace) {
    JobSpec spec = victim_spec("attacker", 1);
    spec.max_ranks = 3;
    spec.lease_ms = 60000;
    if (rank_ != nullptr) old_keys_.push_back(slots().key);
    auto next = std::make_unique<OpenRank>(server_, spec, 0, replace);
    rank_ = std::move(next);
    connect(rank_->reply().offer);
  }
  // Over the control port, as a worker does whose connection broke.
  // `hasty`: posted before the box can know that the connection is made.
  void reconnect(const RawRequest* hasty = nullptr) {
    raw_.reset();
    for (int tries = 0;; ++tries) {
      try {
        return connect(rank_->control().reconnect(rank_->credential()), hasty);
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kTaken || tries == 100) throw;
        std::this_thread::sleep_for(milliseconds(5));
      }
    }
  }
  ibv_wc_status attempt(const RawRequest& request) { return raw_->attempt(request); }
  ibv_wc_status completion() { return raw_->completion(); }
  // Anew as long as the network, not the box, was what ended it.
  ibv_wc_status write_own_slots() {
    ibv_wc_status status = IBV_WC_RETRY_EXC_ERR;
    for (int tries = 0; status == IBV_WC_RETRY_EXC_ERR && tries < 5; ++tries) {
      if (tries > 0) reconnect();
      status = attempt({IBV_WR_RDMA_WRITE, slots().base, slots().key, 4096});
    }
    return status;
  }
  void heartbeat() { rank_->control().heartbeat(rank_->credential()); }

  const QueueOffer& slots() const { return rank_->slots(); }
  uint64_t slot_bytes() const { return rank_->slot_bytes(); }
  const std::vector<uint32_t>& old_keys() const { return old_keys_; }
  std::unique_ptr<RawVerbs> take_connection() { return std::move(raw_); }
  RawVerbs& raw() { return *raw_; }

 private:
  void connect(const Offer& offer, const RawRequest* hasty = nullptr) {
    raw_ = std::make_unique<RawVerbs>(offer.queues.front().address);
    VerbsHello hello;
    hello.ticket = ticket_bytes(offer.ticket);
    if (!raw_->connect(hello, hasty)) throw parse_refusal(raw_->refusal());
  }

  const VerbsServer& server_;
  std::unique_ptr<OpenRank> rank_;
  std::unique_ptr<RawVerbs> raw_;
  std::vector<uint32_t> old_keys_;
};

// Its own key, where it has no business.
void add_wrong_ranges(const Attacker& attacker, std::vector<Attempt>& out) {
  const uint64_t base = attacker.slots().base, bytes = attacker.slot_bytes();
  struct Range {
    const char* what;
    uint64_t address;
    uint32_t bytes;
  };
  const std::vector<Range> ranges = {
      {"one byte below", base - 1, 1},
      {"a chunk below", base - 16384, 16384},
      {"straddling the beginning", base - 64, 128},
      {"one byte above", base + bytes, 1},
      {"a chunk above", base + bytes, 16384},
      {"straddling the end", base + bytes - 64, 128},
      {"one byte too long", base, static_cast<uint32_t>(bytes + 1)},
      {"16 MiB from its beginning", base, 16 * RawVerbs::kBufferBytes},
      {"far below", base - (uint64_t{1} << 32), 4096},
      {"far above", base + (uint64_t{1} << 32), 4096},
      {"address 0", 0, 4096},
      {"the last address", ~uint64_t{0} - 4095, 4096},
      {"past the last address", ~uint64_t{0} - 63, 128},
  };
  for (const Range& range : ranges) {
    for (const ibv_wr_opcode opcode : kOpcodes) {
      RawRequest request = {opcode, range.address, attacker.slots().key, range.bytes, 0};
      if (is_atomic(opcode)) request.bytes = 8, request.address &= ~uint64_t{7};
      out.push_back({std::string("own key, ") + range.what, request});
    }
  }
  // Its own slots may be written and nothing else.
  for (const ibv_wr_opcode opcode : kOpcodes) {
    if (opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM) continue;
    out.push_back(
        {"own key, own slots", {opcode, base & ~uint64_t{7}, attacker.slots().key, 8, 0}});
  }
}

void add_key(const std::string& what, uint64_t address, uint32_t key, std::vector<Attempt>& out) {
  for (const ibv_wr_opcode opcode : kOpcodes) {
    out.push_back({what, {opcode, address & ~uint64_t{7}, key, is_atomic(opcode) ? 8u : 4096u, 0}});
  }
}

// Keys of others: those that a perfect guess finds, every one that the kernel knows, and guesses.
void add_foreign_keys(const Attacker& attacker, const StillVictim& victim, int server,
                      std::mt19937_64& random, std::vector<Attempt>& out) {
  const uint32_t own = attacker.slots().key;
  for (size_t rank = 0; rank < 2; ++rank) {
    const QueueOffer& slots = victim.rank(rank).slots();
    add_key("key and address of a victim's slots", slots.base, slots.key, out);
    add_key("own key, a victim's slots", slots.base, own, out);
  }
  add_key("own key, a victim's results", victim.results(), own, out);
  for (const MemoryKey& key : memory_keys()) {
    if (key.remote == own) continue;
    const std::string whose = key.pid == server ? "the server's" : "another process's";
    if (key.remote != 0) add_key("a key of " + whose, victim.results(), key.remote, out);
    if (key.local != key.remote) {
      add_key("a local key of " + whose, victim.results(), key.local, out);
    }
  }
  for (const uint32_t key : attacker.old_keys()) {
    add_key("the key of its former incarnation", attacker.slots().base, key, out);
  }
  for (uint32_t n = 1; n <= 8; ++n) {
    add_key("own key + n", attacker.slots().base, own + n, out);
    add_key("own key - n", attacker.slots().base, own - n, out);
    add_key("own key, index + n", victim.rank(0).slots().base, own + (n << 8), out);
    add_key("own key, index - n", victim.rank(0).slots().base, own - (n << 8), out);
  }
  add_key("key 0", victim.results(), 0, out);
  add_key("key of all ones", victim.results(), ~0u, out);
  for (int i = 0; i < 8; ++i) {
    const auto key = static_cast<uint32_t>(random());
    if (key != own) add_key("a key at random", victim.results(), key, out);
  }
}

class Report {
 public:
  void count(const Attempt& attempt, ibv_wc_status status) {
    ++by_status_[ibv_wc_status_str(status)];
    kinds_.insert(attempt.what);
  }
  void print(uint64_t attempts, double took_s) const {
    std::printf("%llu attempts of %zu kinds in %.1f s (%.1f ms each):",
                static_cast<unsigned long long>(attempts), kinds_.size(), took_s,
                1e3 * took_s / static_cast<double>(attempts));
    for (const auto& [status, count] : by_status_) {
      std::printf(" %s: %llu.", status.c_str(), static_cast<unsigned long long>(count));
    }
    std::printf("\n");
  }

 private:
  std::map<std::string, uint64_t> by_status_;
  std::set<std::string> kinds_;
};

// Everything once, then the same in any order until there were enough.
TEST(VerbsAttackerTest, AWorkerOfAnotherJobChangesNothing) {
  VerbsServer server;
  TrainingVictim training(server);
  ASSERT_TRUE(training.wait_for(5)) << server.output();
  const StillVictim still(server);
  Attacker attacker(server);

  // What it may do works, and is seen in the server's memory: the rest of this test would see it.
  ASSERT_EQ(attacker.write_own_slots(), IBV_WC_SUCCESS);
  const std::vector<std::byte> own = server.read(attacker.slots().base, 4096);
  ASSERT_TRUE(std::ranges::equal(own, attacker.raw().buffer().first(4096)));

  // A former incarnation: its queue pair, which it still holds, and its key are worth nothing.
  const QueueOffer before = attacker.slots();
  const std::unique_ptr<RawVerbs> fenced = attacker.take_connection();
  attacker.join(/*replace=*/true);
  ASSERT_EQ(attacker.slots().base, before.base);
  ASSERT_NE(attacker.slots().key, before.key);
  std::memset(fenced->buffer().data(), 0x11, fenced->buffer().size());
  EXPECT_NE(fenced->attempt({IBV_WR_RDMA_WRITE, before.base, before.key, 4096}), IBV_WC_SUCCESS);
  EXPECT_TRUE(std::ranges::equal(server.read(before.base, 4096), own));

  std::mt19937_64 random(seed);
  std::printf("seed %llu, %llu bytes of a victim under watch, another one in training\n",
              static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(still.bytes()));
  Report report;
  std::vector<Attempt> todo;
  const uint64_t rounds_before = training.rounds();
  const auto begin = steady_clock::now();
  auto next_beat = begin + seconds(5);
  uint64_t done = 0;
  for (; done < attempts_wanted; ++done) {
    if (todo.empty()) {
      add_wrong_ranges(attacker, todo);
      add_foreign_keys(attacker, still, server.pid(), random, todo);
      std::shuffle(todo.begin(), todo.end(), random);
    }
    const Attempt attempt = std::move(todo.back());
    todo.pop_back();
    ibv_wc_status status = IBV_WC_GENERAL_ERR;
    try {
      attacker.reconnect(done % 2 == 0 ? &attempt.request : nullptr);
      status = done % 2 == 0 ? attacker.completion() : attacker.attempt(attempt.request);
    } catch (const std::exception& error) {
      FAIL() << "attempt " << done << ": " << attempt.what << ": " << error.what() << "; "
             << server.output();
    }
    report.count(attempt, status);
    ASSERT_NE(status, IBV_WC_SUCCESS)
        << "attempt " << done << ": " << attempt.what << ", opcode " << attempt.request.opcode
        << ", address " << attempt.request.address << ", key " << attempt.request.key << ", "
        << attempt.request.bytes << " bytes, was let through";
    ASSERT_NE(status, IBV_WC_GENERAL_ERR)
        << "attempt " << done << ": " << attempt.what << " never ended";
    if (done % 16 == 0) {
      ASSERT_EQ(still.changed(), 0u) << "attempt " << done << ": " << attempt.what;
    }
    if (steady_clock::now() > next_beat) {
      attacker.heartbeat();
      next_beat = steady_clock::now() + seconds(5);
    }
  }
  const double took_s = duration<double>(steady_clock::now() - begin).count();
  report.print(done, took_s);
  EXPECT_EQ(still.changed(), 0u);
  // Its neighbours in its own job, whose slots nobody has touched, and its own: nothing of its
  // attempts is there.
  EXPECT_TRUE(std::ranges::equal(server.read(before.base, 4096), own));

  // By the InfiniBand specification (C9-88) a request of no bytes needs no valid key. It changes
  // nothing, whatever becomes of it.
  attacker.reconnect();
  const ibv_wc_status empty =
      attacker.attempt({IBV_WR_RDMA_WRITE, still.results(), attacker.slots().key + 77, 0});
  std::printf("a write of no bytes with a wrong key: %s\n", ibv_wc_status_str(empty));
  EXPECT_EQ(still.changed(), 0u);

  const uint64_t rounds = training.rounds();
  EXPECT_TRUE(training.wait_for(rounds + 3));
  training.stop();
  std::printf("the training victim: %.1f rounds/s meanwhile, slowest round %.0f ms\n",
              static_cast<double>(rounds - rounds_before) / took_s,
              1e3 * training.slowest_round_s());
  EXPECT_EQ(training.problem(), "");
  EXPECT_EQ(training.reconnections(), 0u);
  EXPECT_LT(training.slowest_round_s(), 10.0);  // an emulated machine on a busy one
  EXPECT_GT(rounds, rounds_before);
  EXPECT_TRUE(server.alive()) << server.output();
}

// --- A rank that errs within its own job.

struct Misstep {
  std::string name;
  std::string reason;  // part of what the log says
  std::function<void(OpenRank&)> err;
};
void post(OpenRank& rank, const Write& write) {
  ASSERT_TRUE(rank.link().endpoint().post({0}, write));
  rank.link().endpoint().flush();
}

// Rounds and kinds that cannot be are told from the others by the core, over any transport
// (worker/bad_input_test.cc).
const std::vector<Misstep>& errors() {
  static const std::vector<Misstep> all = {
      {"ChunkOutOfRange", "on a queue that has fewer",
       [](OpenRank& rank) {
         const auto chunks = static_cast<uint32_t>(rank.reply().layout.queue_chunks.front().size());
         post(rank, {0, 0, 64, encode({chunks, 2})});
       }},
      {"FewerBytesThanTheChunk", "it sent 64 bytes, not as many as belong there",
       [](OpenRank& rank) {
         post(rank, {0, 0, 64, encode({0, 2})});
       }},
      // Its queue pair breaks, which may be the network's fault; it is not heard of again.
      {"WriteOutsideItsSlots", "its lease of 1500 ms expired",
       [](OpenRank& rank) {
         post(rank, {0, rank.slot_bytes(), 64, encode({0, 2})});
       }},
      {"WriteFarOutsideItsSlots", "its lease of 1500 ms expired",
       [](OpenRank& rank) {
         post(rank, {0, uint64_t{1} << 40, 64, encode({0, 2})});
       }},
  };
  return all;
}

class VerbsErringRankTest : public ::testing::TestWithParam<Misstep> {};

TEST_P(VerbsErringRankTest, HarmsOnlyItself) {
  static VerbsServer server;
  constexpr uint64_t kRounds = 30;
  constexpr uint32_t kErring = 2;
  JobSpec spec = victim_spec(GetParam().name, 3);
  spec.lease_ms = 1500;
  std::atomic<uint64_t> wrong{0};
  std::vector<std::thread> others;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    others.emplace_back([&, rank] {
      try {
        WorkerOptions options;
        options.server = server.address();
        options.spec = spec;
        options.rank = static_cast<int32_t>(rank);
        options.transport = "verbs";
        Worker worker(options);
        worker.wait_all();
        for (uint64_t round = 1; round <= kRounds; ++round) {
          for (size_t key = 0; key < worker.keys(); ++key) {
            for (size_t e = 0; float& g : worker.gradient(key)) g = gradient_of(rank, round, e++);
            worker.push(key);
          }
          worker.wait_all();
          for (size_t key = 0; key < worker.keys(); ++key) {
            for (size_t e = 0; const float sum : worker.parameters(key)) {
              // It took part in round 1 and, having erred, in no other.
              const float third = round == 1 ? gradient_of(kErring, 1, e) : 0;
              wrong += sum != gradient_of(0, round, e) + gradient_of(1, round, e) + third;
              ++e;
            }
          }
        }
        worker.barrier();
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  OpenRank erring(server, spec, kErring);
  erring.connect();
  for (size_t key = 0; key < spec.keys.size(); ++key) {
    const std::span<std::byte> bytes = erring.session().gradient(key);
    std::span gradient(reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float));
    for (size_t e = 0; float& g : gradient) g = gradient_of(kErring, 1, e++);
    erring.session().push(key, 0, false);
  }
  erring.await();
  GetParam().err(erring);
  for (std::thread& other : others) other.join();
  EXPECT_EQ(wrong, 0u);

  uint64_t lost = 0;
  for (const LogRecord& record : ControlClient(server.address()).log(spec.name)) {
    if (record.kind != LogRecord::Kind::kLost) continue;
    ++lost;
    EXPECT_EQ(record.rank, kErring);
    EXPECT_NE(record.reason.find(GetParam().reason), std::string::npos) << record.reason;
  }
  EXPECT_EQ(lost, 1u);
  // It is told so, and its connection is closed: nothing that it writes can arrive any more.
  try {
    erring.control().heartbeat(erring.credential());
    ADD_FAILURE() << "its heartbeat was answered";
  } catch (const Error& error) {
    EXPECT_TRUE(error.code() == ErrorCode::kFenced || error.code() == ErrorCode::kNotFound)
        << error.what();
  }
  EXPECT_FALSE(erring.link().connected());
  EXPECT_TRUE(server.alive()) << server.output();
}

INSTANTIATE_TEST_SUITE_P(Every, VerbsErringRankTest, ::testing::ValuesIn(errors()),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace phub::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; i += 2) {
    const std::string option = argv[i];
    const bool known = option == "--attempts" || option == "--seed";
    char* end = nullptr;
    const uint64_t value = i + 1 < argc ? std::strtoull(argv[i + 1], &end, 10) : 0;
    if (!known || end == nullptr || *end != '\0' || end == argv[i + 1]) {
      std::fprintf(stderr, "usage: %s [--attempts N] [--seed N] [--gtest_…]\n", argv[0]);
      return 2;
    }
    (option == "--seed" ? phub::testing::seed : phub::testing::attempts_wanted) = value;
  }
  return RUN_ALL_TESTS();
}
