#include "worker/geeps/held_buffers.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "transport/error.h"

namespace phub::geeps {
namespace {

bool share_a_key(std::span<const uint64_t> a, std::span<const uint64_t> b) {
  if (a.size() > b.size()) std::swap(a, b);
  if (a.size() <= 2) {
    return std::any_of(a.begin(), a.end(),
                       [&](uint64_t key) { return std::find(b.begin(), b.end(), key) != b.end(); });
  }
  const std::unordered_set<uint64_t> keys(a.begin(), a.end());
  return std::any_of(b.begin(), b.end(), [&](uint64_t key) { return keys.contains(key); });
}

}  // namespace

Buffer HeldBuffers::add(Held held) {
  held.handle = next_handle_++;
  held.buffer.handle = held.handle;
  ++tables_[held.table].held;
  held_.push_back(std::move(held));
  Held& kept = held_.back();
  if (!kept.planned) kept.keys = kept.own_keys;
  return kept.buffer;
}

Held& HeldBuffers::find(Call call, uint64_t handle, bool discards) {
  const auto found = std::ranges::find(held_, handle, &Held::handle);
  if (found == held_.end()) {
    if (handle > 0 && handle < next_handle_) {
      fail(ErrorCode::kInvalid, "{} of buffer {}, which was given back before", name_of(call),
           handle);
    }
    fail(ErrorCode::kInvalid, "{} of buffer {}: there never was one", name_of(call), handle);
  }
  if (!discards && release_of(found->call) != call) {
    fail(ErrorCode::kInvalid, "{} of a buffer of '{}' that {} gave: it takes {}", name_of(call),
         tables_[found->table].spec.name, name_of(found->call), name_of(release_of(found->call)));
  }
  return *found;
}

Held HeldBuffers::take(const Held& of) {
  const auto found = held_.begin() + (&of - held_.data());
  Held held = std::move(*found);
  held_.erase(found);
  if (!held.planned) held.keys = held.own_keys;
  --tables_[held.table].held;
  return held;
}

void HeldBuffers::check_not_held(uint32_t table, std::span<const uint64_t> keys) const {
  if (tables_[table].held == 0) return;
  for (const Held& held : held_) {
    if (held.table != table || !share_a_key(held.keys, keys)) continue;
    fail(ErrorCode::kInvalid,
         "LocalAccess of rows of '{}' that are in use: give them back with PostLocalAccess first",
         tables_[table].spec.name);
  }
}

void HeldBuffers::check_only_read() const {
  for (const Held& held : held_) {
    if (held.call == Call::kRead) continue;
    fail(ErrorCode::kInvalid, "save_point with a buffer of '{}' in use",
         tables_[held.table].spec.name);
  }
}

}  // namespace phub::geeps
