// The other side of a cache, which gets its updates and gives it parameters: the box, or the other
// devices of this process. A key is a piece of a table: its rows one after another, f32.
//
// The states of a key: here → push() → its memory is lent → next() returns it → here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/error.h"
#include "worker/worker.h"

namespace phub::geeps {

// Thread-safe, but only one thread may call next(). Errors are phub::Error; after one, every call
// throws it.
class Exchange {
 public:
  virtual ~Exchange() = default;

  virtual size_t keys() const = 0;
  virtual const std::string& name(size_t key) const = 0;
  virtual size_t elements(size_t key) const = 0;

  // The number of pairs of factors that a push of the key may send; gradient() has room for so many
  // times (rows + columns) floats. 0 means that its gradient is sent as it is.
  virtual uint32_t samples(size_t /*key*/) const { return 0; }

  // Always return the same memory. REQUIRES: the gradient is written, and the parameters are read,
  // only while the key is here: from the start, or from next(), to push().
  virtual std::span<float> gradient(size_t key) = 0;
  virtual std::span<const float> parameters(size_t key) const = 0;

  // Sends the gradient, higher priorities first. REQUIRES: the key is here.
  virtual void push(size_t key, int32_t priority) = 0;
  // Does the same with factors, which lie in gradient(key) or in other memory that is lent
  // likewise. REQUIRES: they are at most samples(key).
  virtual void push_factors(size_t /*key*/, std::span<const FactorPairs> /*factors*/,
                            int32_t /*priority*/) {
    throw Error(ErrorCode::kInternal, "this exchange sends no factors");
  }
  // Does the same as push() of a gradient of zeros.
  virtual void push_null(size_t key) = 0;

  // Blocks until a pushed key is here again, and returns it; nullopt after stop().
  virtual std::optional<size_t> next() = 0;
  virtual void stop() = 0;  // from now on next() returns nullopt
  // This side failed and will not push any more: others that share the exchange get the error.
  virtual void abandon(const std::exception& /*error*/) {}
  // This side ended and will not push any more: others that wait for its push get an error.
  virtual void leave() {}

  // Worker::get_state() and set_state(), between the clocks of this side: its keys are all here.
  // The new state counts from the next clock on. Only jobs in lock-step with an optimizer have such
  // a state; in others the calls throw kInvalid.
  virtual void get_state(std::span<KeyState> /*states*/) {
    throw Error(ErrorCode::kInternal, "this exchange has no optimizer whose state it could give");
  }
  virtual void set_state(std::span<const KeyState> /*states*/) {
    throw Error(ErrorCode::kInternal, "this exchange has no optimizer whose state could be set");
  }

  // The number of clocks by which other workers' updates may be missing in the parameters: 0 for
  // BSP, the slack for SSP, nullopt for async.
  virtual std::optional<uint32_t> slack() const = 0;
  // This rank's own state in the checkpoints of its job (WorkerOptions::saver). The state is saved
  // next after so many pushes of the key since the start of this exchange; kNever: it is not saved.
  static constexpr uint64_t kNever = ~uint64_t{0};
  virtual uint64_t saved_after(size_t /*key*/) const { return kNever; }
  // Calls the saver, and saves `tables` beside the saver's state. REQUIRES: every key was pushed
  // saved_after() times, and is here.
  virtual void save(RankState /*tables*/) {}
  // See Worker::restored().
  virtual std::optional<std::span<const std::byte>> restored(const std::string& /*name*/) const {
    return std::nullopt;
  }

  // The branches of the job (Worker::branches()), as they are when the results of so many pushes of
  // every key since the start of this exchange are here. nullopt if the job has none.
  struct Branches {
    uint64_t round = 0;  // the round that begins then: it is fully known
    BranchReply all;
  };
  virtual std::optional<Branches> branches(uint64_t /*pushes*/) { return std::nullopt; }

  // The ranks that the exchange waits for, if known. For messages only: it may take a second.
  virtual std::vector<uint32_t> missing_ranks() { return {}; }
  virtual uint32_t rank() const = 0;
  virtual uint32_t world_size() const = 0;
};

}  // namespace phub::geeps
