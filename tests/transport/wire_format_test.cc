// The formats of TCP and RDMA, on the page and in the code, are one.
#include <gtest/gtest.h>

#include <cstddef>

#include "tests/transport/page.h"
#include "transport/tcp/format.h"
#include "transport/verbs/format.h"

namespace phub {
namespace {

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
#undef PHUB_EXPECT_OFFSET
}

TEST(WireFormatTest, ThePageHasTheCodesConstants) {
  EXPECT_EQ(kTcpMagic, 0x54554850u);
  EXPECT_EQ(kTcpVersion, 1u);
  EXPECT_EQ(kTcpMaxBatch, 32u);
  EXPECT_EQ(kVerbsMagic, 0x56485550u);
  EXPECT_EQ(kVerbsVersion, 1u);
}

}  // namespace
}  // namespace phub
