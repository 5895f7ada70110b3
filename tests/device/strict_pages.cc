#include "tests/device/strict_pages.h"

#include <cstdio>
#include <fstream>
#include <string>

#include "transport/error.h"

namespace phub::testing {

bool is_mapped(const void* memory, size_t bytes, HostUse use) {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  uintptr_t covered = begin;
  std::ifstream maps("/proc/self/maps");  // by address
  for (std::string line; covered < begin + bytes && std::getline(maps, line);) {
    uintptr_t from = 0, to = 0;
    char rights[5] = {};
    if (std::sscanf(line.c_str(), "%lx-%lx %4s", &from, &to, rights) != 3) return false;
    if (to <= covered) continue;
    if (from > covered || rights[0] != 'r') return false;
    if (use == HostUse::kReadWrite && rights[1] != 'w') return false;
    covered = to;
  }
  return covered >= begin + bytes;
}

void StrictPages::do_register(void* begin, size_t bytes, HostUse use, std::string_view what) {
  const auto first = reinterpret_cast<uintptr_t>(begin);
  const size_t page = host_page_bytes();
  const auto refuse = [&](const char* why) {
    ++refused_;
    fail(ErrorCode::kFull, "registration of {} bytes at {} for '{}': {}", bytes, begin, what, why);
  };
  if (first % page != 0 || bytes % page != 0 || bytes == 0) refuse("not whole pages");
  for (uintptr_t at = first; at < first + bytes; at += page) {
    if (pages_.contains(at)) refuse("registered already");
  }
  if (!is_mapped(begin, bytes, use)) refuse("not mapped as it is to be used");
  for (uintptr_t at = first; at < first + bytes; at += page) pages_.insert(at);
  registered_[first] = bytes;
  ++ever_;
}

void StrictPages::do_unregister(void* begin) noexcept {
  const auto found = registered_.find(reinterpret_cast<uintptr_t>(begin));
  PHUB_CHECK(found != registered_.end());
  for (size_t at = 0; at < found->second; at += host_page_bytes()) pages_.erase(found->first + at);
  registered_.erase(found);
}

}  // namespace phub::testing
