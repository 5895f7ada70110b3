#include "worker/save/saver.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <utility>

#include "worker/link/join.h"
#include "worker/save/rank_state.h"

namespace phub {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kBetweenCalls{100};

// One that the box writes to its disk, and one that asks whether the box wants it.
constexpr size_t kMostDeliveries = 2;

}  // namespace

Saver::Saver(LinkKeeper& keeper, GradientCoder& coder)
    : keeper_(keeper),
      coder_(coder),
      saver_(keeper.options().saver),
      rounds_(keeper.reply(), has_state(keeper.options())) {}

Saver::~Saver() { finish(milliseconds(0)); }

void Saver::restore() {
  const uint64_t bytes = keeper_.reply().part_bytes(keeper_.reply().rank);
  if (bytes == 0) return restore_residuals();
  if (const uint64_t most = most_part_bytes(keeper_.reply().spec); bytes > most) {
    fail(ErrorCode::kInternal, "the server has {} bytes of this rank's saved state, of {} at most",
         bytes, most);
  }
  std::string part;
  part.reserve(bytes);
  while (part.size() < bytes) part += restored_piece(part.size(), bytes - part.size());
  restored_ = unpack(part);
  restore_residuals();
}

// From byte `offset` on, of the `left` that there are.
std::string Saver::restored_piece(uint64_t offset, uint64_t left) {
  const SteadyTime give_up = now() + milliseconds(kLongCallMs);
  for (;;) {
    try {
      std::string piece = keeper_.ask([&](ControlClient& client) {
        return client.restored_part(keeper_.credential(), keeper_.reply().rank, offset);
      });
      if (piece.empty() || piece.size() > left) {
        fail(ErrorCode::kInternal,
             "the server's answer has {} bytes of this rank's saved state from byte {} on, where "
             "{} are left",
             piece.size(), offset, left);
      }
      return piece;
    } catch (const Error& error) {
      // The box has many answers of this size under way.
      if (error.code() != ErrorCode::kUnavailable || now() > give_up) throw;
    }
    std::this_thread::sleep_for(kBetweenCalls);
  }
}

void Saver::restore_residuals() {
  if (coder_.residual_bytes() == 0) return;
  const auto saved = restored_.find(std::string(GradientCoder::kStateName));
  if (saved != restored_.end()) {
    coder_.restore(saved->second);
    restored_.erase(saved);
  } else if (keeper_.reply().first_round > 1) {
    fmt::print(stderr, "phub: rank {} begins in round {} with residuals of zero\n",
               keeper_.reply().rank, keeper_.reply().first_round);
  }
}

std::optional<std::span<const std::byte>> Saver::restored(std::string_view name) const {
  const auto found = restored_.find(std::string(name));
  if (found == restored_.end()) return std::nullopt;
  return std::span(found->second);
}

void Saver::check_not_within() const {
  if (within_ == std::this_thread::get_id()) {
    fail(ErrorCode::kInvalid, "a saver may neither push nor wait");
  }
}

void Saver::received(size_t key, uint64_t round) {
  if (!is_active()) return;
  const std::lock_guard lock(mutex_);
  if (rounds_.received(key, round) && !by_call_) take({});
}

void Saver::set_by_call(bool by_call) {
  if (!is_active()) return;
  const std::lock_guard lock(mutex_);
  by_call_ = by_call;
  if (!by_call && rounds_.missing() == 0) rounds_.next();
}

void Saver::save(RankState more) {
  check_not_within();
  const std::lock_guard lock(mutex_);
  if (!is_active() || !by_call_) {
    fail(ErrorCode::kInvalid, "save: this worker's state is not saved by calls");
  }
  if (rounds_.missing() > 0) {
    fail(ErrorCode::kInvalid, "save: the results of round {} are missing for {} keys",
         rounds_.due(), rounds_.missing());
  }
  take(std::move(more));
}

void Saver::take(RankState more) {
  const uint64_t round = rounds_.due();
  if (coder_.residual_bytes() > 0) {
    more.emplace(GradientCoder::kStateName, coder_.residuals());
  }
  // Before the call: what it throws must not make it due again. After the residuals: now others may
  // push.
  rounds_.next();
  struct Within {
    explicit Within(std::atomic<std::thread::id>& thread) : id(thread) {
      id = std::this_thread::get_id();
    }
    ~Within() { id = std::thread::id(); }
    Within(const Within&) = delete;
    Within& operator=(const Within&) = delete;
    std::atomic<std::thread::id>& id;
  };
  std::string part;
  {
    const Within within(within_);
    RankState state = saver_ ? saver_(round) : RankState{};
    state.merge(more);
    if (!more.empty()) {
      fail(ErrorCode::kInvalid, "saver: '{}' is the name of another entry", more.begin()->first);
    }
    part = pack(state, kMaxStateBytes + coder_.residual_bytes());
  }
  send(round, std::move(part));
}

void Saver::send(uint64_t round, std::string part) {
  std::unique_lock lock(sending_mutex_);
  sent_.wait(lock, [this] {
    deliveries_.remove_if([](const Delivery& delivery) { return delivery.is_over; });
    return deliveries_.size() < kMostDeliveries;
  });
  if (finished_) return;
  Delivery& mine = deliveries_.emplace_back();
  mine.thread = keeper_.start(
      "phub-saver",
      [this, &mine, round,
       bytes = std::make_shared<const std::string>(std::move(part))](const std::stop_token& stop) {
        try {
          deliver(round, *bytes, stop);
        } catch (const std::exception& error) {
          fmt::print(stderr, "phub: the state of rank {} after round {} is not saved: {}\n",
                     keeper_.reply().rank, round, error.what());
        }
        const std::lock_guard done(sending_mutex_);
        mine.is_over = true;
        sent_.notify_all();
      });
  mine.is_over = false;  // the thread cannot say that it is before this one lets go
}

void Saver::deliver(uint64_t round, std::string_view part, const std::stop_token& stop) {
  PartPiece place{.whose = keeper_.reply().rank, .round = round, .all = part.size()};
  while (place.offset < place.all) {
    const std::string_view piece = part.substr(place.offset, kPartPieceBytes);
    if (!deliver_piece(place, piece, stop)) return;
    place.offset += piece.size();
  }
}

// False: nobody wants the rest.
bool Saver::deliver_piece(const PartPiece& place, std::string_view piece,
                          const std::stop_token& stop) {
  const SteadyTime give_up = now() + milliseconds(kLongCallMs);
  while (!stop.stop_requested() && !keeper_.failure().happened()) {
    try {
      keeper_.ask(
          [&](ControlClient& client) { client.send_part(keeper_.credential(), place, piece); });
      return true;
    } catch (const Error& error) {
      if (keeper_.failure().happened() || stop.stop_requested()) return false;
      const PartEnd end = end_of_part(error.code());
      if (end == PartEnd::kOver || end == PartEnd::kThere) return end == PartEnd::kThere;
      if (end == PartEnd::kFailed || now() > give_up) throw;
    }
    std::this_thread::sleep_for(kBetweenCalls);
  }
  return false;
}

void Saver::finish(milliseconds limit) noexcept {
  std::unique_lock lock(sending_mutex_);
  finished_ = true;
  const auto all_sent = [this] { return std::ranges::all_of(deliveries_, &Delivery::is_over); };
  if (!sent_.wait_for(lock, limit, all_sent)) keeper_.cancel_calls();
  std::list<Delivery> rest = std::move(deliveries_);
  lock.unlock();
  for (Delivery& delivery : rest) delivery.thread.request_stop();
}

}  // namespace phub
