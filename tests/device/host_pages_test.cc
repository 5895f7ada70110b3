// Registrations that devices share, over a driver that refuses as a GPU's does.
#include "worker/device/host_pages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstddef>

#include "tests/device/device_suite.h"
#include "tests/device/strict_pages.h"
#include "worker/device/host_device.h"

namespace phub {
namespace host_pages_test {

using ::testing::HasSubstr;
using testing::StrictPages;

// So many pages, mapped with these rights.
class Mapping {
 public:
  Mapping(size_t pages, int rights)
      : bytes_(pages * host_page_bytes()),
        memory_(mmap(nullptr, bytes_, rights, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    EXPECT_NE(memory_, MAP_FAILED);
  }
  ~Mapping() { munmap(memory_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  std::byte* at(size_t page) const {
    return static_cast<std::byte*>(memory_) + page * host_page_bytes();
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  void* memory_;
};

std::unique_ptr<HostDevice> device_over(StrictPages& pages) {
  return make_host_device({.budget_bytes = 1 << 16, .pages = &pages});
}

TEST(HostPages, DevicesShareARegistration) {
  const Mapping mapping(4, PROT_READ | PROT_WRITE);
  StrictPages pages;
  const auto first = device_over(pages), second = device_over(pages);
  first->pin_host(mapping.at(0), mapping.bytes(), HostUse::kReadWrite, "both");
  second->pin_host(mapping.at(0), mapping.bytes() - 8, HostUse::kRead, "the same pages");
  EXPECT_EQ(pages.ever(), 1u);
  first->unpin_host(mapping.at(0));
  EXPECT_EQ(pages.registrations(), 1u);
  const DeviceMemory there(*second, 64, "there");
  const auto stream = second->make_stream("copies");
  stream->copy_to_device(there.data(), mapping.at(1), 64);
  stream->synchronize();
  second->unpin_host(mapping.at(0));
  EXPECT_EQ(pages.registrations(), 0u);
  first->pin_host(mapping.at(0), 8, HostUse::kReadWrite, "anew");
  first->unpin_host(mapping.at(0));
  EXPECT_EQ(pages.refused(), 0u);
}

TEST(HostPages, PagesWithOtherNeighboursAreRefused) {
  const Mapping mapping(4, PROT_READ | PROT_WRITE);
  StrictPages pages;
  const auto first = device_over(pages), second = device_over(pages);
  const PinnedMemory two(*first, mapping.at(1), 2 * host_page_bytes(), HostUse::kReadWrite, "two");
  for (const auto& [page, count] : {std::pair(0, 2), {0, 4}, {1, 1}, {2, 1}, {2, 2}}) {
    std::string what;
    EXPECT_EQ(code_of(
                  [&, page = page, count = count] {
                    second->pin_host(mapping.at(static_cast<size_t>(page)),
                                     static_cast<size_t>(count) * host_page_bytes(), HostUse::kRead,
                                     "others");
                  },
                  &what),
              ErrorCode::kInvalid);
    EXPECT_THAT(what, HasSubstr("'others'"));
  }
  EXPECT_EQ(second->stats().host_bytes, 0u);
  const PinnedMemory before(*second, mapping.at(0), 1, HostUse::kRead, "before");
  const PinnedMemory after(*second, mapping.at(3), 1, HostUse::kRead, "after");
  EXPECT_EQ(pages.registrations(), 3u);
}

TEST(HostPages, PagesThatAreOnlyReadMayBeMappedSo) {
  const Mapping mapping(1, PROT_READ);
  StrictPages pages;
  const auto first = device_over(pages), second = device_over(pages);
  std::string what;
  EXPECT_EQ(code_of([&] { first->pin_host(mapping.at(0), 1, HostUse::kReadWrite, "mine"); }, &what),
            ErrorCode::kFull);
  EXPECT_THAT(what, HasSubstr("not mapped as it is to be used"));
  const PinnedMemory read(*first, mapping.at(0), 1, HostUse::kRead, "mine");
  EXPECT_EQ(code_of([&] { second->pin_host(mapping.at(0), 1, HostUse::kReadWrite, "x"); }, &what),
            ErrorCode::kInvalid);
  EXPECT_THAT(what, HasSubstr("for reading only"));
}

// What a driver refused leaves nothing behind.
TEST(HostPages, ARefusalCanBeTriedAgain) {
  StrictPages pages;
  const auto device = device_over(pages);
  const Mapping mapping(2, PROT_READ);
  EXPECT_EQ(code_of([&] { device->pin_host(mapping.at(0), 1, HostUse::kReadWrite, "x"); }),
            ErrorCode::kFull);
  ASSERT_EQ(mprotect(mapping.at(0), mapping.bytes(), PROT_READ | PROT_WRITE), 0);
  const PinnedMemory pinned(*device, mapping.at(0), 1, HostUse::kReadWrite, "x");
  EXPECT_EQ(pages.registrations(), 1u);
}

}  // namespace host_pages_test
}  // namespace phub
