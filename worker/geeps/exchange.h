// Where a cache's updates go and its parameters come from: the box, or the other devices of this
// process. A key is a table: its rows one after another, f32.
//
// A key goes round: here → push() → (its memory is lent) → next() names it → here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace phub::geeps {

// Thread-safe, except that next() is for one thread. Errors are phub::Error; after one, every call
// throws it.
class Exchange {
 public:
  virtual ~Exchange() = default;

  virtual size_t keys() const = 0;
  virtual const std::string& name(size_t key) const = 0;
  virtual size_t elements(size_t key) const = 0;

  // Memory that stays where it is. The gradient may be written, the parameters may be read, while
  // the key is here: from the start (or from next()) to push().
  virtual std::span<float> gradient(size_t key) = 0;
  virtual std::span<const float> parameters(size_t key) const = 0;

  // Sends the gradient; higher priorities first. REQUIRES: the key is here.
  virtual void push(size_t key, int32_t priority) = 0;
  // As push() of a gradient that is zero.
  virtual void push_null(size_t key) = 0;

  // Blocks until a pushed key is here again, and names it; nothing after stop().
  virtual std::optional<size_t> next() = 0;
  virtual void stop() = 0;  // next() answers nothing from now on
  // This side failed and will push no more: whoever shares the exchange is told.
  virtual void abandon(const std::exception& /*error*/) {}
  // This side ended and will push no more: who waits for a push of it is told, now or when they do.
  virtual void leave() {}

  // Clocks by which others may lag behind this worker in the parameters that next() brings: 0 for
  // BSP, the slack for SSP, nothing for async.
  virtual std::optional<uint32_t> slack() const = 0;
  // Ranks that the exchange waits for, if it knows. For messages: it may take a second.
  virtual std::vector<uint32_t> missing_ranks() { return {}; }
  virtual uint32_t rank() const = 0;
  virtual uint32_t world_size() const = 0;
};

}  // namespace phub::geeps
