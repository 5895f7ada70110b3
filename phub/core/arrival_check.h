// Whether what has arrived is what the rank may send to the chunk, in size, place and interest.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

#include "phub/core/chunk_table.h"
#include "phub/core/job_parameters.h"
#include "transport/layout.h"
#include "transport/transport.h"
#include "transport/wire.h"

namespace phub {

class ArrivalCheck {
 public:
  ArrivalCheck(const JobParameters& parameters, const ChunkTable& table)
      : rack_ranks_(parameters.rack_ranks), table_(table) {}

  struct Violation {
    CoreReport::Violation what = CoreReport::kStream;
    uint64_t said = 0;  // the number that the rank sent
  };
  // nullopt: it may. Then `participants` is the number of ranks that took part, as a rack says;
  // from a rank that is no rack it is not changed. REQUIRES: a payload has a slot.
  // Inline: this is asked for every arrival.
  std::optional<Violation> operator()(const Arrival& arrival, uint32_t index, const Imm& imm,
                                      uint32_t& participants) const {
    const CoreChunk& chunk = table_[index];
    const uint64_t slot_bytes =
        chunk.schedule == 0 ? chunk.slot_bytes() : scheduled_bytes(chunk, imm);
    uint64_t bytes = 0;
    if (imm.kind == ImmKind::kData) {
      const bool is_here = arrival.bytes > 0;  // else it has no place, perhaps
      const bool says = chunk.says_size() && is_here;
      const std::byte* const slot = says ? table_.slot(arrival.rank, index) : nullptr;
      bytes = says ? chunk.sent_bytes(slot) : slot_bytes;
      if (bytes > slot_bytes || (says && chunk.says_too_many(slot))) {
        return Violation{CoreReport::kBytes, said(arrival, bytes)};
      }
    }
    uint64_t place = chunk.slot_offset;
    if (imm.kind == ImmKind::kInitial) {
      bytes = initial_part(chunk.elements, slot_bytes, imm.round).count * sizeof(float);
    } else if (is_of_racks() && imm.kind <= ImmKind::kNull) {
      // A null is its trailer alone.
      if (imm.kind == ImmKind::kNull) place += chunk.elements * sizeof(float);
      bytes += kTrailerElements * sizeof(float);
    }
    // Bytes that the payload did not overwrite would be summed as if they had arrived.
    if (!arrival.fits(bytes, place)) {
      if (arrival.bytes == bytes) return Violation{CoreReport::kPlace, arrival.offset};
      return Violation{CoreReport::kBytes, said(arrival, bytes)};
    }
    if (imm.kind > ImmKind::kNull) return {};
    // What was there is lost: a worker waits until it is taken.
    if (imm.kind == ImmKind::kData && table_.is_slot_taken(arrival.rank, index)) {
      return Violation{CoreReport::kSlot, chunk.slot_offset};
    }
    if (is_of_racks()) {
      participants = participants_of(arrival.rank, index);  // read once: it may change meanwhile
      if (!may_take_part(arrival.rank, participants, imm)) {
        return Violation{CoreReport::kParticipants, participants};
      }
    }
    if (table_.is_idle(arrival.rank, index)) return Violation{CoreReport::kInterest, imm.round};
    return {};
  }

  bool is_of_racks() const { return !rack_ranks_.empty(); }

 private:
  // What is sent once more, after a connection broke, has the format of its own round.
  uint64_t scheduled_bytes(const CoreChunk& chunk, const Imm& imm) const {
    if (imm.kind == ImmKind::kInitial) return table_.most_slot_bytes(chunk);
    const uint64_t ago = low8(chunk.round - imm.round);
    return table_.slot_bytes(chunk, chunk.round - std::min(ago, chunk.round));
  }
  uint32_t participants_of(uint32_t rack, uint32_t index) const {
    const CoreChunk& chunk = table_[index];
    uint32_t participants = 0;
    std::memcpy(&participants, table_.slot(rack, index) + chunk.slot_bytes(), sizeof participants);
    return participants;
  }
  static uint64_t said(const Arrival& arrival, uint64_t bytes) {
    return arrival.bytes == Arrival::kNotTold ? bytes : arrival.bytes;
  }
  // It is allowed that none took part: the rack waits for the ranks of a later round.
  bool may_take_part(uint32_t rack, uint32_t participants, const Imm& imm) const {
    const bool null = imm.kind == ImmKind::kNull;
    if (null && participants == kNoneLeft) return true;
    return (participants > 0 || null) && participants <= rack_ranks_[rack];
  }

  const std::vector<uint32_t>& rack_ranks_;  // a rack's ranks; empty: ranks are not racks
  const ChunkTable& table_;
};

}  // namespace phub
