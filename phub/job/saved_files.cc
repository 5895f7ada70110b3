#include "phub/job/saved_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "phub/job_rules.h"
#include "transport/error.h"

namespace phub {
namespace {

TensorType type_of(const KeySpec& key) {
  switch (fold_of(key).type) {
    case kernels::ValueType::kF32:
      return TensorType::kF32;
    case kernels::ValueType::kF64:
      return TensorType::kF64;
    case kernels::ValueType::kI32:
      return TensorType::kI32;
    case kernels::ValueType::kI64:
      return TensorType::kI64;
  }
  return TensorType::kF32;
}

// The parts of a job's keys, in order, for a writer that asks for one after the other.
class PartsOfKeys {
 public:
  PartsOfKeys(const Job& job, uint32_t shelf, size_t array)
      : job_(job), shelf_(shelf), array_(array) {}

  std::span<const std::byte> at(size_t key, uint64_t offset) {
    if (key != key_ || offset == 0) {
      parts_.clear();
      next_ = 0;
      key_ = key;
      job_.for_each_part_of_copy(shelf_, array_, key,
                                 [this](std::span<float> part) { parts_.push_back(part); });
    }
    return std::as_bytes(parts_.at(next_++));
  }

 private:
  const Job& job_;
  const uint32_t shelf_;
  const size_t array_;
  size_t key_ = ~size_t{0};
  std::vector<std::span<float>> parts_;
  size_t next_ = 0;
};

// `ranks`: those of the checkpoint.
std::vector<TensorInfo> clock_tensors(uint64_t chunks, uint64_t ranks) {
  return {{"steps", TensorType::kI64, {chunks}}, {"clocks", TensorType::kI64, {chunks, ranks}}};
}

void write_clocks(const SavedClocks& clocks, uint64_t chunks, CheckpointWriter& writer) {
  const std::span<const uint64_t> steps(clocks.steps, chunks);
  const std::span<const uint64_t> latest(clocks.latest, chunks * clocks.ranks);
  writer.add_tensors(std::string(kClocksFile), clock_tensors(chunks, clocks.ranks),
                     [steps, latest](size_t tensor, uint64_t offset) {
                       return std::as_bytes(tensor == 0 ? steps : latest).subspan(offset);
                     },
                     {{"format", "pt"}});
}

}  // namespace

bool is_damage(const Error& error) {
  return error.code() == ErrorCode::kNotFound || error.code() == ErrorCode::kInvalid;
}

std::string file_of(const Job& job, size_t array) {
  if (array == 0) return std::string(kParametersFile);
  const std::vector<std::string_view> states = optimizer_states(job.spec());
  return array > states.size() ? std::string(kViewFile) : state_file(states[array - 1]);
}

std::vector<std::string> files_of_branch(const Job& job, uint32_t branch) {
  std::vector<std::string> files;
  for (size_t array = 0; array < job.arrays_of_shelf(); ++array) {
    files.push_back(branch_file(branch, file_of(job, array)));
  }
  return files;
}

const SavedShelf& shelf_of(const Manifest& saved, uint32_t branch) {
  const auto at = std::ranges::find(saved.branches.shelves, branch, &SavedShelf::branch);
  if (at != saved.branches.shelves.end()) return *at;
  fail(ErrorCode::kNotFound, "the checkpoint after round {} of job '{}' has no files of branch {}",
       saved.round, saved.spec.name, branch);
}

std::vector<TensorInfo> tensors_of(const JobSpec& spec) {
  std::vector<TensorInfo> tensors;
  for (const KeySpec& key : spec.keys) {
    tensors.push_back({key.name, type_of(key), key.shape});
    std::vector<uint64_t>& shape = tensors.back().shape;
    if (shape.empty()) shape = {key.elements};
    shape.back() /= kernels::words_of(fold_of(key).type);
  }
  return tensors;
}

void read_clocks(CheckpointReader& reader, uint64_t chunks, const SavedClocks& clocks) {
  const TensorTable& table = reader.tensors(kClocksFile);
  const std::vector<uint64_t> shape =
      table.tensors.size() == 2 ? table.tensors[1].shape : std::vector<uint64_t>();
  const uint64_t ranks = shape.size() == 2 ? shape[1] : 0;
  if (ranks > clocks.ranks || table.tensors != clock_tensors(chunks, ranks)) {
    fail(ErrorCode::kInvalid, "{}/{} does not have {} chunks of the {} ranks of its manifest",
         reader.folder(), kClocksFile, chunks, clocks.ranks);
  }
  const auto read = [&](size_t tensor, uint64_t first, std::span<uint64_t> into) {
    reader.read_tensor(kClocksFile, tensor, first * sizeof(uint64_t), std::as_writable_bytes(into));
    if (std::ranges::all_of(into, [](uint64_t n) { return n <= kMaxRound; })) return;
    fail(ErrorCode::kInvalid, "{}/{} has a number above {}", reader.folder(), kClocksFile,
         kMaxRound);
  };
  read(0, 0, {clocks.steps, chunks});
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    read(1, chunk * ranks, {clocks.of(chunk), ranks});
  }
}

void write_tensors(const Job& job, const Manifest& saved, CheckpointWriter& writer) {
  const std::vector<TensorInfo> tensors = tensors_of(saved.spec);
  const auto is_here = [&](const SavedShelf& shelf) { return is_copied(shelf, saved.spec); };
  for (const SavedFile& file : files_of(job, saved, is_here)) {
    PartsOfKeys parts(job, file.shelf, file.array);
    writer.add_tensors(file.name, tensors,
                       [&parts](size_t key, uint64_t offset) { return parts.at(key, offset); },
                       {{"format", "pt"}});
  }
  const SavedClocks& clocks = job.saved_clocks();
  if (clocks.latest) write_clocks(clocks, job.plan().chunks.size(), writer);
  writer.sync();
}

std::string share_branches(const Job& job, CheckpointReader& from, Manifest& saved,
                           CheckpointWriter& writer) {
  std::string problems;
  for (SavedShelf& shelf : saved.branches.shelves) {
    if (is_copied(shelf, saved.spec)) continue;
    shelf.steps = shelf_of(from.manifest(), shelf.branch).steps;
    for (const std::string& file : files_of_branch(job, shelf.branch)) {
      try {
        writer.share_tensors(from, file);
      } catch (const Error& error) {
        if (!is_damage(error) || !is_on_disk(shelf.branch, saved)) throw;
        problems += fmt::format("{}branch {} cannot be revived: {}", problems.empty() ? "" : "; ",
                                shelf.branch, error.what());
      }
    }
  }
  return problems;
}

uint64_t bytes_of(const Manifest& manifest, Shared& counted) {
  std::set<std::string> of_killed;
  for (const SavedBranch& branch : manifest.branches.branches) {
    if (is_on_disk(branch, manifest)) of_killed.insert(branch_file(branch.branch, ""));
  }
  const auto is_shared = [&](const CheckpointFile& file) {
    return std::ranges::any_of(of_killed,
                               [&](const auto& begin) { return file.name.starts_with(begin); });
  };
  uint64_t bytes = 0;
  for (const CheckpointFile& file : manifest.files) {
    if (!is_shared(file) || counted.emplace(file.name, file.checksums).second) bytes += file.bytes;
  }
  return bytes;
}

}  // namespace phub
