// Contributions to a core's chunks that come otherwise than through its endpoint. A way that has
// some says so (Way::intake()); the core job calls these.
#pragma once

#include <cstdint>

#include "phub/core/messages.h"

namespace phub {

class Intake {
 public:
  virtual ~Intake() = default;

  // Called in each pass after the arrivals until it returns kNoChunk, but not while a boundary
  // holds rounds. Accepts contributions to one chunk, which is returned. Adds what was read and
  // written to `bytes`.
  virtual uint32_t take_in(uint64_t& bytes) = 0;
  // A contribution to the round in progress is about to be accepted from the endpoint.
  virtual void took_directly(uint32_t rank, uint32_t index) = 0;
  virtual void detached(uint32_t rank) = 0;

  // At a boundary: adds what has begun to the answer to kHold; is told of the changes.
  virtual void hold(CoreReport& held) = 0;
  virtual void begin_boundary(const Boundary& boundary) = 0;
  virtual void probe(Probe& out) = 0;

  // Readable when contributions have come, edge triggered; -1: something else wakes the core.
  virtual int fd() const = 0;
};

}  // namespace phub
