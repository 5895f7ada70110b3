#include "phub/checkpoint/manifest.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <set>
#include <span>

#include "phub/checkpoint/crc32c.h"
#include "phub/checkpoint/names.h"
#include "transport/control/message_fields.h"
#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

constexpr std::string_view kChecksumBegin = "{\"checksum\":\"";
constexpr std::string_view kChecksumEnd = "\",";
constexpr size_t kChecksumDigits = 8;
constexpr std::string_view kVersionBegin = "\"version\":";
constexpr std::string_view kBodyBegin = ",\"manifest\":";
constexpr std::string_view kBodyEnd = "}\n";
constexpr uint64_t kMaxSavedValues = 1u << 13;  // a branch's: of all fields and groups

uint32_t checksum_of(std::string_view text) { return crc32c(0, std::as_bytes(std::span(text))); }

// Removes `word` from the front of the text.
void expect(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) {
    fail(ErrorCode::kInvalid, "manifest: not in the form of a manifest: '{}' is missing", word);
  }
  text.remove_prefix(word.size());
}

void check_file(const CheckpointFile& file, std::set<std::string_view>& names) {
  check_file_name(file.name);
  if (!names.insert(file.name).second) {
    fail(ErrorCode::kInvalid, "manifest: file '{}' is there twice", printable(file.name));
  }
  const uint64_t needed = file.bytes / kChecksumBytes + (file.bytes % kChecksumBytes == 0 ? 0 : 1);
  if (file.checksums.size() != needed) {
    fail(ErrorCode::kInvalid, "manifest: file '{}' has {} bytes and {} checksums; it needs {}",
         printable(file.name), file.bytes, file.checksums.size(), needed);
  }
}

}  // namespace

template <class A>
void fields(A& a, const CheckpointFile*) {
  a.required("name", &CheckpointFile::name, {1, kMaxFileNameBytes});
  a.required("bytes", &CheckpointFile::bytes);
  a.required("checksums", &CheckpointFile::checksums);
}

template <class A>
void fields(A& a, const SavedRank*) {
  a.optional("incarnation", &SavedRank::incarnation);
  a.optional("last_round", &SavedRank::last_round);
  a.optional("expected", &SavedRank::expected);
}

template <class A>
void fields(A& a, const SavedBranch*) {
  a.required("branch", &SavedBranch::branch);
  a.optional("parent", &SavedBranch::parent);
  a.optional("round", &SavedBranch::round, {0, kMaxRound});
  a.optional("rounds", &SavedBranch::rounds, {0, kMaxRound});
  a.optional("place", &SavedBranch::place, {0, kMaxBranches});
  a.optional("killed", &SavedBranch::killed, {0, kMaxRound});
  a.optional("values", &SavedBranch::values, {0, kMaxSavedValues});
}

template <class A>
void fields(A& a, const SavedShelf*) {
  a.optional("place", &SavedShelf::place, {0, 2 * kMaxBranches});
  a.required("branch", &SavedShelf::branch);
  a.required("steps", &SavedShelf::steps, {1, kMaxSteps});
}

template <class A>
void fields(A& a, const SavedBranches*) {
  a.required("next", &SavedBranches::next);
  a.required("branches", &SavedBranches::branches, {1, kMostBranchesListed});
  a.optional("shelves", &SavedBranches::shelves, {0, 2 * kMaxBranches + kMostKilledBranches});
  a.optional("moves", &SavedBranches::moves, {0, kMostBranchMoves});
  a.required("runs", &SavedBranches::runs, {1, kMostBranchRuns + 1});
  a.optional("forks", &SavedBranches::forks, {0, kMostBranchForks});
}

template <class A>
void fields(A& a, const Manifest*) {
  a.required("spec", &Manifest::spec);
  a.required("round", &Manifest::round, {0, kMaxRound});
  a.required("epoch", &Manifest::epoch, {1, kAny});
  a.optional("source_epoch", &Manifest::source_epoch);
  a.optional("owner", &Manifest::owner, {0, kMaxOwnerBytes});
  a.optional("live_ranks", &Manifest::live_ranks, {0, kMaxRanks});
  a.optional("ranks", &Manifest::ranks, {0, kMaxRanks});
  a.optional("log_first", &Manifest::log_first);
  a.optional("log", &Manifest::log);
  a.optional("steps", &Manifest::steps, {0, kMaxSteps});
  a.optional("hyper", &Manifest::hyper, {0, kMaxScheduleEntries});
  a.optional("branches", &Manifest::branches);
  a.optional("seeds", &Manifest::seeds, {0, kMaxSeeds});
  a.required("files", &Manifest::files, {0, kMaxFiles});
}

bool is_on_disk(const SavedBranch& branch, const Manifest& manifest) {
  return branch.killed > 0 && branch.killed <= manifest.round + 1;
}

bool is_on_disk(uint32_t branch, const Manifest& manifest) {
  const auto at = std::ranges::find(manifest.branches.branches, branch, &SavedBranch::branch);
  return at != manifest.branches.branches.end() && is_on_disk(*at, manifest);
}

bool is_copied(const SavedShelf& shelf, const JobSpec& spec) {
  return shelf.place > 0 && shelf.place <= spec.branches;
}

std::string manifest_text(const Manifest& manifest) {
  const std::string covered = fmt::format("{}{}{}{}{}", kVersionBegin, kManifestVersion, kBodyBegin,
                                          json::encode(manifest), kBodyEnd);
  return fmt::format("{}{:08x}{}{}", kChecksumBegin, checksum_of(covered), kChecksumEnd, covered);
}

Manifest parse_manifest(std::string_view text) {
  expect(text, kChecksumBegin);
  const std::string checksum(text.substr(0, kChecksumDigits));
  text.remove_prefix(checksum.size());
  expect(text, kChecksumEnd);
  if (const std::string found = fmt::format("{:08x}", checksum_of(text)); found != checksum) {
    fail(ErrorCode::kInvalid, "manifest: its checksum is {}, and should be {}: it was damaged",
         found, printable(checksum));
  }
  expect(text, kVersionBegin);
  uint32_t version = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), version);
  if (error != std::errc() || version == 0) {
    fail(ErrorCode::kInvalid, "manifest: its version is not a positive number");
  }
  if (version > kManifestVersion) {
    fail(ErrorCode::kInvalid,
         "manifest: version {}, and this phub knows versions up to {}: a newer phub wrote it, and "
         "is "
         "needed to read it",
         version, kManifestVersion);
  }
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  expect(text, kBodyBegin);
  if (!text.ends_with(kBodyEnd)) fail(ErrorCode::kInvalid, "manifest: the end is missing");
  text.remove_suffix(kBodyEnd.size());

  auto manifest = json::decode<Manifest>(text, "manifest");
  validate(manifest.spec);
  std::set<std::string_view> names;
  for (const CheckpointFile& file : manifest.files) check_file(file, names);
  return manifest;
}

}  // namespace phub
