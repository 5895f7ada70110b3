#include "phub/checkpoint/store.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

constexpr std::string_view kLockFile = ".lock";
constexpr std::string_view kEpochFile = "epoch";
constexpr std::string_view kEndedFile = "ended";
constexpr std::string_view kNewEpochFile = "epoch.new";
constexpr std::string_view kWriting = "writing-";
constexpr std::string_view kRemoving = "removing-";
constexpr std::string_view kNoLinks =
    "it is a symbolic link, and none is followed here: move the folder itself to this place";
constexpr uint64_t kMaxEpochDigits = 20;

const FolderEntry* find_entry(const std::vector<FolderEntry>& entries, std::string_view name) {
  const auto found = std::ranges::find(entries, name, &FolderEntry::name);
  return found == entries.end() ? nullptr : &*found;
}

bool has_entry(const std::vector<FolderEntry>& entries, std::string_view name) {
  return find_entry(entries, name) != nullptr;
}

std::string path_of(const std::string& folder, std::string_view file) {
  return fmt::format("{}/{}", folder, file);
}

std::string parent_of(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string base_of(const std::string& path) { return path.substr(path.find_last_of('/') + 1); }

std::string without_slash(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

// The epoch in a file's text; it is written as "4\n".
uint64_t parse_epoch(const std::string& path, const std::string& text) {
  uint64_t epoch = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), epoch);
  if (error != std::errc() || fmt::format("{}\n", epoch) != text) {
    fail(ErrorCode::kInvalid,
         "{} has '{}' in place of an epoch: it was damaged. Write a number into it that is higher "
         "than "
         "every epoch that the job has had",
         path, printable(text));
  }
  return epoch;
}

}  // namespace

std::string state_file(std::string_view slot) {
  return fmt::format("state-{}{}", encode_name(slot), kTensorsSuffix);
}

std::string branch_file(uint32_t branch, std::string_view file) {
  return fmt::format("branch-{}-{}", branch, file);
}

Checkpoints::Checkpoints(std::string directory, Files& files)
    : directory_(without_slash(std::move(directory))), files_(files) {}

std::string Checkpoints::folder_of(const std::string& job) const {
  return fmt::format("{}/{}", directory_, encode_name(job));
}

std::string Checkpoints::folder_of(const std::string& job, CheckpointId id) const {
  return fmt::format("{}/{}", folder_of(job), folder_name(id));
}

std::vector<std::string> Checkpoints::jobs() {
  std::vector<std::string> jobs;
  for (const FolderEntry& entry : files_.list(directory_)) {
    const std::optional<std::string> job = decode_name(entry.name);
    if (entry.folder && job) jobs.push_back(*job);
  }
  return jobs;
}

bool Checkpoints::has_folder(const std::string& job) {
  const std::vector<FolderEntry> entries = files_.list(directory_);
  const FolderEntry* const entry = find_entry(entries, encode_name(job));
  if (entry == nullptr) return false;
  if (entry->folder) return true;
  fail(ErrorCode::kInvalid, "{}: {}", folder_of(job),
       entry->link ? kNoLinks : "it is not a folder: move it away");
}

std::vector<CheckpointId> Checkpoints::list(const std::string& job) {
  std::vector<CheckpointId> ids;
  for (const Named& named : named(job)) {
    if (named.problem.empty()) ids.push_back(named.id);
  }
  return ids;
}

// What is only being committed has no manifest of its own name yet, and is not there at all.
std::vector<Checkpoints::Named> Checkpoints::named(const std::string& job) {
  if (!has_folder(job)) return {};
  const std::string folder = folder_of(job);
  std::vector<Named> all;
  for (const FolderEntry& entry : files_.list(folder)) {
    const std::optional<CheckpointId> id = parse_folder_name(entry.name);
    if (!id) continue;
    if (!entry.folder) {
      all.push_back({*id, std::string(entry.link ? kNoLinks : "it is not a folder")});
      continue;
    }
    const auto inside = files_.list(folder + "/" + entry.name);
    if (has_entry(inside, kManifestFile)) {
      all.push_back({*id, ""});
    } else if (has_entry(inside, kPassedOverFile)) {
      all.push_back({*id, fmt::format("the job went on from an older one; its manifest is now {}",
                                      kPassedOverFile)});
    } else if (!has_entry(inside, kNewManifestFile)) {
      all.push_back({*id, fmt::format("it has no {}", kManifestFile)});
    }
  }
  std::ranges::sort(all, std::ranges::greater(), &Named::id);
  return all;
}

std::unique_ptr<CheckpointReader> Checkpoints::open(const std::string& job, CheckpointId id) {
  auto reader = std::make_unique<CheckpointReader>(files_, job, folder_of(job, id), id);
  reader->hold(pin(reader->folder()));
  return reader;
}

std::unique_ptr<CheckpointReader> Checkpoints::newest_whole(const std::string& job,
                                                            std::vector<Refusal>& refused) {
  for (const auto& [id, problem] : named(job)) {
    const std::string folder = folder_of(job, id);
    std::vector<std::string> problems;
    try {
      if (!problem.empty()) fail(ErrorCode::kInvalid, "{}", problem);
      std::unique_ptr<CheckpointReader> reader = open(job, id);
      problems = reader->verify(CheckpointReader::What::kNeeded);
      if (problems.empty()) return reader;
    } catch (const Error& error) {
      rethrow_unless_damage(error);
      problems.emplace_back(error.what());
    }
    refused.push_back({folder, fmt::format("{}", fmt::join(problems, "; "))});
    on_refused(folder);
  }
  return nullptr;
}

CheckpointStore::CheckpointStore(std::string directory, uint32_t keep, Files& files)
    : Checkpoints(std::move(directory), files), keep_(keep) {
  PHUB_CHECK(keep > 0);
  files_.make_folder(directory_);
  files_.check_private(directory_);
  try {
    files_.sync_folder(parent_of(directory_));
  } catch (const Error& error) {
    // A parent that this user may not read: whoever made the directory there had to sync it.
    if (error.code() != ErrorCode::kUnauthorized) throw;
  }
  lock_ = files_.lock(path_of(directory_, kLockFile));
  for (const std::string& job : jobs()) remove_leftovers(folder_of(job));
}

void CheckpointStore::make_job_folder(const std::string& job) {
  check_there();
  if (!has_folder(job)) files_.make_folder(folder_of(job));
  files_.sync_folder(directory_);
}

std::unique_ptr<CheckpointWriter> CheckpointStore::begin(const std::string& job, CheckpointId id) {
  make_job_folder(job);
  const std::string folder = folder_of(job), name = folder_name(id);
  const std::vector<FolderEntry> entries = files_.list(folder);
  if (const FolderEntry* const entry = find_entry(entries, name)) {
    const std::string there = path_of(folder, name);
    if (!entry->folder || !has_entry(files_.list(there), kNewManifestFile)) {
      fail(ErrorCode::kTaken, "there is a checkpoint {} already", there);
    }
    remove_checkpoint(there);
  }
  return std::unique_ptr<CheckpointWriter>(new CheckpointWriter(*this, job, id));
}

uint64_t CheckpointStore::epoch_of(const std::string& job) {
  if (!has_folder(job)) return 0;
  const std::string folder = folder_of(job);
  uint64_t epoch = read_epoch(job, kEpochFile);
  for (const FolderEntry& entry : files_.list(folder)) {
    if (const auto id = parse_folder_name(entry.name)) epoch = std::max(epoch, id->epoch);
  }
  return epoch;
}

// 0: there is no such note.
uint64_t CheckpointStore::read_epoch(const std::string& job, std::string_view note) {
  const std::string folder = folder_of(job), path = path_of(folder, note);
  if (!has_entry(files_.list(folder), note)) return 0;
  return parse_epoch(path, read_text(files_, path, kMaxEpochDigits + 1));
}

void CheckpointStore::write_epoch(const std::string& job, std::string_view note, uint64_t epoch) {
  const std::string folder = folder_of(job), fresh = path_of(folder, kNewEpochFile);
  files_.remove(fresh);
  const std::string text = fmt::format("{}\n", epoch);
  const std::unique_ptr<OutputFile> file = files_.create(fresh);
  file->write(std::as_bytes(std::span(text)));
  file->sync();
  file->close();
  files_.rename(fresh, path_of(folder, note));
  files_.sync_folder(folder);
}

void CheckpointStore::keep(const CheckpointReader& reader, const std::vector<Refusal>& refused) {
  for (const FolderEntry& entry : files_.list(parent_of(reader.folder()))) {
    const std::string folder = path_of(parent_of(reader.folder()), entry.name);
    if (!entry.folder || !std::ranges::count(refused, folder, &Refusal::folder)) continue;
    if (!has_entry(files_.list(folder), kManifestFile)) continue;
    files_.rename(path_of(folder, kManifestFile), path_of(folder, kPassedOverFile));
    files_.sync_folder(folder);
  }
  files_.sync_folder(reader.folder());
  files_.sync_folder(parent_of(reader.folder()));
}

uint64_t CheckpointStore::raise_epoch(const std::string& job) {
  make_job_folder(job);
  const uint64_t epoch = epoch_of(job) + 1;
  write_epoch(job, kEpochFile, epoch);
  return epoch;
}

void CheckpointStore::end(const std::string& job) {
  make_job_folder(job);
  write_epoch(job, kEndedFile, epoch_of(job));
}

uint64_t CheckpointStore::ended_epoch(const std::string& job) {
  return read_epoch(job, kEndedFile);
}

bool CheckpointStore::has_ended(const std::string& job, uint64_t epoch) {
  return epoch <= ended_epoch(job);
}

void CheckpointStore::remove_job(const std::string& job) {
  for (const CheckpointId id : list(job)) remove_checkpoint(folder_of(job, id));
  const std::string folder = folder_of(job);
  if (has_entry(files_.list(directory_), encode_name(job))) remove_all(files_, folder);
  files_.sync_folder(directory_);
}

void CheckpointStore::remove_checkpoint(const std::string& folder) {
  const std::string job_folder = parent_of(folder);
  const std::string gone = path_of(job_folder, std::string(kRemoving) + base_of(folder));
  remove_if_there(gone);
  files_.rename(folder, gone);
  files_.sync_folder(job_folder);
  remove_all(files_, gone);
  refused_.erase(folder);
}

void CheckpointStore::remove_if_there(const std::string& folder) {
  const auto entries = files_.list(parent_of(folder));
  if (has_entry(entries, base_of(folder))) remove_all(files_, folder);
}

// What a crash has left of a checkpoint that was being written or removed.
void CheckpointStore::remove_leftovers(const std::string& job_folder) {
  for (const FolderEntry& entry : files_.list(job_folder)) {
    const std::string path = job_folder + "/" + entry.name;
    if (!entry.folder || writing_.contains(path)) continue;
    const bool is_left = entry.name.starts_with(kWriting) || entry.name.starts_with(kRemoving);
    if (is_left) remove_all(files_, path);
    if (is_left || !parse_folder_name(entry.name)) continue;
    const auto inside = files_.list(path);
    if (has_entry(inside, kNewManifestFile) && !has_entry(inside, kManifestFile)) {
      remove_checkpoint(path);
    }
  }
}

std::string CheckpointStore::prune(const std::string& job) {
  std::vector<std::string> problems;
  try {
    uint32_t whole = 0;
    for (const CheckpointId id : list(job)) {
      const std::string folder = folder_of(job, id);
      if (whole >= keep_ && !pinned(folder)) remove_checkpoint(folder);
      if (!refused_.contains(folder)) ++whole;
    }
    remove_leftovers(folder_of(job));
  } catch (const std::exception& error) {
    problems.emplace_back(error.what());
  }
  return fmt::format("{}", fmt::join(problems, "; "));
}

std::shared_ptr<CheckpointPin> CheckpointStore::pin(const std::string& folder) {
  std::shared_ptr<CheckpointPin> pin = pins_[folder].lock();
  if (pin == nullptr) {
    pin = std::make_shared<CheckpointPin>();
    pins_[folder] = pin;
  }
  return pin;
}

bool CheckpointStore::pinned(const std::string& folder) {
  const auto found = pins_.find(folder);
  if (found == pins_.end()) return false;
  if (!found->second.expired()) return true;
  pins_.erase(found);
  return false;
}

}  // namespace phub
