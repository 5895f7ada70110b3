#include "transport/control/key_schedules.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "transport/error.h"

namespace phub {

KeySchedules::KeySchedules(const JobSpec& spec) {
  std::vector<std::string_view> texts;
  for (size_t k = 0; k < spec.keys.size(); ++k) {
    const KeySpec& key = spec.keys[k];
    const std::string_view text = gradient_format(spec, key);
    if (!is_schedule(text)) continue;
    auto at = std::ranges::find(texts, text);
    if (at == texts.end()) {
      if (texts.size() == kMost) {
        fail(ErrorCode::kInvalid,
             "keys[{}].format: a job has at most {} different schedules of formats", k, kMost);
      }
      const std::string field = key.format.empty() ? "gradient_dtype"  //
                                                   : fmt::format("keys[{}].format", k);
      all_.push_back(FormatSchedule::parse(field, text));
      at = texts.insert(texts.end(), text);
    }
    number_.resize(spec.keys.size());
    number_[k] = static_cast<uint8_t>(at - texts.begin() + 1);
  }
}

}  // namespace phub
