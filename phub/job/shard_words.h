// Convert the type of a core's report to the word for it between boxes
// (transport/control/shard_messages.h), and back.
#pragma once

#include <optional>

#include "phub/core/messages.h"
#include "transport/control/shard_messages.h"

namespace phub {

// Returns nullopt if no other box needs the report.
std::optional<ShardSays> word_of(CoreReport::Type report);
// Returns nullopt if the word is about the part, not from a core.
std::optional<CoreReport::Type> report_of(ShardSays word);

}  // namespace phub
