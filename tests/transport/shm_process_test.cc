// Box and worker as processes of their own: what a worker can do to the box, and what its death
// does. The worker is a forked child; its exit status says what it found.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>

#include "tests/transport/link_test.h"
#include "tests/transport/shm_raw_worker.h"
#include "tests/transport/shm_rig.h"
#include "transport/error.h"

namespace phub {
namespace shm_process_test {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kChunks = 24;
constexpr uint32_t kWords = 512;  // 32-bit, per chunk
constexpr uint32_t kChunkBytes = 4 * kWords;

class ShmProcessTest : public LinkTest {
 protected:
  void SetUp() override {
    rig_ = std::make_unique<ShmRig>();
    open(2, 1, kChunks * kChunkBytes, kChunks);
  }
  void TearDown() override {
    if (child_ > 0) {
      kill(child_, SIGKILL);
      waitpid(child_, nullptr, 0);
    }
    LinkTest::TearDown();
  }
  // Runs `worker` in a child; its result is the exit status, an exception is 99.
  void start(const std::function<int()>& worker) {
    child_ = fork();
    if (child_ != 0) return;
    int status = 99;
    try {
      status = worker();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "worker process: %s\n", error.what());
    }
    _exit(status);
  }
  bool eventually(const std::function<bool()>& condition) {
    const auto deadline = Clock::now() + std::chrono::seconds(20);
    while (!condition()) {
      rig_->transport().handle_events(rig_->events());
      if (Clock::now() > deadline) return false;
      sched_yield();
    }
    return true;
  }
  int exit_status() {
    int status = -1;
    if (!eventually([&] { return waitpid(child_, &status, WNOHANG) == child_; })) return -1;
    child_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  bool seen(TransportEvent::Kind kind, uint32_t rank, uint32_t incarnation) {
    for (const TransportEvent& event : rig_->events()) {
      if (event.kind == kind && event.rank == rank && event.incarnation == incarnation) return true;
    }
    return false;
  }

  pid_t child_ = 0;
};

uint32_t word_of(uint32_t who, uint32_t chunk, uint32_t round, uint32_t i) {
  return (who << 28) ^ (chunk << 20) ^ (round << 9) ^ i;
}
void fill(std::span<std::byte> memory, uint32_t who, uint32_t chunk, uint32_t round) {
  std::array<uint32_t, kWords> words;
  for (uint32_t i = 0; i < kWords; ++i) words[i] = word_of(who, chunk, round, i);
  std::memcpy(memory.data() + chunk * kChunkBytes, words.data(), kChunkBytes);
}
bool holds(std::span<const std::byte> memory, uint32_t who, uint32_t chunk, uint32_t round) {
  std::array<uint32_t, kWords> words;
  std::memcpy(words.data(), memory.data() + chunk * kChunkBytes, kChunkBytes);
  for (uint32_t i = 0; i < kWords; ++i) {
    if (words[i] != word_of(who, chunk, round, i)) return false;
  }
  return true;
}

// Both processes check every chunk the moment its immediate is there.
TEST_F(ShmProcessTest, ThePayloadIsThereBeforeItsImmediate) {
  constexpr uint32_t kRounds = 400;
  const Offer offer = box_->admit(1, 3);
  start([&] {
    const auto link = connect_shm(offer, layout_, 5000);
    std::array<Arrival, 8> out;
    for (uint32_t round = 1; round <= kRounds; ++round) {
      for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
        fill(link->gradients(), 1, chunk, round);
        if (!link->endpoint().post({0}, {0, 0, kChunkBytes, encode({chunk, round})})) return 1;
        if (chunk % 2 == round % 2) link->endpoint().flush();
      }
      link->endpoint().flush();
      for (uint32_t seen = 0; seen < kChunks;) {
        const size_t taken = link->endpoint().poll(out);
        for (size_t i = 0; i < taken; ++i, ++seen) {
          if (!holds(link->results(), 2, decode(out[i].imm).chunk, round)) return 2;
        }
        if (taken == 0 && !link->connected()) return 3;
        if (taken == 0) sched_yield();
      }
    }
    return 0;
  });
  BoxEndpoint& core = box_->endpoint(0);
  attach(1, 3);
  std::array<Arrival, 8> out;
  uint32_t seen = 0, wrong = 0;
  EXPECT_TRUE(eventually([&] {
    const size_t taken = core.poll(out);
    for (size_t i = 0; i < taken; ++i, ++seen) {
      const uint32_t chunk = decode(out[i].imm).chunk, round = seen / kChunks + 1;
      wrong += !out[i].ok || chunk >= kChunks || !holds(box_->slots(1), 1, chunk, round);
      fill(box_->results(), 2, chunk, round);
      wrong += !core.post({.rank = 1}, {0, 0, kChunkBytes, out[i].imm});
    }
    core.flush();
    return seen == kRounds * kChunks || wrong != 0;
  }));
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(exit_status(), 0);
}

TEST_F(ShmProcessTest, AKilledWorkerIsNoticedAndReplaced) {
  for (uint32_t incarnation = 1; incarnation <= 5; ++incarnation) {
    const Offer offer = box_->admit(0, incarnation);
    attach(0, incarnation);
    start([&] {
      const auto link = connect_shm(offer, layout_, 5000);
      for (uint32_t i = 0;; ++i) {  // until killed, mid-work
        while (!link->endpoint().post({0}, {0, 0, 4, i})) usleep(10);
        link->endpoint().flush();
      }
      return 0;
    });
    std::array<Arrival, 16> out;
    uint32_t next = 0;
    ASSERT_TRUE(eventually([&] {
      const size_t taken = box_->endpoint(0).poll(out);
      for (size_t i = 0; i < taken; ++i) EXPECT_EQ(out[i].imm, next++);
      return next > 500;
    }));
    const auto killed = Clock::now();
    kill(child_, SIGKILL);
    ASSERT_TRUE(eventually([&] { return seen(TransportEvent::kDisconnected, 0, incarnation); }));
    EXPECT_LT(Clock::now() - killed, std::chrono::seconds(20));
    waitpid(child_, nullptr, 0);
    child_ = 0;
    // Waking the dead is no error either.
    while (box_->endpoint(0).post({.rank = 0}, {})) box_->endpoint(0).flush();
    drop(0);
  }
}

// A worker that hangs, is replaced and wakes up writes into memory that nobody looks at.
TEST_F(ShmProcessTest, AStoppedWorkerThatWakesUpChangesNothing) {
  const Offer offer = box_->admit(0, 1);
  attach(0, 1);
  start([&] {
    const auto link = connect_shm(offer, layout_, 5000);
    if (!link->endpoint().post({0}, {0, 0, 4, 1})) return 1;
    link->endpoint().flush();
    while (link->connected()) {  // and stopped in here
      std::memset(link->gradients().data(), 0xee, link->gradients().size());
      link->endpoint().post({0}, {0, 0, 4, 2});
      link->endpoint().flush();
    }
    std::memset(link->gradients().data(), 0xee, link->gradients().size());
    for (int i = 0; i < 100; ++i) link->endpoint().post({0}, {0, 0, 4, 2});
    link->endpoint().flush();
    return 0;
  });
  std::array<Arrival, 16> out;
  ASSERT_TRUE(eventually([&] { return box_->endpoint(0).poll(out) > 0; }));
  kill(child_, SIGSTOP);
  drop(0);
  const Offer successor = box_->admit(0, 2);
  attach(0, 2);
  kill(child_, SIGCONT);
  EXPECT_EQ(exit_status(), 0);
  EXPECT_EQ(box_->endpoint(0).poll(out), 0u);
  for (const std::byte byte : box_->slots(0)) ASSERT_EQ(byte, std::byte{0});

  // The old ticket opens nothing, the new one does.
  EXPECT_THROW(rig_->connect(offer, layout_), Error);
  const auto link = rig_->connect(successor, layout_);
  link->gradients()[3] = std::byte{5};
  EXPECT_EQ(box_->slots(0)[3], std::byte{5});
}

// Everything that a worker could try with its descriptors to write results or to have the box die
// of a SIGBUS.
TEST_F(ShmProcessTest, AWorkerCannotWriteResultsOrChangeSizes) {
  std::memset(box_->results().data(), 0x55, box_->results().size());
  const Offer offer = box_->admit(0, 1);
  start([&] {
    RawWorker worker(offer);
    if (!worker.receive()) return 1;
    const int results = worker.results().get();
    const size_t bytes = worker.greeting().welcome.results_file_bytes;
    const auto writable = [&](int fd) {
      return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) != MAP_FAILED;
    };
    if (writable(results)) return 2;
    void* readable = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, results, 0);
    if (readable == MAP_FAILED) return 3;
    if (mprotect(readable, bytes, PROT_READ | PROT_WRITE) == 0) return 4;
    if (write(results, "x", 1) >= 0) return 5;
    if (fallocate(results, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == 0) return 6;
    const std::string again = "/proc/self/fd/" + std::to_string(results);
    const Fd reopened(::open(again.c_str(), O_RDWR | O_CLOEXEC));
    if (reopened && writable(reopened.get())) return 7;
    for (const Fd* fd : {&worker.results(), &worker.gradients(), &worker.rings()}) {
      if (ftruncate(fd->get(), 0) == 0 || ftruncate(fd->get(), 1 << 30) == 0) return 8;
      if (fcntl(fd->get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE) == 0) return 9;
      if (fallocate(fd->get(), 0, 0, 1 << 30) == 0) return 10;
    }
    // A hole in its own gradients reads as zeros.
    if (fallocate(worker.gradients().get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 8192) !=
        0) {
      return 11;
    }
    return 0;
  });
  EXPECT_EQ(exit_status(), 0);
  for (const std::byte byte : box_->results()) ASSERT_EQ(byte, std::byte{0x55});
  for (const std::byte byte : box_->slots(0)) ASSERT_EQ(byte, std::byte{0});
}

// A sleeping worker learns at once that the server is gone.
TEST_F(ShmProcessTest, TheDeathOfTheServerWakesASleepingWorker) {
  std::array<int, 2> pipe_ends = {};
  ASSERT_EQ(pipe(pipe_ends.data()), 0);
  start([&] {  // the server
    ShmRig rig;
    const auto box = rig.transport().open_job(layout_);
    const Offer offer = box->admit(0, 1);
    std::array<char, 256> text = {};
    std::snprintf(text.data(), text.size(), "%s %s", offer.address.c_str(), offer.ticket.c_str());
    if (write(pipe_ends[1], text.data(), text.size()) < 0) return 1;
    for (;;) rig.transport().handle_events(rig.events());
    return 0;
  });
  std::array<char, 256> text = {}, address = {}, ticket = {};
  ASSERT_EQ(read(pipe_ends[0], text.data(), text.size()), static_cast<ssize_t>(text.size()));
  ASSERT_EQ(std::sscanf(text.data(), "%255s %255s", address.data(), ticket.data()), 2);
  const auto link = connect_shm({"shm", address.data(), ticket.data()}, layout_, 5000);
  const int epoll = epoll_create1(EPOLL_CLOEXEC);
  epoll_event event = {};
  event.events = EPOLLIN | EPOLLET;
  ASSERT_EQ(epoll_ctl(epoll, EPOLL_CTL_ADD, link->endpoint().wake_fd(), &event), 0);
  ASSERT_TRUE(link->endpoint().arm({}));
  EXPECT_EQ(epoll_wait(epoll, &event, 1, 0), 0);
  kill(child_, SIGKILL);
  // As a worker does: it looks whenever it is woken, and sleeps again while the box seems alive.
  while (link->connected()) ASSERT_EQ(epoll_wait(epoll, &event, 1, 10000), 1);
  close(epoll);
  const std::string directory = std::filesystem::path(address.data()).parent_path();
  std::filesystem::remove_all(directory);
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

}  // namespace shm_process_test
}  // namespace phub
