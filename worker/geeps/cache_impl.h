// Inside the cache: the application's side. Rows in device memory are copied in the application's
// order (DeviceWork), in its thread or on its stream. Rows in host memory are moved by the lanes of
// a Mover, in the background. One mutex guards their shared state (CacheWaits); nothing is copied
// while it is held.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "worker/device/arena.h"
#include "worker/geeps/branch_tables.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/cache_waits.h"
#include "worker/geeps/device_work.h"
#include "worker/geeps/held_buffers.h"
#include "worker/geeps/mover.h"
#include "worker/geeps/own_copies.h"

namespace phub::geeps {

struct Cache::Impl {
  using Lock = CacheWaits::Lock;
  Impl(Device& device, Exchange& exchange, std::vector<TableSpec> tables,
       const CacheOptions& options, const MakeDriver& make_driver);
  ~Impl();

  // cache_read.cc
  Buffer acquire(Call call, uint32_t table, std::span<const uint64_t> keys, bool fetch,
                 std::optional<uint32_t> staleness);
  std::optional<uint64_t> age_of(uint64_t version) const;
  std::optional<Instance> follow(Call call, uint32_t table, std::span<const uint64_t> keys);
  bool blocked_by_held(const Instance& instance) const;
  void acquire_planned(Lock& lock, Held& held, bool fetch, uint64_t back);
  void fetch_planned(Lock& lock, Held& held, uint64_t back);
  void acquire_outside(Lock& lock, Held& held, bool fetch, uint64_t back);
  void reserve(Lock& lock, Held& held);
  void read_pinned(Lock& lock, Held& held, const ListPlan& list, uint64_t back);
  Buffer hold(Held held);

  // cache_release.cc
  void release(Call call, uint64_t handle, bool use);  // use: update, save
  void give_back(Lock& lock, Held held, bool use);
  void table_clock(uint32_t table, std::span<const FactorPairs> factors);
  void clock(uint32_t table, std::vector<FactorPairs> factors = {});

  // cache_sequence.cc
  void begin(bool virtually);
  void finish_sequence();
  Placement place_anew(const Sequence& sequence, SequenceDemand& demand) const;
  void install(Sequence sequence);

  // cache_save.cc
  void check_may_clock(const Table& table) const;
  void check_at_save_point();
  std::optional<RankState> state_at_save_point();
  bool ends_round();

  CacheStats stats();  // cache.cc

  Table& table_of(const Held& held) { return mover_.tables[held.table]; }
  PlannedAccess& access_of(Instance instance) { return mover_.schedule->accesses[instance.access]; }
  const ListPlan& list_of(const Held& held) {
    return held.planned ? mover_.schedule->lists[access_of(*held.planned).list]
                        : held.outside->list;
  }

  // NOLINTBEGIN(readability-identifier-naming): the cache's, which is this class
  Device& device_;
  const CacheOptions options_;
  const std::vector<TableSpec> specs_;
  uint64_t budget_ = 0;
  DeviceMemory memory_;
  Mover mover_;
  std::vector<PinnedMemory> pinned_;  // the exchange's
  DeviceWork work_;
  OwnCopies copies_;

  // Used by the application's thread only.
  size_t reserved_offset_ = 0;
  std::optional<Recorder> recorder_;
  bool virtual_ = false;
  std::vector<bool> inferred_;  // by table: its last Update in the sequence clocks it
  HeldBuffers held_;

  CacheWaits waits_;
  BranchTables branches_;
  // NOLINTEND(readability-identifier-naming)
};

}  // namespace phub::geeps
