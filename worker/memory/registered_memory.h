// The application's own memory, from which keys are pushed and into which their results go.
//
// If the transport can and no conversion is needed, it reads and writes that memory in place.
// Otherwise push() copies into the library's gradients and wait() copies out of its parameters,
// once each, and the same pass converts and scales. Gradients of keys with a coded format are
// always encoded by push(), from the application's memory or from the library's for them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "transport/in_place.h"
#include "worker/memory/gradient_coder.h"
#include "worker/session/session.h"
#include "worker/worker.h"

namespace phub {

// REQUIRES: the caller of every function holds the session's lock. Functions that take it release
// it while they copy.
class RegisteredMemory {
 public:
  using Lock = std::unique_lock<std::mutex>;
  // REQUIRES: all outlive this.
  RegisteredMemory(const JobSpec& spec, Session& session, WorkerLink& link, GradientCoder& coder);

  bool is_registered(size_t key) const {
    return entries_[key].gradient != nullptr || entries_[key].parameters != nullptr;
  }
  // Whether the transport may read or write the key's memory now.
  bool is_lent(size_t key) const;
  // Registers `memory` for the key. Throws Error(kInvalid) if a format is unknown or the scale is
  // not finite. REQUIRES: the key's memory is not lent, or the worker has failed.
  void set(size_t key, const KeyMemory& memory, Lock& lock);
  // Copies or encodes the gradient, if that is needed, before a push that is not null. Returns
  // whether bytes were copied. REQUIRES: the key is ready. (Another thread may have pushed it when
  // this returns.)
  bool copy_in(size_t key, Lock& lock);
  // Does the same with this gradient, which is then in the library's memory for it. Throws
  // Error(kInvalid) if other memory is registered for the key's gradient.
  bool copy_in_from(size_t key, const void* gradient, Lock& lock);
  // Does the same for a key whose factors are sent: parts follow each other in the slots of all
  // chunks.
  bool copy_factors_in(size_t key, std::span<const FactorPairs> factors, Lock& lock);
  // Does the same for a key whose rows are sent; `order` makes them ascend.
  bool copy_rows_in(size_t key, const GradientRows& rows, std::span<const uint32_t> order,
                    Lock& lock);
  // The magnitudes of the key's chunks (magnitude.h), after copy_in(). Without an optimizer in
  // lock-step the key has no parameters, and they are not relative.
  std::vector<float> magnitudes(size_t key, Lock& lock);
  // Lends the key's memory to the transport. REQUIRES: called right before Session::push().
  void lend(size_t key);
  // The key's result is here: its memory is not lent any more.
  void arrived(size_t key);
  // Ends all lending and copying, for good. REQUIRES: the worker has failed; nothing is being
  // copied.
  void take_all_back();
  std::span<const std::byte> result(size_t key) const;  // the latest result
  // Whether copy_out() would copy a result.
  bool must_copy_out(size_t key) const;
  void copy_out(size_t key, Lock& lock);
  // Copies between the library's memory and the application's. Any thread may call it, without the
  // lock.
  void copy(void* to, const void* from, size_t bytes) const;
  // Waits until no bytes are being copied to or from the key's memory; for Session::kAllKeys, of
  // any key.
  void await_copies(size_t key, Lock& lock);

  std::atomic<uint64_t> bytes_copied{0};

 private:
  static constexpr uint64_t kNone = ~uint64_t{0};
  struct Entry {
    const void* gradient = nullptr;
    void* parameters = nullptr;
    kernels::DType gradient_dtype = {}, parameter_dtype = {};
    float gradient_scale = 1;
    uint64_t copied_round = kNone;
    bool copying = false;
    bool in_place = false;         // requested, possible, and without conversion
    bool result_lent = false;      // the transport writes results there
    bool result_is_there = false;  // it wrote the latest result there
  };
  void convert(const void* from, kernels::DType from_dtype, float scale, void* to,
               kernels::DType to_dtype, size_t elements) const;
  template <typename Copy>
  void unlocked(Entry& entry, Lock& lock, Copy copy);
  void encode(size_t key, Lock& lock);
  uint64_t gradient_offset(size_t key) const;
  uint64_t result_offset(size_t key) const;
  void take_back(size_t key);
  bool overlap(size_t key, const Entry& entry) const;  // whether gradient and result overlap
  bool sends_in_place(size_t key) const;
  bool receives_in_place(size_t key) const;
  uint64_t elements(size_t key) const { return spec_.keys[key].elements; }

  const JobSpec& spec_;
  Session& session_;
  WorkerLink& link_;
  InPlace* const in_place_;  // null: the transport does not support it
  GradientCoder& coder_;
  std::vector<kernels::DType> gradient_dtypes_;  // the keys', in memory
  const kernels::DType parameter_dtype_;         // the job's
  const bool has_parameters_;                    // results are those
  std::vector<Entry> entries_;
  const bool streams_;  // the model is larger than what the caches keep until it is read
  bool ended_ = false;  // the memory is the caller's again, who may free it
  std::condition_variable copied_;
};

}  // namespace phub
