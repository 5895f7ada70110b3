#include "numa/memory.h"

#include <fmt/format.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace phub::numa {
namespace {

constexpr size_t kHugePage = 2u << 20;
constexpr uint32_t kMaxNodes = 1024;  // the kernel's own limit

size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

constexpr uintptr_t round_down(uintptr_t n, size_t to) { return n / to * to; }
constexpr uintptr_t round_up(uintptr_t n, size_t to) { return round_down(n + to - 1, to); }

// "0" on a machine with one node, "0-1" or "0,2" on others; no file without NUMA support.
bool has_several_nodes() {
  static const bool several = [] {
    std::ifstream file("/sys/devices/system/node/online");
    std::string nodes;
    return std::getline(file, nodes) && nodes.find_first_of(",-") != std::string::npos;
  }();
  return several;
}

// Maps at a multiple of the huge page size, so that every huge page that fits is one.
void* map_aligned(size_t bytes) {
  const size_t slack = bytes >= kHugePage ? kHugePage : 0;
  void* mapped =
      mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED || slack == 0) return mapped;
  auto* begin = static_cast<std::byte*>(mapped);
  const size_t before =
      round_up(reinterpret_cast<uintptr_t>(begin), kHugePage) - reinterpret_cast<uintptr_t>(begin);
  if (before > 0) munmap(begin, before);
  if (slack > before) munmap(begin + before + bytes, slack - before);
  return begin + before;
}

}  // namespace

Memory::Memory(size_t bytes, uint32_t os_node) {
  if (bytes == 0) return;
  const size_t rounded = bytes <= SIZE_MAX - 2 * kHugePage ? round_up(bytes, page_bytes()) : 0;
  void* mapped = MAP_FAILED;
  errno = ENOMEM;
  if (rounded > 0) mapped = map_aligned(rounded);
  if (mapped == MAP_FAILED) {
    throw std::runtime_error(fmt::format("mmap of {} bytes of memory for NUMA node {}: {}", bytes,
                                         os_node, std::strerror(errno)));
  }
  data_ = static_cast<std::byte*>(mapped);
  size_ = bytes;
  madvise(data_, rounded, MADV_HUGEPAGE);  // a hint, like the node
  prefer_node(std::span<const std::byte>(data_, rounded), os_node);
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  Memory moved(std::move(other));
  std::swap(data_, moved.data_);
  std::swap(size_, moved.size_);
  return *this;
}

Memory::~Memory() {
  if (data_ != nullptr) munmap(data_, round_up(size_, page_bytes()));
}

void populate(std::span<std::byte> range) {
  if (madvise(range.data(), range.size(), MADV_POPULATE_WRITE) == 0) return;  // Linux 5.14
  constexpr size_t kLeastPage = 4096;
  for (size_t at = 0; at < range.size(); at += kLeastPage) {
    volatile std::byte& first = range[at];
    first = first;
  }
}

void release(std::span<std::byte> range) {
  const auto address = reinterpret_cast<uintptr_t>(range.data());
  const uintptr_t begin = round_up(address, page_bytes());
  const uintptr_t end = round_down(address + range.size(), page_bytes());
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

bool prefer_node(std::span<const std::byte> range, uint32_t os_node) {
  if (!has_several_nodes() || os_node >= kMaxNodes) return false;
  const auto address = reinterpret_cast<uintptr_t>(range.data());
  const uintptr_t begin = round_up(address, page_bytes());
  const uintptr_t end = round_down(address + range.size(), page_bytes());
  if (begin >= end) return true;  // no whole page: nothing to ask for

  constexpr size_t kBits = sizeof(unsigned long) * CHAR_BIT;
  std::array<unsigned long, kMaxNodes / kBits> mask{};
  mask[os_node / kBits] = 1ul << (os_node % kBits);
  // The kernel reads one bit less than the given number.
  return syscall(SYS_mbind, begin, end - begin, MPOL_PREFERRED, mask.data(), kMaxNodes + 1, 0) == 0;
}

std::vector<int> nodes_of_pages(std::span<const std::byte> range) {
  if (range.empty()) return {};
  const auto address = reinterpret_cast<uintptr_t>(range.data());
  std::vector<void*> pages;
  for (uintptr_t page = round_down(address, page_bytes()); page < address + range.size();
       page += page_bytes()) {
    pages.push_back(reinterpret_cast<void*>(page));
  }
  std::vector<int> nodes(pages.size(), -1);
  // Without target nodes, move_pages() moves nothing and tells where the pages are; errors of
  // single pages (not there yet) are negative.
  if (syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0) != 0) {
    return std::vector<int>(pages.size(), -1);
  }
  for (int& node : nodes) node = node < 0 ? -1 : node;
  return nodes;
}

bool pin_thread(uint32_t os_cpu) {
  constexpr uint32_t kMaxCpus = 1u << 16;
  if (os_cpu >= kMaxCpus) return false;
  const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(os_cpu + 1),
                                                             [](cpu_set_t* s) { CPU_FREE(s); });
  if (set == nullptr) return false;
  const size_t bytes = CPU_ALLOC_SIZE(os_cpu + 1);
  CPU_ZERO_S(bytes, set.get());
  CPU_SET_S(os_cpu, bytes, set.get());
  return sched_setaffinity(0, bytes, set.get()) == 0;
}

}  // namespace phub::numa
