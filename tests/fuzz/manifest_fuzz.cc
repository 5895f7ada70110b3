// Manifests of checkpoints: as they are, and with a checksum that fits them, as an attacker would
// write it.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <string>
#include <string_view>

#include "phub/checkpoint/crc32c.h"
#include "phub/checkpoint/manifest.h"
#include "phub/checkpoint/names.h"
#include "phub/job/branches.h"

using namespace phub;  // NOLINT: a fuzz target

namespace {

// Whatever branches it has, they are refused, or can be gone on with.
void go_on(const Manifest& manifest) {
  Branches branches(manifest.spec);
  branches.restore(manifest);
  branches.saved(manifest.round);
  const uint64_t lowest = manifest.round + 1;
  uint64_t round = lowest + 1;
  for (const BranchMove& move : manifest.branches.moves) round = std::max(round, move.round);
  for (const SavedBranch& branch : manifest.branches.branches) {
    const BranchTurn turns[] = {{branch.branch, 1}, {manifest.branches.runs.front().branch, 0}};
    for (const BranchAction action :
         {BranchAction::kFork, BranchAction::kSchedule, BranchAction::kKill, BranchAction::kRevive,
          BranchAction::kDiscard}) {
      const BranchChange change{.action = action,
                                .round = round,
                                .branch = branch.branch,
                                .turns = {std::begin(turns), std::end(turns)},
                                .is_loaded = true};
      try {
        round = branches.decide(change, branches.next(), lowest).last;
      } catch (const Error&) {
      }
    }
  }
  branches.saved(manifest.round);
}

void try_to_parse(std::string_view text) {
  try {
    const Manifest manifest = parse_manifest(text);
    for (const CheckpointFile& file : manifest.files) {
      PHUB_CHECK(file.name.find("..") == std::string::npos && !file.name.starts_with('/'));
      PHUB_CHECK(file.checksums.size() <= file.bytes);
    }
    PHUB_CHECK(parse_manifest(manifest_text(manifest)) == manifest);
    go_on(manifest);
  } catch (const Error& error) {
    PHUB_CHECK(error.code() == ErrorCode::kInvalid);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try_to_parse(text);
  const uint32_t checksum = crc32c(0, std::as_bytes(std::span(text)));
  try_to_parse(fmt::format(R"({{"checksum":"{:08x}",{})", checksum, text));
  return 0;
}
