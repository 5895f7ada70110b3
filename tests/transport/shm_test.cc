// Connecting over shared memory: its memory, its sockets, and who may use them. (Strangers:
// strangers_test.cc.)
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <string>

#include "tests/transport/link_test.h"
#include "tests/transport/shm_raw_worker.h"
#include "tests/transport/shm_rig.h"
#include "tests/worker/expect_error.h"
#include "transport/shm/transport.h"

namespace phub {
namespace shm_test {

using testing::error_of;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class ShmTest : public LinkTest {
 protected:
  ShmTest() {
    auto rig = std::make_unique<ShmRig>();
    directory_ = rig->directory();
    rig_ = std::move(rig);
  }
  std::string address() {
    const std::string text = rig_->transport().describe();
    return text.substr(5, text.find(',') - 5);
  }

  std::string directory_;
};

TEST_F(ShmTest, SaysWhereItListens) {
  EXPECT_THAT(rig_->transport().describe(), StartsWith("shm: " + directory_ + "/phub-"));
  EXPECT_THAT(rig_->transport().describe(), HasSubstr("pages"));
  EXPECT_EQ(rig_->transport().name(), "shm");
  struct stat status = {};
  ASSERT_EQ(stat(address().c_str(), &status), 0);
  EXPECT_TRUE(S_ISSOCK(status.st_mode));
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

TEST_F(ShmTest, MemoryIsWhereTheLayoutSays) {
  open(40, 1);
  EXPECT_EQ(box_->results().size(), 5000u);
  EXPECT_TRUE(box_->slots_belong_to_worker());
  for (const uint32_t rank : {0u, 1u, 30u, 31u}) {
    const auto link = rig_->connect(box_->admit(rank, 1), layout_);
    EXPECT_TRUE(link->zero_copy());
    EXPECT_EQ(link->gradients().size(), 5000u);
    EXPECT_EQ(link->results().size(), 5000u);
    const uint64_t skew = rank % kShmSkewRanks * kShmLine;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(link->gradients().data()) % 4096, skew);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(box_->slots(rank).data()) % 4096, skew);
    // One memory: what one side writes, the other reads, without anything being sent.
    link->gradients()[4999] = std::byte{7};
    EXPECT_EQ(box_->slots(rank)[4999], std::byte{7});
    box_->results()[rank] = std::byte{9};
    EXPECT_EQ(link->results()[rank], std::byte{9});
  }
}

TEST_F(ShmTest, WhatComesUninvitedIsDropped) {
  open();
  RawWorker talks(box_->admit(0, 1));
  handle(2);
  send_message(talks.socket(), std::as_bytes(std::span("more")));
  handle(2);
  EXPECT_EQ(rig_->events().back().kind, TransportEvent::kDisconnected);
  const auto open_fds = [] {
    const auto begin = std::filesystem::directory_iterator("/proc/self/fd");
    return std::distance(begin, std::filesystem::directory_iterator());
  };
  const auto before = open_fds();
  {
    const Fd socket = connect_to(address(), 1000);
    const std::vector<int> gifts(50, STDERR_FILENO);
    send_message(socket.get(), std::vector<std::byte>(sizeof(ShmHello)), gifts);
    handle(2);
    const std::vector<std::byte> answer = receive_message(socket.get(), 4096).bytes;
    EXPECT_THAT(error_of([&] { parse_shm_greeting(answer); }), StartsWith("invalid: "));
  }
  EXPECT_EQ(open_fds(), before);
}

TEST_F(ShmTest, TheWorkerChecksTheSizesOfTheBox) {
  open();
  const auto refused_with = [&](const std::function<void(LinkLayout&)>& change) {
    LinkLayout other = layout_;
    change(other);
    const Offer offer = box_->admit(0, 1);
    std::string text = error_of([&] { rig_->connect(offer, other); });
    box_->revoke(0);
    return text;
  };
  EXPECT_THAT(refused_with([](LinkLayout& l) { l.slots_bytes = 5001; }),
              HasSubstr("bytes of gradients: 5001"));
  EXPECT_THAT(refused_with([](LinkLayout& l) { l.results_bytes = 1; }), StartsWith("mismatch: "));
  EXPECT_THAT(refused_with([](LinkLayout& l) { l.queue_chunks = {8}; }), HasSubstr("queues"));
  EXPECT_THAT(refused_with([](LinkLayout& l) { l.queue_chunks[1] = 9999; }),
              HasSubstr("queue 1: rings of"));
  EXPECT_EQ(refused_with([](LinkLayout&) {}), "none");
}

TEST_F(ShmTest, JobsOutOfRangeAreRefused) {
  open();
  const auto refused = [&](const std::function<void(LinkLayout&)>& change) {
    LinkLayout layout = layout_;
    change(layout);
    return error_of([&] { rig_->transport().open_job(layout); });
  };
  EXPECT_THAT(refused([](LinkLayout& l) { l.max_ranks = 0; }), StartsWith("invalid: "));
  EXPECT_THAT(refused([](LinkLayout& l) { l.max_ranks = 5000; }), HasSubstr("max_ranks 5000"));
  EXPECT_THAT(refused([](LinkLayout& l) { l.cores = 3; }), HasSubstr("number of queues"));
  EXPECT_THAT(refused([](LinkLayout& l) { l.results_bytes = 0; }), HasSubstr("results_bytes"));
  EXPECT_THAT(refused([](LinkLayout& l) { l.queue_chunks[0] = 1u << 30; }), HasSubstr("chunks"));
  // More memory than an address space has.
  EXPECT_THAT(refused([](LinkLayout& l) { l.results_bytes = 1ull << 47; }), StartsWith("full: "));
  EXPECT_THAT(error_of([&] { box_->admit(2, 1); }), HasSubstr("memory for 2 ranks"));
}

TEST_F(ShmTest, MoreDescriptorsThanOneMessageCarries) {
  open(2, 600);
  const auto link = rig_->connect(box_->admit(1, 1), layout_);
  BoxEndpoint& core = box_->endpoint(599);
  core.attach(1, 1);
  ASSERT_TRUE(core.arm({}));
  ASSERT_TRUE(link->endpoint().post({599}, {0, 0, 0, 5}));
  link->endpoint().flush();
  pollfd woken = {core.wake_fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&woken, 1, 1000), 1) << "the last doorbell is the last core's";
  core.detach(1);
}

TEST_F(ShmTest, SocketsOfDeadServersAreRemoved) {
  const pid_t dead = fork();
  if (dead == 0) _exit(0);
  waitpid(dead, nullptr, 0);
  const auto path = [&](const std::string& name) { return directory_ + "/" + name; };
  const std::string stale = path("phub-" + std::to_string(dead) + "-00ff.sock");
  const std::string alive = path("phub-" + std::to_string(dead) + "-0100.sock");
  const std::string foreign = path("phub-" + std::to_string(dead) + "-0100.sock.bak");
  { const Fd listener = listen_at(stale); }
  const Fd other_container = listen_at(alive);
  { const Fd listener = listen_at(foreign); }
  const auto second = make_shm_transport({.socket_dir = directory_});
  EXPECT_FALSE(std::filesystem::exists(stale));
  EXPECT_TRUE(std::filesystem::exists(alive)) << "somebody answers there";
  EXPECT_TRUE(std::filesystem::exists(foreign)) << "not a name of ours";
  EXPECT_TRUE(std::filesystem::exists(address()));
}

TEST_F(ShmTest, TheSocketDirectoryIsPrivate) {
  const auto refused = [&](const std::string& dir) {
    return error_of([&] { make_shm_transport({.socket_dir = dir}); });
  };
  const std::string dir = directory_ + "/sub";
  EXPECT_EQ(refused(dir), "none");
  EXPECT_EQ(std::filesystem::status(dir).permissions(), std::filesystem::perms::owner_all);
  chmod(dir.c_str(), 0755);
  EXPECT_THAT(refused(dir), HasSubstr("chmod 700"));
  EXPECT_THAT(refused(directory_ + "/no/where"), HasSubstr("/no/where"));
  std::filesystem::create_symlink(directory_, directory_ + "/link");
  EXPECT_THAT(refused(directory_ + "/link"), HasSubstr("is not a directory"));
  EXPECT_THAT(refused(directory_ + "/" + std::string(90, 'd')), HasSubstr("choose another"));
}

TEST_F(ShmTest, AnotherUserIsRefusedEvenWhereTheFilesAreOpen) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to be someone else";
  chmod(directory_.c_str(), 0755);
  chmod(address().c_str(), 0666);
  const std::string path = address();
  const pid_t child = fork();
  if (child == 0) {
    if (setuid(65534) != 0) _exit(2);
    const std::string text = error_of([&] {
      const Fd socket = connect_to(path, 1000);
      pollfd readable = {socket.get(), POLLIN, 0};
      ::poll(&readable, 1, 5000);
      parse_shm_greeting(receive_message(socket.get(), 4096).bytes);
    });
    _exit(text.find("user 65534 may not") != text.npos ? 0 : 1);
  }
  int status = -1;
  while (waitpid(child, &status, WNOHANG) == 0) handle(1);
  EXPECT_EQ(status, 0);
}

}  // namespace shm_test
}  // namespace phub
