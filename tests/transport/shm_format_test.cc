// The formats on the page and in the code are one.
#include <gtest/gtest.h>

#include <cstddef>

#include "tests/transport/page.h"
#include "transport/shm/format.h"

namespace phub {
namespace shm_format_test {

TEST(ShmFormatTest, ThePageHasTheCodesConstants) {
  Page page(PHUB_SOURCE_DIR);
  const auto expect = [&page](const char* name, uint64_t value) { page.expect(name, value); };
  expect("kShmMagic", kShmMagic);
  expect("kShmVersion", kShmVersion);
  expect("kTicketDigits", kTicketDigits);
  expect("kShmFdsPerMessage", kShmFdsPerMessage);
  expect("kShmFixedFds", kShmFixedFds);
  expect("kShmMaxQueues", kShmMaxQueues);
  expect("kShmRingSlack", kShmRingSlack);
  expect("kShmMaxRingEntries", kShmMaxRingEntries);
  expect("kShmLine", kShmLine);
  expect("kShmSkewRanks", kShmSkewRanks);
  expect("kMaxRefusalBytes", kMaxRefusalBytes);
  expect("kShmArmed", kShmArmed);
  expect("kHello", static_cast<uint64_t>(ShmMessage::kHello));
  expect("kWelcome", static_cast<uint64_t>(ShmMessage::kWelcome));
  expect("kMoreFds", static_cast<uint64_t>(ShmMessage::kMoreFds));
  expect("kRefusal", static_cast<uint64_t>(ShmMessage::kRefusal));
  expect("kData", static_cast<uint64_t>(ImmKind::kData));
  expect("kNull", static_cast<uint64_t>(ImmKind::kNull));
  expect("kInitial", static_cast<uint64_t>(ImmKind::kInitial));
  expect("kControl", static_cast<uint64_t>(ImmKind::kControl));
  expect("kMaxChunksPerQueue", kMaxChunksPerQueue);
  expect("kMaxRanks", kMaxRanks);
#define PHUB_EXPECT_OFFSET(type, field) expect(#type "." #field, offsetof(type, field))
  PHUB_EXPECT_OFFSET(ShmHeader, magic);
  PHUB_EXPECT_OFFSET(ShmHeader, version);
  PHUB_EXPECT_OFFSET(ShmHeader, type);
  PHUB_EXPECT_OFFSET(ShmHeader, fds);
  PHUB_EXPECT_OFFSET(ShmHello, ticket);
  PHUB_EXPECT_OFFSET(ShmWelcome, rank);
  PHUB_EXPECT_OFFSET(ShmWelcome, incarnation);
  PHUB_EXPECT_OFFSET(ShmWelcome, queues);
  PHUB_EXPECT_OFFSET(ShmWelcome, total_fds);
  PHUB_EXPECT_OFFSET(ShmWelcome, results_file_bytes);
  PHUB_EXPECT_OFFSET(ShmWelcome, results_bytes);
  PHUB_EXPECT_OFFSET(ShmWelcome, gradients_file_bytes);
  PHUB_EXPECT_OFFSET(ShmWelcome, gradients_offset);
  PHUB_EXPECT_OFFSET(ShmWelcome, gradients_bytes);
  PHUB_EXPECT_OFFSET(ShmWelcome, rings_file_bytes);
  PHUB_EXPECT_OFFSET(ShmQueue, to_box_offset);
  PHUB_EXPECT_OFFSET(ShmQueue, to_worker_offset);
  PHUB_EXPECT_OFFSET(ShmQueue, to_box_entries);
  PHUB_EXPECT_OFFSET(ShmQueue, to_worker_entries);
  PHUB_EXPECT_OFFSET(ShmRing, tail);
  PHUB_EXPECT_OFFSET(ShmRing, head);
  PHUB_EXPECT_OFFSET(ShmRing, wake_at);
#undef PHUB_EXPECT_OFFSET
  expect("sizeof(ShmHello)", sizeof(ShmHello));
  expect("sizeof(ShmWelcome)", sizeof(ShmWelcome));
  expect("sizeof(ShmQueue)", sizeof(ShmQueue));
  expect("sizeof(ShmRing)", sizeof(ShmRing));
}

}  // namespace shm_format_test
}  // namespace phub
