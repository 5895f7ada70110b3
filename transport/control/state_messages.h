// The messages of the calls that get and set the state of keys, and that ask for a checkpoint.
// staying.md documents them.
#pragma once

#include <cstdint>
#include <vector>

#include "transport/control/job_spec.h"
#include "transport/wire.h"

namespace phub {

inline constexpr uint64_t kStatePieceBytes = uint64_t{4} << 20;  // at most, of a state in pieces

// POST …/state: a rank begins to read or to set the state of keys.
struct StateRequest {
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint64_t epoch = 0;
  bool set = false;
  std::vector<uint32_t> keys;   // by their numbers; none: all
  std::vector<uint64_t> steps;  // set: the optimizer's steps that each of the keys has made
};

// The state is read or sent as `bytes` of f32: key by key as they were named, of each its
// parameters and then the optimizer's states in the order of optimizer_states().
struct StateReply {
  uint64_t round = 0;  // get: it is as it was after this round
  uint64_t bytes = 0;
  std::vector<uint64_t> steps;  // get: the steps that each of the keys had made then
};

// POST …/checkpoint.
struct CheckpointRequest {
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint64_t epoch = 0;
  uint64_t round = 0;  // asks about an earlier answer's; 0: asks for another checkpoint
};
struct CheckpointReply {
  uint64_t round = 0;    // after which the checkpoint is
  bool durable = false;  // it, or one of a later round, survives the server
};

template <class A>
void fields(A& a, const StateRequest*) {
  a.required("rank", &StateRequest::rank, {0, kMaxRanks - 1});
  a.required("incarnation", &StateRequest::incarnation);
  a.optional("epoch", &StateRequest::epoch);
  a.optional("set", &StateRequest::set);
  a.optional("keys", &StateRequest::keys, {0, kMaxKeys});
  a.optional("steps", &StateRequest::steps, {0, kMaxKeys});
}
template <class A>
void fields(A& a, const StateReply*) {
  a.optional("round", &StateReply::round);
  a.required("bytes", &StateReply::bytes);
  a.optional("steps", &StateReply::steps, {0, kMaxKeys});
}
template <class A>
void fields(A& a, const CheckpointRequest*) {
  a.required("rank", &CheckpointRequest::rank, {0, kMaxRanks - 1});
  a.required("incarnation", &CheckpointRequest::incarnation);
  a.optional("epoch", &CheckpointRequest::epoch);
  a.optional("round", &CheckpointRequest::round);
}
template <class A>
void fields(A& a, const CheckpointReply*) {
  a.required("round", &CheckpointReply::round);
  a.optional("durable", &CheckpointReply::durable);
}

}  // namespace phub
