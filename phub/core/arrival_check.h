// Whether what has arrived is what the rank may send to the chunk, in size, place and interest.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>

#include "phub/core/chunk_table.h"
#include "phub/core/job_parameters.h"
#include "transport/contribution_weight.h"
#include "transport/layout.h"
#include "transport/transport.h"
#include "transport/wire.h"

namespace phub {

class ArrivalCheck {
 public:
  ArrivalCheck(const JobParameters& parameters, const ChunkTable& table)
      : rack_ranks_(parameters.rack_ranks), has_weights_(parameters.rules.weights), table_(table) {}

  struct Violation {
    CoreReport::Violation what = CoreReport::kStream;
    uint64_t said = 0;  // the number that the rank sent
  };
  // What stands behind a contribution, each only in jobs that have it.
  struct Trailer {
    uint32_t participants = 1;  // the number of ranks that took part, as a rack says
    float weight = 1;
  };
  // nullopt: it may. Then `trailer` is what it says. REQUIRES: a payload has a slot.
  // Inline: this is asked for every arrival.
  std::optional<Violation> operator()(const Arrival& arrival, uint32_t index, const Imm& imm,
                                      Trailer& trailer) const {
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
    uint64_t place = chunk.slot_offset, trailer_at = 0;
    if (imm.kind == ImmKind::kInitial) {
      bytes = initial_part(chunk.elements, slot_bytes, imm.round).count * sizeof(float);
    } else if (has_trailers() && imm.kind <= ImmKind::kNull) {
      // A null is its trailer alone.
      if (imm.kind == ImmKind::kNull) place += table_.most_slot_bytes(chunk);
      trailer_at = place - chunk.slot_offset + bytes;
      bytes += kTrailerBytes;
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
    if (has_trailers()) {
      const uint32_t bits = trailer_in(arrival.rank, index, trailer_at);
      if (is_of_racks()) {
        trailer.participants = bits;
        if (!may_take_part(arrival.rank, bits, imm)) {
          return Violation{CoreReport::kParticipants, bits};
        }
      } else {
        trailer.weight = std::bit_cast<float>(bits);
        if (!is_weight(trailer.weight)) return Violation{CoreReport::kWeight, bits};
      }
    }
    if (table_.is_idle(arrival.rank, index)) return Violation{CoreReport::kInterest, imm.round};
    return {};
  }

  bool is_of_racks() const { return !rack_ranks_.empty(); }

 private:
  static constexpr uint64_t kTrailerBytes = 4;
  static_assert(kTrailerBytes == kWeightBytes && kTrailerBytes == kTrailerElements * sizeof(float));

  bool has_trailers() const { return is_of_racks() || has_weights_; }
  // What is sent once more, after a connection broke, has the format of its own round.
  uint64_t scheduled_bytes(const CoreChunk& chunk, const Imm& imm) const {
    if (imm.kind == ImmKind::kInitial) return table_.most_slot_bytes(chunk);
    const uint64_t ago = low8(chunk.round - imm.round);
    return table_.slot_bytes(chunk, chunk.round - std::min(ago, chunk.round));
  }
  // Read once: a worker that shares its memory may change it meanwhile.
  uint32_t trailer_in(uint32_t rank, uint32_t index, uint64_t at) const {
    uint32_t bits = 0;
    std::memcpy(&bits, table_.slot(rank, index) + at, sizeof bits);
    return bits;
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
  const bool has_weights_;
  const ChunkTable& table_;
};

}  // namespace phub
