#include "phub/job/switch_use.h"

#include <fmt/format.h>

#include <utility>

namespace phub {

// The first core that ends it is mostly followed by the others.
void SwitchUse::changed(const CoreReport& report) {
  const std::string where =
      fmt::format("job '{}', CPU {}", job_.spec().name, job_.plan().cores[report.core].os_cpu);
  if (report.type == CoreReport::kSwitchBegun) {
    ended_.erase(report.core);
    notes_.add(clock_.now_ms(),
               fmt::format("{}: the switch is used again, from round {}", where, report.round));
    return;
  }
  std::string why = report.why;
  if (report.rank != CoreReport::kNoRank) why += fmt::format(" (rank {})", report.rank);
  if (report.said != 1) {
    notes_.add(
        clock_.now_ms(),
        fmt::format("{}: the switch is not used now, and workers send directly: {}", where, why));
  }
  ended_[report.core] = std::move(why);
}

void SwitchUse::add_to(JobStatus& status) const {
  if (!ended_.empty()) status.switch_ended = ended_.begin()->second;
}

}  // namespace phub
