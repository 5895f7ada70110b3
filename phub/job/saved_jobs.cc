#include "phub/job/saved_jobs.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string_view>
#include <utility>

#include "phub/background.h"
#include "phub/job/saved_files.h"
#include "phub/job_rules.h"
#include "transport/error.h"

namespace phub {
namespace {

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

void SavedJobs::check_own_states(const JobSpec& spec) {
  if (spec.branches == 0 || box_has_state(spec)) return;
  fail(ErrorCode::kInvalid,
       "branches: in job '{}', which has no optimizer, they are states of the ranks, and a rank "
       "that is saved would not have those of a job that goes on; leave out the saver",
       spec.name);
}

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
    // Another process may remove them meanwhile: that is no reason to refuse another job.
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
    begun.writer.reset();  // removes its files
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
    lock.lock();  // the writer removes its files
    throw;
  }
  lock.lock();
  // This comes first: no job may go on from this checkpoint, which has no state of ranks.
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
