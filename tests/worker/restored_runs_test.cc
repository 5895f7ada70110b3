// Jobs whose box is killed, and that go on from their checkpoint on another box: with other cores
// and nodes, over another transport, over more boxes or fewer, in every number format, in lock-step
// or not; and jobs of several boxes of which one is killed. In the end every key has what one
// process computes that adds all updates once.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "kernels/hyper.h"
#include "tests/oracle/coded.h"
#include "tests/oracle/groups.h"
#include "tests/oracle/reference.h"
#include "tests/transport/shm_rig.h"
#include "tests/worker/box.h"
#include "tests/worker/server_process.h"
#include "tests/worker/shard_process.h"
#include "tests/worker/training.h"

namespace phub::testing {
namespace restored_runs_test {

constexpr uint64_t kMoreRounds = 20;  // after the checkpoint
constexpr uint64_t kMostLead = 10;    // of a rank, with any slack
constexpr uint32_t kChunkElements = 256;

struct Place {
  std::string topology = "pack:1 core:2 pu:1", transport = "shm";
  uint32_t shards = 0;  // boxes that serve under the server
};

struct Scenario {
  std::string name;
  Place before, after;
  uint32_t ranks = 3;
  std::string consistency = "bsp", optimizer = "adam", gradient_dtype = "f32",
              parameter_dtype = "f32", rounding = "nearest";
  std::string on_loss = "shrink", on_nonfinite = "stop", unused = "zero", groups = "";
  bool whole_numbers = false;                   // whose sum is exact in any order
  bool saves = false;                           // ranks have parts
  std::map<std::string, double> schedule = {};  // of the learning rate
};
void PrintTo(const Scenario& run, std::ostream* out) { *out << run.name; }

JobSpec spec_of(const Scenario& run) {
  JobSpec spec;
  spec.name = run.name;
  spec.keys = {{.name = "a", .elements = 1},
               {.name = "b", .elements = 33},
               {.name = "c", .elements = 5001},
               {.name = "d", .elements = 512}};
  spec.chunk_elements = kChunkElements;
  spec.world_size = run.ranks;
  spec.consistency = run.consistency;
  if (run.consistency == "ssp") spec.slack = 4;
  spec.optimizer = run.optimizer;
  spec.gradient_dtype = run.gradient_dtype;
  spec.parameter_dtype = run.parameter_dtype;
  spec.rounding = run.rounding;
  spec.on_loss = run.on_loss;
  spec.on_nonfinite = run.on_nonfinite;
  spec.unused = run.unused;
  spec.groups = run.groups;
  spec.lease_ms = 5000;  // on a machine with other things to do
  if (run.whole_numbers && run.optimizer != "none") spec.hyper = {{"lr", 1.0}};
  spec.hyper.insert(run.schedule.begin(), run.schedule.end());
  return spec;
}

bool is_bad(const Scenario& run, uint32_t rank, uint64_t round, size_t key) {
  return run.on_nonfinite == "exclude" && key == 2 && (rank + round) % 5 == 0;
}

// By the rank. Key c is used by one of them at most, and d by nobody in every third round.
bool is_null(const Scenario& run, uint32_t rank, uint64_t round, size_t key) {
  if (run.unused == "zero") return false;
  return key == 2 ? round % 4 != rank : key == 3 && round % 3 == 0;
}

std::vector<std::byte> gradient_of(const Scenario& run, uint32_t rank, uint64_t round, size_t key,
                                   uint64_t elements) {
  const auto dtype = memory_dtype(spec_of(run), static_cast<uint32_t>(key));
  std::vector<std::byte> gradient(elements * kernels::bytes_of(dtype));
  for (uint64_t i = 0; i < elements; ++i) {
    const uint64_t hash = (rank * 7919 + round * 104729 + key * 31 + i * 17 + 1) * 2654435761u;
    const auto small = static_cast<float>((hash >> 12) % 15) - 7;
    // Codes of fp8-e5m2 are fewer than these whole numbers; what is left of them is one, too.
    reference::store(gradient.data(), dtype, i, run.whole_numbers ? small * 9 : small / 11);
  }
  for (uint64_t i = 0; i < elements && is_bad(run, rank, round, key); i += kChunkElements) {
    reference::store(gradient.data(), dtype, i, std::numeric_limits<float>::quiet_NaN());
  }
  return gradient;
}

// What a key holds after these rounds of all ranks. Out of lock-step every update is a step.
std::vector<std::byte> expected_of(const Scenario& run, size_t key, uint64_t elements,
                                   uint64_t rounds) {
  const JobSpec spec = spec_of(run);
  const auto dtype = memory_dtype(spec, static_cast<uint32_t>(key));
  const auto optimizer = *kernels::parse_optimizer(run.optimizer);
  const bool lock_step = run.consistency == "bsp";
  const bool adds = !lock_step && run.optimizer == "none";
  reference::Hyper hyper = kernels::default_hyper(adds ? kernels::Optimizer::kSgd : optimizer);
  if (run.whole_numbers) hyper.lr = adds ? -1 : 1;
  reference::Model model(adds ? kernels::Optimizer::kSgd : optimizer, hyper,
                         std::vector<float>(elements));
  std::vector<float> view(elements);
  std::vector<CodedRank> senders;
  for (uint32_t rank = 0; rank < run.ranks; ++rank) senders.emplace_back(spec, rank);
  for (const auto& [name, value] : run.schedule) kernels::set(hyper, name, value);
  for (uint64_t round = 1; round <= rounds; ++round) {
    model.hyper.lr = reference::learning_rate(hyper, round);
    std::vector<std::vector<std::byte>> gradients;
    for (uint32_t rank = 0; rank < run.ranks; ++rank) {
      if (is_bad(run, rank, round, key) || is_null(run, rank, round, key)) continue;
      gradients.push_back(gradient_of(run, rank, round, key, elements));
      if (!is_coded(spec, static_cast<uint32_t>(key))) continue;
      std::vector<float> pushed(elements);
      std::memcpy(pushed.data(), gradients.back().data(), gradients.back().size());
      const auto sent = senders[rank].send(static_cast<uint32_t>(key), round, pushed);
      std::memcpy(gradients.back().data(), sent.data(), gradients.back().size());
    }
    std::vector<const void*> slots;
    for (const auto& gradient : gradients) slots.push_back(gradient.data());
    if (slots.empty() && run.unused == "skip") {
      // It is no step.
    } else if (!run.groups.empty()) {
      std::vector<float> sum(elements);
      reference::sum(reference::parse_groups(run.groups, run.ranks), slots, dtype, 1, sum.data(),
                     elements);
      model.step(sum);
    } else if (lock_step) {
      model.round(slots, dtype, 1);
    } else {
      for (const void*& slot : slots) model.round({&slot, 1}, dtype, 1);
    }
    move_view(spec, static_cast<uint32_t>(key), round, model.params, view);
  }
  const auto parameter_dtype = *kernels::parse_dtype(parameter_memory_format(spec));
  std::vector<std::byte> result(elements * kernels::bytes_of(parameter_dtype));
  const std::vector<float>& seen = difference_format(spec) ? view : model.params;
  reference::convert(seen.data(), kernels::DType::kF32, result.data(), parameter_dtype, elements);
  return result;
}

class RestoredRuns : public ::testing::TestWithParam<Scenario> {
 protected:
  void serve(const Place& place, std::string listen = "127.0.0.1:0") {
    shards_.clear();
    Flags flags = {"--checkpoints", directory_.path() + "/checkpoints", "--checkpoint-every", "3"};
    flags.insert(flags.end(), kShortShardLease.begin(), kShortShardLease.end());
    server_.emplace(PHUB_BINARY, flags, listen, place.topology);
    for (uint32_t i = 0; i < place.shards; ++i) {
      shards_.push_back(std::make_unique<ShardProcess>(PHUB_BINARY, server_->address()));
    }
    ASSERT_TRUE(becomes([&] { return status().shards.size() == place.shards; }));
  }
  ServerStatus status() const { return ControlClient(server_->address()).status(); }
  // How many boxes have a part of the job.
  size_t boxes() const {
    std::set<uint32_t> boxes;
    for (const JobStatus& job : status().jobs) {
      for (const JobCoreStatus& core : job.cores) boxes.insert(core.box);
    }
    return boxes.size();
  }
  std::unique_ptr<Worker> join(const Place& place, uint32_t rank) const {
    WorkerOptions options = server_->options(spec_of(GetParam()));
    options.transport = place.transport;
    options.rank = static_cast<int32_t>(rank);
    if (GetParam().saves) {
      options.saver = [](uint64_t round) {
        const std::string text = std::to_string(round);
        const auto bytes = std::as_bytes(std::span(text));
        return RankState{{"round", {bytes.begin(), bytes.end()}}};
      };
    }
    return std::make_unique<Worker>(options);
  }
  // Some ranks are slower than others, but by less than the rounds after the checkpoint.
  void train(Worker& worker, uint64_t until) {
    const Scenario& run = GetParam();
    worker.broadcast({});
    for (uint64_t round = worker.first_round(); round <= until; ++round) {
      done_.at(worker.rank()) = round - 1;
      while (run.consistency == "async" && round > slowest() + kMostLead) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      for (size_t key = 0; key < worker.keys(); ++key) {
        if (is_null(run, worker.rank(), round, key)) {
          worker.push_null(key);
          continue;
        }
        const auto gradient =
            gradient_of(run, worker.rank(), round, key, worker.spec().keys[key].elements);
        std::memcpy(worker.gradient_bytes(key).data(), gradient.data(), gradient.size());
        worker.push(key);
        if (key == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1 + worker.rank()));
      }
      worker.wait_all();
    }
  }
  void train_until_rewound(Worker& worker) {
    try {
      train(worker, std::numeric_limits<uint64_t>::max());
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kRewound) << error.what();
    }
    done_.at(worker.rank()) = std::numeric_limits<uint64_t>::max() - kMostLead;  // not waited for
  }
  // Of a rank that trains until then: what it has in the end.
  void train_and_check(Worker& worker, uint64_t last) {
    const Scenario& run = GetParam();
    train(worker, last);
    worker.barrier();
    for (size_t key = 0; key < worker.keys(); ++key) {
      if (run.consistency != "bsp") {  // an update of nothing brings what the others did
        worker.push_null(key);
        worker.wait(key);
      }
      const auto bytes = worker.parameter_bytes(key);
      const auto expected = expected_of(run, key, worker.spec().keys[key].elements, last);
      EXPECT_TRUE(std::ranges::equal(bytes, expected))
          << "key " << key << ", rank " << worker.rank();
    }
    worker.leave();
  }
  uint64_t durable_round() const {
    const std::vector<JobStatus> jobs = status().jobs;
    return jobs.empty() ? 0 : jobs.front().durable_round;
  }

  uint64_t slowest() const {
    return *std::min_element(done_.begin(), done_.begin() + GetParam().ranks);
  }

  const TemporaryDirectory directory_ = TemporaryDirectory::in_memory();
  std::vector<std::unique_ptr<ShardProcess>> shards_;  // end after the server, which ends its jobs
  std::optional<ServerProcess> server_;
  std::array<std::atomic<uint64_t>, 3> done_ = {};  // by rank
};

TEST_P(RestoredRuns, EndAsOneProcessThatAddsEverythingOnce) {
  const Scenario& run = GetParam();
  serve(run.before);
  {
    std::vector<std::jthread> ranks;
    for (uint32_t rank = 0; rank < run.ranks; ++rank) {
      ranks.emplace_back([&, rank] { train_until_rewound(*join(run.before, rank)); });
    }
    EXPECT_TRUE(becomes([&] { return durable_round() >= 6; }));
    EXPECT_EQ(boxes(), run.before.shards + 1);
    EXPECT_EQ(server_->end(SIGKILL), -SIGKILL);
    serve(run.after, server_->address());  // which tells the ranks at once
  }
  std::mutex mutex;
  uint64_t first_round = 0;
  each_rank(run.ranks, [&](uint32_t rank) {
    const std::unique_ptr<Worker> worker = join(run.after, rank);
    {
      const std::lock_guard lock(mutex);
      if (first_round == 0) first_round = worker->first_round();
    }
    EXPECT_GT(first_round, 6u);
    EXPECT_EQ(worker->first_round(), first_round);
    const auto part = worker->restored("round");
    ASSERT_EQ(part.has_value(), run.saves);
    if (part) {
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(part->data()), part->size()),
                std::to_string(first_round - 1));
    }
    EXPECT_EQ(boxes(), run.after.shards + 1);
    train_and_check(*worker, first_round + kMoreRounds);
  });
}

using ShardDies = RestoredRuns;

// Over the other boxes, or, with on_loss wait, over as many as before.
TEST_P(ShardDies, AndTheRanksGoOnFromTheCheckpoint) {
  const Scenario& run = GetParam();
  serve(run.before);
  std::vector<std::jthread> ranks;
  for (uint32_t rank = 0; rank < run.ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      std::unique_ptr<Worker> worker = join(run.before, rank);
      train_until_rewound(*worker);
      worker = worker->rejoin();
      EXPECT_GT(worker->first_round(), 6u);
      train_and_check(*worker, worker->first_round() + kMoreRounds);
    });
  }
  EXPECT_TRUE(becomes([&] { return durable_round() >= 6; }));
  EXPECT_EQ(boxes(), run.before.shards + 1);
  shards_.front()->end(SIGKILL);
  const bool waits = run.on_loss == "wait";
  if (waits) {
    ASSERT_TRUE(becomes([&] { return status().jobs.empty(); }));
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    EXPECT_TRUE(status().jobs.empty()) << "it waits for that box";
    shards_.front() = std::make_unique<ShardProcess>(PHUB_BINARY, server_->address());
  }
  EXPECT_TRUE(becomes([&] { return boxes() == run.before.shards + waits; }));
}

const Place kTwoCores, kTcp{.transport = "tcp"};
const Place kTwoBoxes{.transport = "tcp", .shards = 1};
const Place kThreeBoxes{.topology = "pack:2 core:2 pu:1", .transport = "tcp", .shards = 2};

INSTANTIATE_TEST_SUITE_P(
    All, ShardDies,
    ::testing::Values(Scenario{.name = "of_two", .before = kTwoBoxes},
                      Scenario{.name = "coded",
                               .before = kTwoBoxes,
                               .gradient_dtype = "int4",
                               .rounding = "stochastic"},
                      Scenario{.name = "waits", .before = kTwoBoxes, .on_loss = "wait"},
                      Scenario{.name = "of_three",
                               .before = kThreeBoxes,
                               .gradient_dtype = "bf16",
                               .parameter_dtype = "f16",
                               .unused = "skip",
                               .saves = true}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    All, RestoredRuns,
    ::testing::Values(
        Scenario{.name = "more_cores",
                 .before = {"pack:1 core:1 pu:1"},
                 .after = {"pack:1 core:3 pu:1"}},
        Scenario{.name = "fewer_cores",
                 .before = {"pack:1 core:4 pu:1"},
                 .after = {"pack:1 core:1 pu:1"}},
        Scenario{.name = "more_nodes", .before = kTwoCores, .after = {"pack:2 core:2 pu:1"}},
        Scenario{.name = "fewer_nodes", .before = {"pack:4 core:1 pu:1"}, .after = kTwoCores},
        Scenario{.name = "to_tcp", .before = kTwoCores, .after = kTcp},
        Scenario{.name = "from_tcp", .before = kTcp, .after = kTwoCores},
        Scenario{.name = "more_boxes", .before = kTwoBoxes, .after = kThreeBoxes},
        Scenario{.name = "fewer_boxes",
                 .before = kThreeBoxes,
                 .after = kTwoCores,
                 .unused = "skip",
                 .saves = true},
        Scenario{
            .name = "to_boxes", .before = kTwoCores, .after = kTwoBoxes, .parameter_dtype = "bf16"},
        Scenario{.name = "boxes_in_ssp",
                 .before = kTwoBoxes,
                 .after = kThreeBoxes,
                 .consistency = "ssp",
                 .optimizer = "sgd",
                 .whole_numbers = true},
        Scenario{.name = "boxes_async",
                 .before = kThreeBoxes,
                 .after = kTwoBoxes,
                 .consistency = "async",
                 .optimizer = "none",
                 .whole_numbers = true,
                 .saves = true},
        Scenario{.name = "f16", .gradient_dtype = "f16", .parameter_dtype = "f16"},
        Scenario{.name = "bf16",
                 .optimizer = "nesterov",
                 .gradient_dtype = "bf16",
                 .parameter_dtype = "bf16"},
        Scenario{.name = "f16_gradients", .after = kTcp, .gradient_dtype = "f16"},
        // Residuals are parts of ranks, with and without others.
        Scenario{.name = "int4", .gradient_dtype = "int4"},
        Scenario{.name = "topk",
                 .before = kTcp,
                 .gradient_dtype = "topk",
                 .parameter_dtype = "bf16",
                 .saves = true},
        Scenario{.name = "fp8_at_random",
                 .after = kTwoBoxes,
                 .optimizer = "nesterov",
                 .gradient_dtype = "fp8-e4m3",
                 .rounding = "stochastic",
                 .unused = "skip"},
        Scenario{.name = "int8_sums",
                 .optimizer = "none",
                 .gradient_dtype = "int8",
                 .rounding = "stochastic",
                 .saves = true},
        Scenario{.name = "coded_ssp",
                 .after = {"pack:2 core:2 pu:1"},
                 .consistency = "ssp",
                 .optimizer = "sgd",
                 .gradient_dtype = "fp8-e5m2",
                 .whole_numbers = true},
        // What ranks have is saved beside the parameters.
        Scenario{.name = "differences", .parameter_dtype = "int4"},
        Scenario{.name = "rounded_differences",
                 .before = kTcp,
                 .after = {"pack:1 core:3 pu:1", "tcp"},
                 .gradient_dtype = "int8",
                 .parameter_dtype = "fp8-e5m2",
                 .rounding = "stochastic",
                 .unused = "skip"},
        Scenario{.name = "differences_of_boxes",
                 .before = kTwoBoxes,
                 .after = kThreeBoxes,
                 .optimizer = "nesterov",
                 .parameter_dtype = "fp8-e4m3"},
        // Rates are of the job's rounds, whichever box computes them.
        Scenario{.name = "warms_up",
                 .after = kTcp,
                 .schedule = {{"lr_warmup", 20}, {"lr_exponential", 0.875}}},
        Scenario{.name = "cosine_of_boxes",
                 .before = kTwoBoxes,
                 .after = kThreeBoxes,
                 .optimizer = "adamw",
                 .unused = "skip",
                 .schedule = {{"lr_cosine", 18}, {"lr_end", 0.25}}},
        Scenario{.name = "polynomial_async",
                 .after = {"pack:1 core:3 pu:1"},
                 .ranks = 1,
                 .consistency = "async",
                 .schedule = {{"lr_polynomial", 25}, {"lr_inverse", 0.5}}},
        Scenario{.name = "waits", .on_loss = "wait"}, Scenario{.name = "fails", .on_loss = "fail"},
        Scenario{.name = "excludes", .on_nonfinite = "exclude"},
        Scenario{.name = "groups", .after = kTcp, .groups = "1,2"},
        Scenario{.name = "unused",
                 .after = kTcp,
                 .optimizer = "adamw",
                 .parameter_dtype = "bf16",
                 .unused = "skip"},
        Scenario{.name = "only_parts", .after = kTcp, .optimizer = "none", .saves = true},
        // Out of lock-step.
        Scenario{.name = "ssp",
                 .after = {"pack:2 core:2 pu:1"},
                 .consistency = "ssp",
                 .optimizer = "sgd",
                 .whole_numbers = true},
        Scenario{.name = "ssp_adds",
                 .consistency = "ssp",
                 .optimizer = "none",
                 .on_loss = "wait",
                 .whole_numbers = true},
        Scenario{.name = "ssp_parts",
                 .before = kTcp,
                 .consistency = "ssp",
                 .optimizer = "sgd",
                 .whole_numbers = true,
                 .saves = true},
        Scenario{.name = "async",
                 .after = kTcp,
                 .consistency = "async",
                 .optimizer = "sgd",
                 .parameter_dtype = "bf16",
                 .whole_numbers = true},
        Scenario{.name = "async_parts",
                 .consistency = "async",
                 .optimizer = "none",
                 .whole_numbers = true,
                 .saves = true},
        Scenario{.name = "async_steps",
                 .after = {"pack:1 core:3 pu:1"},
                 .ranks = 1,
                 .consistency = "async"}),
    [](const auto& info) { return info.param.name; });

}  // namespace restored_runs_test
}  // namespace phub::testing
