// The state of keys, got and set while the job runs: to the bit what a process that trains alone
// has, over shared memory and TCP, with several cores and chunks of a key; and through racks.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "tests/oracle/reference.h"
#include "tests/oracle/whole_steps.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/racks.h"
#include "transport/control/control_client.h"

namespace phub {
namespace key_states_test {

using kernels::DType;
using testing::Box;
using testing::each_rank;
using testing::expect_error;
using testing::Racks;

constexpr uint32_t kRanks = 2;
constexpr uint64_t kElements[] = {5000, 7, 640};
constexpr size_t kKeys = std::size(kElements);
const std::vector<uint64_t> kShapes[kKeys] = {{50, 100}, {}, {640}};
constexpr uint32_t kChunk = 96;

struct Kind {
  const char* name;
  const char* optimizer;
  kernels::Optimizer rule;
  const char* dtype;  // of gradients and of what is written back
  DType type;
  const char* differences = "";  // the format in which they are written back instead
};
const Kind kKinds[] = {
    {"adam", "adam", kernels::Optimizer::kAdam, "f32", DType::kF32},
    {"adam_bf16", "adam", kernels::Optimizer::kAdam, "bf16", DType::kBF16},
    {"nesterov", "nesterov", kernels::Optimizer::kNesterov, "f32", DType::kF32},
    {"adagrad_f16", "adagrad", kernels::Optimizer::kAdagrad, "f16", DType::kF16},
    {"adadelta", "adadelta", kernels::Optimizer::kAdadelta, "f32", DType::kF32},
    {"adafactor", "adafactor", kernels::Optimizer::kAdafactor, "f32", DType::kF32},
    {"muon_bf16", "muon", kernels::Optimizer::kMuon, "bf16", DType::kBF16},
    {"sgd", "sgd", kernels::Optimizer::kSgd, "f32", DType::kF32}};
const Kind kDifferences = {"differences", "adam",      kernels::Optimizer::kAdam,
                           "f32",         DType::kF32, "int8"};

JobSpec spec_of(const Kind& kind, const std::string& name) {
  JobSpec spec;
  spec.name = name;
  for (size_t key = 0; key < kKeys; ++key) {
    spec.keys.push_back({.name = fmt::format("k{}", key), .elements = kElements[key]});
    spec.keys.back().shape = kShapes[key];
  }
  spec.world_size = kRanks;
  spec.chunk_elements = kChunk;
  spec.optimizer = kind.optimizer;
  spec.gradient_dtype = kind.dtype;
  spec.parameter_dtype = *kind.differences ? kind.differences : kind.dtype;
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  return spec;
}

// What a rank sends for a key in a round of the training, in the job's format.
std::vector<std::byte> gradient(const Kind& kind, uint64_t round, uint32_t rank, size_t key) {
  std::vector<std::byte> bytes(kElements[key] * kernels::bytes_of(kind.type));
  std::minstd_rand random(static_cast<uint32_t>(1 + round * 97 + rank * 11 + key));
  for (size_t i = 0; i < kElements[key]; ++i) {
    const float value = static_cast<float>(random() % 2001) / 1000 - 1;
    reference::store(bytes.data(), kind.type, i, value);
  }
  return bytes;
}

// One process that trains alone.
struct Alone {
  explicit Alone(const Kind& k) : kind(k) {
    for (const uint64_t elements : kElements) {
      models.emplace_back(kind.rule, kernels::default_hyper(kind.rule),
                          std::vector<float>(elements));
    }
  }
  void train(uint64_t round) {
    for (size_t key = 0; key < kKeys; ++key) {
      std::vector<std::vector<std::byte>> all;
      std::vector<const void*> slots;
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        all.push_back(gradient(kind, round, rank, key));
        slots.push_back(all.back().data());
      }
      reference::Model& model = models[key];
      if (reference::steps_whole(kind.rule, model.hyper, kShapes[key])) {
        std::vector<float> sum(kElements[key]);
        reference::sum(slots, kind.type, 1, sum.data(), sum.size());
        step_whole(model, key, std::move(sum));
      } else {
        model.round(slots, kind.type, 1);
      }
    }
  }
  static void step_whole(reference::Model& model, size_t key, std::vector<float> gradient) {
    const std::span<const float> params = model.params;
    double squares = 0;
    for (size_t at = 0; at < params.size(); at += kChunk) {
      squares += reference::sum_of_squares(
          params.subspan(at, std::min<size_t>(kChunk, params.size() - at)));
    }
    const reference::WholeStep step =
        reference::whole_step(model.optimizer, model.hyper, ++model.steps, kShapes[key],
                              std::move(gradient), squares, model.state0);
    for (size_t i = 0; i < params.size(); ++i) model.params[i] = step.apply(model.params[i], i);
    model.state0 = step.state;
  }
  const std::vector<float>& array(size_t key, size_t which) const {
    const reference::Model& model = models[key];
    return which == 0 ? model.params : which == 1 ? model.state0 : model.state1;
  }
  const Kind& kind;
  std::vector<reference::Model> models;
};

// A round of the training by a rank, up to its last wait.
void train(Worker& worker, const Kind& kind, uint64_t round) {
  for (size_t key = 0; key < kKeys; ++key) {
    const auto bytes = gradient(kind, round, worker.rank(), key);
    std::ranges::copy(bytes, worker.gradient_bytes(key).begin());
    worker.push(key);
  }
  worker.wait_all();
}

// Memory for the state of some keys.
struct States {
  States(const Worker& worker, const std::vector<size_t>& keys = {0, 1, 2}) {
    const size_t arrays = 1 + worker.state_names().size();
    memory.resize(keys.size() * arrays);
    for (size_t i = 0; i < keys.size(); ++i) {
      all.push_back({.key = keys[i], .arrays = {}});
      for (size_t a = 0; a < arrays; ++a) {
        std::vector<float>& array = memory[i * arrays + a];
        array.assign(kElements[keys[i]], -77);
        all.back().arrays.emplace_back(array);
      }
    }
  }
  std::vector<std::vector<float>> memory;
  std::vector<KeyState> all;
};

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

void expect_state(const States& states, const Alone& alone, uint64_t steps) {
  for (const KeyState& state : states.all) {
    EXPECT_EQ(state.step, steps);
    for (size_t a = 0; a < state.arrays.size(); ++a) {
      EXPECT_TRUE(same_bits(state.arrays[a], alone.array(state.key, a)))
          << "key " << state.key << ", array " << a << ", after step " << steps;
    }
  }
}

void expect_parameters(const Worker& worker, const Alone& alone) {
  if (*alone.kind.differences) return;  // what is here of them is another matter
  for (size_t key = 0; key < kKeys; ++key) {
    std::vector<std::byte> expected(kElements[key] * kernels::bytes_of(alone.kind.type));
    reference::convert(alone.array(key, 0).data(), DType::kF32, expected.data(), alone.kind.type,
                       kElements[key]);
    const auto got = worker.parameter_bytes(key);
    EXPECT_TRUE(std::ranges::equal(got, expected)) << "rank " << worker.rank() << ", key " << key;
  }
}

// One box; or two racks of one rank each, and their root.
class Boxes {
 public:
  explicit Boxes(bool racks) {
    if (racks) {
      racks_.emplace("1,1", kRanks);
    } else {
      box_.emplace(2);
    }
  }
  WorkerOptions options(JobSpec spec, uint32_t rank) {
    if (racks_) spec.groups = "1,1";
    WorkerOptions options = (racks_ ? racks_->of(rank) : *box_).options(spec);
    options.rank = static_cast<int32_t>(rank);
    return options;
  }
  std::vector<LogRecord> log(const std::string& job) {
    return (racks_ ? racks_->root() : *box_).log(job);
  }

 private:
  std::optional<Box> box_;
  std::optional<Racks> racks_;
};

using KindAndRacks = std::tuple<Kind, bool>;
std::string name_of_test(const ::testing::TestParamInfo<KindAndRacks>& test) {
  const auto& [kind, racks] = test.param;
  return fmt::format("{}{}", kind.name, racks ? "_racks" : "");
}

class KeyStates : public ::testing::TestWithParam<KindAndRacks> {};

// Rank 1 is up to a round ahead meanwhile.
TEST_P(KeyStates, AreOfOneRound) {
  const Kind& kind = std::get<0>(GetParam());
  Boxes boxes(std::get<1>(GetParam()));
  each_rank(kRanks, [&](uint32_t rank) {
    Worker worker(boxes.options(spec_of(kind, "job"), rank));
    Alone alone(kind);
    for (uint64_t round = 1; round <= 8; ++round) {
      train(worker, kind, round);
      if (rank != 0) continue;
      alone.train(round);
      States states(worker,
                    round % 2 == 0 ? std::vector<size_t>{2, 0} : std::vector<size_t>{0, 1, 2});
      EXPECT_EQ(worker.get_state(states.all), round);
      expect_state(states, alone, round);
      expect_parameters(worker, alone);
    }
  });
}

// What is got of one job and set in another goes on as if nothing had happened.
TEST_P(KeyStates, GoOnInAnotherJob) {
  const Kind& kind = std::get<0>(GetParam());
  Boxes boxes(std::get<1>(GetParam()));
  Alone alone(kind);
  States saved = [&] {
    std::optional<States> got;
    each_rank(kRanks, [&](uint32_t rank) {
      Worker worker(boxes.options(spec_of(kind, "first"), rank));
      for (uint64_t round = 1; round <= 5; ++round) train(worker, kind, round);
      if (rank != 0) return;
      got.emplace(worker);
      worker.get_state(got->all);
    });
    return std::move(*got);
  }();
  for (uint64_t round = 1; round <= 5; ++round) alone.train(round);
  expect_state(saved, alone, 5);

  constexpr uint64_t kBefore = 3, kAfter = 4;  // rounds of the second job
  each_rank(kRanks, [&](uint32_t rank) {
    Worker worker(boxes.options(spec_of(kind, "second"), rank));
    for (uint64_t round = 1; round <= kBefore; ++round) train(worker, kind, 1000 + round);
    worker.barrier();
    if (rank == 1) {
      EXPECT_EQ(worker.set_state(saved.all), kBefore + 1);
      expect_error(ErrorCode::kTaken, "is not taken up yet", [&] { worker.set_state(saved.all); });
    }
    worker.barrier();
    if (rank == 0) {  // before any core has taken it
      States states(worker);
      EXPECT_EQ(worker.get_state(states.all), kBefore);
      expect_state(states, alone, 5);
    }
    worker.barrier();
    Alone mine = alone;
    for (uint64_t round = 6; round < 6 + kAfter; ++round) {
      train(worker, kind, round);
      mine.train(round);
      expect_parameters(worker, mine);
    }
    worker.barrier();
    if (rank == 0) {
      States states(worker);
      EXPECT_EQ(worker.get_state(states.all), kBefore + kAfter);
      expect_state(states, mine, 5 + kAfter);
    }
    worker.barrier();
  });
  const auto log = boxes.log("second");
  const auto set = std::ranges::find(log, LogRecord::Kind::kSet, &LogRecord::kind);
  ASSERT_NE(set, log.end());
  EXPECT_EQ(set->round, kBefore + 1);
  EXPECT_EQ(set->rank, 1u);
  ASSERT_EQ(set->chunks.size(), 1u);
  EXPECT_EQ(set->chunks[0].first, 0u);
}

INSTANTIATE_TEST_SUITE_P(Kinds, KeyStates,
                         ::testing::Combine(::testing::ValuesIn(kKinds), ::testing::Bool()),
                         name_of_test);
// Racks get no differences.
INSTANTIATE_TEST_SUITE_P(Differences, KeyStates,
                         ::testing::Combine(::testing::Values(kDifferences),
                                            ::testing::Values(false)),
                         name_of_test);

// Some keys are set, while rank 1 pushes and reads what it wants: at any time one result is whole.
// Rank 0 of a job of one, which the test plays call by call.
struct Raw {
  Raw(const Box& box, const JobSpec& spec) : client(box.address()) {
    const JoinReply reply =
        client.join({.spec = spec, .rank = 0, .transport = "tcp", .id = "raw"}, 60'000);
    who = {spec.name, reply.rank, reply.incarnation, reply.offer.ticket, reply.epoch};
  }
  ControlClient client;
  Credential who;
};

TEST(KeyStatesErrors, OfTheCalls) {
  Box box(2);
  JobSpec spec = spec_of(kKinds[0], "errors");
  spec.world_size = 2;
  WorkerOptions options = box.options(spec);
  options.rank = 1;
  options.transport = "tcp";
  options.await_ranks = false;
  Worker worker(options);
  States states(worker);
  expect_error(ErrorCode::kInvalid, "has not begun", [&] { worker.get_state(states.all); });
  Raw raw(box, spec);
  ControlClient& client = raw.client;
  const Credential& who = raw.who;

  States wrong(worker);
  wrong.all[1].arrays[0] = wrong.all[1].arrays[0].first(6);
  expect_error(ErrorCode::kInvalid, "key 'k1' has 7 elements, an array of 6 was given",
               [&] { worker.get_state(wrong.all); });
  wrong.all[1].arrays.pop_back();
  expect_error(ErrorCode::kInvalid, "key 'k1' has 3 arrays", [&] { worker.set_state(wrong.all); });
  wrong.all[1].key = 3;
  expect_error(ErrorCode::kInvalid, "out of range", [&] { worker.get_state(wrong.all); });
  expect_error(ErrorCode::kInvalid, "no key", [&] { worker.get_state({}); });

  const auto begin = [&](StateRequest request) {
    return client.begin_state(who, std::move(request));
  };
  expect_error(ErrorCode::kInvalid, "key 9 is out of range", [&] { begin({.keys = {0, 9}}); });
  expect_error(ErrorCode::kInvalid, "'k1' is named twice", [&] { begin({.keys = {1, 1}}); });
  expect_error(ErrorCode::kInvalid, "1 steps for 2 keys", [&] {
    begin({.set = true, .keys = {0, 1}, .steps = {1}});
  });
  expect_error(ErrorCode::kInvalid, "1 steps for 1 keys",
               [&] { begin({.keys = {1}, .steps = {1}}); });
  expect_error(ErrorCode::kInvalid, "steps are more than",
               [&] { begin({.set = true, .keys = {1}, .steps = {~uint64_t{0}}}); });
  expect_error(ErrorCode::kNotFound, "does not set", [&] { client.apply_state(who); });
  expect_error(ErrorCode::kNotFound, "does not read", [&] { client.read_state(who, 0); });
  expect_error(ErrorCode::kNotFound, "does not set", [&] { client.write_state(who, 0, "1234"); });

  EXPECT_EQ(begin({.set = true, .keys = {1}, .steps = {4}}).bytes, 7u * 3 * 4);
  expect_error(ErrorCode::kTaken, "rank 0 sets the state of job 'errors'",
               [&] { worker.get_state(states.all); });
  const std::string whole(7 * 3 * 4, '\0');
  expect_error(ErrorCode::kInvalid, "no piece",
               [&] { client.write_state(who, 0, whole + "1234"); });
  expect_error(ErrorCode::kInvalid, "no piece", [&] { client.write_state(who, 2, "1234"); });
  expect_error(ErrorCode::kInvalid, "no piece", [&] { client.write_state(who, 0, "123"); });
  expect_error(ErrorCode::kInvalid, "no piece",
               [&] { client.write_state(who, whole.size(), "1234"); });
  expect_error(ErrorCode::kInvalid, "no piece",
               [&] { client.write_state(who, ~uint64_t{3}, "1234"); });
  expect_error(ErrorCode::kInvalid, "behind the 0", [&] { client.write_state(who, 4, "1234"); });
  client.write_state(who, 0, "1234");
  expect_error(ErrorCode::kInvalid, "4 of the 84 bytes", [&] { client.apply_state(who); });
  Credential stranger = who;
  stranger.ticket = std::string(32, '0');
  expect_error(ErrorCode::kUnauthorized, "ticket",
               [&] { client.write_state(stranger, 4, "1234"); });
  // Another one of the same rank takes its place; and what is ended holds up nobody.
  const StateReply got = begin({.keys = {2}});
  EXPECT_EQ(got.steps, std::vector<uint64_t>{0});
  EXPECT_EQ(client.read_state(who, 0).size(), 640u * 3 * 4);
  expect_error(ErrorCode::kInvalid, "no piece", [&] { client.read_state(who, got.bytes); });
  client.end_state(who);
  EXPECT_EQ(worker.get_state(states.all), 0u);
  // A rank that is lost takes with it what it had begun.
  begin({.set = true, .keys = {1}, .steps = {4}});
  client.leave(who);
  EXPECT_EQ(worker.get_state(states.all), 0u);
}

TEST(KeyStatesErrors, OfTheJob) {
  Box box(2);
  const auto refused = [&](const std::string& name, auto change) {
    JobSpec spec = spec_of(kKinds[0], name);
    spec.world_size = 1;
    change(spec);
    Worker worker(box.options(spec));
    States states(worker);
    expect_error(ErrorCode::kInvalid, "in jobs in lock-step with an optimizer",
                 [&] { worker.get_state(states.all); });
    expect_error(ErrorCode::kInvalid, "in jobs in lock-step with an optimizer",
                 [&] { worker.set_state(states.all); });
  };
  refused("async", [](JobSpec& spec) { spec.consistency = "async"; });
  refused("ssp", [](JobSpec& spec) { spec.consistency = "ssp", spec.slack = 2; });
  refused("sums", [](JobSpec& spec) { spec.optimizer = "none"; });
}

TEST(KeyStatesErrors, OfAServerWithoutMemory) {
  JobSpec spec = spec_of(kKinds[0], "large");
  spec.world_size = 1;
  spec.keys = {{.name = "w", .elements = 1'000'000}};
  spec.chunk_elements = 8192;
  Box box(1, uint64_t{22} << 20);
  if (!box.status().shards.empty()) GTEST_SKIP() << "with others the job needs less of this box";
  Worker worker(box.options(spec));
  std::vector<float> memory(3'000'000);
  const std::span<float> all(memory);
  KeyState state{
      .key = 0,
      .arrays = {all.first(1'000'000), all.subspan(1'000'000, 1'000'000), all.subspan(2'000'000)}};
  expect_error(ErrorCode::kFull, "raise --memory-limit", [&] { worker.get_state({&state, 1}); });
  worker.push(0);
  worker.wait(0);
}

// What comes right after a join was not pushed for: here the last key's parameters are on their
// way.
TEST(StateAtTheJoin, IsOneBetweenRounds) {
  Box box(1);
  JobSpec spec = spec_of(kKinds[0], "join");
  spec.world_size = 1;
  spec.chunk_elements = 8192;
  spec.keys.push_back({.name = "large", .elements = 4u << 20});
  for (int time = 0; time < 5; ++time) {
    {
      Worker worker(box.options(spec));
      States states(worker);
      EXPECT_EQ(worker.get_state(states.all), 0u);
    }
    ASSERT_TRUE(box.becomes_empty());
  }
}

TEST(StateNames, AreAsManyAsTheOptimizerHasStates) {
  Box box(1);
  for (const char* optimizer :
       {"sgd", "momentum", "nesterov", "adam", "adamw", "adagrad", "rmsprop", "rmsprop+",
        "sparse-adam", "adadelta", "adafactor", "muon"}) {
    SCOPED_TRACE(optimizer);
    JobSpec spec = spec_of(kKinds[0], "names");
    spec.world_size = 1;
    spec.optimizer = std::string(optimizer).substr(0, std::string(optimizer).find('+'));
    if (spec.optimizer != optimizer) spec.hyper["rmsprop_momentum"] = 0.9;
    {
      Worker worker(box.options(spec));
      States states(worker);
      EXPECT_EQ(worker.get_state(states.all), 0u);  // the sizes are the server's
    }
    ASSERT_TRUE(box.becomes_empty());
  }
}

}  // namespace key_states_test
}  // namespace phub
