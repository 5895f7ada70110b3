#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "phub/checkpoint/store.h"
#include "transport/text.h"

namespace phub {
namespace {

void write_durably(Files& files, const std::string& path, const std::string& text) {
  const std::unique_ptr<OutputFile> file = files.create(path);
  file->write(std::as_bytes(std::span(text)));
  file->sync();
  file->close();
}

}  // namespace

CheckpointWriter::CheckpointWriter(CheckpointStore& store, std::string job, CheckpointId id)
    : store_(store),
      files_(store.files_),
      job_(std::move(job)),
      id_(id),
      job_folder_(store.folder_of(job_)),
      folder_(fmt::format("{}/writing-{}", job_folder_, folder_name(id))) {
  if (!store_.writing_.insert(folder_).second) {
    fail(ErrorCode::kTaken, "{} is being written already", folder_);
  }
  try {
    store_.remove_if_there(folder_);
    files_.make_folder(folder_);
  } catch (...) {
    store_.writing_.erase(folder_);
    throw;
  }
}

CheckpointWriter::~CheckpointWriter() {
  if (!committed_) abandon();
}

// What cannot be removed now is removed when the next checkpoint is there, or at the next start.
void CheckpointWriter::abandon() noexcept {
  tensor_files_.clear();
  try {
    const std::string writing = fmt::format("{}/writing-{}", job_folder_, folder_name(id_));
    store_.writing_.erase(writing);
    if (folder_ == writing) {
      remove_all(files_, folder_);
    } else {
      store_.remove_checkpoint(folder_);
    }
  } catch (const std::exception&) {
  }
}

void CheckpointWriter::add_tensors(const std::string& file, const std::vector<TensorInfo>& tensors,
                                   const TensorSource& source,
                                   const std::map<std::string, std::string>& metadata) {
  check_file_name(file);
  PHUB_CHECK(!parse_part_name(file));
  const std::string header = make_tensor_header(tensors, metadata);
  auto output = std::make_unique<CheckedOutput>(files_, folder_ + "/" + file, file);
  output->write(std::as_bytes(std::span(header)));
  for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    const uint64_t bytes = bytes_of(tensors[tensor]);
    for (uint64_t offset = 0; offset < bytes;) {
      const std::span<const std::byte> piece = source(tensor, offset);
      PHUB_CHECK(!piece.empty() && piece.size() <= bytes - offset);
      output->write(piece);
      offset += piece.size();
    }
  }
  output->finish();
  // Synced in commit(): the disk is writing it while the next file is prepared.
  entries_.push_back(output->entry());
  tensor_files_.push_back(std::move(output));
}

void CheckpointWriter::share_tensors(CheckpointReader& from, const std::string& file) {
  const CheckpointFile& entry = from.entry(file);
  entries_.push_back(entry);
  const bool is_shared = files_.link(from.folder() + "/" + file, folder_ + "/" + file);
  if (!is_shared) copy_tensors(from, entry);
}

void CheckpointWriter::copy_tensors(CheckpointReader& from, const CheckpointFile& file) {
  auto output = std::make_unique<CheckedOutput>(files_, folder_ + "/" + file.name, file.name);
  std::vector<std::byte> piece;
  for (uint64_t at = 0; at < file.bytes; at += piece.size()) {
    piece.resize(std::min(kChecksumBytes, file.bytes - at));
    from.read_file(file.name, at, piece);
    output->write(piece);
  }
  output->finish();
  tensor_files_.push_back(std::move(output));
}

PartWriter::PartWriter(CheckpointWriter& writer, const std::string& path, std::string name)
    : writer_(writer), output_(writer.files_, path, std::move(name)) {
  ++writer_.parts_open_;
}

void PartWriter::finish() {
  output_.finish();
  output_.sync_and_close();
  writer_.entries_.push_back(output_.entry());
  --writer_.parts_open_;
}

std::unique_ptr<PartWriter> CheckpointWriter::add_part(uint32_t rank, std::string_view name) {
  const std::string file = part_name(rank, name);
  check_file_name(file);
  const std::string folder = folder_ + "/" + file.substr(0, file.find('/'));
  if (rank_folders_.insert(folder).second) files_.make_folder(folder);
  return std::unique_ptr<PartWriter>(new PartWriter(*this, folder_ + "/" + file, file));
}

void CheckpointWriter::sync() {
  for (const auto& file : tensor_files_) file->sync_and_close();
  tensor_files_.clear();
}

std::string CheckpointWriter::commit(Manifest manifest) {
  PHUB_CHECK(!committed_);
  if (parts_open_ > 0) {
    fail(ErrorCode::kInvalid, "{}: {} parts of ranks are not complete", folder_, parts_open_);
  }
  PHUB_CHECK(manifest.spec.name == job_ && manifest.epoch == id_.epoch &&
             manifest.round == id_.round);
  sync();
  for (const std::string& folder : rank_folders_) files_.sync_folder(folder);

  manifest.files = entries_;
  const std::string new_manifest = fmt::format("{}/{}", folder_, kNewManifestFile);
  write_durably(files_, new_manifest, manifest_text(manifest));
  files_.sync_folder(folder_);

  const std::string checkpoint = fmt::format("{}/{}", job_folder_, folder_name(id_));
  files_.rename(folder_, checkpoint);
  const std::string writing = std::exchange(folder_, checkpoint);
  files_.sync_folder(job_folder_);
  // From here on it exists.
  files_.rename(fmt::format("{}/{}", folder_, kNewManifestFile),
                fmt::format("{}/{}", folder_, kManifestFile));
  files_.sync_folder(folder_);
  committed_ = true;
  store_.writing_.erase(writing);
  return store_.prune(job_);
}

}  // namespace phub
