// The formats of gradients, as far as the wire knows them: how many bytes the elements of a chunk
// take. The folder kernels/, which has the same names and sizes, says what the bytes mean.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string_view>

namespace phub {

// A chunk of a sparse format sends so many elements at least, or all.
inline constexpr uint64_t kLeastTopK = 8;
// In arrays of elements a chunk takes a multiple of this many: 128 bytes of f32.
inline constexpr uint64_t kChunkAlignment = 32;
// The initial parameters of a chunk come in so many parts at most: their number is the immediate's
// round.
inline constexpr uint32_t kMostInitialParts = 255;

struct SlotFormat {
  std::string_view name;
  uint32_t bits = 0;        // per element that is sent
  uint32_t unit_bytes = 0;  // those of all elements together are rounded up to this
  uint32_t tail_bytes = 0;  // beside them: a scale, levels, or how many factors or rows there are
  // In factors (factor_format()), the most pairs of vectors. Each pair is sent as the elements of
  // the left vector for the chunk's rows, and those of the right one for all columns.
  uint32_t rank_limit = 0;
  // In rows (row_format()), the most rows, each with its index. As many rows are sent as there are.
  // With a rank_limit, too, pairs may be sent in their place.
  uint32_t rows_limit = 0;
  uint32_t columns = 0;
  // Of a sparse format: one element in so many is sent (at least kLeastTopK, or all), each with
  // an index of so many bits; 0: that is among its `bits`.
  uint32_t share = 1;
  uint32_t index_bits = 0;
  // Of a schedule (format_schedule.h), which has no format of its own: those of its rounds, a bit
  // for each of kSlotFormats.
  uint32_t any_of = 0;

  constexpr bool is_factors() const { return rank_limit > 0 && rows_limit == 0; }
  constexpr bool is_rows() const { return rows_limit > 0; }
  constexpr bool is_sparse() const { return share > 1; }
  // The size of a slot, and of the bytes that are sent; of rows and of a schedule, at most.
  constexpr uint64_t bytes(uint64_t elements) const {
    if (any_of != 0) return most_bytes(elements);
    if (is_factors()) elements = rank_limit * (elements / columns + columns);
    if (is_rows()) elements = most_words(elements / columns);
    if (is_sparse()) {
      elements = std::max((elements + share - 1) / share, std::min(elements, kLeastTopK));
    }
    return in_units(elements * index_bits) + in_units(elements * bits) + tail_bytes;
  }
  // An array of elements. A key of a plain format is one piece at the worker.
  constexpr bool is_plain() const {
    return bits == unit_bytes * 8 && tail_bytes == 0 && !is_sparse() && any_of == 0;
  }
  // Results may have it: plain, or differences that have something of every element
  // (parameter_dtype).
  constexpr bool for_results() const { return is_plain() || (bits < 32 && !is_sparse()); }

  friend constexpr bool operator==(const SlotFormat&, const SlotFormat&) = default;

 private:
  constexpr uint64_t most_bytes(uint64_t elements) const;
  // Of so many rows of the matrix, without their number.
  constexpr uint64_t most_words(uint64_t rows) const {
    return std::max(std::min<uint64_t>(rows_limit, rows) * (1 + columns),
                    rank_limit * (rows + columns));
  }
  constexpr uint64_t in_units(uint64_t all_bits) const {
    const uint64_t unit_bits = uint64_t{unit_bytes} * 8;
    return (all_bits + unit_bits - 1) / unit_bits * unit_bytes;
  }
};
// As topk: entries of an index and a bf16, or an index of 16 bits and a code of 4 or 2, and a scale
// or two levels.
constexpr SlotFormat sparse_format(std::string_view name, uint32_t share) {
  return {.name = name, .bits = 32, .unit_bytes = 4, .share = share};
}
constexpr SlotFormat sparse_code_format(std::string_view name, uint32_t bits, uint32_t share) {
  return {.name = name,
          .bits = bits,
          .unit_bytes = 4,
          .tail_bytes = 4,
          .share = share,
          .index_bits = 16};
}

inline constexpr std::array<SlotFormat, 20> kSlotFormats = {
    {{"f32", 32, 4, 0},
     {"bf16", 16, 2, 0},
     {"f16", 16, 2, 0},
     {"fp8-e4m3", 8, 4, 4},
     {"fp8-e5m2", 8, 4, 4},
     {"int32", 32, 4, 4},
     {"int8", 8, 4, 4},
     {"int4", 4, 4, 4},
     sparse_format("topk", 32),
     sparse_format("topk-10", 10),
     sparse_format("topk-100", 100),
     sparse_format("topk-1000", 1000),
     sparse_code_format("topk-int4", 4, 32),
     sparse_code_format("topk-10-int4", 4, 10),
     sparse_code_format("topk-100-int4", 4, 100),
     sparse_code_format("topk-1000-int4", 4, 1000),
     sparse_code_format("topk-int2", 2, 32),
     sparse_code_format("topk-10-int2", 2, 10),
     sparse_code_format("topk-100-int2", 2, 100),
     sparse_code_format("topk-1000-int2", 2, 1000)}};
// The format of a key whose gradients are sent as the vectors whose outer products they are the sum
// of (KeySpec::rank_limit). Its chunks are whole rows. A format of keys alone, and no format of
// elements: it is not among those above.
inline constexpr std::string_view kFactors = "factors";
constexpr SlotFormat factor_format(uint32_t rank_limit, uint32_t columns) {
  return {kFactors, 32, 4, 4, rank_limit, 0, columns};
}
// The format of a key whose gradients are sent as their rows that are not zero
// (KeySpec::rows_limit), or, with a rank_limit, as factors.
inline constexpr std::string_view kRows = "rows";
constexpr SlotFormat row_format(uint32_t rows_limit, uint32_t columns, uint32_t rank_limit = 0) {
  return {kRows, 32, 4, 4, rank_limit, rows_limit, columns};
}
inline constexpr std::string_view kScheduled = "scheduled";  // a name that no format has
inline constexpr size_t kPlainFormats = 3;                   // they come first
// Limits the ranks of "int32", whose sums have to fit 32 bits.
inline constexpr std::string_view kInt32 = "int32";
inline constexpr uint32_t kMostInt32Ranks = 512;
// The largest chunk of a sparse format, whose indices have 16 bits.
inline constexpr uint32_t kTopKElements = 65536;

static_assert(kSlotFormats.size() <= 32, "any_of has a bit for each");
constexpr uint64_t SlotFormat::most_bytes(uint64_t elements) const {
  uint64_t most = 0;
  for (size_t i = 0; i < kSlotFormats.size(); ++i) {
    if ((any_of >> i & 1) != 0) most = std::max(most, kSlotFormats[i].bytes(elements));
  }
  return most;
}

// Returns null if there is no such format.
constexpr const SlotFormat* find_slot_format(std::string_view name) {
  const auto at = std::ranges::find(kSlotFormats, name, &SlotFormat::name);
  return at == kSlotFormats.end() ? nullptr : &*at;
}

}  // namespace phub
