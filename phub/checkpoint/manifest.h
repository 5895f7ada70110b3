// The manifest of a checkpoint: the state of the job at its round, and a checksum of every byte of
// its files. It is written last: a checkpoint without a manifest does not exist.
//
//   {"checksum":"0a1b2c3d","version":1,"manifest":{…}}
//
// The checksum is the CRC-32C of everything behind its comma. Later versions keep this form, so
// that every version can refuse one that it does not know.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "transport/control/branch_messages.h"
#include "transport/control/messages.h"

namespace phub {

// 2: keys may have shapes and groups. 3: jobs may be out of lock-step, or without an optimizer.
// 4: jobs may have branches. 5: branches may be killed. 6: forks that are still to come.
inline constexpr uint32_t kManifestVersion = 6;
inline constexpr uint64_t kChecksumBytes = uint64_t{1} << 20;  // bytes of a file per checksum
inline constexpr uint64_t kMaxManifestBytes = uint64_t{1} << 30;
inline constexpr size_t kMaxOwnerBytes = 255;
inline constexpr uint64_t kMaxRound = uint64_t{1} << 62;
inline constexpr uint64_t kMaxSteps = 1u << 24;
inline constexpr uint64_t kMaxSeeds = 1024;
inline constexpr uint64_t kMaxFiles = 1u << 20;

struct CheckpointFile {
  std::string name;  // "parameters.safetensors", "rank-7/position": see names.h
  uint64_t bytes = 0;
  std::vector<uint32_t>
      checksums;  // CRC-32C of each MiB from the file's beginning; the last is shorter

  friend bool operator==(const CheckpointFile&, const CheckpointFile&) = default;
};

// A rank at the checkpoint's round.
struct SavedRank {
  uint32_t incarnation = 0;  // the latest; 0: none
  uint64_t last_round = 0;   // the last round of a lost incarnation
  bool expected = false;     // live, or waited for

  friend bool operator==(const SavedRank&, const SavedRank&) = default;
};

// A branch, after all decisions up to the checkpoint (phub/job/branches.h).
struct SavedBranch {
  uint32_t branch = 0;
  uint32_t parent = 0;
  uint64_t round = 0;   // forked before it
  uint64_t rounds = 0;  // its own rounds before it began to run or stopped, whichever is later
  uint32_t place = 0;   // 0: it runs, or is on disk; else its shelf
  uint64_t killed = 0;  // before this round; 0: it is not. Up to the checkpoint's next: on disk
  std::map<std::string, double> values;  // hyperparameters that are not the optimizer's defaults

  friend bool operator==(const SavedBranch&, const SavedBranch&) = default;
};

// A branch that does not run in the checkpoint's next round, in files of its own (branch_file()).
// If it lay on no shelf then, the checkpoint shares its files with the one before it.
struct SavedShelf {
  uint32_t place = 0;   // its shelf; above the job's `branches`: a dock (BranchOrder); 0: neither
  uint32_t branch = 0;  // perhaps one that is discarded later, and runs until then
  std::vector<uint64_t> steps;  // the optimizer's: by chunk, by key, or one for all

  friend bool operator==(const SavedShelf&, const SavedShelf&) = default;
};

struct SavedBranches {
  uint32_t next = 0;  // number of the next child; 0: the job has no branches
  std::vector<SavedBranch> branches;
  std::vector<SavedShelf> shelves;
  std::vector<BranchMove> moves;  // still to come, before later rounds than the first; ascending
  std::vector<BranchRun> runs;    // from the first round that comes on
  std::vector<BranchFork> forks;  // the same

  friend bool operator==(const SavedBranches&, const SavedBranches&) = default;
};

struct Manifest {
  JobSpec spec;
  uint64_t round = 0;  // completed by every chunk: of the slowest rank, out of lock-step
  uint64_t epoch = 1;  // rises with every restore
  // Of a standby that has lost its source (phub/job/standby.h), and `ranks` are the source's: the
  // epoch that these had. 0: there is no such.
  uint64_t source_epoch = 0;
  std::string owner;  // SHA-256 of the token that the job was created with; empty: none
  std::vector<uint32_t> live_ranks;
  std::vector<SavedRank> ranks;  // max_ranks, or more if it once had more
  uint64_t log_first = 0;        // number of the first record below; those before it were dropped
  std::vector<LogRecord> log;
  // The optimizer's steps in lock-step: by chunk, by key, or one for all; none: the round.
  std::vector<uint64_t> steps;
  std::vector<HyperChange> hyper;  // hyperparameters by ascending round
  SavedBranches branches;
  std::map<std::string, uint64_t> seeds;
  std::vector<CheckpointFile> files;

  friend bool operator==(const Manifest&, const Manifest&) = default;
};

// A killed branch that the checkpoint has in its files, and the job nowhere else. Nobody needs
// these to go on from it.
bool is_on_disk(const SavedBranch& branch, const Manifest& manifest);
bool is_on_disk(uint32_t branch, const Manifest& manifest);
// It lay on a shelf of the job, and the snapshot has a copy.
bool is_copied(const SavedShelf& shelf, const JobSpec& spec);

// The text of the file. Throws Error(kInvalid) if text is not UTF-8 or a number not finite.
std::string manifest_text(const Manifest& manifest);

// Throws Error(kInvalid) that names the problem: the checksum, a version that is newer, a field,
// the job's spec, a file's name, size or number of checksums.
Manifest parse_manifest(std::string_view text);

}  // namespace phub
