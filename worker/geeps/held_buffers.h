// The buffers of a cache that the application holds.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "worker/geeps/cache.h"
#include "worker/geeps/mover.h"

namespace phub::geeps {

struct Held {
  uint64_t handle = 0;
  Call call = Call::kRead;
  uint32_t table = 0;
  Buffer buffer;
  std::span<const uint64_t> keys;  // they lie in the list, or in `own_keys`
  std::vector<uint64_t> own_keys;
  std::optional<Instance> planned;   // set for an access in the sequence
  std::shared_ptr<Outside> outside;  // set for one outside of it; neither: virtual
  bool last_update = false;          // it is, or replaces, the table's last Update of the sequence
  std::optional<uint32_t> recorded;  // its step in the recorder
  uint64_t since_ns = 0;
};

// A cache owns it, and the application's thread calls it.
class HeldBuffers {
 public:
  // REQUIRES: the tables outlive this.
  explicit HeldBuffers(std::vector<Table>& tables) : tables_(tables) {}

  // Returns the application's buffer, with its handle.
  Buffer add(Held held);
  // The buffer that this call gives back. Throws Error(kInvalid) if there is none, or if another
  // call gives it back, unless it is discarded.
  Held& find(Call call, uint64_t handle, bool discards);
  Held take(const Held& held);  // REQUIRES: find() returned it

  const Held* first() const { return held_.empty() ? nullptr : &held_.front(); }
  // Throws Error(kInvalid) if one of these rows is in use.
  void check_not_held(uint32_t table, std::span<const uint64_t> keys) const;
  void check_only_read() const;  // throws Error(kInvalid): at a save point

 private:
  std::vector<Table>& tables_;
  std::vector<Held> held_;
  uint64_t next_handle_ = 1;
};

}  // namespace phub::geeps
