#include "worker/save/key_states.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace phub {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kBetweenPieces{50};

// The caller's memory in the order in which the server has it. Throws Error(kInvalid) if it does
// not have the keys' sizes.
std::vector<std::span<float>> arrays_of(const JobSpec& spec, std::span<const KeyState> states) {
  const size_t count = 1 + optimizer_states(spec).size();
  std::vector<std::span<float>> arrays;
  for (const KeyState& state : states) {
    if (state.key >= spec.keys.size()) {
      fail(ErrorCode::kInvalid, "key {} is out of range: job '{}' has {} keys", state.key,
           spec.name, spec.keys.size());
    }
    const KeySpec& key = spec.keys[state.key];
    if (state.arrays.size() != count) {
      fail(ErrorCode::kInvalid,
           "key '{}' has {} arrays, its parameters and those of optimizer {}; {} were given",
           key.name, count, spec.optimizer, state.arrays.size());
    }
    for (const std::span<float> array : state.arrays) {
      if (array.size() != key.elements) {
        fail(ErrorCode::kInvalid, "key '{}' has {} elements, an array of {} was given", key.name,
             key.elements, array.size());
      }
      arrays.push_back(array);
    }
  }
  if (states.empty()) fail(ErrorCode::kInvalid, "no key is named");
  return arrays;
}

// Calls visit(floats) for the parts of `arrays` that lie from `offset` bytes on, `bytes` in all.
template <typename Visit>
void for_each_part(std::span<const std::span<float>> arrays, uint64_t offset, uint64_t bytes,
                   const Visit& visit) {
  uint64_t first = offset / sizeof(float), count = bytes / sizeof(float);
  for (const std::span<float> array : arrays) {
    if (first >= array.size()) {
      first -= array.size();
      continue;
    }
    const std::span<float> part = array.subspan(first, std::min(count, array.size() - first));
    visit(part);
    count -= part.size();
    first = 0;
    if (count == 0) return;
  }
}

// A state that was begun, and is ended with this.
class Transfer {
 public:
  Transfer(LinkKeeper& keeper, std::span<const KeyState> states, bool set) : keeper_(keeper) {
    StateRequest request{.set = set, .keys = {}, .steps = {}};
    for (const KeyState& state : states) {
      request.keys.push_back(static_cast<uint32_t>(state.key));
      if (set) request.steps.push_back(state.step);
    }
    try {
      reply = keeper_.ask_server(
          [&](ControlClient& client) { return client.begin_state(keeper_.credential(), request); });
    } catch (...) {
      end();  // the server may have begun it all the same
      throw;
    }
  }
  ~Transfer() { end(); }
  void end() noexcept {
    try {
      keeper_.ask([&](ControlClient& client) { client.end_state(keeper_.credential()); });
    } catch (...) {  // NOLINT(bugprone-empty-catch): the server drops it with this rank
    }
  }
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // The server may have too many long messages under way.
  template <typename Body>
  auto piece(Body body) {
    const SteadyTime give_up = now() + milliseconds(kLongCallMs);
    for (;;) {
      try {
        return keeper_.ask(body);
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kUnavailable || now() > give_up) throw;
      }
      std::this_thread::sleep_for(kBetweenPieces);
    }
  }

  StateReply reply;

 private:
  LinkKeeper& keeper_;
};

void check_bytes(const StateReply& reply, std::span<const std::span<float>> arrays) {
  uint64_t bytes = 0;
  for (const std::span<float> array : arrays) bytes += array.size_bytes();
  if (reply.bytes == bytes) return;
  fail(ErrorCode::kInternal, "the server has {} bytes of these keys' state, this worker {}",
       reply.bytes, bytes);
}

}  // namespace

uint64_t get_state(LinkKeeper& keeper, std::span<KeyState> states) {
  const auto arrays = arrays_of(keeper.spec(), states);
  Transfer transfer(keeper, states, false);
  const StateReply& reply = transfer.reply;
  check_bytes(reply, arrays);
  if (reply.steps.size() != states.size()) {
    fail(ErrorCode::kInternal, "the server has {} steps for {} keys", reply.steps.size(),
         states.size());
  }
  for (uint64_t at = 0; at < reply.bytes;) {
    const std::string piece = transfer.piece(
        [&](ControlClient& client) { return client.read_state(keeper.credential(), at); });
    if (piece.empty() || piece.size() % sizeof(float) != 0 || piece.size() > reply.bytes - at) {
      fail(ErrorCode::kInternal, "the server has sent a piece of {} bytes", piece.size());
    }
    const char* from = piece.data();
    for_each_part(arrays, at, piece.size(), [&from](std::span<float> part) {
      std::memcpy(part.data(), from, part.size_bytes());
      from += part.size_bytes();
    });
    at += piece.size();
  }
  for (size_t i = 0; i < states.size(); ++i) states[i].step = reply.steps[i];
  return reply.round;
}

uint64_t set_state(LinkKeeper& keeper, std::span<const KeyState> states) {
  const auto arrays = arrays_of(keeper.spec(), states);
  Transfer transfer(keeper, states, true);
  const StateReply& reply = transfer.reply;
  check_bytes(reply, arrays);
  std::string piece;
  for (uint64_t at = 0; at < reply.bytes; at += piece.size()) {
    piece.resize(std::min(kStatePieceBytes, reply.bytes - at));
    char* to = piece.data();
    for_each_part(arrays, at, piece.size(), [&to](std::span<float> part) {
      std::memcpy(to, part.data(), part.size_bytes());
      to += part.size_bytes();
    });
    transfer.piece(
        [&](ControlClient& client) { client.write_state(keeper.credential(), at, piece); });
  }
  return keeper
      .ask_server([&](ControlClient& client) { return client.apply_state(keeper.credential()); })
      .round;
}

}  // namespace phub
