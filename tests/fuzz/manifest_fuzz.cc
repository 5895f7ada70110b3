// Manifests of checkpoints: as they are, and with a checksum that fits them, as an attacker would
// write it.
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "phub/checkpoint/crc32c.h"
#include "phub/checkpoint/manifest.h"
#include "phub/checkpoint/names.h"

using namespace phub;  // NOLINT: a fuzz target

namespace {

void try_to_parse(std::string_view text) {
  try {
    const Manifest manifest = parse_manifest(text);
    for (const CheckpointFile& file : manifest.files) {
      PHUB_CHECK(file.name.find("..") == std::string::npos && !file.name.starts_with('/'));
      PHUB_CHECK(file.checksums.size() <= file.bytes);
    }
    PHUB_CHECK(parse_manifest(manifest_text(manifest)) == manifest);
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
