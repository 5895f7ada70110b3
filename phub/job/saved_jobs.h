// The checkpoints of a server's jobs: a job goes on from one, and its snapshots are written as new
// ones.
//
// A job that has a checkpoint and has not ended goes on from the newest that is whole as soon as a
// worker joins it. When it has ended, the next of its name begins anew; the files stay.
//
// Any thread. A call waits for others, but not while one writes tensors.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "phub/checkpoint/options.h"
#include "phub/checkpoint/store.h"
#include "phub/job/job.h"

namespace phub {

class SavedJobs {
 public:
  // Locks the folder, which is made if it is not there. Throws Error (checkpoint/store.h).
  explicit SavedJobs(const CheckpointOptions& options);

  uint64_t every() const { return options_.every; }

  // Throws Error(kUnavailable) if the folder was gone at the last look().
  void check_there() const;
  void look();  // blocks as long as the disk takes

  // Throws Error(kInvalid) if the job could not be saved: a key has a name that files of tensors
  // cannot have, or there are too many.
  static void check(const JobSpec& spec);
  // Throws Error(kInvalid) if no rank of the job may save a state of its own.
  static void check_own_states(const JobSpec& spec);

  // Throws Error if the job has ended since its life `epoch` (kNotFound), or is not known to have
  // had that (kFenced).
  void check_goes_on(const std::string& job, uint64_t epoch);
  // The checkpoint that the job goes on from; nullopt if it is to begin anew. Damaged checkpoints
  // are passed over. `said` gets a line for each of these, and a line about the checkpoint that the
  // job goes on from, or the reason why it begins anew though it ran before. Throws Error if all
  // are damaged, or if one cannot be read.
  std::optional<Manifest> newest(const std::string& job, std::vector<std::string>& said);
  // Gives `job` the values of that checkpoint. Throws Error; then the job cannot be used.
  void load(const Manifest& saved, Job& job);
  // A job begins, or goes on. Returns its epoch, which is higher than any before. Throws
  // Error(kUnavailable) if the disk is full or fails; a worker that joins may try again.
  uint64_t begin_life(const std::string& job);
  uint64_t ended_epoch(
      const std::string& job);  // the last epoch whose workers are not to go on; 0: none
  // Writes the next piece of a rank's part of a checkpoint that is to come; write() or drop_parts()
  // follows. Parts of another checkpoint that was not written are dropped. Throws Error; then all
  // parts of this one are gone. One thread calls these three.
  void add_part(const std::string& job, CheckpointId id, uint32_t rank, std::string_view piece,
                bool is_last);
  void drop_parts(const std::string& job);
  // Fills `into` with the rank's part of that checkpoint, which has `all` bytes, from byte `offset`
  // on. Throws Error.
  void read_part(const std::string& job, CheckpointId id, uint32_t rank, uint64_t all,
                 uint64_t offset, std::span<char> into);
  // The size of each rank's part.
  static std::map<uint32_t, uint64_t> parts_of(const Manifest& saved);
  // Fills `into` with a branch that is on disk, from the newest checkpoint of this life of the job,
  // or the one that the job goes on from. Throws Error: kNotFound, its files are gone; kInvalid,
  // they are damaged.
  void read_branch(const Job& job, uint32_t branch, Job::Branch& into);
  // Writes the snapshot that the job holds, with the parts that were added; the checkpoint shares
  // branches that the snapshot does not have with the checkpoint before. `is_end` means that the
  // job ends with this checkpoint; even before the checkpoint is there the job may not go on from
  // an older one. Throws Error; then there is no new checkpoint, and the old ones stay. Returns
  // other problems, for the log; "": none.
  std::string write(const Job& job, const Manifest& saved, bool is_end);
  // The bytes of this owner's checkpoints, by job. A checkpoint that cannot be read counts as 0
  // bytes.
  std::map<std::string, uint64_t> kept_bytes(const std::string& owner);
  // The job has ended, and is not to go on. Returns false if there is no job that could. Throws
  // Error.
  bool end(const std::string& job);

 private:
  bool may_go_on(const std::string& job, std::vector<std::string>& said);
  std::unique_ptr<CheckpointReader> latest(const std::string& job);
  struct Begun {
    CheckpointId id;
    std::unique_ptr<CheckpointWriter> writer;
    std::map<uint32_t, std::unique_ptr<PartWriter>> parts = {};  // incomplete parts, by rank
  };
  // Makes a new writer if no part of the checkpoint was written yet.
  Begun take_begun(const std::string& job, CheckpointId id);

  const CheckpointOptions options_;
  std::atomic<bool> is_gone_ = false;
  std::mutex mutex_;
  CheckpointStore store_;
  // By job: checkpoints that have parts of ranks, and no tensors yet. Guarded by mutex_.
  std::map<std::string, Begun> begun_;
  // By job: the newest checkpoint of its life, or the one that it goes on from. Guarded by mutex_.
  std::map<std::string, CheckpointId> latest_;
};

}  // namespace phub
