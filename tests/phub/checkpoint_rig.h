// A small checkpoint whose every byte follows from its round, and its comparison.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "phub/checkpoint/store.h"

namespace phub::testing {

inline const std::string kJob = "digits.v2";
inline const std::string kMomentum = "state-momentum.safetensors";
inline const std::string kBranchParameters = "branch-2-parameters.safetensors";
inline const std::string kBranchMomentum = "branch-2-state-momentum.safetensors";

inline std::vector<std::byte> bytes_for(uint64_t seed, uint64_t count) {
  std::vector<std::byte> bytes(count);
  for (auto& byte : bytes) {
    seed = seed * 6364136223846793005 + 1442695040888963407;  // Knuth's
    byte = static_cast<std::byte>(seed >> 56);
  }
  return bytes;
}

// What a checkpoint holds: all that one may hold, though no job has both clocks and branches.
// `extra` elements make its files larger than one checksum covers. Without `shapes` its job's keys
// have none, as in version 1; without `clocks` it is in lock-step, as in version 2; without
// `branches` it is as in version 3; without `killed`, as in version 4; without `forks`, in 5.
struct Content {
  uint64_t round = 0, epoch = 1;
  uint64_t extra = 0;
  bool shapes = true;
  bool clocks = true;
  bool branches = true;
  bool killed = true;
  bool forks = true;

  CheckpointId id() const { return {.epoch = epoch, .round = round}; }
  std::vector<TensorInfo> tensors(const std::string& file) const {
    if (file == kClocksFile) {
      return {{"steps", TensorType::kI64, {4}}, {"clocks", TensorType::kI64, {4, 2}}};
    }
    std::vector<TensorInfo> tensors = {{"fc.weight", TensorType::kF32, {10, 7}},
                                       {"empty", TensorType::kF32, {0, 3}},
                                       {"größe", TensorType::kBF16, {5}},
                                       {"scalar", TensorType::kF32, {}}};
    if (extra > 0) tensors.push_back({"extra", TensorType::kF32, {extra}});
    return tensors;
  }
  const std::vector<std::byte>& tensor(const std::string& file, size_t index) const {
    static std::map<uint64_t, std::vector<std::byte>> made;
    const std::vector<std::string> files = {std::string(kParametersFile), kMomentum,
                                            std::string(kClocksFile), kBranchParameters,
                                            kBranchMomentum};
    const auto slot = static_cast<uint64_t>(std::ranges::find(files, file) - files.begin());
    const uint64_t seed = round * 1000 + epoch * 100 + index * 10 + slot;
    std::vector<std::byte>& bytes = made[seed];
    const uint64_t count = bytes_of(tensors(file)[index]);
    if (bytes.size() != count) bytes = bytes_for(seed, count);
    return bytes;
  }
  std::vector<std::byte> part(uint32_t rank) const {
    return bytes_for(round * 77 + epoch * 7 + rank, 300 * rank + 1);
  }
  Manifest manifest() const {
    Manifest manifest;
    manifest.spec.name = kJob;
    manifest.spec.keys = {{"fc.weight", 70}, {"größe", 5}};
    if (shapes) manifest.spec.keys[0].shape = {10, 7};
    if (clocks) manifest.spec.consistency = "ssp";
    manifest.spec.world_size = 2;
    manifest.spec.optimizer = "momentum";
    manifest.round = round;
    manifest.epoch = epoch;
    manifest.owner = "sha256:0123";
    manifest.live_ranks = {0, 1};
    manifest.log_first = 3;
    manifest.log = {{.kind = LogRecord::Kind::kAdmitted, .round = 1, .rank = 0, .incarnation = 1},
                    {.kind = LogRecord::Kind::kHyper, .round = round, .values = {{"lr", 0.1}}}};
    manifest.steps = {round, round + 1};
    manifest.hyper = {{.round = 1, .values = {{"lr", 0.25}}}};
    manifest.seeds = {{"order", round * 3}};
    if (!branches) return manifest;
    manifest.branches = {
        .next = 4,
        .branches = {{.branch = 0, .rounds = round, .place = 0, .values = {{"lr", 0.25}}},
                     {.branch = 2, .parent = 1, .round = 3, .rounds = 2, .place = 2, .values = {}}},
        .shelves = {{.place = 2, .branch = 2, .steps = {round, 2}}},
        .moves = {{.round = round + 2, .copies = true, .from = 2, .to = 1, .child = 3},
                  {.round = round + 4, .to = 2}},
        .runs = {{1, 0}, {round + 4, 2}}};
    if (killed) manifest.branches.branches[0].killed = round + 6;
    if (forks) manifest.branches.forks = {{.round = round + 2, .branch = 3, .parent = 2}};
    return manifest;
  }
};

// Gives the bytes in pieces of odd sizes.
inline void write_tensors(CheckpointWriter& writer, const Content& content,
                          const std::string& file) {
  const auto source = [&](size_t tensor, uint64_t offset) {
    const std::span<const std::byte> bytes(content.tensor(file, tensor));
    const uint64_t left = bytes.size() - offset;
    return bytes.subspan(offset, std::min<uint64_t>(left, offset % 2 == 0 ? 111 : 100'000));
  };
  writer.add_tensors(file, content.tensors(file), source, {{"format", "pt"}});
}

// Returns what commit() does.
inline std::string write_checkpoint(CheckpointStore& store, const Content& content) {
  const auto writer = store.begin(kJob, content.id());
  write_tensors(*writer, content, std::string(kParametersFile));
  const auto first = writer->add_part(1, "../../position");
  write_tensors(*writer, content, kMomentum);
  if (content.clocks) write_tensors(*writer, content, std::string(kClocksFile));
  if (content.branches) {
    for (const std::string& file : {kBranchParameters, kBranchMomentum}) {
      write_tensors(*writer, content, file);
    }
  }
  const auto second = writer->add_part(12, "random");
  for (const auto& [part, rank] : {std::pair(first.get(), 1u), std::pair(second.get(), 12u)}) {
    const std::vector<std::byte> bytes = content.part(rank);
    const std::span<const std::byte> all(bytes);
    part->write(all.first(1));
    part->write(all.subspan(1));
  }
  second->finish();
  first->finish();
  return writer->commit(content.manifest());
}

// "": the reader gives exactly this; else what differs.
inline std::string difference(CheckpointReader& reader, const Content& content) {
  Manifest manifest = reader.manifest();
  manifest.files.clear();
  if (!(manifest == content.manifest())) return "the manifest";
  std::vector<std::string> files = {std::string(kParametersFile), kMomentum};
  if (content.clocks) files.emplace_back(kClocksFile);
  if (content.branches) files.insert(files.end(), {kBranchParameters, kBranchMomentum});
  for (const std::string& file : files) {
    const TensorTable& table = reader.tensors(file);
    if (!(table.tensors == content.tensors(file))) return file + ": the tensors";
    if (table.metadata != std::map<std::string, std::string>{{"format", "pt"}}) return "metadata";
    for (size_t i = 0; i < table.tensors.size(); ++i) {
      const std::vector<std::byte>& expected = content.tensor(file, i);
      std::vector<std::byte> found(expected.size());
      const size_t half = found.size() / 2;
      reader.read_tensor(file, i, half, std::span(found).subspan(half));
      reader.read_tensor(file, i, 0, std::span(found).first(half));
      if (found != expected) return file + ": the bytes of " + table.tensors[i].name;
    }
  }
  if (reader.parts().size() != 2) return "the number of parts";
  for (const auto& [rank, name] : {std::pair(1u, "../../position"), std::pair(12u, "random")}) {
    std::vector<std::byte> found(reader.part_bytes(rank, name));
    reader.read_part(rank, name, 0, found);
    if (found != content.part(rank)) return "a part";
  }
  return "";
}

}  // namespace phub::testing
