// The directory of a box's checkpoints.
//
//   DIR/.lock                                    held by the box that writes here
//   DIR/resnet50%2Ev2/epoch                      the job's latest epoch
//   DIR/resnet50%2Ev2/ended                      the last epoch that nobody is to go on from
//   DIR/resnet50%2Ev2/round-000000000123.epoch-4/
//       parameters.safetensors  state-exp_avg.safetensors  rank-7/position  manifest.json
//       clocks.safetensors (of a job that is not in lock-step)
//       branch-2-parameters.safetensors  branch-2-state-exp_avg.safetensors (of a branch that does
//       not run then; of one that was killed, the same file in every checkpoint since)
//
// A checkpoint is written to a folder "writing-…", which is renamed when all in it is on the disk.
// Then manifest.json gets its name: that is the moment from which the checkpoint exists. Nothing is
// ever overwritten. One that is removed is first renamed to "removing-…": a folder of a round that
// has lost its manifest was damaged by somebody else, and is never taken for nothing. Files are
// 0600, in folders of 0700. No symbolic link is followed.
//
// Errors are those of files.h, and kInvalid for damaged files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "phub/checkpoint/checked_file.h"
#include "phub/checkpoint/files.h"
#include "phub/checkpoint/manifest.h"
#include "phub/checkpoint/names.h"
#include "phub/checkpoint/safetensors.h"
#include "transport/error.h"

namespace phub {

inline constexpr std::string_view kManifestFile = "manifest.json";
inline constexpr std::string_view kNewManifestFile = "manifest.json.new";  // until it is committed
// The name of the manifest once a job has passed over the checkpoint, to go on from an older one:
// nothing goes on from it any more.
inline constexpr std::string_view kPassedOverFile = "manifest.json.passed-over";
inline constexpr std::string_view kParametersFile = "parameters.safetensors";
inline constexpr std::string_view kViewFile = "view.safetensors";  // the ranks' view of them
// For a job that is not in lock-step: "steps" of the optimizer on each chunk, and "clocks", by
// chunk and rank the round of the rank's last update that the chunk has.
inline constexpr std::string_view kClocksFile = "clocks.safetensors";
// The name of the file for a slot of the optimizer's state: "state-exp_avg.safetensors".
std::string state_file(std::string_view slot);
// The name of the file for a branch that does not run in the checkpoint's next round:
// "branch-2-parameters.safetensors".
std::string branch_file(uint32_t branch, std::string_view file);

// As long as one is there, the checkpoint is not removed by this process.
class CheckpointPin {};

// Reads one checkpoint. Every byte is compared with its checksum when it is read, so it returns the
// bytes that were written. One thread at a time; it may outlive the store.
class CheckpointReader {
 public:
  // Reads the manifest, and checks that it is that of this job and checkpoint.
  CheckpointReader(Files& files, const std::string& job, std::string folder, CheckpointId id);

  const Manifest& manifest() const { return manifest_; }
  const std::string& folder() const { return folder_; }
  CheckpointId id() const { return {manifest_.epoch, manifest_.round}; }
  bool has(std::string_view file) const;

  // The tensors in a file. Throws Error(kNotFound) if there is no such file.
  const TensorTable& tensors(std::string_view file);
  // Bytes of a tensor, from `offset` in it on. REQUIRES: they are in the tensor.
  void read_tensor(std::string_view file, size_t tensor, uint64_t offset,
                   std::span<std::byte> into);

  std::vector<PartId> parts() const;
  uint64_t part_bytes(uint32_t rank, std::string_view name) const;  // kNotFound
  void read_part(uint32_t rank, std::string_view name, uint64_t offset, std::span<std::byte> into);

  // Bytes of any file of the manifest.
  void read_file(std::string_view file, uint64_t offset, std::span<std::byte> into) {
    input(file).read(offset, into);
  }
  // Reads everything. Returns a sentence for each damaged file; empty: the checkpoint is whole.
  // kNeeded leaves out the files of killed branches, without which the job goes on.
  enum class What { kAll, kNeeded };
  std::vector<std::string> verify(What what = What::kAll);

  // The manifest's entry of a file. Throws Error(kNotFound).
  const CheckpointFile& entry(std::string_view file) const;

  void hold(std::shared_ptr<CheckpointPin> pin) { pin_ = std::move(pin); }

 private:
  CheckedInput& input(std::string_view file);

  Files& files_;
  std::string folder_;
  Manifest manifest_;
  std::shared_ptr<CheckpointPin> pin_;
  std::map<std::string, TensorTable, std::less<>> tables_;
  std::string open_name_;  // the name of the open file
  std::unique_ptr<CheckedInput> open_;
};

// Throws the error again if it is of this host (permissions, limits) and not of the checkpoint.
void rethrow_unless_damage(const Error& error);

// A checkpoint that cannot be used, for the log.
struct Refusal {
  std::string folder;
  std::string why;
};

// The checkpoints in a directory, for reading. Needs no lock: while a box writes there, a
// checkpoint may be gone when it is opened.
class Checkpoints {
 public:
  explicit Checkpoints(std::string directory, Files& files = system_files());
  virtual ~Checkpoints() = default;

  std::vector<std::string> jobs();
  // Newest first: the highest epoch, in it the highest round. Empty if there is no such job.
  std::vector<CheckpointId> list(const std::string& job);
  // All that have the name of a checkpoint, newest first. `problem` is the reason why list()
  // does not have it: a link, a file, or a folder without a manifest; "": it has.
  struct Named {
    CheckpointId id;
    std::string problem;
  };
  std::vector<Named> named(const std::string& job);
  std::unique_ptr<CheckpointReader> open(const std::string& job, CheckpointId id);
  // The newest that has all that is needed, after reading that; null if there is none. Adds those
  // that are newer and cannot be used to `refused`. An error that somebody can repair (permissions,
  // open files) is no reason to go back to an older one: it is thrown.
  std::unique_ptr<CheckpointReader> newest_whole(const std::string& job,
                                                 std::vector<Refusal>& refused);

 protected:
  std::string folder_of(const std::string& job) const;
  std::string folder_of(const std::string& job, CheckpointId id) const;
  // The job has one. Throws Error(kInvalid): it is a link, or no folder.
  bool has_folder(const std::string& job);
  // Called for each that newest_whole() refuses, and for each that is opened.
  virtual void on_refused(const std::string&) {}
  virtual std::shared_ptr<CheckpointPin> pin(const std::string&) { return nullptr; }

  const std::string directory_;
  Files& files_;
};

class CheckpointWriter;

// The directory for the box that writes there. Belongs to one thread, with its writers.
class CheckpointStore final : public Checkpoints {
 public:
  // Makes the directory if it is not there, locks it (kTaken: another box has it), and removes the
  // leftovers of a crash. The last `keep` whole checkpoints of every job are kept.
  // REQUIRES: keep > 0.
  CheckpointStore(std::string directory, uint32_t keep, Files& files = system_files());

  // Throws Error(kUnavailable) if the directory is not the one that was locked. Any thread.
  void check_there() const { lock_->check(); }

  // Begins a checkpoint. Throws Error(kTaken) if there is one of this epoch and round.
  std::unique_ptr<CheckpointWriter> begin(const std::string& job, CheckpointId id);

  // Keeps a checkpoint that a job is to go on from. The box that wrote it may have been killed
  // before it had synced its name; from here on it stays, as far as the disk is concerned. The
  // newer ones that were refused are not gone on from later, even if they can be read then: the
  // job's further rounds do not lead to them.
  void keep(const CheckpointReader& reader, const std::vector<Refusal>& refused);

  // Returns an epoch that is higher than any before, and durable when this returns. To be called
  // whenever a job starts or is restored, so that no two lives of a job share an epoch.
  uint64_t raise_epoch(const std::string& job);
  // The highest that any checkpoint or note of the job has; 0: it has none.
  uint64_t epoch_of(const std::string& job);

  // The job has ended: none of the checkpoints that it has is one to go on from. Durable when this
  // returns.
  void end(const std::string& job);
  bool has_ended(const std::string& job, uint64_t epoch);
  uint64_t ended_epoch(const std::string& job);  // the last that has ended; 0: none has

  // Removes all of a job.
  void remove_job(const std::string& job);

 private:
  friend class CheckpointWriter;
  void make_job_folder(const std::string& job);
  uint64_t read_epoch(const std::string& job, std::string_view note);
  void write_epoch(const std::string& job, std::string_view note, uint64_t epoch);
  void remove_checkpoint(const std::string& folder);
  void remove_if_there(const std::string& folder);
  void remove_leftovers(const std::string& job_folder);
  // Removes checkpoints older than the last `keep`. Returns the failures; "": there were none.
  std::string prune(const std::string& job);
  void on_refused(const std::string& folder) override { refused_.insert(folder); }
  std::shared_ptr<CheckpointPin> pin(const std::string& folder) override;
  bool pinned(const std::string& folder);

  const uint32_t keep_;
  std::unique_ptr<FileLock> lock_;
  std::set<std::string> refused_;  // folders; they do not count as whole
  std::set<std::string> writing_;  // folders of writers
  std::map<std::string, std::weak_ptr<CheckpointPin>> pins_;
};

// Writes the part of a rank while it comes in.
class PartWriter {
 public:
  void write(std::span<const std::byte> bytes) { output_.write(bytes); }
  uint64_t bytes() const { return output_.entry().bytes; }
  void finish();  // durable when this returns

 private:
  friend class CheckpointWriter;
  PartWriter(CheckpointWriter& writer, const std::string& path, std::string name);

  CheckpointWriter& writer_;
  CheckedOutput output_;
};

// Writes one checkpoint. Destroyed before commit(): all of it is removed. After an Error it can
// only be destroyed. The store must outlive it.
class CheckpointWriter {
 public:
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // The next bytes of a tensor, from `offset` in it on: at least one, in memory that stays as it is
  // until the next call.
  using TensorSource = std::function<std::span<const std::byte>(size_t tensor, uint64_t offset)>;
  // `file`: kParametersFile, state_file(…), or another name that ends in ".safetensors".
  void add_tensors(const std::string& file, const std::vector<TensorInfo>& tensors,
                   const TensorSource& source,
                   const std::map<std::string, std::string>& metadata = {});

  // A file of tensors of an older checkpoint, which is of both from now on; a copy of it where the
  // file system cannot. Throws Error, kNotFound or kInvalid if it is gone or damaged; then the
  // manifest has it all the same, as it should be.
  void share_tensors(CheckpointReader& from, const std::string& file);

  // Several parts may be written at a time. The writer must outlive it.
  std::unique_ptr<PartWriter> add_part(uint32_t rank, std::string_view name);

  // Waits until the tensors are on the disk. Touches no other checkpoint: the store's thread may go
  // on meanwhile.
  void sync();

  // Makes the checkpoint exist, and removes older ones. `manifest` needs no files, and has the
  // epoch and round of begin(). When this returns the checkpoint is durable; if it throws, the one
  // before it stands. Returns the failures in removing older ones, for the log; "": there were
  // none. Throws Error(kInvalid) if a part is not finished.
  std::string commit(Manifest manifest);

 private:
  friend class CheckpointStore;
  friend class PartWriter;
  CheckpointWriter(CheckpointStore& store, std::string job, CheckpointId id);
  void abandon() noexcept;
  void copy_tensors(CheckpointReader& from, const CheckpointFile& file);

  CheckpointStore& store_;
  Files& files_;
  const std::string job_;
  const CheckpointId id_;
  const std::string job_folder_;
  std::string folder_;  // "…/writing-…", then the checkpoint's own
  std::vector<std::unique_ptr<CheckedOutput>> tensor_files_;  // written, not synced
  std::vector<CheckpointFile> entries_;
  std::set<std::string> rank_folders_;
  size_t parts_open_ = 0;
  bool committed_ = false;
};

}  // namespace phub
