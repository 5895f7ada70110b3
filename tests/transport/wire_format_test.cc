// The formats of every transport, on the page and in the code, are one.
#include <gtest/gtest.h>

#include <boost/preprocessor/seq/for_each.hpp>
#include <boost/preprocessor/stringize.hpp>
#include <boost/preprocessor/variadic/to_seq.hpp>
#include <cstddef>

#include "tests/transport/page.h"
#include "transport/ofi/format.h"
#include "transport/shm/format.h"
#include "transport/switch/packet.h"
#include "transport/tcp/format.h"
#include "transport/verbs/format.h"

namespace phub {
namespace wire_format_test {

#define EXPECT_OFFSET(r, type, field) \
  page.expect(BOOST_PP_STRINGIZE(type) "." BOOST_PP_STRINGIZE(field), offsetof(type, field));
#define EXPECT_VALUE(r, type, name) \
  page.expect(BOOST_PP_STRINGIZE(name), static_cast<uint64_t>(type name));
#define FIELDS(type, ...) \
  BOOST_PP_SEQ_FOR_EACH(EXPECT_OFFSET, type, BOOST_PP_VARIADIC_TO_SEQ(__VA_ARGS__))
#define VALUES(scope, ...) \
  BOOST_PP_SEQ_FOR_EACH(EXPECT_VALUE, scope, BOOST_PP_VARIADIC_TO_SEQ(__VA_ARGS__))

TEST(WireFormatTest, ThePageHasTheCodesOffsets) {
  Page page(PHUB_SOURCE_DIR);
  FIELDS(ShmHeader, magic, version, type, fds);
  FIELDS(ShmHello, ticket);
  FIELDS(ShmWelcome, rank, incarnation, queues, total_fds, results_file_bytes, results_bytes,
         gradients_file_bytes, gradients_offset, gradients_bytes, rings_file_bytes);
  FIELDS(ShmQueue, to_box_offset, to_worker_offset, to_box_entries, to_worker_entries);
  FIELDS(ShmRing, tail, head, wake_at);
  FIELDS(TcpHeader, magic, version, type, bytes);
  FIELDS(TcpHello, ticket, queue, queues, queue_chunks, reserved, gradient_bytes, result_bytes);
  FIELDS(TcpWelcome, rank, incarnation);
  FIELDS(TcpBatch, more, reserved, first);
  FIELDS(TcpFrame, imm, bytes, remote_offset);
  FIELDS(VerbsHello, magic, version, queue, ticket, results_base, results_bytes, results_key,
         reserved);
  FIELDS(OfiHeader, magic, version, type, bytes);
  FIELDS(OfiHello, ticket, queue, queues, queue_chunks, reserved, gradient_bytes, result_bytes,
         results);
  FIELDS(OfiWelcome, rank, incarnation, slots);
  FIELDS(OfiTarget, base, key, name_bytes, reserved, name);
  FIELDS(SwitchHeader, magic, kind, worker, slot, generation, turn, chunk, part, round, exponent,
         next_exponent, workers);
  FIELDS(SwitchPacket, codes);
}

TEST(WireFormatTest, ThePageHasTheCodesSizesAndConstants) {
  Page page(PHUB_SOURCE_DIR);
  VALUES(phub::, kShmMagic, kShmVersion, kTicketDigits, kShmFdsPerMessage, kShmFixedFds);
  VALUES(phub::, kShmMaxQueues, kShmRingSlack, kShmMaxRingEntries, kShmLine, kShmSkewRanks);
  VALUES(phub::, kMaxRefusalBytes, kShmArmed, kMaxChunksPerQueue, kMaxRanks);
  VALUES(ShmMessage::, kHello, kWelcome, kMoreFds, kRefusal);
  VALUES(ImmKind::, kData, kNull, kInitial, kControl);
  VALUES(, sizeof(ShmHello), sizeof(ShmWelcome), sizeof(ShmQueue), sizeof(ShmRing));
}

#undef EXPECT_OFFSET
#undef EXPECT_VALUE
#undef FIELDS
#undef VALUES

TEST(WireFormatTest, ConstantsStayAsTheyAre) {
  EXPECT_EQ(kTcpMagic, 0x54554850u);
  EXPECT_EQ(kTcpVersion, 1u);
  EXPECT_EQ(kTcpMaxBatch, 32u);
  EXPECT_EQ(kVerbsMagic, 0x56485550u);
  EXPECT_EQ(kVerbsVersion, 1u);
  EXPECT_EQ(kOfiMagic, 0x4f554850u);
  EXPECT_EQ(kOfiVersion, 1u);
  EXPECT_EQ(kOfiMaxNameBytes, 128u);
  EXPECT_EQ(kSwitchMagic, 0x77534850);
}

}  // namespace wire_format_test
}  // namespace phub
