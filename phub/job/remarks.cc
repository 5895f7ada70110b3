#include "phub/job/remarks.h"

#include <fmt/format.h>

#include <algorithm>

#include "phub/plan/homes.h"
#include "transport/error.h"
#include "transport/text.h"

namespace phub {

// The server has told its operator already where chunks lie (job_maker.h).
Remarks::Remarks(const Job& job, Notes& notes, const Clock& clock)
    : name_(job.spec().name), notes_(notes), clock_(clock) {
  if (const std::string homes = describe(job.whole_plan().homes); !homes.empty()) {
    remarks_.push_back({.subject = "placement", .text = homes});
  }
}

void Remarks::put(const Remark& remark) {
  const auto at = std::ranges::find(remarks_, remark.subject, &Remark::subject);
  if (remark.text.empty()) {
    if (at != remarks_.end()) remarks_.erase(at);
    return;
  }
  if (at == remarks_.end()) {
    if (remarks_.size() >= kMostRemarks) {
      fail(ErrorCode::kFull,
           "job '{}' has remarks on {} subjects, the most of a job: '{}' is one more", name_,
           kMostRemarks, remark.subject);
    }
    remarks_.push_back(remark);
  } else if (at->text == remark.text) {
    return;
  } else {
    at->text = remark.text;
  }
  notes_.add(clock_.now_ms(), fmt::format("job '{}': {}: {}", name_, printable(remark.subject),
                                          printable(remark.text)));
}

}  // namespace phub
