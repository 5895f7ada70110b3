#include "phub/job/barrier.h"

#include <fmt/format.h>

#include <utility>

namespace phub {

void Barrier::enter(uint64_t token, uint32_t rank) {
  refuse(rank, ErrorCode::kInvalid, fmt::format("rank {} entered the barrier twice", rank));
  waiting_[rank] = token;
}

void Barrier::leave(uint32_t rank) {
  refuse(rank, ErrorCode::kUnavailable,
         fmt::format("the connection over which rank {} waited has ended", rank));
}

void Barrier::lose(uint32_t rank, const std::string& why) { refuse(rank, ErrorCode::kFenced, why); }

void Barrier::refuse(uint32_t rank, ErrorCode code, const std::string& message) {
  const auto waiting = waiting_.find(rank);
  if (waiting == waiting_.end()) return;
  actions_.refuse(waiting->second, code, message);
  waiting_.erase(waiting);
}

void Barrier::open() {
  for (const auto& [rank, token] : std::exchange(waiting_, {})) actions_.reply(token);
}

void Barrier::close(ErrorCode code, const std::string& message) {
  for (const auto& [rank, token] : std::exchange(waiting_, {})) {
    actions_.refuse(token, code, message);
  }
}

}  // namespace phub
