// The calls to a running job that wait for a boundary, by the token under which the membership
// knows each call. Control thread only.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "transport/control/messages.h"
#include "transport/error.h"

namespace phub {

class Requests {
 public:
  uint64_t new_token() { return next_++; }  // also for a call that waits elsewhere

  // `reply` gets the round that the change holds from. Returns the token.
  uint64_t expect(Reply<uint64_t> reply) {
    const uint64_t token = new_token();
    waiting_[token] = std::move(reply);
    return token;
  }
  // `reply` gets make(round).
  template <typename T, typename Make>
  uint64_t expect(Reply<T> reply, Make make) {
    return expect([reply = std::move(reply), make](Result<uint64_t> result) {
      if (!result) return reply({result.code, result.message});
      reply(make(*result.value));
    });
  }
  uint64_t expect_done(Reply<Done> reply) {
    return expect(std::move(reply), [](uint64_t) { return Done{}; });
  }

  void answer(uint64_t token, const Result<uint64_t>& result) {
    const auto request = waiting_.extract(token);
    if (!request.empty()) request.mapped()(result);
  }
  void refuse(ErrorCode code, const std::string& why) {  // the job has ended
    for (auto& [token, reply] : waiting_) reply({code, why});
  }

 private:
  uint64_t next_ = 1;
  std::map<uint64_t, Reply<uint64_t>> waiting_;
};

}  // namespace phub
