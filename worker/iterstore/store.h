// IterStore: a store of rows for iterative machine learning. The threads of a job's processes read
// rows, update them, and say where an iteration ends (clock). Most such programs access the same
// rows in the same order in every iteration; recorded once, the order places rows and updates
// (Exploiting characteristics of machine learning applications for efficient parameter servers,
// 002, section 3).
//
//   StoreOptions options{.worker = options_from_environment(), .threads = 4};
//   options.worker.spec.name = "ranks";
//   options.tables = {{.name = "rank", .rows = pages, .type = "f64"}};
//   Store store(options);
//   ... in each of the 4 threads:
//   StoreThread mine(store, thread);
//   mine.begin_virtual();  iterate(mine);  mine.finish();   // recorded, nothing else happens
//   for (...) iterate(mine);
//
//   void iterate(StoreThread& mine) {
//     for (Link& link : links_of_this_thread) {
//       const double rank = mine.read<double>(0, link.from);
//       mine.update(0, link.to, change(link, rank));
//     }
//     mine.clock();
//   }
//
// The state of a table: state ← state ⊕ updates, for the table's operation ⊕; it begins with the
// operation's identity (zeros for add and or). A read returns the state after the last clock ⊕ the
// same thread's updates since. It does not have the other threads' updates since then.
//
// min and max of f32 and f64 are not defined where a value is NaN.
//
// To the bit: a thread's updates of a row are combined in the order of its calls, the first one as
// it is; those of a process's threads in the order of threads, those of processes in that of ranks;
// then the state with the outcome. So f32 and f64 have the same bits with every setting below, and
// with any timing, in lock-step (spec.consistency "bsp"). With "ssp" and "async" a process's
// updates are applied when they come, and the state of a read is as old as the job allows.
//
// Errors are phub::Error: kInvalid, a wrong call, which has no effect; those of the worker
// (worker.h), after which no call succeeds. A store does not outlive its server: kRewound or
// kUnavailable ends it; the next Store goes on from what was saved (StoreOptions::worker).
// When a rank is lost, spec.on_loss decides whether clocks go on ("fail": an error for all);
// finish(), changes of rows, table() of a `fixed` one, and calls that stray from it, need all
// ranks.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/fold.h"
#include "worker/worker.h"

namespace phub::iterstore {

struct TableSpec {
  std::string name;
  uint64_t rows = 0;
  uint32_t columns = 1;           // values of a row
  std::string type = "f32";       // "f64", "i32", "i64"
  std::string operation = "add";  // "multiply", "min", "max"; "or", of whole numbers
  // The threads of a process will read rows that they accessed in the recorded iteration, and
  // update rows that they updated there: only those travel, in lock-step and with `placement`. A
  // call that strays from that has its usual result; but it returns only when all other threads, of
  // all ranks, have come to their next clock(), finish() or table(), or stray, too (so hold no lock
  // that they need), and it takes as long as a finish(). From then on, until rows are placed anew,
  // the table is as if this were false: all of it travels to all.
  bool fixed = false;
  // Places for rows that are added later (add_row), which take memory from the beginning. Only in
  // lock-step, and only for a table that is not fixed.
  uint64_t spare = 0;
};

inline constexpr uint64_t kNoRow = ~uint64_t{0};

// Each process of the job has the same tables, threads and settings.
struct StoreOptions {
  // Server, rank (not -1) and the rest. Its spec counts but for the keys: name, world_size,
  // consistency, slack, chunk_elements, on_loss, limits. The jobs of the store are NAME.1-rows,
  // NAME.2-accesses, …
  //
  // With a saver the store is saved from its first finish() on, in its job NAME.rows, if the box
  // keeps checkpoints. The saver returns this process's own state after so many clocks of the
  // store. It is called after rounds that the box saves, in clock() or table(), by one thread while
  // all threads of the process are in that call; of the store it calls nothing but clocks(). A run
  // that is to go on has as many ranks and makes the same calls up to its first finish(), which
  // goes on: then the tables, clocks() and restored() are those of the checkpoint. In lock-step all
  // that follows has the bits of a run without a break. Needs on_loss "fail" and no spare rows or
  // gather_again; rows are placed once.
  WorkerOptions worker;
  std::vector<TableSpec> tables;
  uint32_t threads = 1;  // the threads of this process; each has a StoreThread

  // The uses of a recorded iteration (section 3.2.2). Each can be switched off, and changes no
  // bits.
  bool placement = true;     // rows that the same processes access lie together, so that tables
                             // which are `fixed` travel only to these
  bool numa = true;          // each thread is pinned to a core, and its memory is on that node; on
                             // machines with several nodes. With several ranks only if
                             // local_world_size says how many of them are on this host
  bool static_index = true;  // where each access of the sequence finds its row is known, without
                             // a lock
  // In how many batches, at most, the rows of a table come, 1 to 64: in the order of their use,
  // while the application computes with the first.
  uint32_t batches = 8;

  // A batch is pushed as soon as each thread of the process has made the last access to it that it
  // recorded before its next clock, and not only with the clock. It changes no bits. An update that
  // comes after that is right all the same, but strays as one of a row that a `fixed` table has not
  // recorded, and then nothing is pushed early until rows are placed anew. Ranks ask each other
  // before each clock() whether somebody strays, which is a round trip; and the state of a batch
  // that goes early is copied. Lock-step only, with static_index.
  bool push_early = false;

  // If at least this share of an iteration's accesses, of all ranks, does not come as recorded, the
  // store records the next iteration again by itself, and places the rows anew; 0 means never. An
  // iteration has as many clocks as when it was recorded last. Lock-step only, with static_index.
  // Ranks that begin a recording themselves all do so after the same clock. Rows of a `fixed` table
  // that were recorded remain so.
  double gather_again = 0;

  // The number of this process's machine. If several boxes serve the job, rows lie at those of the
  // machine that accesses them (phub/plan/homes.h). 0: as this process sees it (numa/host.h).
  uint64_t host = 0;
};

struct StoreStats {          // accesses are those since rows were placed last
  uint64_t in_sequence = 0;  // accesses that came as recorded
  uint64_t by_index = 0;     // others, of rows that the thread is known to access
  uint64_t dynamic = 0;      // others: by a hash map with locks
  uint64_t places = 0;       // rows of threads that have a place of their own
  uint64_t cached = 0;       // those that have a copy of the state
  uint64_t clocks = 0;
  uint64_t placed = 0;   // times that rows were placed, by finish() or by the store itself
  uint64_t widened = 0;  // times that a table ceased to be `fixed`, until rows were placed anew
  uint64_t pushed_early = 0;  // batches that were pushed before the clock, in the present job
  WorkerStats worker;         // the worker's in the present job
};

template <typename T>
concept Value = std::same_as<T, float> || std::same_as<T, double> || std::same_as<T, int32_t> ||
    std::same_as<T, int64_t>;

class Store {
 public:
  // Joins nothing yet: the first access or finish() does, and waits for all ranks, up to
  // join_limit_ms. So all ranks begin with the same of the two, and come to each finish() within
  // that time. Throws Error(kInvalid) that names the option.
  explicit Store(StoreOptions options);
  // Leaves the job, unless an exception destroys it: then as abandon(). REQUIRES: no StoreThread is
  // left.
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // The whole state of a table, row after row, with all that was clocked (also without a rank that
  // was lost, if spec.on_loss lets the others go on). All ranks call it, after equally many clocks,
  // while no thread makes a call: nothing may be updated and not clocked. A table with spare rows
  // is returned place after place, with the identity where there is no row.
  std::vector<std::byte> table(uint32_t table);
  // The number of clocks so far. Of a store that goes on from a checkpoint, those before count from
  // its first finish() on. Any thread.
  uint64_t clocks() const;
  // What this process's saver returned under this name after clocks(), where finish() went on from
  // a checkpoint; nullopt: the store began, or there is no such entry. Valid as long as the store.
  // Any thread, after finish().
  std::optional<std::span<const std::byte>> restored(std::string_view name) const;
  uint64_t table_bytes(uint32_t table) const;  // the size of table()'s result
  // The row in each of its places; kNoRow: none. REQUIRES: no thread makes a call meanwhile.
  std::vector<uint64_t> rows(uint32_t table) const;
  StoreStats stats() const;  // REQUIRES: no thread makes a call
  // Ends the store as if its process had died: to the others this rank is lost, and the next store
  // goes on from the checkpoint, if there is one. For a program that fails and lives on. Any
  // thread; calls that wait, and every later clock(), finish() and table(), are Error(kFenced).
  void abandon() noexcept;

 private:
  friend class StoreThread;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// One application thread's access to the store; made and used on that thread (it may be destroyed
// on another one, between calls). One that is gone
// makes no more clocks: the next clock or finish of others is an error. When all have been there
// and are gone, new ones may be made. An error of clock() or finish() is that of all threads, and
// ends the store.
class StoreThread {
 public:
  StoreThread(Store& store, uint32_t thread);  // `thread` is 0 … threads − 1, each once at a time
  ~StoreThread();
  StoreThread(const StoreThread&) = delete;
  StoreThread& operator=(const StoreThread&) = delete;

  // Records the calls of an iteration, until finish(). Virtual: the calls do nothing else, reads
  // leave their destination as it is, and clock() waits for nobody. The second form records a real
  // one. May be called again when the accesses have changed.
  void begin_virtual();
  void begin_gathering();
  bool is_virtual() const;  // the application must not change anything of its own
  // All threads of all ranks call it, with everything clocked. Returns when rows are placed as the
  // iteration wants them. The state of tables stays.
  void finish();

  // Asks for one more or one less row in a table with spare rows, of any number but kNoRow. From
  // the second clock() behind the call on, at the latest, all ranks have it, all from the same
  // clock on; has_row() tells. It begins with the identity. A change that several ask for at once
  // happens once. A clock that deletes rows moves all tables, as finish() does. In a virtual
  // iteration it checks the call, and does nothing else. Throws Error(kInvalid): the table has the
  // row already, or has it not; no spare row is left. If threads and ranks ask for more than there
  // are, clock() throws that, everywhere.
  void add_row(uint32_t table, uint64_t row);
  void delete_row(uint32_t table, uint64_t row);
  bool has_row(uint32_t table, uint64_t row) const;

  // A row, or several: row after row in `into`. REQUIRES: T is the table's type; columns values for
  // each row.
  template <Value T>
  void read(uint32_t table, uint64_t row, std::span<T> into) {
    read_bytes(table, {&row, 1}, type_of<T>(), std::as_writable_bytes(into));
  }
  template <Value T>
  void read_batch(uint32_t table, std::span<const uint64_t> rows, std::span<T> into) {
    read_bytes(table, rows, type_of<T>(), std::as_writable_bytes(into));
  }
  template <Value T>
  T read(uint32_t table, uint64_t row) {  // REQUIRES: the table has one column
    T value{};
    read(table, row, std::span<T>(&value, 1));
    return value;
  }
  // row ← row ⊕ by
  template <Value T>
  void update(uint32_t table, uint64_t row, std::span<const T> by) {
    update_bytes(table, {&row, 1}, type_of<T>(), std::as_bytes(by));
  }
  template <Value T>
  void update_batch(uint32_t table, std::span<const uint64_t> rows, std::span<const T> by) {
    update_bytes(table, rows, type_of<T>(), std::as_bytes(by));
  }
  template <Value T>
  void update(uint32_t table, uint64_t row, T by) {  // REQUIRES: the table has one column
    update(table, row, std::span<const T>(&by, 1));
  }
  // All threads of the process call it. Their updates go out with the last of them; reads after it
  // have the updates of all ranks (in lock-step).
  void clock();

 private:
  friend class Store;
  struct Impl;

  template <Value T>
  static constexpr kernels::ValueType type_of() {
    if constexpr (std::same_as<T, float>) return kernels::ValueType::kF32;
    if constexpr (std::same_as<T, double>) return kernels::ValueType::kF64;
    if constexpr (std::same_as<T, int32_t>) return kernels::ValueType::kI32;
    return kernels::ValueType::kI64;
  }
  void read_bytes(uint32_t table, std::span<const uint64_t> rows, kernels::ValueType type,
                  std::span<std::byte> into);
  void update_bytes(uint32_t table, std::span<const uint64_t> rows, kernels::ValueType type,
                    std::span<const std::byte> by);

  std::unique_ptr<Impl> impl_;
};

}  // namespace phub::iterstore
