// Connecting over shared memory: tickets, malformed messages, limits, what is left behind.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "tests/transport/shm_raw_worker.h"
#include "tests/transport/shm_rig.h"
#include "transport/error.h"
#include "transport/shm/transport.h"

namespace phub {
namespace shm_test {

using ::testing::HasSubstr;
using ::testing::StartsWith;

size_t open_fds() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}
// Takes every free descriptor below the highest one in use: the next is highest + 1.
std::vector<Fd> fill_descriptors(int& highest) {
  highest = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    highest = std::max(highest, std::stoi(entry.path().filename()));
  }
  std::vector<Fd> taken;
  while (taken.empty() || taken.back().get() <= highest) {
    taken.emplace_back(fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0));
  }
  taken.pop_back();
  return taken;
}
size_t phub_mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("phub-") != line.npos;
  return count;
}

// The Error that `action` throws, as "code: text"; "" if none.
std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return std::string(name_of(error.code())) + ": " + error.what();
  }
  return "";
}

LinkLayout small_layout(uint32_t ranks = 2, uint32_t cores = 2) {
  LinkLayout layout;
  layout.max_ranks = ranks;
  layout.cores = cores;
  layout.queue_chunks.assign(cores, 8);
  layout.core_node.assign(cores, 0);
  layout.slots_bytes = layout.results_bytes = 5000;
  return layout;
}

class ShmTest : public ::testing::Test {
 protected:
  void start(ShmOptions options = {}) { rig_ = std::make_unique<ShmRig>(options); }
  void open(uint32_t ranks = 2, uint32_t cores = 2) {
    layout_ = small_layout(ranks, cores);
    box_ = rig_->transport().open_job(layout_);
  }
  void handle(int times = 3) {
    for (int i = 0; i < times; ++i) rig_->transport().handle_events(rig_->events());
  }
  // What the box answers to `message`, sent raw with `fds`; "" if it just closes the connection.
  std::string answer_to(std::span<const std::byte> message, std::span<const int> fds = {}) {
    const Fd socket = connect_to(address(), 1000);
    send_message(socket.get(), message, fds);
    handle();
    const UnixMessage received = receive_message(socket.get(), 1 << 16);
    if (received.error == EAGAIN) return "silence";
    if (received.bytes.empty()) return "";
    return error_of([&] { parse_shm_greeting(received.bytes); });
  }
  std::string address() {
    const std::string text = rig_->transport().describe();
    return text.substr(5, text.find(',') - 5);
  }

  std::unique_ptr<ShmRig> rig_ = std::make_unique<ShmRig>();
  LinkLayout layout_;
  std::unique_ptr<BoxLink> box_;
};

TEST_F(ShmTest, SaysWhereItListens) {
  EXPECT_THAT(rig_->transport().describe(), StartsWith("shm: " + rig_->directory() + "/phub-"));
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

TEST_F(ShmTest, MalformedHellosAreAnsweredAndChangeNothing) {
  open();
  const Offer offer = box_->admit(0, 1);
  ShmHello good;
  std::memcpy(good.ticket.data(), offer.ticket.data(), good.ticket.size());
  const auto with = [&](const std::function<void(ShmHello&)>& change) {
    ShmHello hello = good;
    change(hello);
    return answer_to(std::as_bytes(std::span(&hello, 1)));
  };
  EXPECT_THAT(with([](ShmHello& h) { h.header.magic = 1; }), HasSubstr("not a phub peer"));
  EXPECT_THAT(with([](ShmHello& h) { h.header.version = 9; }), HasSubstr("protocol version 9"));
  EXPECT_THAT(with([](ShmHello& h) { h.header.type = ShmMessage::kWelcome; }),
              HasSubstr("message type 1"));
  EXPECT_THAT(with([](ShmHello& h) { h.header.fds = 3; }), HasSubstr("3 descriptors"));
  EXPECT_THAT(with([](ShmHello& h) { h.ticket[5] = 'x'; }), StartsWith("unauthorized: "));
  EXPECT_THAT(with([](ShmHello& h) { h.ticket.fill('0'); }), StartsWith("unauthorized: "));
  const auto bytes = std::as_bytes(std::span(&good, 1));
  for (const size_t size : {1u, 15u, 16u, 47u}) {
    EXPECT_THAT(answer_to(bytes.first(size)), StartsWith("invalid: ")) << size;
  }
  const std::vector<std::byte> longer(100000);
  std::vector<std::byte> padded(bytes.begin(), bytes.end());
  padded.push_back(std::byte{0});
  EXPECT_THAT(answer_to(longer), StartsWith("invalid: "));
  EXPECT_THAT(answer_to(padded), StartsWith("invalid: "));

  const size_t before = open_fds();
  const std::vector<int> gifts(50, STDERR_FILENO);
  EXPECT_THAT(answer_to(padded, gifts), StartsWith("invalid: "));
  EXPECT_EQ(open_fds(), before) << "descriptors that came uninvited are dropped";

  // After all this the ticket is as good as new.
  EXPECT_TRUE(rig_->connect(offer, layout_)->connected());
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
  EXPECT_EQ(refused_with([](LinkLayout&) {}), "");
}

TEST_F(ShmTest, JobsOutOfRangeAreRefused) {
  const auto refused = [&](const std::function<void(LinkLayout&)>& change) {
    LinkLayout layout = small_layout();
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
  open();
  EXPECT_THAT(error_of([&] { box_->admit(2, 1); }), HasSubstr("memory for 2 ranks"));
}

TEST_F(ShmTest, HalfOpenConnectionsEnd) {
  start({.socket_dir = "", .half_open_ms = 500, .max_half_open = 8});
  const size_t before = open_fds();
  std::vector<Fd> silent;
  for (int i = 0; i < 100; ++i) silent.push_back(connect_to(address(), 1000));
  handle(10);
  // 100 of ours, at most 8 of the box.
  EXPECT_LE(open_fds(), before + 108);
  open();
  EXPECT_TRUE(rig_->connect(box_->admit(0, 1), layout_)->connected()) << "room for the honest";

  pollfd events = {rig_->transport().event_fd(), POLLIN, 0};
  pollfd answered = {silent.back().get(), POLLIN, 0};
  for (int i = 0; i < 50 && ::poll(&answered, 1, 0) == 0; ++i) {
    EXPECT_EQ(::poll(&events, 1, 5000), 1) << "asks to be called when their time is over";
    handle(1);
  }
  const UnixMessage last = receive_message(silent.back().get(), 4096);
  EXPECT_THAT(error_of([&] { parse_shm_greeting(last.bytes); }), HasSubstr("within 500 ms"));
  const UnixMessage first = receive_message(silent.front().get(), 4096);
  EXPECT_THAT(error_of([&] { parse_shm_greeting(first.bytes); }), HasSubstr("too many"));
}

TEST_F(ShmTest, ABurstOfHonestWorkersIsNotAFlood) {
  start({.socket_dir = "", .max_half_open = 1});
  open(12, 1);
  std::vector<std::unique_ptr<RawWorker>> workers;
  for (uint32_t rank = 0; rank < 12; ++rank) {
    workers.push_back(std::make_unique<RawWorker>(box_->admit(rank, 1)));
  }
  handle(10);
  for (const auto& worker : workers) EXPECT_TRUE(worker->receive());
}

// Its hello is there when it would have to give way.
TEST_F(ShmTest, ASlowHelloIsReadBeforeItIsTooLate) {
  start({.socket_dir = "", .max_half_open = 1});
  open();
  const Offer offer = box_->admit(0, 1);
  const Fd slow = connect_to(address(), 1000);
  handle(1);
  const Fd other = connect_to(address(), 1000);
  ShmHello hello;
  std::copy(offer.ticket.begin(), offer.ticket.end(), hello.ticket.begin());
  send_message(slow.get(), std::as_bytes(std::span(&hello, 1)));
  handle(1);
  const UnixMessage answer = receive_message(slow.get(), 1 << 16);
  EXPECT_EQ(error_of([&] { parse_shm_greeting(answer.bytes); }), "");
  EXPECT_TRUE(rig_->events().empty()) << "nobody was refused";
}

TEST_F(ShmTest, NothingIsLeftBehind) {
  open();
  const auto every_way_to_end = [&] {
    {  // a whole life
      auto link = rig_->connect(box_->admit(0, 1), layout_);
      for (const uint32_t core : {0u, 1u}) box_->endpoint(core).attach(0, 1);
      link.reset();
      handle();
      for (const uint32_t core : {0u, 1u}) box_->endpoint(core).detach(0);
      box_->revoke(0);
    }
    {  // revoked before the worker comes; the worker's ticket is refused
      const Offer offer = box_->admit(0, 2);
      box_->revoke(0);
      EXPECT_NE(error_of([&] { rig_->connect(offer, layout_); }), "");
    }
    {  // the worker finds other sizes than it expects
      LinkLayout other = layout_;
      other.slots_bytes = 1;
      const Offer offer = box_->admit(0, 3);
      EXPECT_NE(error_of([&] { rig_->connect(offer, other); }), "");
      box_->revoke(0);
    }
    {  // the worker dies before it takes the answer
      { const RawWorker dies(box_->admit(0, 4)); }
      handle();
      box_->revoke(0);
    }
    {  // says too much after its hello
      RawWorker talks(box_->admit(0, 5));
      handle();
      send_message(talks.socket(), std::as_bytes(std::span("more")));
      handle();
      EXPECT_EQ(rig_->events().back().kind, TransportEvent::kDisconnected);
      box_->revoke(0);
    }
    {  // a job ends with its ranks
      const std::unique_ptr<BoxLink> other = rig_->transport().open_job(layout_);
      const auto link = rig_->connect(other->admit(1, 1), layout_);
    }
    answer_to(std::as_bytes(std::span("garbage")));
    handle();
  };
  every_way_to_end();
  const size_t fds = open_fds();
  const size_t mappings = phub_mappings();
  for (int i = 0; i < 100; ++i) every_way_to_end();
  EXPECT_EQ(open_fds(), fds);
  EXPECT_EQ(phub_mappings(), mappings);
}

// Admission fails as a whole at each descriptor that it cannot get, names the limit, and leaves
// nothing; so does connecting.
TEST_F(ShmTest, RunningOutOfDescriptors) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the sanitizer's own checks need descriptors";
#endif
  open(2, 3);
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  int highest = 0;
  const std::vector<Fd> filled = fill_descriptors(highest);
  const size_t fds = open_fds();
  int refused = 0;
  for (rlim_t spare = 0; spare < 12; ++spare) {
    rlimit few = {highest + 1 + spare, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    const std::string text = error_of([&] { box_->admit(1, 1); });
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
    if (text.empty()) {
      box_->revoke(1);
      break;
    }
    ++refused;
    EXPECT_THAT(text, StartsWith("full: "));
    EXPECT_THAT(text, HasSubstr("ulimit -n"));
    EXPECT_EQ(open_fds(), fds) << "with " << spare << " to spare";
  }
  EXPECT_EQ(refused, 7) << "gradients, rings, both ends of the pipe, three doorbells";

  // Out of descriptors when a worker knocks: it is told, and the NIC does not spin on it.
  const Offer offer = box_->admit(1, 1);
  Fd socket = connect_to(offer.address, 1000);
  rlimit none = {static_cast<rlim_t>(highest + 1), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  handle();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  const UnixMessage received = receive_message(socket.get(), 4096);
  EXPECT_THAT(error_of([&] { parse_shm_greeting(received.bytes); }), StartsWith("full: "));
  EXPECT_TRUE(rig_->connect(offer, layout_)->connected());
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

TEST_F(ShmTest, NoServerOrOneThatDoesNotAnswer) {
  open();
  Offer offer = box_->admit(0, 1);
  EXPECT_THAT(error_of([&] { connect_shm(offer, layout_, 50); }), StartsWith("timeout: "));
  offer.address += "x";
  EXPECT_THAT(error_of([&] { connect_shm(offer, layout_, 50); }), StartsWith("unavailable: "));
  offer.address = std::string(200, 'a');
  EXPECT_THAT(error_of([&] { connect_shm(offer, layout_, 50); }), HasSubstr("200 bytes"));
  offer.ticket = "short";
  EXPECT_THAT(error_of([&] { connect_shm(offer, layout_, 50); }), HasSubstr("5 characters"));
  offer.transport = "tcp";
  EXPECT_THAT(error_of([&] { connect_shm(offer, layout_, 50); }), HasSubstr("'tcp'"));
}

TEST_F(ShmTest, SocketsOfDeadServersAreRemoved) {
  const pid_t dead = fork();
  if (dead == 0) _exit(0);
  waitpid(dead, nullptr, 0);
  const auto path = [&](const std::string& name) { return rig_->directory() + "/" + name; };
  const std::string stale = path("phub-" + std::to_string(dead) + "-00ff.sock");
  const std::string alive = path("phub-" + std::to_string(dead) + "-0100.sock");
  const std::string foreign = path("phub-" + std::to_string(dead) + "-0100.sock.bak");
  { const Fd listener = listen_at(stale); }
  const Fd other_container = listen_at(alive);
  { const Fd listener = listen_at(foreign); }
  const auto second = make_shm_transport({.socket_dir = rig_->directory()});
  EXPECT_FALSE(std::filesystem::exists(stale));
  EXPECT_TRUE(std::filesystem::exists(alive)) << "somebody answers there";
  EXPECT_TRUE(std::filesystem::exists(foreign)) << "not a name of ours";
  EXPECT_TRUE(std::filesystem::exists(address()));
}

TEST_F(ShmTest, TheSocketDirectoryIsPrivate) {
  const auto refused = [&](const std::string& dir) {
    return error_of([&] { make_shm_transport({.socket_dir = dir}); });
  };
  const std::string dir = rig_->directory() + "/sub";
  EXPECT_EQ(refused(dir), "");
  EXPECT_EQ(std::filesystem::status(dir).permissions(), std::filesystem::perms::owner_all);
  chmod(dir.c_str(), 0755);
  EXPECT_THAT(refused(dir), HasSubstr("chmod 700"));
  EXPECT_THAT(refused(rig_->directory() + "/no/where"), HasSubstr("/no/where"));
  std::filesystem::create_symlink(rig_->directory(), rig_->directory() + "/link");
  EXPECT_THAT(refused(rig_->directory() + "/link"), HasSubstr("is not a directory"));
  EXPECT_THAT(refused(rig_->directory() + "/" + std::string(90, 'd')), HasSubstr("choose another"));
}

TEST_F(ShmTest, AnotherUserIsRefusedEvenWhereTheFilesAreOpen) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to be someone else";
  chmod(rig_->directory().c_str(), 0755);
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
