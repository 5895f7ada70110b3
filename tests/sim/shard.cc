#include "tests/sim/shard.h"

#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "tests/sim/virtual_clock.h"

namespace phub::sim {

Shard::Shard(SimNet& net, ControlNet& control, const Clock& clock,
             std::function<ControlHandler&()> server, MakeServer make)
    : net_(net),
      control_(control),
      clock_(clock),
      handler_(std::move(server)),
      make_(std::move(make)) {
  start();
}

void Shard::start() {
  server_ = make_();
  mail_ = std::make_shared<Mail>();
  state_ = State::kApart;
  joining_ = asking_ = reporting_ = moving_ = false;
  failing_since_ms_ = timer_ns_ = hangs_until_ns_ = 0;
}

void Shard::crash() {
  mail_.reset();
  server_.reset();
}

// Its loop sleeps no longer than it says.
void Shard::set_timer() {
  if (net_.now_ns() < timer_ns_) return;
  timer_ns_ = net_.now_ns() + ShardServer::kPollMs * kMs;
  net_.after(ShardServer::kPollMs * kMs, [] {});
}

void Shard::poll() {
  while (!mail_->empty()) {
    auto action = std::move(mail_->front());
    mail_->pop_front();
    action();
  }
  server_->poll();
  std::vector<ShardReport> reports = server_->take_reports();
  if (state_ == State::kJoined) post_.add(std::move(reports));
  if (state_ == State::kEnding && server_->empty()) state_ = State::kApart;
  if (state_ == State::kApart && !joining_) join();
  if (state_ == State::kJoined && !asking_) ask();
  if (state_ == State::kJoined && !reporting_ && post_.has_reports()) report();
  if (!moving_) {
    if (const auto piece = server_->next_piece()) move(*piece);
  }
  set_timer();
}

void Shard::join() {
  joining_ = true;
  control_.call<ShardWelcome>(
      "join shard", mail_,
      [this, hello = server_->hello()](const Reply<ShardWelcome>& reply) {
        handler_().shards().join(hello, reply);
      },
      [this](const Result<ShardWelcome>& result) {
        joining_ = false;
        if (!result) return;
        net_.trace("shard joined");
        post_.begin(*result.value);
        state_ = State::kJoined;
      },
      false);
}

template <typename T>
bool Shard::arrived(uint64_t as, const Result<T>& result) {
  if (state_ != State::kJoined || post_.welcome().shard != as) return false;
  const uint64_t now = clock_.now_ms();
  const bool stood_still = now > std::exchange(tried_ms_, now) + post_.welcome().lease_ms;
  if (result) {
    failing_since_ms_ = 0;
    return true;
  }
  const bool may_pass =
      result.code == ErrorCode::kUnavailable || result.code == ErrorCode::kTimeout;
  if (failing_since_ms_ == 0 || stood_still) failing_since_ms_ = now;
  if (may_pass && now <= failing_since_ms_ + post_.welcome().lease_ms) return false;
  net_.trace("shard lost its server");
  failing_since_ms_ = 0;
  state_ = State::kEnding;
  post_.drop_reports();
  server_->end_all();
  return false;
}

void Shard::ask() {
  asking_ = true;
  const ShardMail mail = post_.asking();
  control_.call<ShardOrders>(
      "orders", mail_,
      [this, as = post_.welcome().shard, mail](const Reply<ShardOrders>& reply) {
        handler_().shards().take_mail(as, mail, reply);
      },
      [this, as = post_.welcome().shard](const Result<ShardOrders>& result) {
        asking_ = false;
        if (!arrived(as, result)) return;
        for (const ShardOrder& order : post_.take(*result.value)) server_->handle(order);
      });
}

void Shard::report() {
  reporting_ = true;
  const auto mail = std::make_shared<ShardMail>(post_.reporting());
  control_.call<ShardOrders>(
      "reports", mail_,
      [this, as = post_.welcome().shard, mail](const Reply<ShardOrders>& reply) {
        handler_().shards().take_mail(as, *mail, reply);
      },
      [this, as = post_.welcome().shard, mail](const Result<ShardOrders>& result) {
        reporting_ = false;
        if (arrived(as, result)) post_.delivered(*mail);
      });
}

// As ShardLink does: again and again while it serves under that server.
void Shard::move(const ShardPiece& piece) {
  moving_ = true;
  const uint64_t as = post_.welcome().shard;
  const auto ended = [this, as, piece](const std::optional<Error>& failed) {
    moving_ = false;
    const bool may_pass = failed && (failed->code() == ErrorCode::kUnavailable ||
                                     failed->code() == ErrorCode::kTimeout);
    if (may_pass && state_ == State::kJoined && post_.welcome().shard == as) return move(piece);
    server_->moved(piece, failed);
  };
  const auto error_in = [](const auto& result) {
    return result ? std::nullopt : std::optional<Error>(std::in_place, result.code, result.message);
  };
  if (!piece.to_server) {
    return control_.call<PartBytes>(
        "read copy", mail_,
        [this, as, piece](const Reply<PartBytes>& reply) {
          handler_().shards().read_copy(as, piece.place, reply);
        },
        [ended, error_in, piece](const Result<PartBytes>& result) {
          if (result && result.value->bytes.size() == piece.bytes.size()) {
            std::memcpy(piece.bytes.data(), result.value->bytes.data(), piece.bytes.size());
          }
          ended(error_in(result));
        });
  }
  const std::string bytes(reinterpret_cast<const char*>(piece.bytes.data()), piece.bytes.size());
  control_.call<Done>(
      "write copy", mail_,
      [this, as, piece, bytes](const Reply<Done>& reply) {
        handler_().shards().check_copy(as, piece.place, bytes.size());
        handler_().shards().write_copy(as, piece.place, bytes, reply);
      },
      [ended, error_in](const Result<Done>& result) { ended(error_in(result)); });
}

}  // namespace phub::sim
