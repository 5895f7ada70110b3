// The objects behind phub_store_options, phub_store and phub_store_thread.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "worker/c_abi/handles.h"
#include "worker/iterstore/store.h"

namespace phub::c_abi {

struct StoreOptionsObject : Object {
  static constexpr Type kType = Type::kStoreOptions;
  std::mutex mutex;                 // guards the members below
  iterstore::StoreOptions options;  // all but the worker's options
};

struct StoreObject : Object {
  static constexpr Type kType = Type::kStore;
  explicit StoreObject(const iterstore::StoreOptions& options)
      : rank(static_cast<uint32_t>(options.worker.rank)),
        world_size(options.worker.spec.world_size),
        store(options) {}
  const uint32_t rank, world_size;
  iterstore::Store store;
  // Shared by the calls of its threads, and held alone by those that nobody may make beside them.
  std::shared_mutex calls;
};

// The number of the calling thread: unlike a std::thread::id it is never used again in this
// process, even after the thread has ended.
uint64_t number_of_this_thread();

// Keeps its store. Members are destroyed from the last to the first.
struct StoreThreadObject : Object {
  static constexpr Type kType = Type::kStoreThread;
  StoreThreadObject(std::shared_ptr<StoreObject> of, uint32_t number)
      : store(std::move(of)), mine(store->store, number) {}
  const std::shared_ptr<StoreObject> store;
  const uint64_t runs_on = number_of_this_thread();
  iterstore::StoreThread mine;
};

}  // namespace phub::c_abi
