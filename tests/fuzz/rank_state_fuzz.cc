// What a rank gets back from a checkpoint: its part, and in it the cursor of its data. The first
// bytes of the input are the data that the cursor is restored to.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "tests/fuzz/input.h"
#include "transport/error.h"
#include "worker/data_shards.h"
#include "worker/save/rank_state.h"

using namespace phub;  // NOLINT: a fuzz target

namespace {

void try_to_unpack(std::string_view part) {
  try {
    const RankState state = unpack(part);
    PHUB_CHECK(unpack(pack(state, part.size())) == state);
  } catch (const Error& error) {
    PHUB_CHECK(error.code() == ErrorCode::kInvalid);
  }
}

// It is refused, or a place in this data, from which all goes on as from any other.
void try_to_restore(const DataOptions& options, std::span<const std::byte> cursor) {
  DataShards shards(options);
  try {
    shards.restore(cursor);
  } catch (const Error& error) {
    PHUB_CHECK(error.code() == ErrorCode::kInvalid);
    PHUB_CHECK(shards.epoch() == 0 && shards.position() == 0);
    return;
  }
  const auto mine = shards.cursor();
  shards.restore(mine);
  PHUB_CHECK(shards.cursor() == mine && shards.left() > 0 && shards.position() < options.samples);
  for (int batch = 0; batch < 3; ++batch) {
    for (const uint64_t sample : shards.next(5)) PHUB_CHECK(sample < options.samples);
  }
  DataShards skipped(options);
  skipped.restore(mine);
  skipped.skip(3, 5);
  PHUB_CHECK(skipped.cursor() == shards.cursor());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try_to_unpack({reinterpret_cast<const char*>(data), size});
  constexpr size_t kOptionBytes = 28;
  testing::Input input(std::span(data, size));
  DataOptions options = {.samples = input.take<uint64_t>(),
                         .rank = input.take<uint32_t>(),
                         .world_size = input.take<uint32_t>()};
  options.partition = input.take<uint8_t>() % 2 == 0 ? Partition::kShared : Partition::kPrivate;
  options.seed = input.take<uint64_t>();
  const auto flags = input.take<uint8_t>();
  options.shuffle = flags % 2 == 0;
  options.drop_last = flags / 2 % 2 == 1;
  input.take<uint16_t>();
  try {
    const DataShards shards(options);
    auto cursor = shards.cursor();
    const auto rest = std::as_bytes(std::span(data, size)).subspan(std::min(kOptionBytes, size));
    try_to_restore(options, rest);
    // As it is made, with other bytes at its end: the epoch and the position.
    for (size_t i = 0; i < rest.size() && i < 16; ++i) cursor[32 + i] = rest[i];
    try_to_restore(options, cursor);
  } catch (const Error& error) {
    PHUB_CHECK(error.code() == ErrorCode::kInvalid);
  }
  return 0;
}
