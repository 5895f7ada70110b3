#include "phub/job/remarks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <optional>

#include "phub/background.h"
#include "phub/plan/homes.h"
#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

// A remark has a length that it may not exceed (kMaxRemarkBytes).
std::string first_of(const std::set<uint32_t>& ranks) {
  constexpr size_t kShown = 16;
  const size_t shown = std::min(ranks.size(), kShown);
  const auto end = std::next(ranks.begin(), static_cast<std::ptrdiff_t>(shown));
  std::string text = fmt::format("{}", fmt::join(ranks.begin(), end, ", "));
  if (ranks.size() > shown) text += fmt::format(" and {} more", ranks.size() - shown);
  return text;
}

}  // namespace

// The server has told its operator already where chunks lie (job_maker.h).
Remarks::Remarks(const Job& job, Notes& notes, const Clock& clock)
    : job_(job), name_(job.spec().name), notes_(notes), clock_(clock) {
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
  note(remark);
}

void Remarks::note_machine(uint32_t rank, uint64_t host) {
  const std::vector<uint64_t>& planned = job_.spec().rank_hosts;
  if (!job_.whole_plan().homes.known || host == 0) return;
  const uint64_t then = rank < planned.size() ? planned[rank] : 0;
  if (then == 0) return;  // it was not known where the rank is
  const bool is_new = then != host ? moved_.insert(rank).second : moved_.erase(rank) > 0;
  if (!is_new) return;
  std::string text;
  if (!moved_.empty()) {
    const bool is_one = moved_.size() == 1;
    text = fmt::format(
        "{} {} {} last seen at another machine than when chunks were placed: what {} stays at the "
        "boxes where it lies until the job goes on from a checkpoint",
        is_one ? "rank" : "ranks", first_of(moved_), is_one ? "was" : "were",
        is_one ? "it exchanges" : "they exchange");
  }
  // With as many remarks as a job may have, it is missing.
  const std::optional<Error> full =
      error_of([&] { put({.subject = "moved ranks", .text = text}); });
  static_cast<void>(full);
}

// Also subjects that come and go are few in a minute: all jobs share the operator's lines.
void Remarks::note(const Remark& remark) {
  const uint64_t now = clock_.now_ms();
  std::erase_if(noted_ms_, [now](const auto& of) { return now - of.second >= kMsPerNote; });
  if (noted_ms_.size() >= kMostRemarks || !noted_ms_.emplace(remark.subject, now).second) return;
  notes_.add(now, fmt::format("job '{}': {}: {}", name_, printable(remark.subject),
                              printable(remark.text)));
}

}  // namespace phub
