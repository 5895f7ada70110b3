// The safetensors format: a length of 8 bytes (little-endian), a JSON header of that length, the
// tensors' bytes.
//
//   {"__metadata__": {"format": "pt"}, "fc.weight": {"dtype": "F32", "shape": [10, 64],
//   "data_offsets": [0, 2560]}}
//
// Offsets count from the end of the header. Tensors lie one after another, without holes. Errors
// are Error(kInvalid) that names the problem. Pure functions, any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/control/choices.h"

namespace phub {

enum class TensorType : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kF64,
  kI64,
  kU64
};  // clang-format off
template <>
inline constexpr std::string_view kWords<TensorType>[] = {
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64", "U64"};
// clang-format on
size_t bytes_of(TensorType type);

struct TensorInfo {
  std::string name;  // UTF-8, not "__metadata__"
  TensorType type = TensorType::kF32;
  std::vector<uint64_t> shape;  // empty: a scalar

  friend bool operator==(const TensorInfo&, const TensorInfo&) = default;
};
// Throws if the number is more than 2^63 - 1.
uint64_t bytes_of(const TensorInfo& tensor);

struct TensorTable {
  std::vector<TensorInfo> tensors;  // in the order of their bytes
  std::vector<uint64_t> offsets;    // by tensor: its offset in the file; one more: the file's size
  std::map<std::string, std::string> metadata;
};

// Other readers take no longer headers: about 700,000 tensors with names of 50 bytes.
inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;
inline constexpr uint64_t kHeaderLengthBytes = 8;
inline constexpr size_t kMaxDimensions = 64;

// The beginning of a file: length and header, padded with spaces to a multiple of 8 bytes.
// Throws if a name is not UTF-8, empty, there twice or "__metadata__"; kFull if the header is too
// long.
std::string make_tensor_header(const std::vector<TensorInfo>& tensors,
                               const std::map<std::string, std::string>& metadata);

// The length in a file's first 8 bytes, checked against the file's size and the limit.
uint64_t tensor_header_bytes(std::span<const std::byte, kHeaderLengthBytes> begin,
                             uint64_t file_bytes);

// `header`: the JSON alone. Checks that offsets fit types and shapes, that there is no hole, no
// overlap and no name twice, and that the last tensor ends with the file.
TensorTable parse_tensor_header(std::string_view header, uint64_t file_bytes);

}  // namespace phub
