// From a join to a job that has begun: what is refused, sent twice, slow or missing on the way, and
// what others notice of it.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <future>
#include <mutex>
#include <optional>
#include <thread>

#include "phub/server.h"
#include "tests/transport/shm_rig.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/process.h"
#include "tests/worker/server_process.h"
#include "tests/worker/training.h"
#include "transport/control/control_client.h"
#include "transport/transport.h"

namespace phub::testing {
namespace joins_test {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using ::testing::HasSubstr;

constexpr uint32_t kLongMs = 60000;

JobSpec spec_of(const std::string& name, uint32_t ranks) {
  JobSpec spec;
  spec.name = name;
  spec.keys = {{.name = "w", .elements = 20000}, {.name = "b", .elements = 7}};
  spec.world_size = ranks;
  return spec;
}

std::string transport() {
  const char* transport = std::getenv("PHUB_TRANSPORT");
  return transport ? transport : "shm";
}

JoinRequest request_of(JobSpec spec, int32_t rank, std::string id = "") {
  return {.spec = std::move(spec), .rank = rank, .transport = transport(), .id = std::move(id)};
}

std::optional<JobStatus> job_of(const ServerStatus& status, const std::string& name) {
  for (const JobStatus& job : status.jobs) {
    if (job.name == name) return job;
  }
  return std::nullopt;
}

// One round in which every rank's gradient is 1.
void train(Worker& worker) {
  for (size_t key = 0; key < worker.keys(); ++key) {
    for (float& g : worker.gradient(key)) g = 1;
    worker.push(key);
  }
  worker.wait_all();
}

// ---- What takes long ----

constexpr uint32_t kSlowRanks = 7;  // max_ranks of the job that is slow

// Lets one after another through, as many as were allowed.
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    const int number = ++came_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return allowed_ >= number; });
  }
  bool await(int number) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kLong, [&] { return came_ >= number; });
  }
  void allow(int number) {
    const std::lock_guard lock(mutex_);
    allowed_ = number;
    changed_.notify_all();
  }
  std::atomic<Clock::time_point> connect_from{Clock::time_point::min()};

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int came_ = 0, allowed_ = 0;
};

class SlowLink final : public BoxLink {
 public:
  SlowLink(std::unique_ptr<BoxLink> link, Gate& gate) : link_(std::move(link)), gate_(gate) {}
  std::span<std::byte> results() override { return link_->results(); }
  BoxEndpoint& endpoint(uint32_t core) override { return link_->endpoint(core); }
  void prepare(uint32_t) override { gate_.pass(); }
  Offer admit(uint32_t rank, uint32_t incarnation) override {
    return link_->admit(rank, incarnation);
  }
  void use_ticket(std::string ticket) override { link_->use_ticket(std::move(ticket)); }
  std::span<const std::byte> slots(uint32_t rank) override { return link_->slots(rank); }
  HeldMemory revoke(uint32_t rank) override { return link_->revoke(rank); }
  void close() override { link_->close(); }
  bool slots_belong_to_worker() const override { return link_->slots_belong_to_worker(); }

 private:
  std::unique_ptr<BoxLink> link_;
  Gate& gate_;
};

class SlowTransport final : public Transport {
 public:
  SlowTransport(std::unique_ptr<Transport> transport, Gate& gate)
      : transport_(std::move(transport)), gate_(gate) {}
  std::string_view name() const override { return transport_->name(); }
  std::string describe() const override { return transport_->describe(); }
  bool shares_memory() const override { return transport_->shares_memory(); }
  std::unique_ptr<BoxLink> open_job(const LinkLayout& layout) override {
    if (layout.max_ranks != kSlowRanks) return transport_->open_job(layout);
    gate_.pass();
    return std::make_unique<SlowLink>(transport_->open_job(layout), gate_);
  }
  int event_fd() const override { return transport_->event_fd(); }
  void handle_events(std::vector<TransportEvent>& out) override {
    if (Clock::now() > gate_.connect_from.load()) transport_->handle_events(out);
  }

 private:
  std::unique_ptr<Transport> transport_;
  Gate& gate_;
};

Box::Wrap slowed_by(Gate& gate) {
  return [&gate](std::unique_ptr<Transport> transport) {
    return std::make_unique<SlowTransport>(std::move(transport), gate);
  };
}

// While a job is made, and while a rank's memory is registered, others keep their leases, train and
// get answers.
TEST(Joins, WhatTakesLongHoldsNobodyUp) {
  Gate gate;
  Box box(2, uint64_t{1} << 33, slowed_by(gate));
  JobSpec fast = spec_of("fast", 1);
  fast.lease_ms = 2000;
  Worker worker(box.options(fast));
  JobSpec slow = spec_of("slow", 1);
  slow.max_ranks = kSlowRanks;
  auto join = std::async(std::launch::async, [&] {
    return ControlClient(box.address()).join(request_of(slow, 0), kLongMs);
  });
  for (int phase = 1; phase <= 2; ++phase) {  // 1: the job; 2: the rank
    EXPECT_TRUE(gate.await(phase));
    for (const auto begin = Clock::now(); Clock::now() < begin + milliseconds(2200);) {
      train(worker);
      EXPECT_TRUE(job_of(box.status(), "fast"));
      EXPECT_EQ(box.log("fast").size(), 1u);  // encoded beside the control thread, too
      std::this_thread::sleep_for(milliseconds(20));
    }
    EXPECT_EQ(join.wait_for(milliseconds(0)), std::future_status::timeout);
    gate.allow(phase);
  }
  EXPECT_EQ(join.get().rank, 0u);
  EXPECT_EQ(box.log("fast").size(), 1u);  // nobody was lost
}

// Nobody can send a heartbeat before its join is answered: until then it need not.
TEST(Joins, AnAnswerMayTakeLongerThanALease) {
  Box box;
  Background* background = nullptr;
  std::atomic<bool> busy = true;
  const std::function<void()> sleep = [&] {
    background->run([] { std::this_thread::sleep_for(milliseconds(1100)); },
                    [&](const std::optional<Error>&) {
                      if (busy) sleep();
                    });
  };
  box.on_control([&](Server& server) {
    background = &server.background();
    sleep();  // and so on, behind each part of the answer
  });
  JobSpec spec = spec_of("slow", 1);
  spec.lease_ms = 1000;
  ControlClient client(box.address());
  const JoinReply reply = client.join(request_of(spec, 0), kLongMs);
  EXPECT_EQ(error_of([&] {
              client.heartbeat({"slow", reply.rank, reply.incarnation, reply.offer.ticket});
            }),
            "none");
  busy = false;
  ASSERT_TRUE(becomes([&] { return box.log("slow").size() > 1; }));
  EXPECT_THAT(box.log("slow").at(1).reason, HasSubstr("its lease of 1000 ms expired"));
}

// A worker says that it lives while it connects.
TEST(Joins, AConnectionMayTakeLongerThanALease) {
  Gate gate;
  Box box(2, uint64_t{1} << 33, slowed_by(gate));
  JobSpec spec = spec_of("connects", 1);
  spec.lease_ms = 2000;
  WorkerOptions options = box.options(spec);
  options.connect_timeout_ms = kLongMs;
  gate.connect_from = Clock::now() + milliseconds(3000);
  Worker worker(options);
  EXPECT_GT(Clock::now(), gate.connect_from.load());
  train(worker);
  EXPECT_EQ(worker.incarnation(), 1u);
  EXPECT_EQ(box.log("connects").size(), 1u);  // nobody was lost
}

TEST(Joins, ABoxThatWasStoppedFencesNobody) {
  const TemporaryDirectory directory;
  Process server({PHUB_BINARY, "serve", "--listen", "127.0.0.1:0", "--topology",
                  "pack:1 core:2 pu:1", "--pin", "false", "--socket-dir", directory.path()},
                 directory.path() + "/out");
  JobSpec spec = spec_of("stopped", 2);
  spec.lease_ms = 2000;
  const std::string address = server.listening_address();
  each_rank(2, [&](uint32_t rank) {
    WorkerOptions options;
    options.server = address;
    options.transport = transport();
    options.spec = spec;
    options.rank = static_cast<int32_t>(rank);
    Worker worker(options);
    train(worker);
    if (rank == 0) {
      server.send(SIGSTOP);
      std::this_thread::sleep_for(milliseconds(2500));
      server.send(SIGCONT);
    }
    for (int round = 0; round < 50; ++round) {
      train(worker);
      std::this_thread::sleep_for(milliseconds(5));
    }
    for (const LogRecord& record : ControlClient(address).log("stopped")) {
      EXPECT_NE(record.kind, LogRecord::Kind::kLost) << record.reason;
    }
    worker.barrier();
  });
}

// ---- What is refused, or sent again ----

TEST(Joins, ARefusedJoinLeavesNothingBehind) {
  Box box;
  ControlClient client(box.address());
  JobSpec wrong = spec_of("job", 2);
  wrong.keys[0].elements = 1 << 20;
  EXPECT_THAT(error_of([&] { client.join(request_of(wrong, 2), kLongMs); }),
              HasSubstr("full: rank 2 is out of range"));
  EXPECT_TRUE(box.becomes_empty());
  EXPECT_EQ(client.join(request_of(spec_of("job", 2), 1), kLongMs).rank, 1u);
}

uint64_t resident_bytes(pid_t pid) {
  std::ifstream statm(fmt::format("/proc/{}/statm", pid));
  uint64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

// What a large request took is given back to the system, not kept for the next one.
TEST(Joins, LargeRequestsThatAreOverTakeNoMemory) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's allocator keeps what was freed";
#endif
  const ServerProcess server(PHUB_BINARY);
  ControlClient client(server.address());
  JobSpec spec = spec_of("job", 2);
  spec.optimizer = "adam";
  for (uint64_t round = 2; round < 40000; ++round) {
    HyperChange& change = spec.schedule.emplace_back(HyperChange{.round = round, .values = {}});
    for (const char* name :
         {"lr", "weight_decay", "lr_end", "lr_warmup_from", "beta1", "beta2", "eps"}) {
      change.values[name] = 1.0 / static_cast<double>(round);
    }
  }
  const uint64_t before = resident_bytes(server.pid());
  for (int i = 0; i < 6; ++i) {
    EXPECT_THAT(error_of([&] { client.join(request_of(spec, 2), kLongMs); }),
                HasSubstr("full: rank 2 is out of range"));
  }
  EXPECT_TRUE(becomes([&] { return resident_bytes(server.pid()) < before + (32u << 20); }))
      << before << " bytes before, " << resident_bytes(server.pid()) << " after";
}

TEST(Joins, AJoinThatIsSentAgainGetsTheSameAnswer) {
  Box box;
  ControlClient client(box.address());
  JobSpec spec = spec_of("job", 3);
  spec.on_loss = "fail";
  spec.initial = "broadcast";
  spec.lease_ms = kLongMs;
  const JoinReply first = client.join(request_of(spec, -1, "one"), kLongMs);
  const JoinReply again = client.join(request_of(spec, -1, "one"), kLongMs);
  EXPECT_EQ(again.rank, first.rank);
  EXPECT_EQ(again.incarnation, first.incarnation);
  EXPECT_EQ(again.offer.ticket, first.offer.ticket);
  EXPECT_EQ(again.first_round, first.first_round);
  EXPECT_TRUE(first.send_initial && again.send_initial);
  // With a rank, and although it says replace: it is its own.
  JoinRequest replace = request_of(spec, static_cast<int32_t>(first.rank), "one");
  replace.replace = true;
  EXPECT_EQ(client.join(replace, kLongMs).offer.ticket, first.offer.ticket);
  // Others are others.
  EXPECT_NE(client.join(request_of(spec, -1, "two"), kLongMs).rank, first.rank);
  EXPECT_THAT(error_of([&] { client.join(request_of(spec, 0, "three"), kLongMs); }),
              HasSubstr("taken: rank 0"));
  // Many at the same time are one rank, too.
  std::vector<std::future<JoinReply>> same;
  for (int i = 0; i < 8; ++i) {
    same.push_back(std::async(std::launch::async, [&] {
      return ControlClient(box.address()).join(request_of(spec, -1, "four"), kLongMs);
    }));
  }
  for (auto& reply : same) EXPECT_EQ(reply.get().rank, 2u);
  EXPECT_EQ(box.log("job").size(), 3u);
}

TEST(Joins, AJoinThatIsSentAgainWhileItWaitsIsOne) {
  Gate gate;
  Box box(2, uint64_t{1} << 33, slowed_by(gate));
  JobSpec spec = spec_of("slow", 1);
  spec.max_ranks = kSlowRanks;
  spec.lease_ms = kLongMs;
  const auto send = [&] {
    return std::async(std::launch::async, [&] {
      return ControlClient(box.address()).join(request_of(spec, -1, "one"), kLongMs);
    });
  };
  auto first = send();
  EXPECT_TRUE(gate.await(1));
  gate.allow(1);
  EXPECT_TRUE(gate.await(2));  // its rank is being prepared
  auto again = send();
  std::this_thread::sleep_for(milliseconds(300));
  gate.allow(9);
  const JoinReply reply = first.get();
  EXPECT_EQ(again.get().offer.ticket, reply.offer.ticket);
  EXPECT_EQ(box.log("slow").size(), 1u);
}

TEST(Joins, AJoinThatIsSentAgainAfterItsRankWasLostIsANewOne) {
  Box box;
  ControlClient client(box.address());
  JobSpec spec = spec_of("job", 2);
  spec.lease_ms = 2000;
  const Worker other([&] {
    WorkerOptions options = box.options(spec);
    options.rank = 0;
    options.await_ranks = false;
    return options;
  }());
  const JoinReply first = client.join(request_of(spec, 1, "one"), kLongMs);
  EXPECT_TRUE(becomes([&] { return job_of(box.status(), "job")->ranks[1].state == "lost"; }));
  const JoinReply again = client.join(request_of(spec, 1, "one"), kLongMs);
  EXPECT_EQ(again.incarnation, first.incarnation + 1);
  EXPECT_NE(again.offer.ticket, first.offer.ticket);
}

// Who gave up waiting is not there: the next barrier is the same for all.
TEST(Joins, ABarrierThatTimedOutIsNotEntered) {
  Box box;
  ControlClient one(box.address()), two(box.address());
  const JobSpec spec = [] {
    JobSpec two_ranks = spec_of("job", 2);
    two_ranks.lease_ms = kLongMs;
    return two_ranks;
  }();
  const auto join = [&](ControlClient& client, int32_t rank) -> Credential {
    const JoinReply reply = client.join(request_of(spec, rank), kLongMs);
    return {"job", reply.rank, reply.incarnation, reply.offer.ticket};
  };
  const Credential first = join(one, 0), second = join(two, 1);
  EXPECT_THAT(error_of([&] { one.barrier(first, 200); }), HasSubstr("timeout"));
  std::this_thread::sleep_for(milliseconds(100));  // the server hears of it
  auto waits = std::async(std::launch::async, [&] { two.barrier(second, kLongMs); });
  EXPECT_EQ(waits.wait_for(milliseconds(500)), std::future_status::timeout);
  one.barrier(first, kLongMs);
  waits.get();
}

// When DELETE is answered, the name and the memory are free.
TEST(Joins, AJobThatIsDeletedIsGone) {
  Box box;
  ControlClient client(box.address());
  for (uint64_t i = 0; i < 20; ++i) {
    JobSpec spec = spec_of("job", 2);
    spec.keys[0].elements = 1000 + i;
    client.join(request_of(spec, 0), kLongMs);
    std::future<std::string> boundary;  // is under way
    if (i % 2) {
      boundary = std::async(std::launch::async, [&] {
        return error_of([&] { ControlClient(box.address()).join(request_of(spec, 0), kLongMs); });
      });
    }
    client.remove("job");
    if (i % 2) {
      const std::string answer = boundary.get();  // taken, deleted, or it made the job anew
      if (answer == "none") client.remove("job");
    }
    const ServerStatus status = box.status();
    EXPECT_TRUE(status.jobs.empty());
    EXPECT_EQ(status.memory_bytes, 0u);
  }
}

// ---- How a job begins ----

TEST(Joins, AWorkerIsThereWhenAllAre) {
  Box box;
  std::atomic<bool> second{false};
  each_rank(2, [&](uint32_t rank) {
    WorkerOptions options = box.options(spec_of("job", 2), rank);
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(300));
      second = true;
    }
    Worker worker(options);
    EXPECT_TRUE(second);
    train(worker);
    EXPECT_EQ(worker.parameters(1)[0], 2);
  });
}

TEST(Joins, WhoIsMissingIsNamed) {
  Box box;
  const std::string policies[] = {"shrink", "wait", "fail"};
  each_rank(6, [&](uint32_t i) {  // two of each job
    JobSpec spec = spec_of(fmt::format("missing-{}", policies[i / 2]), 4);
    spec.join_limit_ms = 3000;
    spec.on_loss = policies[i / 2];
    WorkerOptions options = box.options(spec);
    options.rank = static_cast<int32_t>(2 * (i % 2));
    EXPECT_THAT(error_of([&] { const Worker worker(options); }),
                HasSubstr("rank_lost: rank 1, 3 did not join within 3000 ms"));
  });
}

TEST(Joins, ToBeginWithFewerIsAnOption) {
  Box box;
  setenv("PHUB_MIN_RANKS", "2", 1);
  const uint32_t min_ranks = options_from_environment().spec.min_ranks;
  unsetenv("PHUB_MIN_RANKS");
  EXPECT_EQ(min_ranks, 2u);
  JobSpec spec = spec_of("fewer", 4);
  spec.join_limit_ms = 3000;
  spec.min_ranks = min_ranks;
  each_rank(2, [&](uint32_t rank) {
    WorkerOptions options = box.options(spec);
    options.rank = static_cast<int32_t>(2 * rank);
    Worker worker(options);
    train(worker);
    EXPECT_EQ(worker.parameters(1)[0], 2);
    worker.barrier();
  });
}

TEST(Joins, WhoeverLeavesBeforeTheJobHasBegunDoesNotHoldTheOthers) {
  Box box;
  for (const char* policy : {"shrink", "fail", "wait"}) {
    JobSpec spec = spec_of(fmt::format("leaves-{}", policy), 2);
    spec.initial = "broadcast";
    spec.on_loss = policy;
    spec.wait_limit_ms = 300;
    each_rank(2, [&](uint32_t rank) {
      Worker worker(box.options(spec, rank));
      worker.barrier();
      if (rank == 0) return worker.leave();  // it could not load its file
      EXPECT_THAT(error_of([&] { worker.broadcast({}); }), HasSubstr("rank_lost: ")) << policy;
    });
  }
}

// All die, and are started again under the same name.
TEST(Joins, ARestartUnderTheSameNameBeginsAnew) {
  Box box;
  JobSpec spec = spec_of("job", 2);
  spec.initial = "broadcast";
  spec.optimizer = "sgd";
  spec.hyper = {{"lr", 0.5}};
  spec.lease_ms = 2000;
  ControlClient client(box.address());
  for (int32_t rank = 0; rank < 2; ++rank) {  // and that is the last that is heard of them
    client.join(request_of(spec, rank), kLongMs);
  }
  EXPECT_TRUE(becomes([&] { return !job_of(box.status(), "job"); }));
  EXPECT_EQ(box.log("job").back().kind, LogRecord::Kind::kFailed);
  spec.lease_ms = 3000;
  std::atomic<bool> over{false};
  each_rank(2, [&](uint32_t rank) {
    WorkerOptions options = box.options(spec, rank);
    Worker worker(options);
    const std::vector<float> initial(20007, 3);
    EXPECT_EQ(worker.initial_counts(), rank == 0);
    EXPECT_EQ(worker.broadcast(rank == 0 ? initial : std::vector<float>()), rank == 0);
    EXPECT_EQ(worker.parameters(1)[0], 3);
    train(worker);
    EXPECT_EQ(worker.parameters(1)[0], 2);  // 3 - 0.5 * (1 + 1)
    worker.barrier();
    if (rank == 1) {
      EXPECT_TRUE(becomes([&] { return over.load(); }));
      return;
    }

    // A successor of rank 0 while the job is under way: what it brings does not count.
    worker.leave();
    Worker successor(options);
    EXPECT_FALSE(successor.broadcast(initial));
    EXPECT_EQ(successor.parameters(1)[0], 2);
    over = true;
  });
}

}  // namespace joins_test
}  // namespace phub::testing
