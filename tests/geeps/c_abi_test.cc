// What phub.h has for callers that compute in a stream of the device, and for several devices of a
// process. Devices are of host memory, whose streams are a phub_host_stream.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/worker/box.h"
#include "worker/phub.h"

namespace phub::geeps {
namespace c_abi_test {

using phub::testing::Box;
using phub::testing::each_rank;

constexpr size_t kRows = 6, kFloats = 40, kElements = kRows * kFloats;

void expect_ok(phub_code code) { ASSERT_EQ(code, PHUB_OK) << phub_last_error(); }

void expect_refused(phub_code got, phub_code want, const std::string& words) {
  EXPECT_EQ(got, want) << phub_last_error();
  EXPECT_THAT(phub_last_error(), ::testing::HasSubstr(words));
}

phub_buffer no_buffer() {
  phub_buffer buffer = {};
  buffer.size = sizeof buffer;
  return buffer;
}

// A table of parameters and one of local data, a job for it, and a device.
class Rig {
 public:
  explicit Rig(uint64_t device_bytes = 1 << 16) {
    expect_ok(phub_geeps_options_create(&tables));
    expect_ok(phub_geeps_options_add_table(tables, "w", kFloats, nullptr, kRows));
    expect_ok(phub_geeps_options_add_local(tables, "sum", kFloats, nullptr, kRows));
    expect_ok(phub_geeps_options_set_number(tables, "poison", 1));
    expect_ok(phub_options_from_environment(&job));
    expect_ok(phub_options_set(job, "job", "c-abi"));
    expect_ok(phub_options_set(job, "optimizer", "sgd"));
    expect_ok(phub_options_set_hyper(job, "lr", 1));
    device = open(device_bytes);
  }
  ~Rig() {
    expect_ok(phub_device_close(device));
    expect_ok(phub_options_destroy(job));
    expect_ok(phub_geeps_options_destroy(tables));
  }
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  static phub_device* open(uint64_t bytes) {
    phub_device* opened = nullptr;
    expect_ok(phub_device_open_host(bytes, 0, 0, &opened));
    return opened;
  }
  phub_host_stream* make_stream() const {
    phub_host_stream* made = nullptr;
    expect_ok(phub_host_stream_create(device, &made));
    return made;
  }
  phub_geeps* standalone() const {
    phub_geeps* geeps = nullptr;
    expect_ok(phub_options_add_tables(job, tables));
    expect_ok(phub_geeps_create_standalone(device, job, tables, nullptr, 0, &geeps));
    return geeps;
  }

  phub_geeps_options* tables = nullptr;
  phub_options* job = nullptr;
  phub_device* device = nullptr;
};

// Work of a stream, in its order.
void enqueue(phub_host_stream* stream, std::function<void()> work) {
  auto* held = new std::function<void()>(std::move(work));
  expect_ok(phub_host_stream_call(
      stream,
      [](void* data) {
        const std::unique_ptr<std::function<void()>> mine(
            static_cast<std::function<void()>*>(data));
        (*mine)();
      },
      held));
}

// Holds a stream up until it is opened; for ten seconds at most, so that a caller which waits for
// the stream sees that it did.
class Gate {
 public:
  void hold(phub_host_stream* stream) {
    enqueue(stream, [this] {
      std::unique_lock lock(mutex_);
      in_time_ = changed_.wait_for(lock, std::chrono::seconds(10), [this] { return open_; });
    });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  bool opened_in_time() {
    const std::lock_guard lock(mutex_);
    return in_time_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false, in_time_ = false;
};

// One iteration in a stream: local rows get the parameters added, and the update is -1 everywhere.
// Within the call nothing is computed. `seen` gets what the stream has read when it comes there.
void iterate(phub_geeps* geeps, phub_host_stream* stream, std::vector<float>* seen) {
  phub_buffer weights = no_buffer(), sum = no_buffer(), update = no_buffer();
  expect_ok(phub_geeps_read(geeps, 0, nullptr, 0, PHUB_STALENESS_OF_JOB, &weights));
  expect_ok(phub_geeps_local_access(geeps, 1, nullptr, 0, 1, &sum));
  if (seen != nullptr) {
    enqueue(stream, [=] {
      for (size_t i = 0; i < kElements; ++i) sum.data[i] += weights.data[i];
      seen->insert(seen->end(), {weights.data[0], weights.data[kElements - 1], sum.data[7]});
    });
  }
  expect_ok(phub_geeps_post_read(geeps, weights.handle));
  expect_ok(phub_geeps_post_local_access(geeps, sum.handle, 1));
  expect_ok(phub_geeps_pre_update(geeps, 0, nullptr, 0, &update));
  if (seen != nullptr) {
    enqueue(stream, [=] {
      for (size_t i = 0; i < kElements; ++i) update.data[i] = -1;
    });
  }
  expect_ok(phub_geeps_update(geeps, update.handle));
  expect_ok(phub_geeps_table_clock(geeps, 0));
}

void place(phub_geeps* geeps) {
  expect_ok(phub_geeps_begin_virtual(geeps));
  iterate(geeps, nullptr, nullptr);
  expect_ok(phub_geeps_finish(geeps));
}

// Of so many iterations: the parameters are 0, 1, 2 …, and the local rows their sums.
std::vector<float> expected(int iterations) {
  std::vector<float> all;
  float sum = 0;
  for (int i = 0; i < iterations; ++i) {
    const auto weight = static_cast<float>(i);
    sum += weight;
    all.insert(all.end(), {weight, weight, sum});
  }
  return all;
}

// Everything is pinned, and the results of the clock before are here: a whole iteration's calls
// return while the stream is held up in front of all of their work.
TEST(GeepsInC, CallsDoNotWaitForTheCallersStream) {
  constexpr int kIterations = 4;
  const Rig rig;
  phub_host_stream* stream = rig.make_stream();
  expect_ok(phub_geeps_options_set_stream(rig.tables, stream));
  phub_geeps* geeps = rig.standalone();
  place(geeps);
  std::vector<float> seen;
  for (int i = 0; i < kIterations; ++i) {
    Gate gate;
    gate.hold(stream);
    iterate(geeps, stream, &seen);  // reads the results of the clock before, whose work is over
    EXPECT_EQ(seen, expected(i));
    gate.open();
    expect_ok(phub_host_stream_wait(stream));
    EXPECT_TRUE(gate.opened_in_time());
    if (HasFailure()) break;
  }
  expect_ok(phub_geeps_wait_all(geeps));
  EXPECT_EQ(seen, expected(kIterations));
  expect_ok(phub_geeps_destroy(geeps));
  expect_ok(phub_host_stream_destroy(stream));
}

// In little memory, buffers are fetched from the host and stored there, in the stream's order: it
// is never waited for by the program but at the end.
TEST(GeepsInC, TheStreamFindsItsBuffersFilled) {
  constexpr int kIterations = 20;
  const Rig rig(5 * kElements * sizeof(float));
  phub_host_stream* stream = rig.make_stream();
  expect_ok(phub_geeps_options_set_stream(rig.tables, stream));
  expect_ok(phub_geeps_options_set_number(rig.tables, "measure_stalls", 1));
  phub_geeps* geeps = rig.standalone();
  expect_ok(phub_host_stream_destroy(stream));  // the cache keeps it
  expect_refused(phub_host_stream_wait(stream), PHUB_BAD_HANDLE, "was destroyed");
  stream = nullptr;
  expect_ok(phub_geeps_destroy(geeps));

  stream = rig.make_stream();
  expect_ok(phub_geeps_options_set_stream(rig.tables, stream));
  expect_ok(phub_geeps_create_standalone(rig.device, rig.job, rig.tables, nullptr, 0, &geeps));
  place(geeps);
  phub_placement placement = {};
  placement.size = sizeof placement;
  expect_ok(phub_geeps_placement(geeps, &placement));
  EXPECT_GT(placement.moved_bytes, 0u);
  std::vector<float> seen;
  for (int i = 0; i < kIterations; ++i) iterate(geeps, stream, &seen);
  expect_ok(phub_geeps_destroy(geeps));  // waits for the stream
  EXPECT_EQ(seen, expected(kIterations));
  expect_ok(phub_host_stream_destroy(stream));
}

TEST(GeepsInC, StreamsOfTheCallerAreThoseOfTheDevice) {
  const Rig rig;
  phub_device* other = Rig::open(1 << 12);
  phub_host_stream *stream = nullptr, *theirs = nullptr;
  phub_geeps* geeps = nullptr;
  expect_refused(phub_host_stream_create(nullptr, &stream), PHUB_BAD_HANDLE, "phub_device is null");
  expect_refused(phub_host_stream_create(other, nullptr), PHUB_INVALID, "stream is null");
  expect_ok(phub_host_stream_create(other, &theirs));
  expect_refused(phub_host_stream_call(theirs, nullptr, nullptr), PHUB_INVALID, "work is null");
  expect_refused(phub_host_stream_call(
                     nullptr, [](void*) {}, nullptr),
                 PHUB_BAD_HANDLE, "null");
  expect_refused(phub_host_stream_wait(reinterpret_cast<phub_host_stream*>(other)), PHUB_BAD_HANDLE,
                 "this is a phub_device, a phub_host_stream is needed");
  expect_refused(phub_geeps_options_set_stream(nullptr, theirs), PHUB_BAD_HANDLE, "null");
  expect_ok(phub_options_add_tables(rig.job, rig.tables));
  const auto create = [&](void* with) {
    expect_ok(phub_geeps_options_set_stream(rig.tables, with));
    return phub_geeps_create_standalone(rig.device, rig.job, rig.tables, nullptr, 0, &geeps);
  };
  int nothing = 0;
  expect_refused(create(&nothing), PHUB_BAD_HANDLE, "no phub_host_stream");
  expect_refused(create(rig.device), PHUB_BAD_HANDLE, "this is a phub_device");
  expect_refused(create(theirs), PHUB_INVALID, "of another device");
  EXPECT_EQ(geeps, nullptr);
  expect_ok(create(nullptr));  // the calling thread
  phub_buffer buffer = no_buffer();
  expect_ok(phub_geeps_read(geeps, 0, nullptr, 0, PHUB_STALENESS_OF_JOB, &buffer));
  EXPECT_EQ(buffer.data[kElements - 1], 0);
  expect_ok(phub_geeps_post_read(geeps, buffer.handle));
  expect_ok(phub_geeps_destroy(geeps));
  expect_ok(phub_host_stream_destroy(theirs));
  expect_refused(phub_host_stream_destroy(theirs), PHUB_BAD_HANDLE, "was destroyed");
  expect_ok(phub_device_close(other));
}

// A group of two devices, each in a thread of its own: the first computes in a stream.
class Group {
 public:
  explicit Group(const Rig& rig) : rig_(rig), devices_{Rig::open(1 << 16), Rig::open(1 << 13)} {
    expect_ok(phub_host_stream_create(devices_[0], &stream_));
  }
  ~Group() {
    for (phub_geeps* geeps : members_) {
      if (geeps != nullptr) expect_ok(phub_geeps_destroy(geeps));
    }
    expect_ok(phub_host_stream_destroy(stream_));
    for (phub_device* device : devices_) expect_ok(phub_device_close(device));
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  void make_members(phub_device_group* group) {
    for (uint32_t i = 0; i < 2; ++i) {
      expect_ok(phub_geeps_options_set_stream(rig_.tables, i == 0 ? stream_ : nullptr));
      expect_ok(phub_geeps_create_member(devices_[i], group, i, rig_.tables, &members_[i]));
    }
  }
  phub_geeps* member(uint32_t i) const { return members_[i]; }
  phub_device* device(uint32_t i) const { return devices_[i]; }
  void end(uint32_t i) {
    expect_ok(phub_geeps_destroy(members_[i]));
    members_[i] = nullptr;
  }

  // Member m of rank r adds (2 r + m + 1) to all parameters at every clock. Returns what the last
  // read had.
  float train(uint32_t i, uint32_t rank, int clocks) {
    for (int clock = 0; clock < clocks; ++clock) update(i, -static_cast<float>(2 * rank + i + 1));
    return read(i);
  }
  void update(uint32_t i, float value) {
    phub_buffer buffer = no_buffer();
    expect_ok(phub_geeps_pre_update(members_[i], 0, nullptr, 0, &buffer));
    in_order(i, [=] {
      for (size_t e = 0; e < kElements; ++e) buffer.data[e] = value;
    });
    expect_ok(phub_geeps_update(members_[i], buffer.handle));
    expect_ok(phub_geeps_table_clock(members_[i], 0));
  }
  float read(uint32_t i) {
    float got = 0;
    phub_buffer buffer = no_buffer();
    expect_ok(phub_geeps_read(members_[i], 0, nullptr, 0, PHUB_STALENESS_OF_JOB, &buffer));
    in_order(i, [&got, buffer] { got = buffer.data[kElements - 1]; });
    expect_ok(phub_geeps_post_read(members_[i], buffer.handle));
    if (i == 0) expect_ok(phub_host_stream_wait(stream_));
    return got;
  }

 private:
  void in_order(uint32_t i, const std::function<void()>& work) {
    i == 0 ? enqueue(stream_, work) : work();
  }

  const Rig& rig_;
  phub_device* devices_[2];
  phub_host_stream* stream_ = nullptr;
  phub_geeps* members_[2] = {};
};

// Two processes with two devices each, as one job: a rank adds up its devices.
TEST(GeepsInC, DevicesOfAGroupAreOneRank) {
  constexpr int kClocks = 5;
  const Box box;
  each_rank(2, [&](uint32_t rank) {
    Rig rig;
    expect_ok(phub_options_set(rig.job, "server", box.address().c_str()));
    expect_ok(phub_options_set_number(rig.job, "rank", rank));
    expect_ok(phub_options_set_number(rig.job, "world_size", 2));
    expect_ok(phub_options_add_group_tables(rig.job, rig.tables, 2));
    phub_worker* worker = nullptr;
    expect_ok(phub_worker_create(rig.job, &worker));
    phub_device_group *group = nullptr, *second = nullptr;
    phub_geeps* geeps = nullptr;
    expect_ok(phub_device_group_create(worker, rig.tables, 2, 0, 0, &group));
    expect_refused(phub_device_group_create(worker, rig.tables, 2, 0, 0, &second), PHUB_TAKEN,
                   "has a phub_device_group already");
    expect_refused(phub_geeps_create(rig.device, worker, rig.tables, &geeps), PHUB_TAKEN,
                   "has a phub_device_group already");
    expect_refused(phub_push(worker, 0, 0), PHUB_INVALID, "exchanged by its phub_device_group");
    expect_refused(phub_save_point(worker, 1), PHUB_INVALID, "phub_geeps_save_point");
    {
      Group devices(rig);
      devices.make_members(group);
      expect_ok(phub_device_group_destroy(group));  // its members keep it
      expect_refused(phub_geeps_create_member(rig.device, group, 1, rig.tables, &geeps),
                     PHUB_BAD_HANDLE, "this phub_device_group was destroyed");
      each_rank(2, [&](uint32_t i) {
        EXPECT_EQ(devices.train(i, rank, kClocks), kClocks * (1 + 2 + 3 + 4));
      });
    }
    expect_ok(phub_push(worker, 0, 0));  // with the last member its keys are the worker's own again
    expect_ok(phub_wait(worker, 0));
    expect_ok(phub_worker_destroy(worker));
  });
}

TEST(GeepsInC, AGroupMayTakeTheMean) {
  const Rig rig;
  expect_ok(phub_options_add_group_tables(rig.job, rig.tables, 2));
  const std::vector<float> initial(kElements, 100);
  for (const int mean : {0, 1}) {
    phub_device_group* group = nullptr;
    expect_ok(phub_device_group_create_standalone(rig.job, initial.data(), kElements, 2, mean, 1,
                                                  &group));
    Group devices(rig);
    devices.make_members(group);
    expect_ok(phub_device_group_destroy(group));
    each_rank(2, [&](uint32_t i) { EXPECT_EQ(devices.train(i, 0, 4), mean == 1 ? 106 : 112); });
  }
}

// The pairs of both devices fit into the key, whose room is for a group.
TEST(GeepsInC, TheFactorsOfAGroupGoTogether) {
  const Rig rig;
  phub_geeps_options* tables = nullptr;
  expect_ok(phub_geeps_options_create(&tables));
  expect_ok(phub_geeps_options_add_table(tables, "matrix", 2, nullptr, 3));
  expect_ok(phub_geeps_options_set_samples(tables, 0, 2));
  expect_refused(phub_options_add_group_tables(rig.job, tables, 0), PHUB_INVALID, "0 devices");
  expect_ok(phub_options_add_group_tables(rig.job, tables, 2));
  phub_device_group* group = nullptr;
  expect_refused(phub_device_group_create_standalone(rig.job, nullptr, 0, 2, 1, 0, &group),
                 PHUB_INVALID, "takes the mean");
  expect_ok(phub_device_group_create_standalone(rig.job, nullptr, 0, 2, 0, 0, &group));
  static const float left[2][6] = {{1, 2, 3, 10, 0, 0}, {0, 1, 0, 0, 0, 1}};
  static const float right[2][4] = {{1, 2, 3, 4}, {5, 6, 7, 8}};
  phub_device* devices[2] = {Rig::open(1 << 12), Rig::open(1 << 12)};
  phub_geeps* members[2] = {};
  for (uint32_t i = 0; i < 2; ++i) {
    expect_ok(phub_geeps_create_member(devices[i], group, i, tables, &members[i]));
    expect_ok(phub_geeps_clock_factors(members[i], 0, left[i], right[i], 2));
  }
  for (phub_geeps* geeps : members) {
    phub_buffer buffer = no_buffer();
    expect_ok(phub_geeps_read(geeps, 0, nullptr, 0, PHUB_STALENESS_OF_JOB, &buffer));
    EXPECT_THAT(std::vector<float>(buffer.data, buffer.data + 6),
                ::testing::ElementsAre(-31, -42, -7, -10, -10, -14));
    expect_ok(phub_geeps_post_read(geeps, buffer.handle));
  }
  expect_ok(phub_device_group_destroy(group));
  for (phub_geeps* geeps : members) expect_ok(phub_geeps_destroy(geeps));
  for (phub_device* device : devices) expect_ok(phub_device_close(device));
  expect_ok(phub_geeps_options_destroy(tables));
}

TEST(GeepsInC, WrongCallsForAGroupChangeNothing) {
  const Rig rig;
  phub_device_group* group = nullptr;
  phub_geeps* geeps = nullptr;
  expect_ok(phub_options_add_group_tables(rig.job, rig.tables, 2));
  const auto create = [&](uint32_t members, uint32_t threads, const float* initial, size_t count) {
    return phub_device_group_create_standalone(rig.job, initial, count, members, 0, threads,
                                               &group);
  };
  expect_refused(create(0, 0, nullptr, 0), PHUB_INVALID, "a group of 0 devices");
  expect_refused(create(1025, 0, nullptr, 0), PHUB_INVALID, "1025 devices");
  expect_refused(create(2, 1025, nullptr, 0), PHUB_INVALID, "1025 threads");
  expect_refused(create(2, 0, nullptr, 5), PHUB_INVALID, "initial is null");
  expect_refused(phub_device_group_create_standalone(rig.job, nullptr, 0, 2, 0, 0, nullptr),
                 PHUB_INVALID, "group is null");
  expect_refused(phub_device_group_create(nullptr, rig.tables, 2, 0, 0, &group), PHUB_BAD_HANDLE,
                 "phub_worker is null");
  EXPECT_EQ(group, nullptr);
  expect_ok(create(2, 0, nullptr, 0));
  const auto join = [&](phub_device* device, uint32_t member) {
    return phub_geeps_create_member(device, group, member, rig.tables, &geeps);
  };
  expect_refused(join(rig.device, 2), PHUB_INVALID, "member 2 of a group of 2 devices");
  expect_refused(phub_geeps_create_member(rig.device, nullptr, 0, rig.tables, &geeps),
                 PHUB_BAD_HANDLE, "phub_device_group is null");
  phub_device* small = Rig::open(0);
  EXPECT_NE(join(small, 0), PHUB_OK);  // the member is not taken by this
  expect_ok(phub_device_close(small));
  Group devices(rig);
  devices.make_members(group);
  expect_refused(join(rig.device, 0), PHUB_TAKEN, "member 0");
  devices.end(1);
  expect_refused(join(rig.device, 1), PHUB_TAKEN, "had, a phub_geeps");
  expect_ok(phub_device_group_destroy(group));
  expect_refused(phub_device_group_destroy(group), PHUB_BAD_HANDLE, "was destroyed");

  // Member 0 waits for an update that member 1 cannot send any more.
  phub_buffer buffer = no_buffer();
  expect_ok(phub_geeps_pre_update(devices.member(0), 0, nullptr, 0, &buffer));
  expect_ok(phub_geeps_update(devices.member(0), buffer.handle));
  phub_geeps_table_clock(devices.member(0), 0);
  expect_refused(phub_geeps_wait_all(devices.member(0)), PHUB_RANK_LOST, "device 1 has left");
}

}  // namespace c_abi_test
}  // namespace phub::geeps
