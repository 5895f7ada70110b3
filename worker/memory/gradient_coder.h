// Gradients of keys whose format is coded (fp8, int8, int4, topk): the library's f32 memory for
// them, and the residuals, the parts that their formats could not hold so far (kernels/encode.h),
// which are state of this rank.
//
// A residual is zero when a rank begins. It changes when the key is pushed with a gradient whose
// sum with it is finite; a null leaves it alone. A rank that takes over from one that was lost
// begins with zero as well, unless the job goes on from a checkpoint: the residuals are a part of
// the rank's state there.
//
// If a budget carries chunks over to a later round (WorkerOptions::carry_over), the residual also
// keeps the part of them that was not sent, and keys in f32 have a residual, too: their sums with
// the next gradient are rounded to f32, and nothing else is lost.
//
// Where a key's format changes by the round (transport/format_schedule.h), so does the part that it
// could not hold: a round in f32 sends the residual with the gradient, and leaves none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/kernels.h"
#include "transport/control/key_schedules.h"
#include "transport/control/messages.h"
#include "worker/memory/key_arrays.h"
#include "worker/session/session.h"
#include "worker/worker.h"

namespace phub {

// Whether gradients of any key are coded.
bool has_coded_keys(const JobSpec& spec);

// Whether the residuals of a rank are saved by themselves: where the box keeps no state, they do
// not make the job a saved one.
bool saves_residuals(const JobSpec& spec);

// Whether chunks can be carried over. Throws Error(kInvalid): the job is in lock-step, or gradients
// of a key have 16 bits, or its factors are sent.
void check_carries(const JobSpec& spec);

// Calls for different keys may run at the same time.
class GradientCoder {
 public:
  // The name of the residuals in the rank's state: those of all keys one after another, f32.
  static constexpr std::string_view kStateName = "phub.residuals";

  // `carries`: there are residuals of all keys. Throws Error: kFull, there is no memory for them;
  // kInvalid, carries and the server saves the job; and check_carries()'s.
  explicit GradientCoder(const JoinReply& reply, bool carries = false);

  // Whether a push makes slots of the key's gradient: its format is coded, and not left to the
  // caller; or each slot has a weight behind it.
  bool codes(size_t key) const { return by_chunks_[key] != 0 && !by_caller_[key]; }
  // Whether its format is coded, in some round.
  bool is_coded(size_t key) const { return has_schedule(key) || !kernels::is_plain(formats_[key]); }
  bool has_schedule(size_t key) const { return schedules_.of(key) != nullptr; }
  // From now on the caller puts encoded gradients of the key into its slots, and keeps its residual
  // up to date, or it does so no more. REQUIRES: the format is a coded one; nobody pushes the key.
  void leave_to_caller(size_t key, bool by_caller) { by_caller_[key] = by_caller ? 1 : 0; }
  bool left_to_caller(size_t key) const { return by_caller_[key] != 0; }
  std::span<float> residual(size_t key) const { return residuals_[key]; }
  bool carries() const { return carries_; }
  kernels::DType format(size_t key, uint64_t round) const;  // the format of its slots
  // The library's memory for its gradient. REQUIRES: codes(key)
  std::span<float> gradient(size_t key) const { return gradients_[key]; }
  // Fills the key's slots in `session` for this round: the elements at `gradient`, which have this
  // format and are multiplied by `scale`. REQUIRES: codes(key); the key is ready, and nobody else
  // pushes it.
  void encode(Session& session, size_t key, uint64_t round, const void* gradient,
              kernels::DType dtype, float scale);

  // Takes the chunk in the slot over into the residual. False: it must be sent, as it is coded and
  // holds a value that is not a number. REQUIRES: carries(); the chunk's message of this round is a
  // null.
  bool carry(size_t key, const ChunkLayout& chunk, const std::byte* slot);
  // Adds the values that were carried over to the gradient in the slots, for a key that is not
  // coded; encode() does so for the others. REQUIRES: carries() && !codes(key); nobody else pushes
  // it.
  void add_carried(size_t key, std::span<std::byte> slots);

  uint64_t residual_bytes() const { return residual_elements_ * sizeof(float); }
  // REQUIRES of both: nothing is encoded meanwhile.
  std::vector<std::byte> residuals() const;
  // Throws Error(kInvalid): they have another size.
  void restore(std::span<const std::byte> residuals);

 private:
  struct Random {
    bool stochastic;
    uint64_t job, rank;
  };
  const Random random_;
  const bool carries_;
  const KeySchedules schedules_;
  std::vector<kernels::DType> formats_;  // by key, unless that has a schedule
  std::vector<uint8_t> by_caller_;       // by key: not bits, which keys would share
  std::vector<uint8_t> by_chunks_;       // by key, whatever the caller does
  KeyArrays gradients_, residuals_;      // empty for keys that have none
  std::vector<float> decoded_;           // the values of one chunk
  uint64_t residual_elements_ = 0;
};

}  // namespace phub
