// The packets between workers, a switch that adds, and the box: the payload of UDP over IPv4,
// little-endian, of one size. Plain C, as the program in the switch is compiled from it too.
//
// A chunk is sent in parts of 256 whole numbers. The switch adds the parts of all workers and lets
// the sum go on to the box, which acknowledges it to all workers. (Sapio et al., Scaling
// Distributed Machine Learning with In-Network Aggregation, NSDI 2021, algorithms 3 and 4; there
// the sum itself comes back from the switch.)
#pragma once

#include <stdint.h>

#ifndef PHUB_SWITCH_ELEMENTS  // in CMake, for bench/switch_goodput
#define PHUB_SWITCH_ELEMENTS 256
#endif

#ifdef __cplusplus
namespace phub {
#endif

enum {
  kSwitchMagic = 0x77534850,  // "PHSw"
  kSwitchPort = 7718,         // UDP, of the box, unless it says otherwise
  kSwitchElements = PHUB_SWITCH_ELEMENTS,
  kSwitchWorkers = 64,
  kMostSwitchSlots = 32768,  // 64 MiB of the kernel's memory
  // Numbers in a part are from -2^22 to 2^22 - 1, so that the sum of 64, and of 512, fits 32 bits.
  kSwitchCodeBits = 23,
};

enum SwitchKind {
  kSwitchPart = 1,     // worker to switch: its numbers. At the box: the switch did not take it
  kSwitchSum = 2,      // switch to box: the sum of all workers
  kSwitchWaiting = 3,  // switch to box: a part came again, and others have not come yet; and the
                       // box's answer, that all are alive
  kSwitchTaken = 4,    // box to workers: it has the sum
  kSwitchEnded = 5,    // box to workers: this generation has ended
};

// Exponents: a part's numbers are multiples of 2^exponent. All workers send the same, which is
// the largest that one of them has asked for, in the packet before in this slot.
enum {
  kSwitchNothing = -32768,  // all zeros: any will do
  kSwitchNoNumber = 32766,  // the chunk holds a value that is not a number: zeros are sent
  kSwitchUnknown = 32767,   // a worker does not have the next chunk yet. It is above all others
};

// In place of a chunk: the packet carries no part, only the next exponent.
static const uint32_t kSwitchNoChunk = 0xFFFFFFFFu;

struct SwitchHeader {
  uint32_t magic;
  uint8_t kind;    // SwitchKind
  uint8_t worker;  // the sender of the part; of a sum: the last worker to come
  uint16_t slot;   // the slot in the switch
  // A random number of the job, which its workers get with their rank: a sender that does not know
  // it can neither add to a sum nor acknowledge one. It is never 0.
  uint64_t generation;
  uint32_t turn;          // the number of uses of the slot in this generation, from 1
  uint32_t chunk;         // or kSwitchNoChunk
  uint16_t part;          // the part of the chunk
  uint16_t round;         // its low bits
  int16_t exponent;       // the exponent of this packet
  int16_t next_exponent;  // for the next packet in this slot: this worker's, or the largest of all
  uint64_t workers;       // a bit for each that must take part; sum, waiting: that has
};

struct SwitchPacket {
  struct SwitchHeader header;
  int32_t codes[kSwitchElements];  // behind the chunk's end: zeros
};
// A packet from the box is a header alone.

#ifdef __cplusplus
static_assert(kSwitchElements >= 1 && kSwitchElements <= 256, "a packet fits an Ethernet frame");
static_assert(sizeof(SwitchHeader) == 40 && sizeof(SwitchPacket) == 40 + 4 * kSwitchElements);
}  // namespace phub
#endif
