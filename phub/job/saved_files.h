// The files of a job's checkpoint, and the part of the job that each of them has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "phub/checkpoint/manifest.h"
#include "phub/checkpoint/safetensors.h"
#include "phub/checkpoint/store.h"
#include "phub/job/job.h"
#include "transport/error.h"

namespace phub {

// The file of one of the arrays that a job saves.
std::string file_of(const Job& job, size_t array);
std::vector<std::string> files_of_branch(const Job& job, uint32_t branch);

struct SavedFile {
  std::string name;
  uint32_t shelf = 0;
  size_t array = 0;
};

// All files that have tensors of the job's keys: of the job, and of the shelves for which
// concerns(shelf) holds.
template <typename Concerns>
std::vector<SavedFile> files_of(const Job& job, const Manifest& saved, const Concerns& concerns) {
  std::vector<SavedFile> files;
  for (size_t array = 0; array < job.saved_arrays(); ++array) {
    files.push_back({.name = file_of(job, array), .array = array});
  }
  for (const SavedShelf& shelf : saved.branches.shelves) {
    if (!concerns(shelf)) continue;
    size_t array = 0;
    for (std::string& name : files_of_branch(job, shelf.branch)) {
      files.push_back({std::move(name), shelf.place, array++});
    }
  }
  return files;
}

// Throws Error(kNotFound) if the checkpoint has no files of that branch.
const SavedShelf& shelf_of(const Manifest& saved, uint32_t branch);

// The tensors of a file that has one array of all keys.
std::vector<TensorInfo> tensors_of(const JobSpec& spec);
void write_tensors(const Job& job, const Manifest& saved, CheckpointWriter& writer);
// Calls visit_key(key, visit) for each key, which is to call visit(part) for its parts in order,
// and fills these.
template <typename VisitKey>
void read_tensors(CheckpointReader& reader, const std::string& file,
                  const std::vector<TensorInfo>& expected, const VisitKey& visit_key) {
  if (reader.tensors(file).tensors != expected) {
    fail(ErrorCode::kInvalid, "{}/{} does not have the keys of its manifest", reader.folder(),
         file);
  }
  for (size_t key = 0; key < expected.size(); ++key) {
    uint64_t offset = 0;
    visit_key(key, [&](std::span<float> part) {
      reader.read_tensor(file, key, offset, std::as_writable_bytes(part));
      offset += part.size_bytes();
    });
  }
}

// Reads, out of lock-step, the round of each rank's last update to each chunk.
void read_clocks(CheckpointReader& reader, uint64_t chunks, const SavedClocks& clocks);

// Whether the error says that a file is gone or damaged; other errors come from the disk.
bool is_damage(const Error& error);

// Takes the files of branches that the snapshot does not have from the checkpoint before. Returns
// the problems; "": none. A gone or damaged file shows when its branch is revived, and is no reason
// not to save the rest.
std::string share_branches(const Job& job, CheckpointReader& from, Manifest& saved,
                           CheckpointWriter& writer);

// Files of killed branches, which several checkpoints of a job have.
using Shared = std::set<std::pair<std::string, std::vector<uint32_t>>>;  // name, checksums

// The bytes of a checkpoint on the disk, but for files that are counted already.
uint64_t bytes_of(const Manifest& manifest, Shared& counted);

}  // namespace phub
