#include "transport/format_schedule.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

std::optional<uint64_t> rounds_in(std::string_view text) {
  uint64_t rounds = 0;
  const char* const end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, rounds);
  const bool fits = error == std::errc() && at == end && text.front() != '0';
  return fits && rounds <= FormatSchedule::kMostRounds ? std::optional(rounds) : std::nullopt;
}

bool may_be_phase(const SlotFormat& format) {
  return format.name == "f32" || (!format.is_plain() && format.name != kInt32);
}

}  // namespace

FormatSchedule FormatSchedule::parse(std::string_view field, std::string_view text) {
  const auto refuse = [field, text] {
    fail(ErrorCode::kInvalid,
         "{}: must be a format or a schedule such as 'f32*100,int8*900,topk' (2 to {} formats, "
         "each f32 or coded, but not int32, and each but the last for 1 to {} rounds), got '{}'",
         field, kMostPhases, kMostRounds, printable(text));
  };
  FormatSchedule schedule;
  uint64_t rounds = 0;
  for (size_t phase = 0;; ++phase) {
    const size_t comma = text.find(',');
    const std::string_view part = text.substr(0, comma);
    const size_t star = part.find('*');
    const auto at = std::ranges::find(kSlotFormats, part.substr(0, star), &SlotFormat::name);
    const auto format = static_cast<size_t>(at - kSlotFormats.begin());
    const bool is_last = comma == text.npos;
    if (phase == kMostPhases || at == kSlotFormats.end() || !may_be_phase(*at)) refuse();
    if (is_last != (star == part.npos) || (is_last && phase == 0)) refuse();
    schedule.phases_[phase].format = format;
    schedule.slot_.any_of |= 1u << format;
    if (is_last) break;
    const std::optional<uint64_t> more = rounds_in(part.substr(star + 1));
    if (!more) refuse();
    rounds += *more;
    schedule.phases_[phase].last = rounds;
    text.remove_prefix(comma + 1);
  }
  schedule.slot_.name = kScheduled;
  return schedule;
}

}  // namespace phub
