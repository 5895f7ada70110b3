// What calls.def says of a call, and the bounds of the bodies of all calls of the control port.
#pragma once

#include <cstdint>
#include <string_view>

#include "transport/control/branch_messages.h"
#include "transport/control/loss_messages.h"
#include "transport/control/messages.h"
#include "transport/control/state_messages.h"

namespace phub {

inline constexpr uint64_t kMaxJoinBytes = uint64_t{64} << 20;  // key tables
static_assert(kPartPieceBytes <= kMaxJoinBytes);               // which is the most of any body
inline constexpr uint64_t kMaxStateRequestBytes = uint64_t{256} << 10;
inline constexpr uint64_t kMaxNewsBytes = uint64_t{256} << 10;  // of a rack
inline constexpr uint64_t kMaxShardBytes = uint64_t{1} << 20;   // cores and NICs of a box
inline constexpr uint64_t kMaxBodyBytes = uint64_t{16} << 10;   // everything else

inline constexpr uint32_t kCallMs = 10000;      // how long a caller waits for an answer
inline constexpr uint32_t kLongCallMs = 60000;  // where the server moves state or writes files

struct CallInfo {
  std::string_view path;
  std::string_view summary;             // for openapi.json
  std::string_view lane = "calls";      // a rack sends the calls of one lane one after another
  uint64_t most_bytes = kMaxBodyBytes;  // of the request
  uint32_t timeout_ms = kCallMs;        // 0: no limit
  // False: the call would act twice if a broken connection made the client send it again.
  bool may_repeat = true;
  bool admin_too = false;   // an admin may make the call, too, without being a rank
  bool is_beat = false;     // the server hears when the connection of the call ends
  bool is_barrier = false;  // the server hears when that happens before the answer
};

// A message of calls.def, with the rank that sends it.
template <typename Request>
Request sent_by(const Credential& who, Request request) {
  request.rank = who.rank;
  request.incarnation = who.incarnation;
  request.epoch = who.epoch;
  return request;
}

namespace calls {
#define PHUB_CALL(name, Answer, where, ...) inline constexpr CallInfo name{__VA_ARGS__};
#define PHUB_REQUEST(name, Request, Answer, where, ...) inline constexpr CallInfo name{__VA_ARGS__};
#include "transport/control/calls.def"
}  // namespace calls

}  // namespace phub
