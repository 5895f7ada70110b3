// The program of the switch and its loader share this. Plain C.
#pragma once

#include "transport/switch/slot.h"

#ifdef __cplusplus
namespace phub {
#endif

enum {
  kSwitchFrameHeader = 14 + 20 + 8,  // Ethernet, IPv4 without options, UDP
  // The counters: one for every SwitchVerdict, and
  kSwitchForged = kSwitchVerdicts,  // a part that came in on another port than its worker's
  kSwitchCounters,
};

#ifdef __cplusplus
}  // namespace phub
#endif
