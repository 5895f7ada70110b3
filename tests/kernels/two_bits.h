// The codes of 2 bits in slots of sparse formats, from their definition in encode.h: a part of
// slots.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/encode.h"

namespace phub::reference {

// Writes the codes and the levels of the elements that are sent, behind their indices; x are their
// values, `elements` which of the chunk's they are. It is all zeros before.
void encode_two_bits(std::span<const float> x, bool finite, const kernels::Rounding& rounding,
                     std::span<const size_t> elements, uint8_t* to);

// The value of entry i of so many.
float value_of_two_bits(const uint8_t* from, size_t i, size_t entries);

}  // namespace phub::reference
