// A rank's own state in the checkpoints of its job: the calls of the caller's saver, the part on
// its way to the box, and the part that came back at the join.
//
// The rounds that are saved. The reply to the join has a number that stays for the life of the job
// on this box. A checkpoint that needs parts of ranks is one of a round that is a multiple of it.
// So every rank knows for itself, as soon as it has a round's results, whether its state is needed:
// no message can come too late, however fast the rank is. The box chooses such a round at a
// boundary, before any chunk has closed it (RunningJob::commit), so no part can come too early. It
// may leave rounds out, while it still writes the one before: then it refuses the part, which is no
// error. A rank that joins in the middle, from round F on, sends parts from F on, and none for F -
// 1.
//
// The time to save them. A round is over  for the caller when every key's result of it was returned
// to it, by the order of its own calls and not by that of the network: so the same program is asked
// at the same place in every run. The state is taken on that thread; it is sent on others: while
// the box's disk is behind with one part, the box answers at once that it does not want the next.
// If a thread that knows nothing of the caller's state gets the results, the caller calls save().
//
// Residuals of coded gradients are saved with the state, and by themselves where the caller has no
// saver. No push of the next round begins before they are taken.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "worker/link/link_keeper.h"
#include "worker/memory/gradient_coder.h"
#include "worker/save/saved_rounds.h"
#include "worker/worker.h"

namespace phub {

// Thread-safe, except for restore().
class Saver {
 public:
  // REQUIRES: both outlive this.
  Saver(LinkKeeper& keeper, GradientCoder& coder);
  ~Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  // Asks for the part of the checkpoint that the rank goes on from, if there is one, and takes the
  // residuals from it. REQUIRES: the keeper is connected. Throws Error.
  void restore();
  std::optional<std::span<const std::byte>> restored(std::string_view name) const;

  bool is_active() const { return rounds_.any(); }
  // Throws Error(kInvalid) within the caller's saver, which would wait for itself.
  void check_not_within() const;
  // The caller has got the key's result of this round. Calls its saver if it was the last one.
  void received(size_t key, uint64_t round);
  // Whether only save() calls the saver. A round that ended meanwhile without it is left out.
  void set_by_call(bool by_call);
  bool is_by_call() const { return by_call_; }
  // Calls the saver for due(), and sends `more` with its state. Throws Error(kInvalid) if results
  // of that round are missing, or two entries have the same name.
  void save(RankState more);
  // Before a push of this round: whether the state of an earlier one must be taken first, which
  // needs the results of all keys.
  bool is_due_before(uint64_t round) const { return rounds_.is_due_before(round); }
  uint64_t due() const { return rounds_.due(); }

  // Waits until all parts are sent; after the limit all calls to the control port are cancelled.
  // Afterwards nothing is sent.
  void finish(std::chrono::milliseconds limit) noexcept;

 private:
  void take(RankState more);
  void send(uint64_t round, std::string part);
  void deliver(uint64_t round, std::string_view part, const std::stop_token& stop);
  bool deliver_piece(const PartPiece& place, std::string_view piece, const std::stop_token& stop);

  std::string restored_piece(uint64_t offset, uint64_t left);
  void restore_residuals();

  LinkKeeper& keeper_;
  GradientCoder& coder_;
  const std::function<RankState(uint64_t round)>& saver_;
  std::atomic<bool> by_call_ = false;
  RankState restored_;

  std::mutex mutex_;  // held while the caller's saver runs
  std::atomic<std::thread::id> within_ = {};
  SavedRounds rounds_;  // guarded by mutex_, but for due()

  std::mutex sending_mutex_;  // guards the members below
  std::condition_variable_any sent_;
  bool finished_ = false;
  struct Delivery {
    bool is_over = true;
    std::jthread thread;
  };
  std::list<Delivery> deliveries_;
};

}  // namespace phub
