// Getting and setting the state of keys over the control port, in pieces.
#pragma once

#include <cstdint>
#include <span>

#include "worker/link/link_keeper.h"
#include "worker/worker.h"

namespace phub {

// They do what Worker's functions of these names do. Any thread may call them.
uint64_t get_state(LinkKeeper& keeper, std::span<KeyState> states);
uint64_t set_state(LinkKeeper& keeper, std::span<const KeyState> states);

}  // namespace phub
