// A driver that refuses what a GPU's does: pages that it has already, memory that is not there, and
// pages that cannot be written unless it is told that nothing writes them.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "worker/device/host_pages.h"

namespace phub::testing {

class StrictPages final : public HostPages {
 public:
  size_t registrations() const { return registered_.size(); }
  size_t refused() const { return refused_; }
  size_t ever() const { return ever_; }  // registered

 private:
  void do_register(void* begin, size_t bytes, HostUse use, std::string_view what) override;
  void do_unregister(void* begin) noexcept override;

  std::set<uintptr_t> pages_;               // that it has
  std::map<uintptr_t, size_t> registered_;  // as they were given
  size_t refused_ = 0, ever_ = 0;
};

// What the kernel says of this process's memory: mapped, and as it is needed, all of it.
bool is_mapped(const void* begin, size_t bytes, HostUse use);

}  // namespace phub::testing
