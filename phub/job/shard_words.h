// What a shard calls the report of a core (transport/control/shard_messages.h), and back.
#pragma once

#include <optional>

#include "phub/core/messages.h"
#include "transport/control/shard_messages.h"

namespace phub {

// Nothing: no other box needs to know.
std::optional<ShardSays> word_of(CoreReport::Type report);
// Nothing: it is about the part, not of a core.
std::optional<CoreReport::Type> report_of(ShardSays word);

}  // namespace phub
