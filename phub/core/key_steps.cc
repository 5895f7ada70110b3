#include "phub/core/key_steps.h"

#include <algorithm>
#include <utility>

namespace phub {
namespace {

size_t scratch_of(std::span<const kernels::WholeKey> keys) {
  size_t most = 0;
  for (const kernels::WholeKey& key : keys) {
    if (key.rule == kernels::KeyRule::kElements) continue;
    most = std::max(most, key.elements() + kernels::scratch_elements(key));
  }
  return most;
}

}  // namespace

KeySteps::KeySteps(std::vector<kernels::WholeKey> keys, std::vector<Chunk> chunks,
                   const JobArrays& arrays, uint32_t cores)
    : chunks_(std::move(chunks)),
      arrays_(arrays),
      keys_(keys.size()),
      steps_(chunks_.size()),
      open_(std::make_unique<std::atomic<uint32_t>[]>(keys.size())),
      scratch_(cores, std::vector<float>(scratch_of(keys))) {
  for (size_t key = 0; key < keys.size(); ++key) keys_[key].whole = keys[key];
  for (uint32_t id = 0; id < chunks_.size(); ++id) {
    Key& key = keys_[chunks_[id].key];
    if (key.chunks++ == 0) key.first = id;
  }
  for (size_t key = 0; key < keys.size(); ++key) open_[key] = keys_[key].chunks;
}

uint64_t KeySteps::bytes(std::span<const kernels::WholeKey> keys, uint64_t chunks, uint64_t cores) {
  return sizeof(KeySteps) + chunks * (sizeof(Chunk) + sizeof(uint64_t)) +
         keys.size() * (sizeof(Key) + sizeof(std::atomic<uint32_t>)) +
         cores * scratch_of(keys) * sizeof(float);
}

void KeySteps::close(uint32_t core, uint32_t chunk, uint64_t round, uint64_t step, bool unused,
                     const Settings& settings) {
  steps_[chunk] = unused ? 0 : step;
  const uint32_t key = chunks_[chunk].key;
  if (open_[key].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  make_step(core, key, round, settings);
}

void KeySteps::complete(uint32_t core, uint64_t round, const Settings& settings) {
  for (uint32_t key = 0; key < keys_.size(); ++key) {
    if (open_[key].load(std::memory_order_relaxed) < keys_[key].chunks) {
      make_step(core, key, round, settings);
    }
  }
}

// All chunks of a key have made as many steps.
void KeySteps::make_step(uint32_t core, uint32_t key, uint64_t round, const Settings& settings) {
  Key& of = keys_[key];
  open_[key].store(of.chunks, std::memory_order_relaxed);  // no core closes the next round yet
  const std::span chunks = std::span(chunks_).subspan(of.first, of.chunks);
  const std::span steps = std::span(steps_).subspan(of.first, of.chunks);
  uint64_t number = 0;
  for (const uint64_t step : steps) number = std::max(number, step);
  of.unused = number == 0;
  if (of.unused) return;
  float* const gradient = scratch_[core].data();
  float* at = gradient;
  double squares = 0;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const Chunk& chunk = chunks[i];
    // Without a gradient in this round the sums are an earlier round's direction.
    const bool has_gradient = std::exchange(steps[i], 0) > 0;
    at = has_gradient ? std::copy_n(arrays_.sums + chunk.offset, chunk.elements, at)
                      : std::fill_n(at, chunk.elements, 0.0f);
    squares += kernels::sum_of_squares(arrays_.parameters + chunk.offset, chunk.elements);
  }
  const uint64_t state = arrays_.state_pieces[of.first].offset[0];
  of.step =
      kernels::step_of_key(of.whole, settings.of(round, chunks.front().settings), number, squares,
                           arrays_.state0 + state, gradient, arrays_.new_state + state, at);
  at = gradient;
  for (const Chunk& chunk : chunks) {
    std::copy_n(at, chunk.elements, arrays_.sums + chunk.offset);
    at += chunk.elements;
  }
}

KeySteps::Part KeySteps::part_of(uint32_t chunk) const {
  const Chunk& of = chunks_[chunk];
  const Key& key = keys_[of.key];
  const StatePiece& piece = arrays_.state_pieces[chunk];
  return {.unused = key.unused,
          .step = key.step,
          .direction = arrays_.sums + of.offset,
          .new_state = {arrays_.new_state + piece.offset[0], piece.elements[0]},
          .state = arrays_.state0 + piece.offset[0]};
}

}  // namespace phub
