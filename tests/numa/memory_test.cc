#include "numa/memory.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <thread>

namespace phub::numa {
namespace memory_test {

const size_t kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));

bool machine_has_node(uint32_t node) {
  return std::filesystem::exists(fmt::format("/sys/devices/system/node/node{}", node));
}

TEST(Memory, IsZeroedWritableAndAligned) {
  for (size_t bytes : {size_t{1}, kPage, kPage + 1, size_t{3} << 20, size_t{9} << 20}) {
    const Memory memory(bytes, 0);
    const std::span<std::byte> span = memory.bytes();
    ASSERT_EQ(span.size(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(span.data()) % kPage, 0u);
    if (bytes >= 2u << 20) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(span.data()) % (2u << 20), 0u) << "for huge pages";
    }
    EXPECT_TRUE(
        std::all_of(span.begin(), span.end(), [](std::byte b) { return b == std::byte{0}; }));
    std::fill(span.begin(), span.end(), std::byte{7});
  }
  EXPECT_TRUE(Memory(0, 0).bytes().empty());
  EXPECT_TRUE(Memory().bytes().empty());
}

// Whether a page is mapped: mincore() fails with ENOMEM where nothing is.
bool is_mapped(const void* page) {
  unsigned char resident = 0;
  return mincore(const_cast<void*>(page), 1, &resident) == 0;
}

TEST(Memory, IsUnmappedOnceWhenMoved) {
  const std::byte *first = nullptr, *second = nullptr;
  {
    Memory a(kPage, 0), b(2 * kPage, 0);
    first = a.bytes().data(), second = b.bytes().data();
    Memory c(std::move(a));
    EXPECT_TRUE(a.bytes().empty());
    EXPECT_EQ(c.bytes().data(), first);
    c = std::move(b);
    EXPECT_EQ(c.bytes().data(), second);
    EXPECT_FALSE(is_mapped(first));
    EXPECT_TRUE(is_mapped(second));
    EXPECT_TRUE(is_mapped(second + kPage));
    Memory& same = c;
    c = std::move(same);
    EXPECT_EQ(c.bytes().data(), second);
  }
  EXPECT_FALSE(is_mapped(second));
}

TEST(Memory, TooMuchIsAnErrorWithTheSize) {
  for (size_t bytes : {size_t{1} << 60, SIZE_MAX}) {
    try {
      Memory memory(bytes, 0);
      ADD_FAILURE() << bytes;
    } catch (const std::runtime_error& error) {
      const std::string what = error.what();
      EXPECT_NE(what.find(std::to_string(bytes)), std::string::npos) << what;
      EXPECT_NE(what.find("Cannot allocate memory"), std::string::npos) << what;
    }
  }
}

TEST(Memory, LiesOnTheNodeThatWasAskedFor) {
  if (!machine_has_node(1)) GTEST_SKIP() << "this machine has one NUMA node";
  for (int node : {1, 0, 1}) {
    const Memory memory(size_t{5} << 20, static_cast<uint32_t>(node));
    std::fill(memory.bytes().begin(), memory.bytes().end(), std::byte{1});
    for (int on : nodes_of_pages(memory.bytes())) ASSERT_EQ(on, node);
  }
}

TEST(PreferNode, HoldsForTheWholePagesInside) {
  if (!machine_has_node(1)) GTEST_SKIP() << "this machine has one NUMA node";
  const Memory memory(4 * kPage, 0);
  ASSERT_TRUE(prefer_node(memory.bytes().subspan(kPage - 8, 2 * kPage), 1));
  std::fill(memory.bytes().begin(), memory.bytes().end(), std::byte{1});
  EXPECT_EQ(nodes_of_pages(memory.bytes()), (std::vector<int>{0, 1, 0, 0}));
}

TEST(PreferNode, IsOnlyAHint) {
  const Memory memory(4 * kPage, 0);
  if (!machine_has_node(1)) {
    EXPECT_FALSE(prefer_node(memory.bytes(), 0));
  }
  EXPECT_FALSE(prefer_node(memory.bytes(), 1'000'000));
  const Memory elsewhere(4 * kPage, 1'000'000);  // an unknown node is no error
  elsewhere.bytes()[0] = std::byte{1};
}

TEST(NodesOfPages, TellsTouchedPagesFromOthers) {
  const Memory memory(8 * kPage, 0);
  memory.bytes()[2 * kPage] = std::byte{1};
  memory.bytes()[5 * kPage + 17] = std::byte{1};
  const std::vector<int> nodes = nodes_of_pages(memory.bytes());
  ASSERT_EQ(nodes.size(), 8u);
  if (nodes[2] < 0) GTEST_SKIP() << "the kernel does not tell";
  for (size_t i = 0; i < 8; i++) EXPECT_EQ(nodes[i] >= 0, i == 2 || i == 5) << i;
  // A range that covers parts of pages has all of them.
  EXPECT_EQ(nodes_of_pages(memory.bytes().subspan(2 * kPage - 1, 2)).size(), 2u);
  EXPECT_TRUE(nodes_of_pages({}).empty());
}

TEST(PinThread, MovesTheThreadToTheCpu) {
  cpu_set_t allowed;
  ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  for (uint32_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    std::thread([cpu] {
      EXPECT_TRUE(pin_thread(cpu));
      EXPECT_EQ(sched_getcpu(), static_cast<int>(cpu));
    }).join();
  }
  std::thread([] {
    EXPECT_FALSE(pin_thread(60'000));
    EXPECT_FALSE(pin_thread(UINT32_MAX));
  }).join();
}

}  // namespace memory_test
}  // namespace phub::numa
