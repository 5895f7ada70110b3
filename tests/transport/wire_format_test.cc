// The formats of TCP, RDMA, libfabric and the switch, on the page and in the code, are one.
#include <gtest/gtest.h>

#include <cstddef>

#include "tests/transport/page.h"
#include "transport/ofi/format.h"
#include "transport/switch/packet.h"
#include "transport/tcp/format.h"
#include "transport/verbs/format.h"

namespace phub {
namespace wire_format_test {

TEST(WireFormatTest, ThePageHasTheCodesOffsets) {
  Page page(PHUB_SOURCE_DIR);
#define PHUB_EXPECT_OFFSET(type, field) page.expect(#type "." #field, offsetof(type, field))
  PHUB_EXPECT_OFFSET(TcpHeader, magic);
  PHUB_EXPECT_OFFSET(TcpHeader, version);
  PHUB_EXPECT_OFFSET(TcpHeader, type);
  PHUB_EXPECT_OFFSET(TcpHeader, bytes);
  PHUB_EXPECT_OFFSET(TcpHello, ticket);
  PHUB_EXPECT_OFFSET(TcpHello, queue);
  PHUB_EXPECT_OFFSET(TcpHello, queues);
  PHUB_EXPECT_OFFSET(TcpHello, queue_chunks);
  PHUB_EXPECT_OFFSET(TcpHello, reserved);
  PHUB_EXPECT_OFFSET(TcpHello, gradient_bytes);
  PHUB_EXPECT_OFFSET(TcpHello, result_bytes);
  PHUB_EXPECT_OFFSET(TcpWelcome, rank);
  PHUB_EXPECT_OFFSET(TcpWelcome, incarnation);
  PHUB_EXPECT_OFFSET(TcpBatch, more);
  PHUB_EXPECT_OFFSET(TcpBatch, reserved);
  PHUB_EXPECT_OFFSET(TcpBatch, first);
  PHUB_EXPECT_OFFSET(TcpFrame, imm);
  PHUB_EXPECT_OFFSET(TcpFrame, bytes);
  PHUB_EXPECT_OFFSET(TcpFrame, remote_offset);
  PHUB_EXPECT_OFFSET(VerbsHello, magic);
  PHUB_EXPECT_OFFSET(VerbsHello, version);
  PHUB_EXPECT_OFFSET(VerbsHello, queue);
  PHUB_EXPECT_OFFSET(VerbsHello, ticket);
  PHUB_EXPECT_OFFSET(VerbsHello, results_base);
  PHUB_EXPECT_OFFSET(VerbsHello, results_bytes);
  PHUB_EXPECT_OFFSET(VerbsHello, results_key);
  PHUB_EXPECT_OFFSET(VerbsHello, reserved);
  PHUB_EXPECT_OFFSET(OfiHeader, magic);
  PHUB_EXPECT_OFFSET(OfiHeader, version);
  PHUB_EXPECT_OFFSET(OfiHeader, type);
  PHUB_EXPECT_OFFSET(OfiHeader, bytes);
  PHUB_EXPECT_OFFSET(OfiHello, ticket);
  PHUB_EXPECT_OFFSET(OfiHello, queue);
  PHUB_EXPECT_OFFSET(OfiHello, queues);
  PHUB_EXPECT_OFFSET(OfiHello, queue_chunks);
  PHUB_EXPECT_OFFSET(OfiHello, reserved);
  PHUB_EXPECT_OFFSET(OfiHello, gradient_bytes);
  PHUB_EXPECT_OFFSET(OfiHello, result_bytes);
  PHUB_EXPECT_OFFSET(OfiHello, results);
  PHUB_EXPECT_OFFSET(OfiWelcome, rank);
  PHUB_EXPECT_OFFSET(OfiWelcome, incarnation);
  PHUB_EXPECT_OFFSET(OfiWelcome, slots);
  PHUB_EXPECT_OFFSET(OfiTarget, base);
  PHUB_EXPECT_OFFSET(OfiTarget, key);
  PHUB_EXPECT_OFFSET(OfiTarget, name_bytes);
  PHUB_EXPECT_OFFSET(OfiTarget, reserved);
  PHUB_EXPECT_OFFSET(OfiTarget, name);
  PHUB_EXPECT_OFFSET(SwitchHeader, magic);
  PHUB_EXPECT_OFFSET(SwitchHeader, kind);
  PHUB_EXPECT_OFFSET(SwitchHeader, worker);
  PHUB_EXPECT_OFFSET(SwitchHeader, slot);
  PHUB_EXPECT_OFFSET(SwitchHeader, generation);
  PHUB_EXPECT_OFFSET(SwitchHeader, turn);
  PHUB_EXPECT_OFFSET(SwitchHeader, chunk);
  PHUB_EXPECT_OFFSET(SwitchHeader, part);
  PHUB_EXPECT_OFFSET(SwitchHeader, round);
  PHUB_EXPECT_OFFSET(SwitchHeader, exponent);
  PHUB_EXPECT_OFFSET(SwitchHeader, next_exponent);
  PHUB_EXPECT_OFFSET(SwitchHeader, workers);
  PHUB_EXPECT_OFFSET(SwitchPacket, codes);
#undef PHUB_EXPECT_OFFSET
}

TEST(WireFormatTest, ThePageHasTheCodesConstants) {
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
