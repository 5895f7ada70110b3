#include "phub/shard/shard_link.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "phub/background.h"
#include "transport/error.h"
#include "transport/fd.h"

namespace phub {
namespace {

using Steady = std::chrono::steady_clock;
using std::chrono::milliseconds;
constexpr milliseconds kBetweenAttempts{200};
constexpr milliseconds kMostForLeaving{1000};

void ring_bell(int fd) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(fd, &one, sizeof one);
}

}  // namespace

ShardLink::ShardLink(Options options, ShardHello hello)
    : options_(std::move(options)),
      hello_(std::move(hello)),
      event_fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      waiting_(options_.server, options_.token, options_.tls),
      sending_(options_.server, options_.token, options_.tls),
      moving_(options_.server, options_.token, options_.tls) {
  if (event_fd_ < 0) fail_system("eventfd", errno);
  receiver_ = std::jthread([this](const std::stop_token& stop) {
    pthread_setname_np(pthread_self(), "phub-orders");
    receive(stop);
  });
  sender_ = std::jthread([this](const std::stop_token& stop) {
    pthread_setname_np(pthread_self(), "phub-reports");
    deliver(stop);
  });
  mover_ = std::jthread([this](const std::stop_token& stop) {
    pthread_setname_np(pthread_self(), "phub-copies");
    move_pieces(stop);
  });
}

ShardLink::~ShardLink() {
  receiver_.request_stop();
  sender_.request_stop();
  mover_.request_stop();
  waiting_.cancel();
  sending_.cancel();
  moving_.cancel();
  receiver_ = {};
  sender_ = {};
  mover_ = {};
  close(event_fd_);
}

ShardLink::News ShardLink::take() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t n = read(event_fd_, &count, sizeof count);
  const std::lock_guard lock(mutex_);
  return std::exchange(news_, {});
}

void ShardLink::send(std::vector<ShardReport> reports) {
  if (reports.empty()) return;
  const std::lock_guard lock(mutex_);
  if (state_ != State::kJoined) return;
  post_.add(std::move(reports));
  changed_.notify_all();
}

void ShardLink::move(const ShardPiece& piece) {
  const std::lock_guard lock(mutex_);
  piece_ = piece;
  changed_.notify_all();
}

bool ShardLink::is_moving() {
  const std::lock_guard lock(mutex_);
  return piece_ || news_.moved;
}

void ShardLink::rejoin() {
  const std::lock_guard lock(mutex_);
  state_ = State::kApart;
  changed_.notify_all();
}

bool ShardLink::has_joined() {
  const std::lock_guard lock(mutex_);
  return state_ == State::kJoined;
}

void ShardLink::leave() {
  std::unique_lock lock(mutex_);
  if (state_ != State::kJoined) return;
  post_.add({ShardReport{.kind = ShardSays::kLeaves}});
  changed_.notify_all();
  changed_.wait_for(lock, kMostForLeaving,
                    [this] { return state_ != State::kJoined || !post_.has_reports(); });
}

void ShardLink::lose(const ShardWelcome& as, const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (!serves_as(as)) return;
    state_ = State::kLost;
    news_.lost = true;
    news_.orders.clear();
    post_.drop_reports();
    changed_.notify_all();
  }
  options_.note(fmt::format("the server at {} is lost: {}", options_.server, why));
  ring_bell(event_fd_);
}

bool ShardLink::join(const std::stop_token& stop) {
  std::string said;
  while (!stop.stop_requested()) {
    ShardWelcome welcome;
    const std::optional<Error> refused = error_of([&] { welcome = waiting_.join_shard(hello_); });
    if (!refused) {
      const std::lock_guard lock(mutex_);
      state_ = State::kJoined;
      post_.begin(welcome);
      changed_.notify_all();
      options_.note(fmt::format("serving under {}", options_.server));
      return !stop.stop_requested();
    }
    if (stop.stop_requested()) return false;
    if (said != refused->what()) {
      said = refused->what();
      options_.note(fmt::format("not serving under {} yet: {}", options_.server, said));
    }
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, stop, kBetweenAttempts, [] { return false; });
  }
  return false;
}

std::optional<Error> ShardLink::attempt(const std::stop_token& stop, const ShardWelcome& as,
                                        const std::function<void()>& call) {
  const milliseconds lease(as.lease_ms);
  Steady::time_point give_up = Steady::now() + lease;
  for (;;) {
    const Steady::time_point began = Steady::now();
    std::optional<Error> failed = error_of(call);
    if (!failed) return failed;
    // A call has a limit of a lease: this box has stood still, and the server perhaps with it.
    if (Steady::now() > began + lease + lease / 2) give_up = Steady::now() + lease;
    const bool may_pass =
        failed->code() == ErrorCode::kUnavailable || failed->code() == ErrorCode::kTimeout;
    if (!may_pass || stop.stop_requested() || Steady::now() > give_up) return failed;
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, stop, kBetweenAttempts, [&] { return !serves_as(as); });
    if (!serves_as(as)) return failed;
  }
}

bool ShardLink::exchange(ControlClient& client, const std::stop_token& stop, const ShardWelcome& as,
                         const ShardMail& mail, ShardOrders& orders) {
  const std::optional<Error> failed =
      attempt(stop, as, [&] { orders = client.mail(as.shard, mail, as.lease_ms); });
  if (failed && !stop.stop_requested()) lose(as, failed->what());
  return !failed;
}

void ShardLink::move_pieces(const std::stop_token& stop) {
  for (;;) {
    ShardPiece piece;
    ShardWelcome as;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, stop, [this] { return piece_ && !news_.moved; });
      if (stop.stop_requested()) return;
      piece = *piece_;
      as = post_.welcome();
    }
    const std::optional<Error> failed = attempt(stop, as, [&] { move_once(as, piece); });
    const std::lock_guard lock(mutex_);
    piece_.reset();
    news_.moved = {piece, failed};
    ring_bell(event_fd_);
  }
}

void ShardLink::move_once(const ShardWelcome& as, const ShardPiece& piece) {
  const CopyPlace& at = piece.place;
  const std::string_view here(reinterpret_cast<const char*>(piece.bytes.data()),
                              piece.bytes.size());
  if (piece.to_server) {
    return moving_.write_copy(as.shard, at, here, as.lease_ms);
  }
  const std::string came = moving_.read_copy(as.shard, at, as.lease_ms);
  if (came.size() != here.size()) {
    fail(ErrorCode::kInternal, "the server sent a piece of {} bytes, not {}", came.size(),
         here.size());
  }
  std::ranges::copy(std::as_bytes(std::span(came)), piece.bytes.begin());
}

void ShardLink::receive(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, stop, [this] { return state_ != State::kLost; });
      if (stop.stop_requested()) return;
      if (state_ == State::kApart) {
        lock.unlock();
        if (!join(stop)) return;
      }
    }
    ShardMail mail;
    ShardWelcome as;
    {
      const std::lock_guard lock(mutex_);
      mail = post_.asking();
      as = post_.welcome();
    }
    ShardOrders came;
    if (!exchange(waiting_, stop, as, mail, came)) continue;
    const std::lock_guard lock(mutex_);
    if (!serves_as(as)) continue;
    std::ranges::move(post_.take(std::move(came)), std::back_inserter(news_.orders));
    if (!news_.orders.empty()) ring_bell(event_fd_);
  }
}

void ShardLink::deliver(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    ShardMail mail;
    ShardWelcome as;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, stop, [this] { return state_ == State::kJoined && post_.has_reports(); });
      if (stop.stop_requested()) return;
      mail = post_.reporting();
      as = post_.welcome();
    }
    ShardOrders none;
    if (!exchange(sending_, stop, as, mail, none)) continue;
    const std::lock_guard lock(mutex_);
    if (!serves_as(as)) continue;
    post_.delivered(mail);
    changed_.notify_all();
  }
}

}  // namespace phub
