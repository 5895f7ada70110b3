// A shard's side of the mail with its server: which orders came, and which reports the server has
// not got yet. Both are numbered, so what is sent again counts once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include "transport/control/shard_messages.h"

namespace phub {

class ShardPost {
 public:
  // It has joined: what was before is void.
  void begin(const ShardWelcome& welcome) { *this = ShardPost(welcome); }
  ShardPost() = default;

  const ShardWelcome& welcome() const { return welcome_; }
  void add(std::vector<ShardReport> reports) {
    std::ranges::move(reports, std::back_inserter(unsent_));
  }
  bool has_reports() const { return !unsent_.empty(); }
  void drop_reports() { unsent_.clear(); }

  // To wait for orders, or with all reports.
  ShardMail asking() const { return {.received = orders_, .first = reports_, .wait = true}; }
  ShardMail reporting() const { return {.first = reports_, .reports = unsent_}; }
  // The answers to them. Returns the orders that are new.
  std::vector<ShardOrder> take(ShardOrders came) {
    std::vector<ShardOrder> fresh;
    for (size_t i = 0; i < came.orders.size(); ++i) {
      if (came.first + i != orders_) continue;  // it came before
      fresh.push_back(std::move(came.orders[i]));
      ++orders_;
    }
    return fresh;
  }
  void delivered(const ShardMail& mail) {
    const auto sent = static_cast<ptrdiff_t>(mail.reports.size());
    unsent_.erase(unsent_.begin(), unsent_.begin() + sent);
    reports_ += mail.reports.size();
  }

 private:
  explicit ShardPost(const ShardWelcome& welcome) : welcome_(welcome) {}

  ShardWelcome welcome_;
  uint64_t orders_ = 0;   // that came
  uint64_t reports_ = 0;  // number of the first of unsent_
  std::vector<ShardReport> unsent_;
};

}  // namespace phub
