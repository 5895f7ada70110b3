// Ranks with state of their own, which belongs to the job's checkpoints: a generator whose numbers
// are the gradients. The server is a process that is killed; the ranks are threads, whose workers
// join again, or begin anew with nothing but what was saved.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/seeds.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/saved_box.h"
#include "tests/worker/saving_program.h"
#include "worker/link/join.h"
#include "worker/link/link_keeper.h"
#include "worker/phub.h"
#include "worker/save/rank_state.h"

namespace phub::testing {
namespace saver_test {

using ::testing::HasSubstr;

constexpr uint64_t kEvery = 7;

// Free now, and none that a connection or another test gets a moment later: below the kernel's own
// choice, from this process's number on.
uint16_t free_port() {
  for (auto port = static_cast<uint16_t>(10'000 + getpid() % 20'000);; ++port) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in here = {};
    here.sin_family = AF_INET;
    here.sin_port = htons(port);
    const bool is_free = bind(fd, reinterpret_cast<sockaddr*>(&here), sizeof here) == 0;
    close(fd);
    if (is_free) return port;
  }
}

class SaverTest : public SavedBoxTest {
 protected:
  SaverTest() : SavedBoxTest(PHUB_BINARY) {}
  void join_over_c(phub_saver saver, void* user_data, phub_options*& options,
                   phub_worker*& worker) const {
    ASSERT_EQ(phub_options_create(&options), PHUB_OK);
    phub_options_set(options, "server", server_->address().c_str());
    phub_options_set(options, "job", "c");
    phub_options_set(options, "optimizer", "sgd");
    if (const char* transport = std::getenv("PHUB_TRANSPORT")) {
      phub_options_set(options, "transport", transport);
    }
    phub_options_add_key(options, "w", 100);
    ASSERT_EQ(phub_options_set_saver(options, saver, user_data), PHUB_OK);
    ASSERT_EQ(phub_worker_create(options, &worker), PHUB_OK) << phub_last_error();
  }
  bool has_checkpoint(const std::string& job, uint64_t round) const {
    const std::string begin = fmt::format("round-{:012}.", round);
    for (const auto& entry : std::filesystem::directory_iterator(folder() + "/" + job)) {
      if (entry.path().filename().string().starts_with(begin)) return true;
    }
    return false;
  }

  std::vector<WorkerOptions> options_of_all(const JobSpec& spec) const {
    std::vector<WorkerOptions> all;
    for (uint32_t rank = 0; rank < spec.world_size; ++rank) {
      all.push_back(options(spec, static_cast<int32_t>(rank)));
    }
    return all;
  }
};

TEST_F(SaverTest, ARunWhoseServerIsKilledEndsAsOneThatIsNot) {
  constexpr uint64_t kRounds = 160;
  std::mt19937_64 random(fresh_seeds(1).first);
  serve(kEvery);
  const std::string expected = run_saving(options_of_all(saving_spec("undisturbed", 3)), kRounds,
                                          std::atomic<uint64_t>(kRounds), false);
  ASSERT_FALSE(expected.empty());
  for (const bool anew : {false, true}) {
    SCOPED_TRACE(anew ? "new processes" : "rejoin");
    const JobSpec spec = saving_spec(anew ? "anew" : "rejoins", 3);
    std::atomic<uint64_t> allowed = 0;
    std::string result;
    std::jthread training([&, options = options_of_all(spec)] {
      result = run_saving(options, kRounds, allowed, anew);
    });
    const auto allow = [&](uint64_t round) {
      allowed = std::max<uint64_t>(allowed, std::min(kRounds - 1, round));
    };
    uint64_t durable = 0;
    for (int kill = 0; kill < 4; ++kill) {
      // The first time perhaps before there is a checkpoint.
      const uint64_t least = kill == 0 ? random() % 2 : durable + 1;
      EXPECT_TRUE(becomes_status(spec.name, [&](const JobStatus& job) {
        allow(job.next_saved_round + 3);
        return job.durable_round >= least;
      }));
      allow(allowed + random() % 20);
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
      durable = std::max(durable, status(spec.name).durable_round);
      EXPECT_EQ(durable % kEvery, 0u);
      die_and_come_back(kEvery);
      allow(allowed + 1);  // who waits for nothing would notice it late
    }
    allowed = kRounds;
    training.join();
    EXPECT_EQ(result, expected);
  }
}

// The server refuses the ticket of its life before at the data port; the control port knows why.
TEST_F(SaverTest, AServerThatDiesBetweenJoinAndConnectionRewinds) {
  more_flags_ = {"--data-port", std::to_string(free_port())};
  serve(kEvery);
  WorkerOptions mine = options(saving_spec("between", 1), 0);
  mine.transport = "tcp";
  const Joined joined = phub::join(mine);
  die_and_come_back(kEvery);
  LinkKeeper keeper(mine, joined);
  expect_error(ErrorCode::kRewound, "goes on from its checkpoint", [&] { keeper.connect([] {}); });
}

// With another period, and other ranks: rank r gets what rank r saved, and a new one nothing.
TEST_F(SaverTest, AServerThatIsToldToEndSavesWithTheParts) {
  serve(kEvery);
  const JobSpec spec = saving_spec("told", 3);
  std::atomic<uint64_t> allowed = 0, rounds = ~uint64_t{0};  // how many are not known yet
  std::string result;
  std::jthread training([&, options = options_of_all(spec)] {  //
    result = run_saving(options, rounds, allowed, false);
  });
  EXPECT_TRUE(becomes_status(spec.name, [&](const JobStatus& job) {
    allowed = job.next_saved_round + 3;
    return job.durable_round > 0;
  }));
  std::jthread going_on([&](const std::stop_token& stop) {
    for (; !stop.stop_requested(); ++allowed) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  uint64_t completed = 0;  // what is known to be, the end saves
  EXPECT_TRUE(becomes_status(spec.name, [&](const JobStatus& job) {
    completed = job.completed_round;
    return completed > job.durable_round;
  }));
  const std::string address = server_->address();
  EXPECT_EQ(server_->end(SIGTERM), 0) << server_->output();
  going_on.request_stop();
  going_on.join();
  serve(kEvery, address);
  EXPECT_TRUE(becomes_status(spec.name, [&](const JobStatus& job) {
    EXPECT_TRUE(job.name.empty() || job.durable_round >= completed) << completed;
    return job.durable_round > 0;
  }));
  rounds = allowed + 10;
  allowed = rounds.load();
  training.join();
  EXPECT_EQ(result, run_saving(options_of_all(saving_spec("untold", 3)), rounds, rounds, false));
}

phub_code save_as_c(void* user_data, uint64_t round, phub_state* state) {
  auto& last = *static_cast<std::pair<uint64_t, phub_state*>*>(user_data);
  last = {round, state};
  if (phub_save(state, "", "x", 1) != PHUB_OK) return PHUB_INTERNAL;  // is found out at the end
  if (phub_save(state, "round", &round, sizeof round) != PHUB_OK) return PHUB_INTERNAL;
  if (phub_save(state, "round", &round, sizeof round) != PHUB_TAKEN) return PHUB_INTERNAL;
  return PHUB_OK;
}
phub_code save_round_as_c(void* user_data, uint64_t round, phub_state* state) {
  auto& last = *static_cast<std::pair<uint64_t, phub_state*>*>(user_data);
  last = {round, state};
  if (phub_save(state, "nothing", nullptr, 0) != PHUB_OK) return PHUB_INTERNAL;
  return phub_save(state, "round", &round, sizeof round);
}

TEST_F(SaverTest, OverTheCInterface) {
  serve(2);
  std::pair<uint64_t, phub_state*> last;
  phub_options* options = nullptr;
  phub_worker* worker = nullptr;
  ASSERT_NO_FATAL_FAILURE(join_over_c(save_round_as_c, &last, options, worker));
  const void* bytes = nullptr;
  size_t size = 0;
  EXPECT_EQ(phub_restored(worker, "round", &bytes, &size), PHUB_NOT_FOUND);
  const auto step = [&] {
    const phub_code code = phub_push_null(worker, 0);
    return code == PHUB_OK ? phub_wait(worker, 0) : code;
  };
  ASSERT_TRUE(becomes([&] { return step() == PHUB_OK && status("c").durable_round > 0; }));
  EXPECT_EQ(last.first % 2, 0u);
  EXPECT_EQ(phub_save(last.second, "late", "x", 1), PHUB_BAD_HANDLE);
  die_and_come_back(2);
  EXPECT_TRUE(becomes([&] { return step() == PHUB_REWOUND; }));
  uint64_t first_round = 0;
  ASSERT_EQ(phub_rejoin(worker, &first_round), PHUB_OK) << phub_last_error();
  ASSERT_EQ(phub_restored(worker, "round", &bytes, &size), PHUB_OK) << phub_last_error();
  uint64_t round = 0;
  ASSERT_EQ(size, sizeof round);
  std::memcpy(&round, bytes, sizeof round);
  EXPECT_EQ(round + 1, first_round);
  ASSERT_EQ(phub_restored(worker, "nothing", &bytes, &size), PHUB_OK);
  EXPECT_EQ(size, 0u);
  EXPECT_EQ(phub_worker_destroy(worker), PHUB_OK);
  // What a saver may not do: the call that called it says so.
  ASSERT_EQ(phub_options_set(options, "job", "c2"), PHUB_OK);
  ASSERT_EQ(phub_options_set_saver(options, save_as_c, &last), PHUB_OK);
  ASSERT_EQ(phub_worker_create(options, &worker), PHUB_OK) << phub_last_error();
  ASSERT_EQ(step(), PHUB_OK);
  ASSERT_EQ(step(), PHUB_INVALID);
  EXPECT_THAT(phub_last_error(), HasSubstr("1 to 255 bytes"));
  ASSERT_EQ(step(), PHUB_OK);
  EXPECT_EQ(phub_worker_destroy(worker), PHUB_OK);
  EXPECT_EQ(phub_options_destroy(options), PHUB_OK);
}

phub_code count_as_c(void* user_data, uint64_t, phub_state*) {
  ++*static_cast<int*>(user_data);
  return PHUB_OK;
}

TEST_F(SaverTest, OverTheCInterfaceWhenTheProgramSaysSo) {
  serve(2);
  int asked = 0;
  phub_options* options = nullptr;
  phub_worker* worker = nullptr;
  ASSERT_NO_FATAL_FAILURE(join_over_c(count_as_c, &asked, options, worker));
  const char* name = nullptr;
  ASSERT_EQ(phub_job_name(worker, &name), PHUB_OK);
  EXPECT_STREQ(name, "c");
  for (uint64_t round = 0; round <= 4; ++round) {
    ASSERT_EQ(phub_save_point(worker, round), PHUB_OK) << phub_last_error();
    EXPECT_EQ(asked, static_cast<int>(round / 2)) << round;
    ASSERT_EQ(phub_push_null(worker, 0), PHUB_OK);
    if (round % 3 == 0) {
      ASSERT_EQ(phub_wait(worker, 0), PHUB_OK);  // otherwise the save point waits
    }
  }
  ASSERT_EQ(phub_push_null(worker, 0), PHUB_OK);
  EXPECT_EQ(phub_push_null(worker, 0), PHUB_INVALID);  // without a save point after round 6
  EXPECT_THAT(phub_last_error(), HasSubstr("of the state after round 6"));
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(phub_worker_destroy(worker), PHUB_OK);
  EXPECT_EQ(phub_options_destroy(options), PHUB_OK);
}

// Two ranks in lock-step with this test: nobody goes on before it says so.
class Steps : public SaverTest {
 protected:
  void begin(const JobSpec& spec, uint64_t every) {
    serve(every);
    for (uint32_t rank = 0; rank < 2; ++rank) join(spec, rank);
    for (auto& worker : workers_) worker->wait_all();
    // From here on the round that is saved next is known.
    ASSERT_TRUE(
        becomes_status(spec.name, [](const JobStatus& job) { return job.next_saved_round > 0; }));
  }
  void join(const JobSpec& spec, uint32_t rank) {
    WorkerOptions mine = options(spec, static_cast<int32_t>(rank));
    mine.await_ranks = false;
    mine.saver = [this, rank](uint64_t round) {
      ++asked_[rank];
      if (on_save_[rank]) on_save_[rank](round);
      return RankState{{"round", bytes_of(std::to_string(round))}};
    };
    workers_[rank].reset();
    workers_[rank] = std::make_unique<Worker>(mine);
  }
  static void push(Worker& worker) {
    for (size_t key = 0; key < worker.keys(); ++key) worker.push_null(key);
  }
  void step() {
    for (auto& worker : workers_) push(*worker);
    for (auto& worker : workers_) worker->wait_all();
  }
  std::unique_ptr<Worker> workers_[2];
  std::function<void(uint64_t round)> on_save_[2];
  int asked_[2] = {0, 0};
};

TEST_F(Steps, ARankThatIsLostBeforeItsPartVoidsThatSnapshotOnly) {
  JobSpec spec = saving_spec("void", 2);
  spec.lease_ms = 3000;
  begin(spec, 2);
  ASSERT_EQ(status("void").next_saved_round, 2u);
  on_save_[1] = [this](uint64_t) { workers_[1]->end("this rank dies"); };
  step();
  step();
  EXPECT_TRUE(becomes_status("void", [](const JobStatus& job) { return job.void_snapshots == 1; }));
  EXPECT_FALSE(has_checkpoint("void", 2));
  EXPECT_EQ(status("void").durable_round, 0u);
  EXPECT_TRUE(becomes([&] {
    return server_->output().find(
               "round 2 was not saved, the last that is remains round 0: rank 1 "
               "was lost before it had sent its part") != std::string::npos;
  }));
  // The others' next one.
  EXPECT_TRUE(becomes([&] {
    push(*workers_[0]);
    workers_[0]->wait_all();
    return status("void").durable_round > 2;
  }));
  EXPECT_EQ(status("void").void_snapshots, 1u);
  workers_[0]->leave();
}

// It had left the job before the round that is saved.
TEST_F(Steps, ARankThatWasNotInTheRoundIsNotNeeded) {
  begin(saving_spec("left", 2), 3);
  ASSERT_EQ(status("left").next_saved_round, 3u);
  step();
  workers_[1]->leave();
  for (int round = 2; round <= 3; ++round) {
    push(*workers_[0]);
    workers_[0]->wait_all();
  }
  EXPECT_TRUE(becomes_status("left", [](const JobStatus& job) { return job.durable_round == 3; }));
  EXPECT_EQ(status("left").void_snapshots, 0u);
  EXPECT_EQ(asked_[1], 0);
}

TEST_F(Steps, WhoJoinsAJobInProgressGetsNothing) {
  const JobSpec spec = saving_spec("later", 2);
  begin(spec, 2);
  step();
  step();
  ASSERT_TRUE(becomes_status("later", [](const JobStatus& job) { return job.durable_round == 2; }));
  die_and_come_back(2);
  for (auto& worker : workers_) {
    push(*worker);
    EXPECT_THROW(worker->wait_all(), Error);
  }
  for (uint32_t rank = 0; rank < 2; ++rank) join(spec, rank);
  for (auto& worker : workers_) {
    EXPECT_EQ(worker->first_round(), 3u);
    EXPECT_EQ(text_of(worker->restored("round").value()), "2");
    worker->wait_all();
  }
  step();
  workers_[1]->leave();
  push(*workers_[0]);
  workers_[0]->wait_all();
  join(spec, 1);
  EXPECT_GT(workers_[1]->first_round(), 3u);
  EXPECT_FALSE(workers_[1]->restored("round"));
}

TEST_F(Steps, APartThatDoesNotComeVoidsTheSnapshot) {
  JobSpec spec = saving_spec("late", 2);
  spec.progress_limit_ms = 3000;
  begin(spec, 2);
  on_save_[1] = [](uint64_t) { fail(ErrorCode::kInvalid, "cannot save"); };
  step();
  for (auto& worker : workers_) push(*worker);
  workers_[0]->wait_all();
  EXPECT_THROW(workers_[1]->wait_all(), Error);
  EXPECT_TRUE(becomes_status("late", [](const JobStatus& job) { return job.void_snapshots > 0; }));
  EXPECT_THAT(server_->output(), HasSubstr("the parts of ranks 1 have not come within 3000 ms"));
  on_save_[1] = {};
  ASSERT_TRUE(
      becomes_status("late", [](const JobStatus& job) { return job.next_saved_round > 2; }));
  while (asked_[1] < 2) step();
  EXPECT_TRUE(becomes_status("late", [](const JobStatus& job) { return job.durable_round >= 4; }));
}

TEST_F(Steps, TheSaverIsCalledOnceBetweenTwoRounds) {
  begin(saving_spec("order", 2), 1);
  std::vector<uint64_t> rounds;
  on_save_[0] = [&](uint64_t round) {
    rounds.push_back(round);
    for (size_t key = 0; key < kKeys; ++key) EXPECT_EQ(workers_[0]->round(key), round);
    EXPECT_THROW(workers_[0]->wait(0), Error);
    EXPECT_THROW(workers_[0]->push(0), Error);
  };
  for (auto& worker : workers_) push(*worker);
  workers_[1]->wait_all();
  for (size_t key = 0; key < kKeys; ++key) {
    EXPECT_TRUE(rounds.empty());
    workers_[0]->wait(key);
  }
  EXPECT_EQ(rounds, std::vector<uint64_t>{1});
  // By the first push of the next round, which waits for what the caller has not.
  for (auto& worker : workers_) push(*worker);
  workers_[1]->wait_all();
  workers_[0]->wait(1);
  EXPECT_EQ(rounds, std::vector<uint64_t>{1});
  workers_[0]->push_null(1);
  EXPECT_EQ(rounds, (std::vector<uint64_t>{1, 2}));
  // One key may not run ahead over a round that is saved.
  workers_[1]->push_null(1);
  workers_[1]->wait(1);
  try {
    workers_[0]->push_null(1);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("key 'k1' is pushed in round 4, and key 'k0' was not in "
                                        "round 3"));
  }
}

TEST_F(Steps, WhatTheSaverThrowsIsNotTheEndOfThePush) {
  begin(saving_spec("announced", 2), 1);
  on_save_[0] = [](uint64_t) { fail(ErrorCode::kInvalid, "cannot save"); };
  for (size_t key = 0; key < kKeys; ++key) {
    workers_[0]->push(key, {.null = true, .announced = true});
  }
  push(*workers_[1]);
  for (size_t i = 1; i <= kKeys; ++i) {
    const std::optional<Completion> here = workers_[0]->wait_any();
    ASSERT_TRUE(here);
    EXPECT_FALSE(here->error) << here->error->what();
    EXPECT_EQ(here->saver_error.has_value(), i == kKeys);
    if (here->saver_error) {
      EXPECT_THAT(here->saver_error->what(), HasSubstr("cannot save"));
    }
  }
  workers_[1]->wait_all();
  on_save_[0] = {};
  step();
}

// They are saved beside what the caller's saver returns.
TEST_F(SaverTest, NoSaverMayNameAnEntryAsTheResiduals) {
  serve(1);
  JobSpec spec = saving_spec("residuals", 1);
  spec.keys[1].format = "int8";
  WorkerOptions mine = options(spec, 0);
  mine.saver = [](uint64_t) { return RankState{{"phub.residuals", bytes_of("mine")}}; };
  Worker worker(mine);
  worker.wait_all();
  expect_error(ErrorCode::kInvalid, "saver: 'phub.residuals' is the name of another entry", [&] {
    for (size_t key = 0; key < kKeys; ++key) worker.push(key);
    for (size_t key = 0; key < kKeys; ++key) worker.wait(key);
  });
}

// --- what is refused -----------------------------------------------------------------------------

class Parts : public SaverTest {
 protected:
  // A rank by its calls of the control port only.
  Credential join(ControlClient& control, const JobSpec& spec, bool saves,
                  JoinReply* got = nullptr) {
    const JoinReply reply = control.join(
        {.spec = spec, .transport = "tcp", .id = fmt::format("j{}", next_++), .saves = saves},
        60000);
    if (got) *got = reply;
    return {spec.name, reply.rank, reply.incarnation, reply.offer.ticket, reply.epoch};
  }
  template <typename Call>
  static ErrorCode code_of(Call call, std::string* message = nullptr) {
    try {
      call();
    } catch (const Error& error) {
      if (message) *message = error.what();
      return error.code();
    }
    ADD_FAILURE() << "did not fail";
    return ErrorCode::kInternal;
  }
  int next_ = 0;
};

TEST_F(Parts, WhatIsNotWantedIsRefused) {
  serve(10);
  ControlClient control(server_->address());
  JobSpec spec = saving_spec("refused", 2);
  spec.lease_ms = 60'000;  // these ranks send no heartbeats
  JoinReply saver;
  const Credential who = join(control, spec, true, &saver);
  EXPECT_EQ(saver.save_every, 10u);
  EXPECT_EQ(saver.parts.size(), 0u);
  const auto send_piece = [&](const Credential& as, const PartPiece& place, size_t bytes) {
    return code_of([&] { control.send_part(as, place, std::string(bytes, 'x')); });
  };
  const auto send = [&](const Credential& as, uint64_t round, size_t bytes = 3) {
    return send_piece(as, {.round = round, .all = bytes}, bytes);
  };
  EXPECT_EQ(send(who, 10), ErrorCode::kNotFound);  // the job has not begun
  const Credential other = join(control, spec, false, &saver);
  EXPECT_EQ(saver.save_every, 0u);
  // Nobody pushes: the job waits in round 1, and will be saved after round 10.
  ASSERT_TRUE(
      becomes_status("refused", [](const JobStatus& job) { return job.next_saved_round == 10; }));
  EXPECT_EQ(send(who, 9), ErrorCode::kNotFound);
  EXPECT_EQ(send(who, 20), ErrorCode::kNotFound);
  EXPECT_EQ(send(who, 0), ErrorCode::kNotFound);
  EXPECT_EQ(send(other, 10), ErrorCode::kInvalid);  // it does not save
  Credential wrong = who;
  wrong.ticket = "of-somebody-else";
  EXPECT_EQ(send(wrong, 10), ErrorCode::kUnauthorized);
  wrong = who;
  ++wrong.incarnation;
  EXPECT_EQ(send(wrong, 10), ErrorCode::kFenced);
  wrong = who;
  ++wrong.epoch;
  EXPECT_EQ(send(wrong, 10), ErrorCode::kFenced);
  wrong = who;
  wrong.rank = 1000000;
  EXPECT_EQ(send(wrong, 10), ErrorCode::kInvalid);
  EXPECT_EQ(send(who, 10, 0), ErrorCode::kInvalid);
  EXPECT_EQ(code_of([&] { control.restored_part(who, who.rank, 0); }), ErrorCode::kNotFound);
  // Of a part, and of its pieces: sizes, and their order.
  EXPECT_EQ(send_piece(who, {.round = 10, .all = kMaxStateBytes + 1}, 3), ErrorCode::kInvalid);
  EXPECT_EQ(send(who, 10, kPartPieceBytes + 1), ErrorCode::kInvalid);
  EXPECT_EQ(send_piece(who, {.round = 10, .offset = 8, .all = 10}, 3), ErrorCode::kInvalid);
  EXPECT_EQ(send_piece(who, {.round = 10, .offset = ~uint64_t{0}, .all = 10}, 3),
            ErrorCode::kInvalid);
  PartPiece place{.round = 10, .all = kMaxStateBytes};
  EXPECT_EQ(send_piece(who, {.round = 10, .offset = 1, .all = place.all}, 3), ErrorCode::kInvalid);
  for (; place.offset < place.all; place.offset += kPartPieceBytes) {
    control.send_part(who, place, std::string(kPartPieceBytes, 'x'));
    if (place.offset + kPartPieceBytes == place.all) break;
    if (place.offset > 0) continue;  // as the first one
    EXPECT_EQ(send_piece(who, place, kPartPieceBytes), ErrorCode::kTaken);
    const uint64_t next = place.offset + kPartPieceBytes;
    EXPECT_EQ(send_piece(who, {.round = 10, .offset = next + 1, .all = place.all}, 3),
              ErrorCode::kInvalid);
    EXPECT_EQ(send_piece(who, {.round = 10, .offset = next, .all = place.all - 1}, 3),
              ErrorCode::kInvalid);
  }
  EXPECT_EQ(send(who, 10), ErrorCode::kTaken);
  EXPECT_EQ(status("refused").state, "running");
  control.leave(who);
  control.leave(other);
}

// --- the bytes of a part -------------------------------------------------------------------------

TEST(RankStateTest, ComesBack) {
  std::mt19937_64 random(fresh_seeds(1).first);
  for (int i = 0; i < 100; ++i) {
    RankState state;
    for (uint64_t entries = random() % 5; entries > 0; --entries) {
      std::string name(1 + random() % 255, 'n');
      for (char& c : name) c = static_cast<char>(random());
      std::vector<std::byte> bytes(random() % 1000);
      for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
      state[name] = bytes;
    }
    const std::string part = pack(state, kMaxStateBytes);
    EXPECT_EQ(unpack(part), state);
    EXPECT_THROW(unpack(part.substr(0, random() % part.size())), Error);
    EXPECT_THROW(unpack(part + "x"), Error);
  }
}

TEST(RankStateTest, LimitsAreNamed) {
  const auto message = [](const RankState& state) -> std::string {
    try {
      pack(state, kMaxStateBytes);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(message({{"", {}}}), HasSubstr("1 to 255"));
  EXPECT_THAT(message({{std::string(256, 'n'), {}}}), HasSubstr("has 256"));
  EXPECT_THAT(message({{"big", std::vector<std::byte>(kMaxStateBytes)}}), HasSubstr("'big'"));
  EXPECT_EQ(message({{std::string(255, 'n'), {}}}), "");
}

// Any bytes: an answer or an error, never more memory than there are bytes.
TEST(RankStateTest, DamageIsNoticed) {
  std::mt19937_64 random(fresh_seeds(1).first);
  const std::string part =
      pack({{"random", bytes_of("12345")}, {"position", bytes_of("7")}}, kMaxStateBytes);
  for (int i = 0; i < 2000; ++i) {
    std::string damaged = part;
    damaged[random() % damaged.size()] ^= static_cast<char>(1u << random() % 8);
    try {
      unpack(damaged);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalid) << error.what();
    }
  }
}

}  // namespace saver_test
}  // namespace phub::testing
