// A worker's link whose chunks in int32 go through a switch that adds; results come over the link
// that it is put around, and so does everything else.
//
// A chunk goes through the switch when all chunks before it have, in the order that all ranks
// share: round by round, and in it by keys. A chunk that is posted earlier waits for its turn. When
// a stream's generation ends, for whatever reason, every chunk of it that has no result yet is
// posted directly, and from then on all are, until the box begins another
// (transport/switch/generation.h). The box takes each once (phub/core/switch_intake.h).
#pragma once

#include <memory>

#include "transport/control/messages.h"
#include "transport/transport.h"
#include "worker/link/switch_port.h"

namespace phub {

struct SwitchPatience {
  uint64_t retry_ns = 20'000'000;       // until a part that is not acknowledged is sent again
  uint64_t silence_ns = 5'000'000'000;  // switch and box are silent so long: a generation ends
  uint64_t probe_ns = 500'000'000;      // the same, from the beginning of another generation
  uint64_t order_ns = 10'000'000'000;   // for a chunk that others wait for: the same
};

// The link as it is, if the answer has no switch, or if the UDP port is in use, which stderr says:
// then this worker sends directly. Throws Error(kInternal): the answer contradicts itself.
std::unique_ptr<WorkerLink> through_switch(std::unique_ptr<WorkerLink> link, const JoinReply& reply,
                                           const SwitchPatience& patience = {},
                                           const OpenSwitchPort& open = open_switch_port);

}  // namespace phub
