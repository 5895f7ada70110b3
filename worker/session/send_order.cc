#include "worker/session/send_order.h"

#include <array>
#include <utility>

#include "transport/error.h"
#include "transport/text.h"

namespace phub {

SendOrder parse_send_order(std::string_view word) {
  constexpr std::array<std::pair<std::string_view, SendOrder>, 4> kWords = {{
      {"priority", SendOrder::kPriority},
      {"fifo", SendOrder::kFifo},
      {"random", SendOrder::kRandom},
      {"magnitude", SendOrder::kMagnitude},
  }};
  for (const auto& [name, order] : kWords) {
    if (word == name) return order;
  }
  fail(ErrorCode::kInvalid, "send_order must be priority, fifo, random or magnitude, got '{}'",
       printable(word));
}

}  // namespace phub
