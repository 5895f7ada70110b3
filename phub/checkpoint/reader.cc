#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "phub/checkpoint/store.h"
#include "transport/text.h"

namespace phub {
namespace {

Manifest read_manifest(Files& files, const std::string& folder) {
  const std::string path = fmt::format("{}/{}", folder, kManifestFile);
  try {
    return parse_manifest(read_text(files, path, kMaxManifestBytes));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalid) throw;
    fail(ErrorCode::kInvalid, "{}: {}", path, error.what());
  }
}

}  // namespace

void rethrow_unless_damage(const Error& error) {
  if (error.code() == ErrorCode::kFull || error.code() == ErrorCode::kUnauthorized) throw error;
}

CheckpointReader::CheckpointReader(Files& files, const std::string& job, std::string folder,
                                   CheckpointId id)
    : files_(files), folder_(std::move(folder)), manifest_(read_manifest(files, folder_)) {
  if (manifest_.spec.name != job) {
    fail(ErrorCode::kInvalid, "{}: its manifest is that of job '{}'", folder_,
         printable(manifest_.spec.name));
  }
  if (CheckpointReader::id() != id) {
    fail(ErrorCode::kInvalid, "{}: its manifest is that of epoch {}, round {}", folder_,
         manifest_.epoch, manifest_.round);
  }
  std::sort(manifest_.files.begin(), manifest_.files.end(),
            [](const CheckpointFile& a, const CheckpointFile& b) { return a.name < b.name; });
}

bool CheckpointReader::has(std::string_view file) const {
  return std::any_of(manifest_.files.begin(), manifest_.files.end(),
                     [&](const CheckpointFile& entry) { return entry.name == file; });
}

const CheckpointFile& CheckpointReader::entry(std::string_view file) const {
  const auto found = std::lower_bound(
      manifest_.files.begin(), manifest_.files.end(), file,
      [](const CheckpointFile& entry, std::string_view name) { return entry.name < name; });
  if (found == manifest_.files.end() || found->name != file) {
    fail(ErrorCode::kNotFound, "{} has no file '{}'", folder_, printable(file));
  }
  return *found;
}

CheckedInput& CheckpointReader::input(std::string_view file) {
  if (open_ == nullptr || open_name_ != file) {
    open_ = nullptr;
    open_ =
        std::make_unique<CheckedInput>(files_, fmt::format("{}/{}", folder_, file), entry(file));
    open_name_ = file;
  }
  return *open_;
}

const TensorTable& CheckpointReader::tensors(std::string_view file) {
  const auto known = tables_.find(file);
  if (known != tables_.end()) return known->second;
  const uint64_t bytes = entry(file).bytes;
  try {
    CheckedInput& opened = input(file);
    std::array<std::byte, kHeaderLengthBytes> length;
    opened.read(0, length);
    std::string header(tensor_header_bytes(length, bytes), '\0');
    opened.read(kHeaderLengthBytes, std::as_writable_bytes(std::span(header)));
    return tables_.emplace(file, parse_tensor_header(header, bytes)).first->second;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalid) throw;
    fail(ErrorCode::kInvalid, "{}/{}: {}", folder_, file, error.what());
  }
}

void CheckpointReader::read_tensor(std::string_view file, size_t tensor, uint64_t offset,
                                   std::span<std::byte> into) {
  const TensorTable& table = tensors(file);
  PHUB_CHECK(tensor < table.tensors.size());
  const uint64_t bytes = table.offsets[tensor + 1] - table.offsets[tensor];
  PHUB_CHECK(offset <= bytes && into.size() <= bytes - offset);
  input(file).read(table.offsets[tensor] + offset, into);
}

std::vector<PartId> CheckpointReader::parts() const {
  std::vector<PartId> parts;
  for (const CheckpointFile& file : manifest_.files) {
    if (auto part = parse_part_name(file.name)) parts.push_back(std::move(*part));
  }
  return parts;
}

uint64_t CheckpointReader::part_bytes(uint32_t rank, std::string_view name) const {
  return entry(part_name(rank, name)).bytes;
}

void CheckpointReader::read_part(uint32_t rank, std::string_view name, uint64_t offset,
                                 std::span<std::byte> into) {
  input(part_name(rank, name)).read(offset, into);
}

std::vector<std::string> CheckpointReader::verify(What what) {
  std::set<std::string, std::less<>> unneeded;
  for (const SavedBranch& branch : manifest_.branches.branches) {
    if (what == What::kAll || !is_on_disk(branch, manifest_)) continue;
    for (const CheckpointFile& file : manifest_.files) {
      if (file.name.starts_with(branch_file(branch.branch, ""))) unneeded.insert(file.name);
    }
  }
  std::vector<std::string> problems;
  for (const CheckpointFile& file : manifest_.files) {
    if (unneeded.contains(file.name)) continue;
    try {
      input(file.name).verify();
      if (!parse_part_name(file.name)) tensors(file.name);
    } catch (const Error& error) {
      rethrow_unless_damage(error);
      problems.emplace_back(error.what());
    }
  }
  return problems;
}

}  // namespace phub
