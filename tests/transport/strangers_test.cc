// Who comes to a box and should not, over every transport that listens at a socket: what strangers
// and workers that err are told, that others notice nothing of it, and that nothing is left behind.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/transport/link_test.h"
#include "tests/transport/ofi_rig.h"
#include "tests/transport/shm_rig.h"
#include "tests/transport/tcp_raw_worker.h"
#include "tests/transport/tcp_rig.h"
#include "tests/transport/tcp_tls_rig.h"
#include "tests/worker/expect_error.h"
#include "transport/ofi/format.h"
#include "transport/shm/format.h"
#include "transport/shm/socket.h"

namespace phub {
namespace strangers_test {

using ::testing::AllOf;
using ::testing::AnyOf;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Bytes = std::vector<std::byte>;

// --- How to come to a box ------------------------------------------------------------------------

struct Wrong {
  Bytes hello;
  const char* says;
};
template <typename T>
Bytes bytes_of(const T& value) {
  const auto bytes = std::as_bytes(std::span(&value, 1));
  return {bytes.begin(), bytes.end()};
}

template <typename Hello>
std::vector<Wrong> wrong_hellos(const Hello& good) {
  std::vector<Wrong> all;
  const auto add = [&](const char* says, auto change) {
    Hello hello = good;
    change(hello);
    all.push_back({bytes_of(hello), says});
  };
  add("not a phub peer", [](Hello& h) { h.header.magic = 1; });
  add("protocol version 9", [](Hello& h) { h.header.version = 9; });
  add("unauthorized: ", [](Hello& h) { h.ticket[5] = 'x'; });
  add("unauthorized: ", [](Hello& h) { h.ticket.fill('0'); });
  if constexpr (requires { good.header.fds; }) {
    add("message type 1", [](Hello& h) { h.header.type = ShmMessage::kWelcome; });
    add("3 descriptors", [](Hello& h) { h.header.fds = 3; });
  } else {
    using Type = decltype(good.header.type);
    add("message type 7", [](Hello& h) { h.header.type = Type{7}; });
    add("message type 2", [](Hello& h) { h.header = {.type = Type::kRefusal, .bytes = 64}; });
    add("with 65 bytes", [](Hello& h) { h.header.bytes = 65; });
    add("queue 2 of 2", [](Hello& h) { h.queue = 2; });
    add("invalid: ", [](Hello& h) { h.queue = ~0u; });
    add("queues: 3", [](Hello& h) { h.queues = 3; });
    add("chunks of queue 1: 9", [](Hello& h) { h.queue_chunks = 9; });
    add("mismatch: ", [](Hello& h) { h.gradient_bytes = 1; });
    add("bytes of results: 1", [](Hello& h) { h.result_bytes = 1; });
  }
  if constexpr (requires { good.results; }) {
    add("name of 0 bytes", [](Hello& h) { h.results.name_bytes = 0; });
    add("invalid: ", [](Hello& h) { h.results.name_bytes = 129; });
    add("invalid: ", [](Hello& h) { h.results.name_bytes = ~0u; });
  }
  return all;
}

struct Limits {
  uint32_t half_open_ms = 5000, max_half_open = 64;
};
using Rig = std::unique_ptr<TransportRig>;

// A transport, and the socket that its boxes listen at.
struct Door {
  std::string name;
  std::function<Rig(const Limits&)> make;  // null: this host has none
  std::function<Bytes(const Offer&, const LinkLayout&, uint32_t queue)> hello;
  std::function<std::vector<Wrong>(const Offer&, const LinkLayout&)> wrong;
  std::function<void(std::span<const std::byte>)> parse;  // an answer; throws what it refuses with
  std::function<std::unique_ptr<WorkerLink>(const Offer&, const LinkLayout&, uint32_t ms)> dial;
  rlim_t admission_fds = 0;  // of a rank with three queues; 0: libfabric's business
  const char* full_says = "full: ";
  bool at_path = false;  // of whole messages; else a stream, at an address

  const std::string& address(const Offer& offer) const {
    return at_path ? offer.address : offer.queues[0].address;
  }
  RawTcp knock(const std::string& address) const {
    return at_path ? RawTcp(connect_to(address, 1000)) : RawTcp(address);
  }
  friend void PrintTo(const Door& door, std::ostream* out) {  // NOLINT: GoogleTest looks for it
    *out << door.name;
  }
};

template <typename Hello>
Door door_of(std::string name, std::function<Rig(const Limits&)> make) {
  Door door{.name = std::move(name), .make = std::move(make)};
  door.hello = [](const Offer& offer, const LinkLayout& layout, uint32_t queue) {
    Hello hello = hello_of<Hello>(offer, layout, queue);
    if constexpr (requires { hello.results; }) hello.results.name_bytes = 16;
    return bytes_of(hello);
  };
  door.wrong = [hello = door.hello](const Offer& offer, const LinkLayout& layout) {
    Hello good;
    std::memcpy(&good, hello(offer, layout, layout.cores - 1).data(), sizeof good);
    return wrong_hellos(good);
  };
  return door;
}

Door tcp_door(std::string name = "tcp", std::function<Rig(const Limits&)> make = nullptr) {
  if (!make) {
    make = [](const Limits& limits) {
      return std::make_unique<TcpRig>(
          TcpOptions{.half_open_ms = limits.half_open_ms, .max_half_open = limits.max_half_open});
    };
  }
  Door door = door_of<TcpHello>(std::move(name), std::move(make));
  door.parse = [](std::span<const std::byte> answer) { parse_tcp_answer(answer); };
  door.dial = [](const Offer& offer, const LinkLayout& layout, uint32_t ms) {
    return connect_tcp(offer, layout, ms);
  };
  door.admission_fds = 3;
  door.full_says = "full: 3 connections of rank 1";
  return door;
}

Door shm_door() {
  Door door = door_of<ShmHello>("shm", [](const Limits& limits) {
    return std::make_unique<ShmRig>(ShmOptions{.socket_dir = "",
                                               .half_open_ms = limits.half_open_ms,
                                               .max_half_open = limits.max_half_open});
  });
  door.parse = [](std::span<const std::byte> answer) { parse_shm_greeting(answer); };
  door.dial = connect_shm;
  door.admission_fds = 7;  // gradients, rings, both ends of the pipe, three doorbells
  door.at_path = true;
  return door;
}

Door ofi_door(const std::string& provider, Near near = Near::kNone) {
  std::string name = "ofi_" + provider;
  std::ranges::replace(name, ';', '_');
  if (near != Near::kNone) name += near == Near::kAll ? "_near" : "_half_near";
  Door door = door_of<OfiHello>(name, [provider, near](const Limits& limits) {
    return OfiRig::over(
        provider, nullptr, near,
        {.half_open_ms = limits.half_open_ms, .max_half_open = limits.max_half_open});
  });
  door.parse = [](std::span<const std::byte> answer) { parse_ofi_answer(answer); };
  door.dial = [](const Offer& offer, const LinkLayout& layout, uint32_t ms) {
    return connect_ofi(offer, layout, ms);
  };
  return door;
}

std::vector<Door> doors() {
  std::vector<Door> all = {tcp_door(), shm_door()};
  for (const char* provider : providers_to_test()) all.push_back(ofi_door(provider));
  return all;
}
// Where what is left behind is another thing.
std::vector<Door> all_doors() {
  std::vector<Door> all = doors();
  all.push_back(tcp_door("tcp_near", [](const Limits&) {
    return std::make_unique<TcpRig>(TcpOptions(), TcpTrust(), nullptr, true);
  }));
  all.push_back(tcp_door("tcp_tls", [](const Limits&) { return make_tcp_tls_rig(); }));
  for (const char* provider : providers_to_test()) {
    for (const Near near : {Near::kAll, Near::kOdd}) all.push_back(ofi_door(provider, near));
  }
  return all;
}

// --- Descriptors ---------------------------------------------------------------------------------

size_t open_fds() {
  const auto begin = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin, std::filesystem::directory_iterator()));
}
// Takes every free descriptor below the highest one in use: the next is highest + 1.
std::vector<Fd> fill_descriptors(rlim_t& highest) {
  highest = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    highest = std::max<rlim_t>(highest, std::stoull(entry.path().filename()));
  }
  std::vector<Fd> taken;
  while (taken.empty() || static_cast<rlim_t>(taken.back().get()) <= highest) {
    taken.emplace_back(fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0));
  }
  taken.pop_back();
  return taken;
}
// Lowers the limit of open files as long as it lives.
class FileLimit {
 public:
  explicit FileLimit(rlim_t limit) {
    getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit few = {limit, before_.rlim_max};
    setrlimit(RLIMIT_NOFILE, &few);
  }
  ~FileLimit() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_ = {};
};
size_t phub_mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("phub-") != line.npos;
  return count;
}

// -------------------------------------------------------------------------------------------------

class StrangersTest : public LinkTest, public ::testing::WithParamInterface<Door> {
 protected:
  void SetUp() override { start({}); }
  void start(const Limits& limits) { rig_ = door().make(limits); }
  const Door& door() const { return GetParam(); }
  // What the box says: "welcome", an error as error_of() has it, "" if it just closes the
  // connection, "silence".
  std::string heard(RawTcp& stranger) const {
    const Bytes message = stranger.receive();
    if (message.empty()) return stranger.ended() ? "" : "silence";
    const std::string error = error_of([&] { door().parse(message); });
    return error == "none" ? "welcome" : error;
  }
  std::string answer_to(const std::string& address, std::span<const std::byte> message) {
    RawTcp stranger = door().knock(address);
    stranger.send(message);
    handle();
    return heard(stranger);
  }
  std::string refusal(const Offer& offer, const LinkLayout& layout) {
    return error_of([&] { rig_->connect(offer, layout); });
  }
  long count(TransportEvent::Kind kind) const {
    return std::ranges::count(rig_->events(), kind, &TransportEvent::kind);
  }
  bool nic_calls(int within_ms) const {
    pollfd events = {rig_->transport().event_fd(), POLLIN, 0};
    return ::poll(&events, 1, within_ms) == 1;
  }
  void end_in_every_way(uint32_t& incarnation);
};

TEST_P(StrangersTest, WrongHellosAreAnsweredAndChangeNothing) {
  open();
  const Offer offer = box_->admit(0, 1), others = box_->admit(1, 1);
  const std::string address = door().address(offer);
  for (const uint32_t rank : {0u, 1u}) attach(rank, 1);
  for (const Wrong& wrong : door().wrong(offer, layout_)) {
    EXPECT_THAT(answer_to(address, wrong.hello), HasSubstr(wrong.says));
  }
  const std::string http = "GET /metrics HTTP/1.1\r\nHost: box\r\n\r\n";
  EXPECT_THAT(answer_to(address, std::as_bytes(std::span(http))),
              HasSubstr(door().at_path ? "invalid: " : "not a phub peer"));
  EXPECT_EQ(rig_->events().back().kind, TransportEvent::kRefused);  // for the server's log
  const std::string peer =
      door().at_path ? "of process " : "from " + parse_host_port(address).host + ":";
  EXPECT_THAT(
      rig_->events().back().reason,
      AllOf(HasSubstr(std::string(rig_->transport().name()) + ": a connection " + peer),
            HasSubstr(door().at_path ? "was refused: invalid: " : "invalid: hello: magic")));
  EXPECT_THAT(answer_to(address, Bytes(100'000)), StartsWith("invalid: "));

  const Bytes good = door().hello(offer, layout_, layout_.cores - 1);
  const auto part = [&](size_t bytes) { return std::span(good).first(bytes); };
  for (const size_t size : {size_t{0}, size_t{1}, size_t{15}, size_t{16}, good.size() - 1}) {
    RawTcp stranger = door().knock(address);
    stranger.send(part(size));
    handle();
    EXPECT_THAT(heard(stranger), StartsWith(door().at_path && size > 0 ? "invalid: " : "silence"));
    shutdown(stranger.socket(), SHUT_WR);
    handle();
    EXPECT_EQ(heard(stranger), "") << size;
  }
  if (!door().at_path) {  // a hello may come in pieces
    RawTcp slow = door().knock(address);
    const Bytes hello = door().hello(others, layout_, 1);
    slow.send(std::span(hello).first(7));
    handle();
    EXPECT_EQ(heard(slow), "silence");
    slow.send(std::span(hello).subspan(7));
    handle();
    EXPECT_THAT(heard(slow), AnyOf("welcome", HasSubstr("endpoint")));
  }
  // After all this the ticket is as good as new.
  const auto worker = rig_->connect(offer, layout_);
  expect_exchange(*worker, 0);
}

TEST_P(StrangersTest, TheSilentHaveTheirTimeAndAJobGoesOn) {
  start({.half_open_ms = 500, .max_half_open = 8});
  open();
  const Offer offer = box_->admit(0, 1);
  attach(0, 1);
  const auto worker = rig_->connect(offer, layout_);
  join(1, 1);
  drop(1);
  handle();
  const size_t before = open_fds();
  const std::string address = door().address(offer);
  const Bytes hello = door().hello(offer, layout_, 0);
  std::vector<RawTcp> silent;
  for (int i = 0; i < 100; ++i) {
    silent.push_back(door().knock(address));
    if (i % 2 == 1 && !door().at_path) {  // and no more
      silent.back().send(std::span(hello).first(16));
    }
    if (i % 10 == 0) handle(1);
  }
  handle(10);
  EXPECT_LE(open_fds(), before + 108) << "100 of ours, at most 8 of the box";
  expect_exchange(*worker, 0);
  auto other = join(1, 2);
  EXPECT_TRUE(other->connected()) << "room for the honest";
  EXPECT_THAT(heard(silent.front()), HasSubstr("too many"));
  std::string last = "silence";
  for (int i = 0; i < 50 && last == "silence"; ++i) {
    EXPECT_TRUE(nic_calls(5000)) << "it asks to be called when their time is over";
    handle(1);
    last = heard(silent.back());
  }
  EXPECT_THAT(last, HasSubstr("within 500 ms"));
  expect_exchange(*worker, 0);
  silent.clear();
  other.reset();
  drop(1);
  handle();
  if (door().admission_fds > 0) {  // else libfabric has some
    EXPECT_EQ(open_fds(), before);
  }
}

TEST_P(StrangersTest, ABurstOfHonestWorkersIsNotAFlood) {
  start({.max_half_open = 1});
  open(12, 1);
  std::vector<RawTcp> workers;
  for (uint32_t rank = 0; rank < 12; ++rank) {
    const Offer offer = box_->admit(rank, 1);
    attach(rank, 1);
    workers.push_back(door().knock(door().address(offer)));
    workers.back().send(door().hello(offer, layout_, 0));
  }
  handle();
  for (RawTcp& worker : workers)
    EXPECT_THAT(heard(worker), AnyOf("welcome", HasSubstr("endpoint")));
}

// Its hello is read to make room for another one; the event that tells of the hello comes behind.
TEST_P(StrangersTest, ASlowHelloIsReadBeforeItIsTooLate) {
  if (door().admission_fds == 0) GTEST_SKIP() << "a provider may refuse the name of nobody";
  start({.max_half_open = 1});
  open(1, 1);
  const Offer offer = box_->admit(0, 1);
  RawTcp slow = door().knock(door().address(offer));
  handle(1);
  const RawTcp other = door().knock(door().address(offer));
  slow.send(door().hello(offer, layout_, 0));
  handle(1);
  EXPECT_EQ(heard(slow), "welcome");
  EXPECT_TRUE(rig_->events().empty()) << "nobody was refused, and nobody went";
  slow.close();
  handle(2);
  EXPECT_EQ(count(TransportEvent::kDisconnected), 1);
}

// Admission fails as a whole at each descriptor that it cannot get, names the limit, and leaves
// nothing. A worker that knocks meanwhile is told, and the NIC does not spin on it.
TEST_P(StrangersTest, RunningOutOfDescriptors) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the sanitizer's own checks need descriptors";
#endif
  if (door().admission_fds == 0) GTEST_SKIP() << "how many libfabric needs is not ours";
  open(2, 3);
  const auto running = join(0, 1);
  rlim_t highest = 0, spare = 0;
  const std::vector<Fd> filled = fill_descriptors(highest);
  const size_t fds = open_fds();
  Offer offer;
  for (std::string said; spare < 12; ++spare) {
    {
      const FileLimit few(highest + 1 + spare);
      said = error_of([&] { offer = box_->admit(1, 1); });
    }
    if (said == "none") break;
    EXPECT_THAT(said, AllOf(StartsWith(door().full_says), HasSubstr("ulimit -n")));
    EXPECT_EQ(open_fds(), fds) << "with " << spare << " to spare";
  }
  EXPECT_EQ(spare, door().admission_fds);
  const std::vector<Fd> rest = fill_descriptors(highest);
  RawTcp raw = door().knock(door().address(offer));
  raw.send(door().hello(offer, layout_, 0));
  {
    const FileLimit none(highest + 1);
    handle();
    EXPECT_FALSE(nic_calls(0));
    EXPECT_THAT(heard(raw), StartsWith("full: "));
    expect_exchange(*running, 0);
  }
  if (!door().at_path) {
    const FileLimit few(highest + 3);
    EXPECT_THAT(error_of([&] { door().dial(offer, layout_, 100); }), StartsWith("full: "));
  }
  handle();
  EXPECT_TRUE(rig_->connect(offer, layout_)->connected());
}

TEST_P(StrangersTest, NoServerOrOneThatDoesNotAnswer) {
  open();
  const Offer good = box_->admit(0, 1);
  const auto with = [&](const std::function<void(Offer&)>& change) {
    Offer offer = good;
    change(offer);
    return error_of([&] { door().dial(offer, layout_, 20'000); });
  };
  const auto at = [&](const std::string& address) {
    return with([&](Offer& o) { (door().at_path ? o.address : o.queues[1].address) = address; });
  };
  EXPECT_THAT(error_of([&] { door().dial(good, layout_, 50); }), StartsWith("timeout: "));
  EXPECT_THAT(with([](Offer& o) { o.ticket = "short"; }), HasSubstr("5 characters"));
  EXPECT_THAT(with([](Offer& o) { o.transport = "other"; }), HasSubstr("'other'"));
  if (door().at_path) {
    EXPECT_THAT(at(good.address + "x"), StartsWith("unavailable: "));
    EXPECT_THAT(at(std::string(200, 'a')), HasSubstr("200 bytes"));
  } else {
    EXPECT_THAT(at("127.0.0.1:1"), StartsWith("unavailable: no server at 127.0.0.1:1"));
    EXPECT_THAT(at("box:7"), HasSubstr("not an IP address"));
    EXPECT_THAT(at("nowhere"), StartsWith("invalid: "));
    EXPECT_THAT(with([](Offer& o) { o.queues.pop_back(); }),
                StartsWith("mismatch: 1 queues are offered, the plan has 2"));
  }
}

INSTANTIATE_TEST_SUITE_P(Every, StrangersTest, ::testing::ValuesIn(doors()),
                         [](const auto& instance) { return instance.param.name; });

// --- Nothing is left behind ----------------------------------------------------------------------

void StrangersTest::end_in_every_way(uint32_t& incarnation) {
  {  // a whole life
    auto link = join(0, ++incarnation);
    expect_exchange(*link, 0);
    link.reset();
    handle(2);
    drop(0);
  }
  {  // revoked before the worker comes
    const Offer offer = box_->admit(0, ++incarnation);
    box_->revoke(0);
    EXPECT_THAT(refusal(offer, layout_), HasSubstr("join again"));
  }
  {  // the worker expects other sizes
    LinkLayout other = layout_;
    other.slots_bytes = 1;
    EXPECT_THAT(refusal(box_->admit(0, ++incarnation), other), StartsWith("mismatch: "));
    box_->revoke(0);
  }
  {  // it dies with one queue of two, or before it takes the answer
    const Offer offer = box_->admit(0, ++incarnation);
    RawTcp dies = door().knock(door().address(offer));
    dies.send(door().hello(offer, layout_, layout_.cores - 1));
    handle(2);
    dies.close();
    handle(2);
    box_->revoke(0);
  }
  {  // a reconnection
    auto link = join(0, ++incarnation);
    if (link->can_reconnect()) {
      detach(0);
      const Offer again = box_->reconnect(0);
      attach(0, incarnation);
      rig_->reconnect(*link, again);
      expect_exchange(*link, 0);
    }
    drop(0);
  }
  {  // a job ends with its ranks
    const std::unique_ptr<BoxLink> other = rig_->transport().open_job(layout_);
    const Offer offer = other->admit(1, 1);
    const auto link = rig_->connect(offer, layout_);
    RawTcp garbage = door().knock(door().address(offer));
    garbage.send(Bytes(100));
    handle(2);
  }
  handle(2);
}

class LeftBehindTest : public StrangersTest {};

TEST_P(LeftBehindTest, Nothing) {
  open();
  uint32_t incarnation = 0;
  for (int i = 0; i < 2; ++i) end_in_every_way(incarnation);
  // A connection that still says goodbye is not one that is left behind.
  const auto settle = [&](const std::function<bool()>& is_settled) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    do {
      handle();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    } while (!is_settled() && std::chrono::steady_clock::now() < until);
  };
  size_t fds = open_fds();
  int same = 0;
  settle([&] { return (same = std::exchange(fds, open_fds()) == fds ? same + 1 : 0) == 50; });
  const size_t mappings = phub_mappings();
  for (int i = 0; i < (door().admission_fds == 0 ? 5 : 25); ++i) end_in_every_way(incarnation);
  settle([&] { return open_fds() <= fds && phub_mappings() <= mappings; });
  EXPECT_LE(open_fds(), fds);
  EXPECT_LE(phub_mappings(), mappings);
}

INSTANTIATE_TEST_SUITE_P(Every, LeftBehindTest, ::testing::ValuesIn(all_doors()),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace strangers_test
}  // namespace phub
