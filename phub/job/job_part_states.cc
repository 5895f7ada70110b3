// The optimizer's states of a part, where they are not laid out as the parameters: of 8 bits, or in
// pieces of keys that have less state than elements.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "kernels/whole_key.h"
#include "phub/core/key_steps.h"
#include "phub/job/job_part.h"
#include "transport/box_memory.h"

namespace phub {
namespace {

float* floats_of(const numa::Memory& memory) {
  return reinterpret_cast<float*>(memory.bytes().data());
}

}  // namespace

void JobPart::make_states8(size_t states) {
  const uint64_t elements = plan_.box_elements;
  for (size_t i = 0; i < states; ++i) {
    numa::Memory& memory = memory_of_arrays_[1 + i];
    memory =
        allocate(kernels::state8_bytes(elements, plan_.chunks.size()), plan_.cores.front().os_node,
                 fmt::format("optimizer state of job '{}'", spec_->name));
    place(memory.bytes().first(elements), sizeof(uint8_t), node_runs(plan_));
    arrays_.state8[i] = kernels::state8_in(memory.bytes().data(), elements, rules_.optimizer, i);
  }
}

// Chunk after chunk, and so key after key.
void JobPart::make_state_pieces(size_t states) {
  const std::vector<kernels::WholeKey> keys = whole_keys(*spec_, rules_.optimizer);
  std::array<uint64_t, 2> end = {};
  state_pieces_.reserve(plan_.chunks.size());
  for (const ChunkLayout& chunk : plan_.chunks) {
    StatePiece& piece = state_pieces_.emplace_back();
    for (size_t i = 0; i < states; ++i) {
      const uint64_t of_key = kernels::state_elements(keys[chunk.key], i);
      const uint64_t rest = of_key - std::min(of_key, chunk.key_element);
      piece.offset[i] = end[i];
      piece.elements[i] = static_cast<uint32_t>(std::min<uint64_t>(rest, chunk.elements));
      end[i] += piece.elements[i];
    }
  }
  const auto make = [&](numa::Memory& memory, uint64_t elements) {
    memory = allocate(std::max<uint64_t>(elements, 1) * sizeof(float), plan_.cores.front().os_node,
                      fmt::format("optimizer state of job '{}'", spec_->name));
    return floats_of(memory);
  };
  arrays_.state_pieces = state_pieces_;
  arrays_.state0 = make(memory_of_arrays_[1], end[0]);
  if (states > 1) arrays_.state1 = make(memory_of_arrays_[2], end[1]);
  arrays_.new_state = make(memory_of_new_state_, end[0]);
}

// Null: the optimizer's steps are of elements.
std::unique_ptr<KeySteps> JobPart::make_key_steps(uint32_t cores) const {
  if (!kernels::takes_whole_keys(rules_.optimizer)) return nullptr;
  std::vector<KeySteps::Chunk> chunks;
  chunks.reserve(plan_.chunks.size());
  for (const ChunkLayout& chunk : plan_.chunks) {
    chunks.push_back({.key = chunk.key,
                      .elements = chunk.elements,
                      .settings = classes_.of_key[chunk.key],
                      .offset = chunk.box_offset});
  }
  return std::make_unique<KeySteps>(whole_keys(*spec_, rules_.optimizer), std::move(chunks),
                                    arrays_, cores);
}

JobArrays JobPart::loaded() const {
  JobArrays arrays = arrays_;
  if (!arrays.state_pieces.empty()) {
    arrays.state0 = arrays.copy.state0;
    arrays.state1 = arrays.copy.state1;
  }
  if (arrays.state8[0]) arrays.state0 = arrays.copy.state0;
  if (arrays.state8[1]) arrays.state1 = arrays.copy.state1;
  return arrays;
}

void JobPart::take_loaded_states() {
  const float* const loads[] = {arrays_.copy.state0, arrays_.copy.state1};
  float* const states[] = {arrays_.state0, arrays_.state1};
  for (const ChunkLayout& chunk : plan_.chunks) {
    const auto id = static_cast<uint64_t>(&chunk - plan_.chunks.data());
    for (size_t i = 0; i < 2 && loads[i] && !state_pieces_.empty(); ++i) {
      const StatePiece& piece = state_pieces_[id];
      std::copy_n(loads[i] + chunk.box_offset, piece.elements[i], states[i] + piece.offset[i]);
    }
    for (size_t i = 0; i < 2 && chunk.queue != kElsewhere; ++i) {
      if (!arrays_.state8[i]) continue;
      kernels::encode_state(loads[i] + chunk.box_offset, chunk.elements,
                            arrays_.state8[i].from(chunk.box_offset, id));
    }
  }
}

}  // namespace phub
