// The checkpoints of a server's jobs: what a job goes on from, and where its snapshots are written.
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

  // Throws Error(kUnavailable) if the folder is not there any more, as look() has seen it last.
  void check_there() const;
  void look();  // takes as long as the disk takes

  // Throws Error(kInvalid) if the job could not be saved: a key has a name that files of tensors
  // cannot have, or there are too many.
  static void check(const JobSpec& spec);

  // Throws Error if the job has ended since its life `epoch` (kNotFound), or is not known to have
  // had that (kFenced).
  void check_goes_on(const std::string& job, uint64_t epoch);
  // What the job goes on from; nothing: it begins. Damaged ones are passed over. `said` gets a line
  // for each of these, and for what the job goes on from, or why it begins though it has been here.
  // Throws Error if all are damaged, or if it cannot be read.
  std::optional<Manifest> newest(const std::string& job, std::vector<std::string>& said);
  // Gives `job` the values of that checkpoint. Throws Error: then it cannot be used.
  void load(const Manifest& saved, Job& job);
  // A job begins, or goes on. Returns its epoch, which is higher than any before. Throws Error,
  // kUnavailable: the disk is full or fails; those who join may try again.
  uint64_t begin_life(const std::string& job);
  uint64_t ended_epoch(const std::string& job);  // the last whose workers are not to go on; 0: none
  // Writes the next piece of a rank's part of a checkpoint that is to come, after which write() is
  // called for it, or drop_parts(). Parts of another one that was not written are dropped. Throws
  // Error: then all parts of this one are gone. One thread for these three.
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
  // or that which it goes on from. Throws Error: kNotFound or kInvalid, its files are gone or
  // damaged.
  void read_branch(const Job& job, uint32_t branch, Job::Branch& into);
  // Writes the snapshot that the job holds, with the parts that were added; branches that the
  // snapshot does not have, it shares with the checkpoint before. `is_end`: the job ends with it,
  // and is not to go on, from before the checkpoint is there. Throws Error: it is not there, and
  // those before are. Returns what else went wrong, for the log; "": nothing.
  std::string write(const Job& job, const Manifest& saved, bool is_end);
  // The bytes of the checkpoints that this owner has, by job. What cannot be read counts as none.
  std::map<std::string, uint64_t> kept_bytes(const std::string& owner);
  // The job has ended, and is not to go on. False: there is none that could. Throws Error.
  bool end(const std::string& job);

 private:
  bool may_go_on(const std::string& job, std::vector<std::string>& said);
  std::unique_ptr<CheckpointReader> latest(const std::string& job);
  struct Begun {
    CheckpointId id;
    std::unique_ptr<CheckpointWriter> writer;
    std::map<uint32_t, std::unique_ptr<PartWriter>> parts = {};  // that are not complete, by rank
  };
  // With a new writer if nothing of it was written yet.
  Begun take_begun(const std::string& job, CheckpointId id);

  const CheckpointOptions options_;
  std::atomic<bool> is_gone_ = false;
  std::mutex mutex_;
  CheckpointStore store_;
  // By job: checkpoints that have parts of ranks, and no tensors yet. Guarded by mutex_.
  std::map<std::string, Begun> begun_;
  // By job: the newest of its life, or that which it goes on from. Guarded by mutex_.
  std::map<std::string, CheckpointId> latest_;
};

}  // namespace phub
