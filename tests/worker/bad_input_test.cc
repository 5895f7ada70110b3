// What users and broken programs do wrong: each gets one clear error, on the side that caused it,
// in bounded time; server and other jobs stay as they were.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <optional>

#include "tests/phub/http_rig.h"
#include "tests/worker/box.h"
#include "tests/worker/bystander.h"
#include "transport/control/control_client.h"
#include "transport/control/messages_json.h"

namespace phub::testing {
namespace bad_input_test {

using ::testing::HasSubstr;
using enum ErrorCode;
using Clock = std::chrono::steady_clock;
constexpr double kBoundedMs = 60000;  // on a machine with other things to do

JobSpec spec_of(std::string name, uint32_t world_size = 1) {
  JobSpec spec;
  spec.name = std::move(name);
  spec.keys = {{.name = "w", .elements = 20000}, {.name = "b", .elements = 10}};
  spec.world_size = world_size;
  spec.optimizer = "sgd";
  return spec;
}

// Calls `body`, which must fail soon with `code` and a message that says `text`.
void expect_error(ErrorCode code, const std::string& text, const std::function<void()>& body) {
  const auto begin = Clock::now();
  try {
    body();
    ADD_FAILURE() << "no error, instead of: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(name_of(error.code()), name_of(code)) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(text));
    EXPECT_LT(std::strlen(error.what()), 1000u);
  }
  const std::chrono::duration<double, std::milli> took = Clock::now() - begin;
  EXPECT_LT(took.count(), kBoundedMs);
}

// A box with a job beside; nothing may be left over in it.
class BadInput : public ::testing::Test {
 protected:
  void TearDown() override {
    if (::testing::Test::HasFatalFailure()) return;
    std::vector<std::string> names;
    const auto give_up = Clock::now() + std::chrono::seconds(60);
    do {  // the cores may still be letting go of a job that has ended
      names.clear();
      for (const JobStatus& job : box_.status().jobs) names.push_back(job.name);
    } while (names.size() > 1 && Clock::now() < give_up);
    EXPECT_THAT(names, ::testing::ElementsAre("bystander"));
  }
  // A worker that says `change`d things.
  void join(const std::function<void(WorkerOptions&)>& change) {
    WorkerOptions options = box_.options(spec_of("job"));
    change(options);
    Worker worker(options);
  }

  Box box_{2, 64 << 20};
  Bystander bystander_{box_.address()};
};

void schedule(WorkerOptions& options, uint64_t round, const char* name, double value) {
  options.spec.schedule = {{.round = round, .values = {{name, value}}}};
}

struct BadJoin {
  const char* what;
  ErrorCode code;
  const char* says;
  std::function<void(WorkerOptions&)> change;
};

// What a spec may not be is in transport/messages_test; here is who refuses it, and the rest.
TEST_F(BadInput, JobsThatCannotBe) {
  const std::vector<BadJoin> kCases = {
      {"no keys", kInvalid, "a job needs at least one key", [](auto& o) { o.spec.keys.clear(); }},
      {"no name", kInvalid,
       "got ''. Give the job a name (PHUB_JOB), or start the ranks with a launcher",
       [](auto& o) { o.spec.name = ""; }},
      {"an optimizer that is not known", kInvalid, "optimizer: must be one of none, sgd",
       [](auto& o) { o.spec.optimizer = "sdg"; }},
      {"a hyperparameter's name", kInvalid, "unknown hyperparameter 'learning_rate'; known are lr",
       [](auto& o) { o.spec.hyper["learning_rate"] = 0.1; }},
      {"a hyperparameter's value", kInvalid, "'lr' is -1",
       [](auto& o) { o.spec.hyper["lr"] = -1; }},
      {"another's value", kInvalid, "'beta1' is 1", [](auto& o) { o.spec.hyper["beta1"] = 1; }},
      {"a value of another optimizer", kInvalid,
       "hyperparameter 'momentum' is 0.9, and optimizer 'sgd' does not use it: it is "
       "for momentum, nesterov, lars, muon. Choose one",
       [](auto& o) { o.spec.hyper["momentum"] = 0.9; }},
      {"a value without an optimizer", kInvalid,
       "hyperparameter 'lr' is 0.5, and optimizer 'none' does not use it: it is for "
       "all but none",
       [](auto& o) { o.spec.optimizer = "none", o.spec.hyper["lr"] = 0.5; }},
      {"a value of another optimizer in the schedule", kInvalid, "'dampening' is 0.1",
       [](auto& o) { o.spec.optimizer = "nesterov", schedule(o, 5, "dampening", 0.1); }},
      {"a value of a group without a key", kInvalid, "and no key of job 'job' is of group 1",
       [](auto& o) { o.spec.keys[0].group = 2, o.spec.hyper["lr@1"] = 0.5; }},
      {"a name in the schedule", kInvalid, "unknown hyperparameter 'lrr'",
       [](auto& o) { schedule(o, 5, "lrr", 1); }},
      {"a schedule that changes the state", kInvalid, "rmsprop_momentum cannot change",
       [](auto& o) { o.spec.optimizer = "rmsprop", schedule(o, 5, "rmsprop_momentum", 0.5); }},
      {"a norm", kInvalid, "max_norm", [](auto& o) { o.spec.hyper["max_norm"] = -1; }},
      {"a norm that comes too late", kInvalid,
       "hyperparameter 'max_norm' is 1, and optimizer 'lamb' does not use it",
       [](auto& o) { o.spec.optimizer = "lamb", o.spec.hyper["max_norm"] = 1; }},
      {"norms of keys that no round has", kInvalid, "optimizer 'lamb': it needs rounds",
       [](auto& o) { o.spec.optimizer = "lamb", o.spec.consistency = "async"; }},
      {"norms of states of 8 bits", kInvalid, "job 'job' has optimizer 'lars'",
       [](auto& o) { o.spec.optimizer = "lars", o.spec.state_dtype = "8bit"; }},
      {"a norm of steps of whole keys", kInvalid,
       "max_norm: steps of whole keys are made before the norm of all keys is known",
       [](auto& o) { o.spec.optimizer = "muon", o.spec.hyper["max_norm"] = 1; }},
      {"whole keys that no round has", kInvalid, "optimizer 'adafactor': it needs rounds",
       [](auto& o) { o.spec.optimizer = "adafactor", o.spec.consistency = "ssp"; }},
      {"whole keys in branches", kInvalid, "keys have all of their state at one place",
       [](auto& o) { o.spec.optimizer = "muon", o.spec.branches = 1; }},
      {"a matrix that would take too long", kInvalid, "is a matrix of 6000 x 6000, and a step of",
       [](auto& o) {
         o.spec.optimizer = "muon";
         o.spec.keys[0].elements = 36'000'000, o.spec.keys[0].shape = {6000, 6000};
       }},
      {"steps of muon that come later", kInvalid, "schedule: ns_steps@0 cannot change",
       [](auto& o) { o.spec.optimizer = "muon", schedule(o, 5, "ns_steps@0", 3); }},
      {"too many steps of muon", kInvalid, "'ns_steps' is 100",
       [](auto& o) { o.spec.optimizer = "muon", o.spec.hyper["ns_steps"] = 100; }},
      {"half a step of muon", kInvalid, "'ns_steps' is 2.5: it must be a whole number",
       [](auto& o) { o.spec.optimizer = "muon", o.spec.hyper["ns_steps"] = 2.5; }},
      {"an eps of muon", kInvalid, "'eps' is 0: with optimizer 'muon' it must be above 0",
       [](auto& o) { o.spec.optimizer = "muon", o.spec.hyper["eps"] = 0; }},
      {"an eps of adafactor that comes later", kInvalid, "'eps@0' is 0: with optimizer 'adafactor'",
       [](auto& o) { o.spec.optimizer = "adafactor", schedule(o, 5, "eps@0", 0); }},
      {"a norm of a group", kInvalid, "the same for all groups",
       [](auto& o) {
         o.spec.keys[1].group = 1, o.spec.hyper = {{"max_norm", 1}, {"max_norm@1", 1}};
       }},
      {"groups of fewer ranks", kInvalid, "groups: '1' has 1 ranks, and max_ranks is 2",
       [](auto& o) { o.spec.groups = "1", o.spec.max_ranks = 2; }},
      {"a transport", kInvalid, "this server does not offer transport 'pigeon'; it offers: shm",
       [](auto& o) { o.transport = "pigeon"; }},
      {"a rank that cannot be", kInvalid, "rank", [](auto& o) { o.rank = 5000; }},
      {"another", kInvalid, "rank", [](auto& o) { o.rank = -2; }},
      {"more memory than there is", kFull,
       "MiB (gradients of 8 ranks 128.0, parameters 16.0, optimizer state 16.0, gated sums 0.0, "
       "branches 0.0, snapshot 0.0, bookkeeping",
       [](auto& o) {
         o.spec.keys = {{.name = "w", .elements = 4 << 20}};
         o.spec.world_size = 8, o.spec.optimizer = "nesterov";
       }},
      {"more memory than there could be", kFull, "raise --memory-limit",
       [](auto& o) {
         o.spec.keys = {{.name = "w", .elements = kMaxElements}};
         o.spec.world_size = 1024, o.spec.chunk_elements = 1 << 24;
       }},
      {"a server's address", kInvalid, "nowhere", [](auto& o) { o.server = "nowhere"; }},
  };
  for (const BadJoin& bad : kCases) {
    SCOPED_TRACE(bad.what);
    expect_error(bad.code, bad.says, [&] { join(bad.change); });
  }
}

TEST_F(BadInput, RanksThatDisagree) {
  WorkerOptions options = box_.options(spec_of("job", 2));
  options.spec.max_ranks = 3;
  options.rank = 0;
  options.await_ranks = false;
  Worker present(options);
  const std::vector<BadJoin> kCases = {
      {"one key less", kMismatch, "there are 1 keys here and 2 in the job",
       [](auto& o) { o.spec.keys.pop_back(); }},
      {"the order of keys", kMismatch, "key 0 is 'b' here and 'w' in the job",
       [](auto& o) { std::swap(o.spec.keys[0], o.spec.keys[1]); }},
      {"the optimizer", kMismatch, "optimizer is 'adam' here and 'sgd' in the job",
       [](auto& o) { o.spec.optimizer = "adam"; }},
      {"the most ranks", kMismatch, "max_ranks is 2 here and 3 in the job",
       [](auto& o) { o.spec.max_ranks = 0; }},
      {"the groups", kMismatch, "groups is '2,1' here and '' in the job",
       [](auto& o) { o.spec.groups = "2,1"; }},
      {"the transport", kMismatch, "runs over shm, this worker asks for tcp",
       [](auto& o) { o.transport = "tcp"; }},
      {"a rank twice", kTaken, "rank 0 of job 'job' is taken by incarnation 1",
       [](auto& o) { o.rank = 0; }},
      {"one rank too many", kFull, "rank 3 is out of range: job 'job' has max_ranks 3",
       [](auto& o) { o.rank = 3; }},
  };
  for (const BadJoin& bad : kCases) {
    SCOPED_TRACE(bad.what);
    WorkerOptions other = options;
    other.rank = 1;
    bad.change(other);
    expect_error(bad.code, bad.says, [&] { Worker worker(other); });
  }
  options.rank = -1;
  Worker one(options), two(options);
  expect_error(kFull, "job 'job' is full: all 3 ranks are taken", [&] { Worker worker(options); });
  const ServerStatus status = box_.status();
  EXPECT_EQ(status.jobs[1].name, "job");
  for (const RankStatus& rank : status.jobs[1].ranks) EXPECT_EQ(rank.incarnation, 1u);
}

TEST_F(BadInput, MemoryThatOthersHold) {
  JobSpec large = spec_of("large");
  large.keys = {{.name = "w", .elements = 5 << 20}};  // 20 MiB, twice
  std::optional<Worker> holder(box_.options(large));
  large.name = "larger";
  expect_error(kFull, "MiB are in use: end another job",
               [&] { Worker worker(box_.options(large)); });
  holder.reset();
  const Worker now(box_.options(large));  // its memory is there again
  EXPECT_EQ(now.rank(), 0u);
}

// What a join takes once it is decoded is counted before that.
TEST_F(BadInput, AJoinThatIsTooLargeToRead) {
  JobSpec many = spec_of("many");
  for (uint32_t key = 0; key < 200'000; ++key) {
    many.keys.push_back({.name = std::to_string(key), .elements = 1});
  }
  expect_error(kFull, "MiB to read, and", [&] { Worker worker(box_.options(many)); });
}

// As for a worker of another user, or of a container with a /tmp of its own.
TEST_F(BadInput, ASocketThatIsOutOfReach) {
  const std::string line = box_.status().nics.at(0);  // "shm: PATH.sock, …"
  const std::string path = line.substr(5, line.find(',') - 5);
  const std::string aside = path + ".aside";
  ASSERT_EQ(rename(path.c_str(), aside.c_str()), 0) << path;
  expect_error(kUnavailable, fmt::format("no server at '{}'", path), [&] { join([](auto&) {}); });
  expect_error(kUnavailable, "set PHUB_TRANSPORT=tcp", [&] { join([](auto&) {}); });
  EXPECT_EQ(rename(aside.c_str(), path.c_str()), 0);
}

// Every call of the control port with a credential that is wrong in some way, while its owner is
// live, fenced, or gone.
TEST_F(BadInput, CredentialsThatAreWrong) {
  ControlClient client(box_.address());
  const auto joined = [&](const char* job, int32_t rank, bool replace = false) {
    JoinRequest request;
    request.spec = spec_of(job, 2);
    request.rank = rank;
    request.replace = replace;
    request.spec.lease_ms = 60'000;  // they send no heartbeats
    return client.join(request, 5000);
  };
  const auto credential = [](const JoinReply& reply) {
    return Credential{reply.spec.name, reply.rank, reply.incarnation, reply.offer.ticket};
  };
  const Credential fenced = credential(joined("job", 0));
  const Credential live = credential(joined("job", 0, true));
  const Credential neighbour = credential(joined("job", 1));
  const Credential stranger = credential(joined("other", 0));

  struct Call {
    const char* name;
    std::function<void(const Credential&)> make;
  };
  const std::vector<Call> calls = {
      {"heartbeat", [&](const Credential& who) { client.heartbeat(who); }},
      {"leave", [&](const Credential& who) { client.leave(who); }},
      {"barrier", [&](const Credential& who) { client.barrier(who, 5000); }},
      {"hyper",
       [&](const Credential& who) {
         client.set_hyper(who, {.round = 0, .values = {{"lr", 9}}});
       }},
      {"reconnect", [&](const Credential& who) { client.reconnect(who); }},
  };
  struct Wrong {
    const char* what;
    Credential who;
    ErrorCode code = kUnauthorized;
    const char* says = "not the ticket";
  };
  std::string almost = live.ticket;
  almost.back() = almost.back() == '0' ? '1' : '0';
  const uint32_t now = live.incarnation;
  const std::vector<Wrong> wrongs = {
      {"another ticket",
       {"job", 0, now, std::string(32, 'a')},
       kUnauthorized,
       "this is not the ticket of rank 0 of job 'job'"},
      {"one digit", {"job", 0, now, almost}},
      {"half a ticket", {"job", 0, now, live.ticket.substr(0, 16)}},
      {"no ticket", {"job", 0, now, ""}, kUnauthorized, "Bearer"},
      {"the neighbour's", {"job", 0, now, neighbour.ticket}},
      {"of another job", {"job", 0, now, stranger.ticket}},
      {"for another job", {"bystander", 0, now, live.ticket}, kFenced, "incarnation 2 of rank 0"},
      {"an incarnation that was replaced", fenced, kFenced, "incarnation 1 of rank 0 was replaced"},
      {"an incarnation to come", {"job", 0, 3, live.ticket}, kFenced, "incarnation 3"},
      {"a rank that has not joined", {"other", 1, 0, live.ticket}},
      {"a rank that is not there",
       {"job", 7, 1, live.ticket},
       kNotFound,
       "job 'job' has no rank 7"},
      {"a job that is not there", {"jobb", 0, 1, live.ticket}, kNotFound, "there is no job 'jobb'"},
  };
  const auto try_all = [&] {
    for (const Wrong& wrong : wrongs) {
      for (const Call& call : calls) {
        SCOPED_TRACE(fmt::format("{} with {}", call.name, wrong.what));
        expect_error(wrong.code, wrong.says, [&] { call.make(wrong.who); });
      }
    }
  };
  try_all();
  expect_error(kInvalid, "unknown hyperparameter", [&] {
    client.set_hyper(live, {.round = 0, .values = {{"speed", 9}}});
  });
  expect_error(kInvalid, "cannot make a broken connection again", [&] { client.reconnect(live); });
  for (const LogRecord& record : box_.log("job")) EXPECT_NE(record.kind, LogRecord::Kind::kHyper);
  EXPECT_TRUE(client.heartbeat(live).missing.empty());  // and the job goes on

  // Once it has left, even its own ticket opens nothing.
  client.leave(live);
  for (const Call& call : calls) {
    SCOPED_TRACE(call.name);
    expect_error(kFenced, "rank 0 (incarnation 2) is out: left", [&] { call.make(live); });
  }
  client.leave(neighbour);
  client.leave(stranger);
  for (const Call& call : calls) {
    SCOPED_TRACE(call.name);
    expect_error(kNotFound, "rank 0 has left job 'job', which has ended well since",
                 [&] { call.make(live); });
  }
}

// The caller's memory is as large as the caller asked for.
TEST(WrongServer, AnAnswerAboutAnotherJobIsRefused) {
  const auto expect_refused = [](const std::string& text, auto change) {
    HttpRig server;
    server.on_control([&] { server.handler.change_join = change; });
    WorkerOptions options;
    options.server = server.address();
    options.transport = "shm";
    options.spec = spec_of("job");
    expect_error(kInternal, "the server's answer is about another job: " + text,
                 [&] { Worker worker(options); });
  };
  expect_refused("key 0 'w' has 20000 elements here and 20001 in the job",
                 [](JoinReply& reply) { ++reply.spec.keys[0].elements; });
  expect_refused("there are 2 keys here and 1 in the job",
                 [](JoinReply& reply) { reply.spec.keys.pop_back(); });
  expect_refused("gradient_dtype is 'f32' here and 'f16' in the job",
                 [](JoinReply& reply) { reply.spec.gradient_dtype = "f16"; });
  expect_refused("parameter_dtype is 'f32' here and 'bf16' in the job",
                 [](JoinReply& reply) { reply.spec.parameter_dtype = "bf16"; });
}

// Whoever destroys the worker: the rank has failed, and on_loss decides.
TEST_F(BadInput, ARankThatAnExceptionEndsIsLost) {
  for (const bool abandons : {false, true}) {
    JobSpec spec = spec_of(abandons ? "abandoned" : "thrown", 2);
    spec.on_loss = "fail";
    spec.lease_ms = 10'000;
    each_rank(2, [&](uint32_t rank) {
      WorkerOptions options = box_.options(spec, rank);
      const auto train = [&] {
        Worker worker(options);
        for (int round = 0; round < 4; ++round) {
          if (rank == 1 && round == 1 && !abandons) throw std::runtime_error("no data");
          if (rank == 1 && round == 1) worker.abandon();
          for (const size_t key : {0, 1}) worker.push_null(key);
          worker.wait_all();
        }
      };
      if (rank == 0) {
        expect_error(kRankLost, "rank 1", train);
      } else if (abandons) {
        expect_error(kFenced, "rank 1 has given up job 'abandoned'", train);
      } else {
        EXPECT_THROW(train(), std::runtime_error);
      }
    });
  }
}

// The server knows of the failure before the program goes on: its next worker finds the rank free.
TEST_F(BadInput, WhoFailedMayJoinAtOnce) {
  for (const uint32_t ranks : {1, 2}) {
    const JobSpec spec = spec_of(fmt::format("again-{}", ranks), ranks);
    std::optional<Worker> other;
    if (ranks == 2) {
      WorkerOptions options = box_.options(spec);
      options.rank = 0;
      options.await_ranks = false;
      other.emplace(options);
    }
    for (int i = 0; i < 10; ++i) {
      try {
        Worker worker(box_.options(spec));
        EXPECT_EQ(worker.rank(), ranks - 1);
        if (i % 2 == 0) throw std::runtime_error("no data");
        worker.abandon();
      } catch (const std::runtime_error&) {
      }
    }
  }
}

TEST_F(BadInput, ParametersThatWouldNotCount) {
  Worker worker(box_.options(spec_of("job")));
  const std::vector<float> initial(20010, 1.5f);
  expect_error(kInvalid,
               "broadcast: job 'job' begins with zeros, and these parameters would not count",
               [&] { worker.broadcast(initial); });
  const float* of_keys[] = {initial.data(), initial.data()};
  expect_error(kInvalid, "say 'broadcast' in the option initial",
               [&] { worker.broadcast_keys(of_keys); });
  EXPECT_FALSE(worker.broadcast({}));
}

TEST_F(BadInput, CallsOfTheLibrary) {
  JobSpec spec = spec_of("job", 2);
  spec.initial = "broadcast";
  each_rank(2, [&](uint32_t rank) {
    Worker worker(box_.options(spec, rank));
    const auto expect = [&](ErrorCode code, const char* says, const std::function<void()>& body) {
      SCOPED_TRACE(fmt::format("rank {}", rank));
      expect_error(code, says, body);
    };
    if (rank == 0) {
      constexpr const char* kFirst = "rank 0 must call broadcast()";
      expect(kInvalid, kFirst, [&] { worker.push(0); });
      expect(kInvalid, kFirst, [&] { worker.push_null(0); });
      expect(kInvalid, kFirst, [&] { worker.wait(1); });
      expect(kInvalid, kFirst, [&] { worker.wait_all(); });
      EXPECT_FALSE(worker.test(0));
      const std::vector<float> few(20009), many(20011);
      expect(kInvalid, "broadcast: 20009 initial parameters for keys of 20010 elements",
             [&] { worker.broadcast(few); });
      expect(kInvalid, "20011 initial", [&] { worker.broadcast(many); });
      expect(kInvalid, "0 initial", [&] { worker.broadcast({}); });
    }
    worker.broadcast(rank == 0 ? std::vector<float>(20010, 1.5f) : std::vector<float>{});
    EXPECT_EQ(worker.parameters(1)[9], 1.5f);

    for (const size_t key : {size_t{2}, ~size_t{0}}) {
      constexpr const char* kRange = "is out of range: job 'job' has 2 keys";
      expect(kInvalid, kRange, [&] { worker.push(key); });
      expect(kInvalid, kRange, [&] { worker.push_null(key); });
      expect(kInvalid, kRange, [&] { worker.wait(key); });
      expect(kInvalid, kRange, [&] { worker.test(key); });
      expect(kInvalid, kRange, [&] { worker.round(key); });
      expect(kInvalid, kRange, [&] { worker.gradient(key); });
      expect(kInvalid, kRange, [&] { worker.parameters(key); });
      expect(kInvalid, kRange, [&] { worker.register_memory(key, {}); });
      expect(kInvalid, kRange, [&] { worker.pull(key, {}); });
    }
    std::vector<std::byte> small(39);
    expect(kInvalid, "push_copy: the gradient of key 'b' has 40 bytes, and 39 are given",
           [&] { worker.push_copy(1, small); });
    expect(kInvalid, "pull: key 'b' has 40 bytes, the destination 39",
           [&] { worker.pull(1, small); });
    expect(kNotFound, "job 'job' has no key 'v'", [&] { worker.key("v"); });
    expect(kInvalid, "hyperparameter", [&] { worker.set_hyper({{"lrr", 1}}); });
    expect(kInvalid, "lr@1", [&] { worker.set_hyper({{"lr@1", 1}}); });
    expect(kInvalid, "a job that began with one", [&] { worker.set_hyper({{"max_norm", 1}}); });
    worker.push_null(0);
    worker.push_null(0);  // round 2, without having waited for round 1
    worker.wait(0);
    EXPECT_EQ(worker.round(0), 2u);
    worker.barrier();
    worker.leave();
    worker.leave();  // once more changes nothing
    const std::string left = fmt::format("rank {} has left job 'job'", rank);
    expect(kFenced, left.c_str(), [&] { worker.push_pull(0); });
    expect(kFenced, left.c_str(), [&] { worker.barrier(); });
    EXPECT_EQ(worker.parameters(1)[9], 1.5f);
  });
}

TEST_F(BadInput, FormatsOfOtherWidth) {
  JobSpec spec = spec_of("job");
  spec.gradient_dtype = "bf16";
  spec.parameter_dtype = "f16";
  Worker worker(box_.options(spec));
  EXPECT_EQ(worker.gradient_bytes(1).size(), 20u);
  expect_error(kInvalid, "gradients of job 'job' are bf16: use gradient_bytes()",
               [&] { worker.gradient(0); });
  expect_error(kInvalid, "parameters of job 'job' are f16: use parameter_bytes()",
               [&] { worker.parameters(0); });
}

}  // namespace bad_input_test
}  // namespace phub::testing
