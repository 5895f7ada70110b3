// Names of jobs, files and ranks' parts as names of folders and files. Pure functions, any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace phub {

inline constexpr size_t kMaxEncodedBytes = 255;  // as file systems allow
inline constexpr size_t kMaxFileNameBytes = 300;
inline constexpr std::string_view kTensorsSuffix = ".safetensors";

// Letters, digits, '_' and '-' stay; every other byte, also '.', becomes %XX. Throws
// Error(kInvalid) if the name is empty or the result longer than 255 bytes.
std::string encode_name(std::string_view name);

// Returns nullopt if encode_name() never returns this.
std::optional<std::string> decode_name(std::string_view encoded);

// The folder of a checkpoint: "round-000000000123.epoch-4".
struct CheckpointId {
  uint64_t epoch = 0;
  uint64_t round = 0;

  friend auto operator<=>(const CheckpointId&, const CheckpointId&) = default;
};
std::string folder_name(CheckpointId id);
std::optional<CheckpointId> parse_folder_name(std::string_view name);

// "rank-7/NAME", with the name encoded.
std::string part_name(uint32_t rank, std::string_view name);
struct PartId {
  uint32_t rank = 0;
  std::string name;  // decoded
};
std::optional<PartId> parse_part_name(std::string_view file);

// Throws Error(kInvalid) unless it is an encoded name and ".safetensors", or that of a part.
void check_file_name(std::string_view file);

}  // namespace phub
