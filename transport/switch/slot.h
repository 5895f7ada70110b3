// A switch that adds, as a pure state machine: one packet in one slot, and its outcome. Plain C
// without calls: the program that the kernel's verifier checks is compiled from it (program.bpf.c),
// and so are the tests and the simulator.
//
// A slot is used in turns, and there are two sets of slots: turn t lies in set t % 2. A worker
// begins turn t + 1 of a slot when the box has acknowledged turn t. So when the first part of turn
// t + 2 comes, every worker has sent one of turn t + 1, and has the acknowledgement of turn t:
// nobody needs the content of the set any more. Until then a part of turn t that comes again makes
// the switch send the sum again: workers repeat parts that are not acknowledged, and no one else
// has a clock.
//
// Nothing counts twice: in a turn each worker's bit is set once, and a turn that was left never
// begins again. A switch that has lost its memory adds repeated parts from the beginning; a sum
// leaves only when all workers are in it. So it is with a slot that a packet of another generation
// has taken over: of two generations one has ended, and its late packets come to an end.
#pragma once

#include "transport/switch/packet.h"

#ifdef __cplusplus
namespace phub {
#endif

struct SwitchSlot {
  uint64_t generation;
  uint64_t workers;  // those that must take part
  uint64_t arrived;
  uint32_t turn;  // 0: never
  uint32_t chunk;
  uint16_t part;
  uint16_t round;
  int16_t exponent;
  int16_t next_exponent;  // the largest so far
  uint32_t spread;  // all numbers + 2^22, or'ed: a bit above the 23rd says that one is too large
  uint32_t zero;
  int32_t sums[kSwitchElements];
};

enum SwitchVerdict {
  kSwitchAdded,     // it was taken, and goes nowhere
  kSwitchLate,      // it is of an earlier turn: it goes nowhere
  kSwitchComplete,  // it has become the sum, and goes on
  kSwitchRepeated,  // it has become the sum once more, and goes on
  kSwitchStill,     // it came again, and others are missing: it goes on as kSwitchWaiting
  kSwitchRefused,   // it goes on as it is
  kSwitchVerdicts
};

// The place of a slot's turn among 2 * slots.
static inline uint32_t switch_place(uint16_t slot, uint32_t turn) {
  return 2u * slot + (turn & 1u);
}

// REQUIRES: the packet's magic and kind are those of a part. Refused are packets that disagree with
// those of other workers in the same turn, and sums of which a number was out of bounds.
static inline __attribute__((always_inline)) enum SwitchVerdict switch_take(
    struct SwitchSlot* slot, struct SwitchHeader* header, int32_t* codes) {
  const int same = slot->generation == header->generation;
  uint64_t worker = 0;
  uint32_t spread = 0;
  int begins = 0;
  int i = 0;
  if (header->worker >= kSwitchWorkers) return kSwitchRefused;
  worker = (uint64_t)1 << (header->worker & 63);
  if ((header->workers & worker) == 0 || header->turn == 0) return kSwitchRefused;
  if (same && header->turn < slot->turn) return kSwitchLate;
  begins = !same || header->turn > slot->turn;
  if (begins) {
    slot->generation = header->generation;
    slot->workers = header->workers;
    slot->arrived = 0;
    slot->turn = header->turn;
    slot->chunk = header->chunk;
    slot->part = header->part;
    slot->round = header->round;
    slot->exponent = header->exponent;
    slot->next_exponent = kSwitchNothing;
    slot->spread = 0;
  } else if (slot->workers != header->workers || slot->chunk != header->chunk ||
             slot->part != header->part || slot->round != header->round ||
             slot->exponent != header->exponent) {
    return kSwitchRefused;
  }
  if (slot->arrived & worker) {
    if (slot->arrived != slot->workers) {
      header->kind = kSwitchWaiting;
      header->workers = slot->arrived;
      return kSwitchStill;
    }
  } else {
    slot->arrived |= worker;
    if (header->next_exponent > slot->next_exponent) slot->next_exponent = header->next_exponent;
    for (i = 0; i < kSwitchElements; ++i) {
      const uint32_t code = (uint32_t)codes[i];
      const uint32_t before = begins ? 0 : (uint32_t)slot->sums[i];
      spread |= code + (1u << (kSwitchCodeBits - 1));
      slot->sums[i] = (int32_t)(before + code);
    }
    slot->spread |= spread;
    if (slot->arrived != slot->workers) return kSwitchAdded;
    worker = 0;
  }
  if (slot->spread >> kSwitchCodeBits) return kSwitchRefused;
  for (i = 0; i < kSwitchElements; ++i) codes[i] = slot->sums[i];
  header->kind = kSwitchSum;
  header->next_exponent = slot->next_exponent;
  return worker == 0 ? kSwitchComplete : kSwitchRepeated;
}

#ifdef __cplusplus
}  // namespace phub
#endif
