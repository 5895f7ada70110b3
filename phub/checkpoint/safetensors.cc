#include "phub/checkpoint/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <unordered_set>

#include "transport/control/json_codec.h"
#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

constexpr std::string_view kMetadata = "__metadata__";
constexpr uint64_t kMaxTensors = 1u << 20;
constexpr uint64_t kMaxTensorNameBytes = 4096;
constexpr uint64_t kMaxMetadata = 1024;
constexpr uint64_t kMaxTensorBytes = std::numeric_limits<int64_t>::max();

// A tensor as the header has it.
struct TensorEntry {
  TensorType type = TensorType::kF32;
  std::vector<uint64_t> shape;
  std::vector<uint64_t> data_offsets;  // begin, end
};

template <class A>
void fields(A& a, const TensorEntry*) {
  a.required("dtype", &TensorEntry::type);
  a.required("shape", &TensorEntry::shape, {0, kMaxDimensions});
  a.required("data_offsets", &TensorEntry::data_offsets, {2, 2});
}

struct HeaderText {
  std::map<std::string, std::string> metadata;
  std::map<std::string, TensorEntry> tensors;
  bool has_metadata = false;
};

// Names of tensors are the fields of the header, so the codec's table for structs does not fit.
json::Place header_field(void* object, std::string_view name) {
  auto& header = *static_cast<HeaderText*>(object);
  if (name == kMetadata) {
    const bool again = std::exchange(header.has_metadata, true);
    return {&header.metadata, json::type_of<decltype(header.metadata)>(), {0, kMaxMetadata}, again};
  }
  if (name.empty() || name.size() > kMaxTensorNameBytes) {
    fail(ErrorCode::kInvalid, "safetensors header: a tensor's name must have 1 to {} bytes, not {}",
         kMaxTensorNameBytes, name.size());
  }
  const auto [entry, added] = header.tensors.try_emplace(std::string(name));
  return {&entry->second, json::type_of<TensorEntry>(), {}, !added};
}

constexpr json::Type kHeaderType = {
    .shape = json::Type::Shape::kObject, .expected = json::expected_object, .entry = header_field};

[[noreturn]] void refuse_tensor(std::string_view name, const std::string& why) {
  fail(ErrorCode::kInvalid, "safetensors header: tensor '{}': {}", printable(name), why);
}

}  // namespace

size_t bytes_of(TensorType type) {
  switch (type) {
    case TensorType::kBool:
    case TensorType::kU8:
    case TensorType::kI8:
    case TensorType::kF8E5M2:
    case TensorType::kF8E4M3:
      return 1;
    case TensorType::kI16:
    case TensorType::kU16:
    case TensorType::kF16:
    case TensorType::kBF16:
      return 2;
    case TensorType::kI32:
    case TensorType::kU32:
    case TensorType::kF32:
      return 4;
    case TensorType::kF64:
    case TensorType::kI64:
    case TensorType::kU64:
      return 8;
  }
  PHUB_CHECK(false);
  return 0;
}

uint64_t bytes_of(const TensorInfo& tensor) {
  // With a dimension of zero there are no bytes, however large the others are.
  if (std::count(tensor.shape.begin(), tensor.shape.end(), 0) > 0) return 0;
  uint64_t bytes = bytes_of(tensor.type);
  for (const uint64_t dimension : tensor.shape) {
    if (dimension > kMaxTensorBytes / bytes) {
      refuse_tensor(tensor.name, fmt::format("the shape [{}] has too many elements",
                                             fmt::join(tensor.shape, ", ")));
    }
    bytes *= dimension;
  }
  return bytes;
}

std::string make_tensor_header(const std::vector<TensorInfo>& tensors,
                               const std::map<std::string, std::string>& metadata) {
  if (tensors.size() > kMaxTensors) {
    fail(ErrorCode::kFull, "{} tensors do not go into one file: at most {} do", tensors.size(),
         kMaxTensors);
  }
  std::string text = "{";
  const auto field = [&](std::string_view name) {
    if (text.size() > 1) text += ',';
    json::write_string(text, name);
    text += ':';
  };
  if (!metadata.empty()) {
    field(kMetadata);
    json::write(text, metadata);
  }
  std::unordered_set<std::string_view> names;
  uint64_t offset = 0;
  for (const TensorInfo& tensor : tensors) {
    if (tensor.name.empty() || tensor.name.size() > kMaxTensorNameBytes) {
      fail(ErrorCode::kInvalid, "the name of a tensor must have 1 to {} bytes, not {}",
           kMaxTensorNameBytes, tensor.name.size());
    }
    if (tensor.name == kMetadata) {
      fail(ErrorCode::kInvalid, "no tensor can be named {}: safetensors files use that name",
           kMetadata);
    }
    if (!names.insert(tensor.name).second) refuse_tensor(tensor.name, "the name is there twice");
    if (tensor.shape.size() > kMaxDimensions) {
      refuse_tensor(tensor.name,
                    fmt::format("{} dimensions, at most {}", tensor.shape.size(), kMaxDimensions));
    }
    const uint64_t bytes = bytes_of(tensor);
    if (bytes > kMaxTensorBytes - offset) refuse_tensor(tensor.name, "the file would be too large");
    field(tensor.name);
    json::write(text, TensorEntry{tensor.type, tensor.shape, {offset, offset + bytes}});
    offset += bytes;
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (text.size() > kMaxHeaderBytes) {
    fail(ErrorCode::kFull,
         "the header of {} tensors has {} bytes; safetensors files have at most {}", tensors.size(),
         text.size(), kMaxHeaderBytes);
  }
  std::string length(kHeaderLengthBytes, '\0');
  for (size_t i = 0; i < kHeaderLengthBytes; ++i) {
    length[i] = static_cast<char>(text.size() >> 8 * i & 0xff);
  }
  return length + text;
}

uint64_t tensor_header_bytes(std::span<const std::byte, kHeaderLengthBytes> begin,
                             uint64_t file_bytes) {
  uint64_t length = 0;
  for (size_t i = kHeaderLengthBytes; i-- > 0;) {
    length = length << 8 | std::to_integer<uint64_t>(begin[i]);
  }
  const uint64_t most = file_bytes < kHeaderLengthBytes ? 0 : file_bytes - kHeaderLengthBytes;
  if (length > std::min(most, kMaxHeaderBytes)) {
    fail(ErrorCode::kInvalid,
         "safetensors: a header of {} bytes in a file of {} bytes (at most {})", length, file_bytes,
         kMaxHeaderBytes);
  }
  return length;
}

TensorTable parse_tensor_header(std::string_view header, uint64_t file_bytes) {
  if (!header.starts_with('{')) {
    fail(ErrorCode::kInvalid, "safetensors header: must begin with {{");
  }
  HeaderText text;
  json::decode(header, "safetensors header", {&text, &kHeaderType, {0, kMaxTensors + 1}});

  const uint64_t data_begin = kHeaderLengthBytes + header.size();
  if (data_begin > file_bytes) {
    fail(ErrorCode::kInvalid, "safetensors: the file ends within its header");
  }
  std::vector<std::pair<const std::string, TensorEntry>*> order;
  for (auto& entry : text.tensors) order.push_back(&entry);
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return a->second.data_offsets < b->second.data_offsets;
  });

  TensorTable table{.tensors = {}, .offsets = {data_begin}, .metadata = std::move(text.metadata)};
  uint64_t end = 0;
  for (auto* named : order) {
    const auto& [name, entry] = *named;
    TensorInfo tensor{name, entry.type, entry.shape};
    const uint64_t bytes = bytes_of(tensor);
    if (entry.data_offsets[0] != end) {
      refuse_tensor(name, fmt::format("begins at byte {}, and the bytes before it end at {}",
                                      entry.data_offsets[0], end));
    }
    if (entry.data_offsets[1] < end || entry.data_offsets[1] - end != bytes) {
      refuse_tensor(name, fmt::format("its bytes are [{}], and {} of {} take {}",
                                      fmt::join(entry.data_offsets, ", "), word_of(entry.type),
                                      fmt::format("[{}]", fmt::join(entry.shape, ", ")), bytes));
    }
    end = entry.data_offsets[1];
    if (end > file_bytes - data_begin) {
      refuse_tensor(name, fmt::format("ends at byte {} of {}", end, file_bytes - data_begin));
    }
    table.tensors.push_back(std::move(tensor));
    table.offsets.push_back(data_begin + end);
  }
  if (table.offsets.back() != file_bytes) {
    fail(ErrorCode::kInvalid, "safetensors: {} bytes behind the last tensor",
         file_bytes - table.offsets.back());
  }
  return table;
}

}  // namespace phub
