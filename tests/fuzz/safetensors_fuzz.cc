// Headers of safetensors files. The first two bytes say how long the rest of the file is.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "phub/checkpoint/names.h"
#include "phub/checkpoint/safetensors.h"
#include "transport/error.h"

using namespace phub;  // NOLINT: a fuzz target

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2 + kHeaderLengthBytes) return 0;
  const uint64_t data_bytes = data[0] + 256u * data[1];
  const auto file = std::as_bytes(std::span(data, size)).subspan(2);
  try {
    tensor_header_bytes(file.first<kHeaderLengthBytes>(), file.size() + data_bytes);
  } catch (const Error& error) {
    PHUB_CHECK(error.code() == ErrorCode::kInvalid);
  }
  const std::string_view header(reinterpret_cast<const char*>(data) + 2, size - 2);
  if (const auto name = decode_name(header)) PHUB_CHECK(encode_name(*name) == header);
  try {
    const uint64_t file_bytes = kHeaderLengthBytes + header.size() + data_bytes;
    const TensorTable table = parse_tensor_header(header, file_bytes);
    uint64_t sum = kHeaderLengthBytes + header.size();
    for (size_t i = 0; i < table.tensors.size(); ++i) {
      PHUB_CHECK(table.offsets[i] == sum);
      sum += bytes_of(table.tensors[i]);
    }
    PHUB_CHECK(sum == file_bytes && table.offsets.back() == sum);
    const std::string again = make_tensor_header(table.tensors, table.metadata);
    const TensorTable same = parse_tensor_header(std::string_view(again).substr(kHeaderLengthBytes),
                                                 again.size() + data_bytes);
    PHUB_CHECK(same.tensors == table.tensors && same.metadata == table.metadata);
  } catch (const Error& error) {
    PHUB_CHECK(error.code() == ErrorCode::kInvalid);
  }
  return 0;
}
