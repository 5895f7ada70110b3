#include "phub/job/saved_jobs.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "phub/background.h"
#include "phub/plan/choices.h"
#include "transport/error.h"

namespace phub {
namespace {

// Of one of the arrays that a job saves.
std::string file_of(const Job& job, size_t array) {
  if (array == 0) return std::string(kParametersFile);
  const std::vector<std::string_view> states = optimizer_states(job.spec());
  return array > states.size() ? std::string(kViewFile) : state_file(states[array - 1]);
}

struct SavedFile {
  std::string name;
  uint32_t shelf = 0;
  size_t array = 0;
};

std::vector<std::string> files_of_branch(const Job& job, uint32_t branch) {
  std::vector<std::string> files;
  for (size_t array = 0; array < job.arrays_of_shelf(); ++array) {
    files.push_back(branch_file(branch, file_of(job, array)));
  }
  return files;
}

// All that have tensors of the job's keys, of the shelves that concerns(shelf).
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

const SavedShelf& shelf_of(const Manifest& saved, uint32_t branch) {
  const auto at = std::ranges::find(saved.branches.shelves, branch, &SavedShelf::branch);
  if (at != saved.branches.shelves.end()) return *at;
  fail(ErrorCode::kNotFound, "the checkpoint after round {} of job '{}' has no files of branch {}",
       saved.round, saved.spec.name, branch);
}

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

bool is_damage(const Error& error) {
  return error.code() == ErrorCode::kNotFound || error.code() == ErrorCode::kInvalid;
}

// Branches that the snapshot does not have, from the checkpoint before. Returns what is wrong.
// What is gone or damaged is still to be missed, and is no reason not to save the rest.
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

// Files of killed branches, which several checkpoints of a job have.
using Shared = std::set<std::pair<std::string, std::vector<uint32_t>>>;  // name, checksums

// On the disk, but for those that are counted already.
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

constexpr std::string_view kPartName = "state";  // a rank has one

CheckpointId id_of(const Manifest& saved) { return {.epoch = saved.epoch, .round = saved.round}; }

}  // namespace

SavedJobs::SavedJobs(const CheckpointOptions& options)
    : options_(options),
      store_(options.folder, options.keep, options.files ? *options.files : system_files()) {}

void SavedJobs::check_there() const {
  if (!is_gone_) return;
  fail(ErrorCode::kUnavailable,
       "the folder of the checkpoints, {}, was removed, replaced or unmounted since this box "
       "began; bring it back, or start the box again",
       options_.folder);
}

void SavedJobs::look() {
  is_gone_ = error_of([this] { store_.check_there(); }).has_value();
}

void SavedJobs::check(const JobSpec& spec) { make_tensor_header(tensors_of(spec), {}); }

bool SavedJobs::may_go_on(const std::string& job, std::vector<std::string>& said) {
  const std::vector<Checkpoints::Named> all = store_.named(job);
  const uint64_t lives = store_.epoch_of(job);
  if (lives == 0) return false;
  if (all.empty() && !store_.has_ended(job, lives)) {
    said.push_back(fmt::format(
        "job '{}' begins at round 1: it has had {} lives here, and none has left a checkpoint", job,
        lives));
  }
  if (all.empty()) return false;
  if (!store_.has_ended(job, all.front().id.epoch)) return true;
  said.push_back(fmt::format(
      "job '{}' begins at round 1: the one of this name, whose newest checkpoint is of round {}, "
      "has ended",
      job, all.front().id.round));
  return false;
}

void SavedJobs::check_goes_on(const std::string& job, uint64_t epoch) {
  const std::scoped_lock lock(mutex_);
  store_.check_there();
  if (const uint64_t latest = store_.epoch_of(job); latest < epoch) {
    fail(ErrorCode::kFenced,
         "this worker was in life {} of job '{}', and this server knows of {}: its checkpoints are "
         "older, or another job's",
         epoch, job, latest);
  }
  if (store_.has_ended(job, epoch)) {
    fail(ErrorCode::kNotFound, "job '{}' has ended: it does not go on", job);
  }
}

std::map<std::string, uint64_t> SavedJobs::kept_bytes(const std::string& owner) {
  const std::scoped_lock lock(mutex_);
  std::map<std::string, uint64_t> bytes;
  for (const std::string& job : store_.jobs()) {
    // Somebody may remove them meanwhile: that is no reason to refuse another job.
    static_cast<void>(error_of([&] {
      Shared shared;
      for (const CheckpointId id : store_.list(job)) {
        static_cast<void>(error_of([&] {
          const std::unique_ptr<CheckpointReader> reader = store_.open(job, id);
          if (reader->manifest().owner != owner) return;
          bytes[job] += bytes_of(reader->manifest(), shared);
        }));
      }
    }));
  }
  return bytes;
}

std::optional<Manifest> SavedJobs::newest(const std::string& job, std::vector<std::string>& said) {
  const std::scoped_lock lock(mutex_);
  store_.check_there();
  if (!may_go_on(job, said)) return std::nullopt;
  std::vector<Refusal> refused;
  const std::unique_ptr<CheckpointReader> reader = store_.newest_whole(job, refused);
  for (const Refusal& refusal : refused) {
    said.push_back(fmt::format("job '{}': checkpoint {} is passed over: {}", job, refusal.folder,
                               refusal.why));
  }
  if (!reader || store_.has_ended(job, reader->id().epoch)) {
    fail(ErrorCode::kInvalid,
         "job '{}' is to go on from a checkpoint, and none of those that it has is whole: {}; "
         "delete the job to begin anew, or move its checkpoints away",
         job, fmt::join(said, "; "));
  }
  store_.keep(*reader, refused);
  said.push_back(fmt::format("job '{}' goes on after round {}, from {}", job, reader->id().round,
                             reader->folder()));
  return reader->manifest();
}

void SavedJobs::load(const Manifest& saved, Job& job) {
  const std::scoped_lock lock(mutex_);
  const std::unique_ptr<CheckpointReader> reader = store_.open(saved.spec.name, id_of(saved));
  const std::vector<TensorInfo> expected = tensors_of(saved.spec);
  const auto is_needed = [&](const SavedShelf& shelf) { return !is_on_disk(shelf.branch, saved); };
  for (const SavedFile& file : files_of(job, saved, is_needed)) {
    read_tensors(*reader, file.name, expected, [&](size_t key, const Job::VisitPart& visit) {
      job.for_each_part(file.shelf, file.array, key, visit);
    });
  }
  const SavedClocks& clocks = job.saved_clocks();
  if (clocks.latest) read_clocks(*reader, job.plan().chunks.size(), clocks);
  job.publish_restored(saved);
  latest_[saved.spec.name] = id_of(saved);
}

uint64_t SavedJobs::begin_life(const std::string& job) {
  const std::scoped_lock lock(mutex_);
  uint64_t epoch = 0;
  const std::optional<Error> failed = error_of([&] { epoch = store_.raise_epoch(job); });
  if (!failed) return epoch;
  if (failed->code() == ErrorCode::kInvalid) throw Error(*failed);
  fail(ErrorCode::kUnavailable,
       "job '{}' cannot begin as long as nothing can be written to {}: {}; workers try again", job,
       options_.folder, failed->what());
}

uint64_t SavedJobs::ended_epoch(const std::string& job) {
  const std::scoped_lock lock(mutex_);
  return store_.ended_epoch(job);
}

SavedJobs::Begun SavedJobs::take_begun(const std::string& job, CheckpointId id) {
  {
    auto begun = begun_.extract(job);
    if (!begun.empty() && begun.mapped().id == id) return std::move(begun.mapped());
  }
  return {id, store_.begin(job, id)};
}

void SavedJobs::add_part(const std::string& job, CheckpointId id, uint32_t rank,
                         std::string_view piece, bool is_last) {
  std::unique_lock lock(mutex_);
  Begun begun = take_begun(job, id);
  lock.unlock();
  const std::optional<Error> failed = error_of([&] {
    std::unique_ptr<PartWriter>& part = begun.parts[rank];
    if (!part) part = begun.writer->add_part(rank, kPartName);
    part->write(std::as_bytes(std::span(piece)));
    if (!is_last) return;
    part->finish();
    begun.parts.erase(rank);
  });
  lock.lock();
  if (failed) {
    begun.parts.clear();
    begun.writer.reset();  // removes what it has written
    throw Error(failed->code(), failed->what());
  }
  begun_.emplace(job, std::move(begun));
}

void SavedJobs::drop_parts(const std::string& job) {
  const std::scoped_lock lock(mutex_);
  begun_.erase(job);
}

void SavedJobs::read_part(const std::string& job, CheckpointId id, uint32_t rank, uint64_t all,
                          uint64_t offset, std::span<char> into) {
  const std::scoped_lock lock(mutex_);
  const std::unique_ptr<CheckpointReader> reader = store_.open(job, id);
  if (reader->part_bytes(rank, kPartName) != all) {
    fail(ErrorCode::kInvalid, "{}: the part of rank {} has another size than its manifest said",
         reader->folder(), rank);
  }
  reader->read_part(rank, kPartName, offset, std::as_writable_bytes(into));
}

std::map<uint32_t, uint64_t> SavedJobs::parts_of(const Manifest& saved) {
  std::map<uint32_t, uint64_t> parts;
  for (const CheckpointFile& file : saved.files) {
    const std::optional<PartId> part = parse_part_name(file.name);
    if (part && part->name == kPartName && file.bytes <= most_part_bytes(saved.spec)) {
      parts[part->rank] = file.bytes;
    }
  }
  return parts;
}

std::string SavedJobs::write(const Job& job, const Manifest& saved, bool is_end) {
  Manifest whole = saved;
  const bool shares = !std::ranges::all_of(saved.branches.shelves, [&](const SavedShelf& shelf) {
    return is_copied(shelf, saved.spec);
  });
  std::unique_lock lock(mutex_);
  const std::unique_ptr<CheckpointWriter> writer = take_begun(saved.spec.name, id_of(saved)).writer;
  std::unique_ptr<CheckpointReader> before = shares ? latest(saved.spec.name) : nullptr;
  lock.unlock();
  std::string problems;
  try {
    if (before) problems = share_branches(job, *before, whole, *writer);
    before.reset();  // it may be removed now
    write_tensors(job, saved, *writer);
  } catch (...) {
    lock.lock();  // the writer removes what it has written
    throw;
  }
  lock.lock();
  // First: nobody may go on from this one, which has no state of ranks.
  if (is_end) store_.end(saved.spec.name);
  const std::string others = writer->commit(std::move(whole));
  latest_[saved.spec.name] = id_of(saved);
  if (!problems.empty() && !others.empty()) problems += "; ";
  return problems + others;
}

std::unique_ptr<CheckpointReader> SavedJobs::latest(const std::string& job) {
  const auto at = latest_.find(job);
  if (at == latest_.end()) fail(ErrorCode::kNotFound, "job '{}' has no checkpoint", job);
  try {
    return store_.open(job, at->second);
  } catch (const Error& error) {
    if (!is_damage(error)) throw;
    for (const CheckpointId& id : store_.list(job)) {
      if (id == at->second) continue;
      try {
        return store_.open(job, id);
      } catch (const Error& of_another) {
        if (!is_damage(of_another)) throw;
      }
    }
    throw;
  }
}

void SavedJobs::read_branch(const Job& job, uint32_t branch, Job::Branch& into) {
  std::unique_lock lock(mutex_);
  const std::unique_ptr<CheckpointReader> reader = latest(job.spec().name);
  lock.unlock();
  const Manifest& saved = reader->manifest();
  for (Job::Shelf& of_box : into) {
    job.take_steps(shelf_of(saved, branch).steps, saved.round, of_box.steps.data());
  }
  size_t array = 0;
  for (const std::string& file : files_of_branch(job, branch)) {
    read_tensors(*reader, file, tensors_of(saved.spec),
                 [&](size_t key, const Job::VisitPart& visit) {
                   job.for_each_part(into, array, key, visit);
                 });
    ++array;
  }
}

bool SavedJobs::end(const std::string& job) {
  const std::scoped_lock lock(mutex_);
  latest_.erase(job);
  const uint64_t latest = store_.epoch_of(job);
  if (latest == 0 || store_.has_ended(job, latest)) return false;
  store_.end(job);
  return true;
}

}  // namespace phub
