// A device: memory within a fixed budget, streams of work, events, copies, and the kernels that a
// parameter cache needs. Two implementers keep this contract: host_device.h and cuda_device.h.
//
//   auto device = make_host_device({.budget_bytes = 1 << 30});
//   DeviceMemory table(*device, rows * row_bytes, "table");     // poisoned: NaN in every format
//   HostMemory staging(*device, rows * row_bytes, "staging");   // pinned
//   auto stream = device->make_stream("fetch");
//   auto fetched = device->make_event();
//   stream->copy_to_device(table.data(), staging.data(), rows * row_bytes);
//   stream->record(*fetched);
//   compute->wait(*fetched);                                    // on the device, not here
//
// Thread-safe: any thread may call anything; a stream's work runs in the order of the calls. A
// device outlives its streams, events and memory.
//
// Errors are phub::Error: kFull, a budget is exceeded; kInvalid, a pointer, event or index is not
// this device's, or a range is not inside one allocation; kInternal, work failed on the device. A
// failure stops its stream: later work is dropped, callbacks included. It spreads to the streams
// that wait for it. The next call that enqueues on or waits for one of these streams throws
// kInternal with the origin, once; later calls throw kUnavailable.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>

#include "kernels/encode.h"
#include "kernels/kernels.h"
#include "transport/memory_device.h"
#include "worker/device/arena.h"
#include "worker/device/host_pages.h"
#include "worker/device/kernel.h"

namespace phub {

class Device;

// A table in device memory: rows of equal size, one after another.
struct Rows {
  float* data;
  size_t rows;
  size_t row_floats;
};
struct ConstRows {
  ConstRows(const float* d, size_t r, size_t f) : data(d), rows(r), row_floats(f) {}
  ConstRows(const Rows& r) : data(r.data), rows(r.rows), row_floats(r.row_floats) {}  // NOLINT
  const float* data;
  size_t rows;
  size_t row_floats;
};

// Device memory or pinned host memory, released at the end of the scope.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(Device& device, size_t bytes, std::string_view what);
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  ~DeviceMemory();
  void* data() const { return data_; }
  float* floats() const { return static_cast<float*>(data_); }
  size_t bytes() const { return bytes_; }

 private:
  Device* device_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

class HostMemory {
 public:
  HostMemory() = default;
  HostMemory(Device& device, size_t bytes, std::string_view what);
  HostMemory(HostMemory&& other) noexcept;
  HostMemory& operator=(HostMemory&& other) noexcept;
  ~HostMemory();
  void* data() const { return data_; }
  std::span<float> floats() const { return {static_cast<float*>(data_), bytes_ / sizeof(float)}; }
  size_t bytes() const { return bytes_; }

 private:
  Device* device_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Pins memory that was allocated elsewhere, until the end of the scope.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  PinnedMemory(Device& device, const void* memory, size_t bytes, HostUse use,
               std::string_view what);
  PinnedMemory(PinnedMemory&& other) noexcept;
  PinnedMemory& operator=(PinnedMemory&& other) noexcept;
  ~PinnedMemory();

 private:
  Device* device_ = nullptr;
  const void* memory_ = nullptr;
};

// A list of rows in device memory. It is checked and copied there once, so that kernels need not.
class RowIndex {
 public:
  RowIndex() = default;
  RowIndex(Device& device, std::span<const uint32_t> rows);  // allocates the memory
  // In the caller's memory, 4 bytes per row. REQUIRES: `place` outlives this.
  RowIndex(Device& device, void* place, std::span<const uint32_t> rows);

  size_t size() const { return size_; }
  const uint32_t* data() const { return data_; }
  size_t table_rows() const { return table_rows_; }  // the least rows of a table
  bool distinct() const { return distinct_; }        // no row occurs twice

 private:
  RowIndex(DeviceMemory memory, Device& device, std::span<const uint32_t> rows);

  DeviceMemory memory_;
  uint32_t* data_ = nullptr;
  size_t size_ = 0;
  size_t table_rows_ = 0;
  bool distinct_ = true;
};

// A point in the work of the stream that recorded it last. Before the first record() it is done.
class Event {
 public:
  explicit Event(Device& device) : device_(device) {}
  virtual ~Event() = default;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  Device& device() const { return device_; }

  virtual bool done() const = 0;
  virtual void wait() const = 0;  // blocks the caller, without using a CPU

 private:
  Device& device_;
};

// The slots of a gradient in a coded format (kernels/encode.h): chunk after chunk, of which the
// last may have fewer elements.
struct ChunkedSlots {
  kernels::DType format = {};
  size_t chunk_elements = 0;
  size_t chunk_bytes = 0;           // from the beginning of a slot to that of the next
  kernels::Rounding rounding = {};  // of the first element
};

// Numbers that the host raises, 0 at first, and that streams wait for: so the work behind an event
// of the host can be enqueued before it happens. They count modulo 2^32. REQUIRES: a wait is for
// less than 2^30 more than the number is; this outlives the work that waits for it.
class Signals {
 public:
  virtual ~Signals() = default;
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;
  Device& device() const { return device_; }
  size_t size() const { return size_; }

  // None of these blocks. Called by one thread at a time.
  void raise(size_t index, uint32_t number);  // REQUIRES: it is higher than before
  void fail();  // ends all waits, also later ones, and lets poison_if_failed() poison

 protected:
  Signals(Device& device, size_t count);

 private:
  friend class Stream;

  virtual void do_raised() = 0;

  Device& device_;
  size_t size_;
  HostMemory memory_;
  bool has_failed_ = false;
  uint32_t* words_;  // whether they have failed; then the numbers
};

// Runs work in order. All calls return at once. REQUIRES: memory stays valid and unchanged until
// the work is done.
class Stream {
 public:
  Stream(Device& device, std::string name);
  virtual ~Stream() = default;  // waits for its work
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  Device& device() const { return device_; }
  const std::string& name() const { return name_; }

  // REQUIRES: the host's side is pinned memory, from allocate_host() or pin_host().
  void copy_to_device(void* to, const void* from, size_t bytes);
  void copy_to_host(void* to, const void* from, size_t bytes);
  void copy_on_device(void* to, const void* from, size_t bytes);

  // to row i = from row index[i]; `to` has index.size() rows.
  void gather(ConstRows from, const RowIndex& index, float* to);
  void gather_add(ConstRows from, const RowIndex& index, float* to);  // += it
  // to row index[i] = from row i, or += it. REQUIRES: index.distinct(), else kInvalid.
  void scatter(const float* from, const RowIndex& index, Rows to);
  void scatter_add(const float* from, const RowIndex& index, Rows to);
  // to[i] += factor · from[i]: a multiplication and an addition, two roundings on every device.
  void add_scaled(float factor, const float* from, float* to, size_t elements);
  void fill(float* to, float value, size_t elements);
  // Rounds to nearest even; every NaN becomes the same one, as in kernels::convert. With a factor
  // it does what kernels::convert_scaled does.
  void convert(const void* from, kernels::DType from_dtype, void* to, kernels::DType to_dtype,
               size_t elements, float factor = 1);

  // Writes the slots of factor · from[i] + residual[i], and what they do not hold into the
  // residual: as kernels::convert_scaled and kernels::encode do of one chunk after another, to the
  // bit. No residual (null): of factor · from[i]. REQUIRES, else kInvalid: Device::may_encode()
  // the format.
  void encode(const void* from, kernels::DType from_dtype, float factor, float* residual,
              const ChunkedSlots& slots, void* to, size_t elements);

  // Calls `callback` in a thread of the device. REQUIRES: it does not throw, and calls no function
  // of a device.
  void call(std::function<void()> callback);
  // Simulates computation of this length, to measure overlap.
  void work_for(std::chrono::nanoseconds time);

  void record(Event& event);      // the event is done when all work enqueued before is
  void wait(const Event& event);  // later work waits for the event's latest record() so far
  void synchronize();             // blocks the caller until all work is done

  // Later work waits until this number is at least `number`.
  void wait(const Signals& signals, size_t index, uint32_t number);
  // Writes bytes of 0xFF if the signals have failed when the stream comes here.
  void poison_if_failed(const Signals& signals, void* memory, size_t bytes);

 private:
  // `what` is for errors. The kernel reads and writes so many bytes.
  void launch(const char* what, const Kernel& kernel, size_t from_bytes, size_t to_bytes);
  void gather(const char* what, Kernel::Kind kind, ConstRows from, const RowIndex& index,
              float* to);
  void scatter(const char* what, Kernel::Kind kind, const float* from, const RowIndex& index,
               Rows to);
  void check_index(const char* what, const RowIndex& index, ConstRows table) const;
  void check_slots(const ChunkedSlots& slots, const void* to) const;
  void check_signals(const Signals& signals) const;

  virtual void do_copy_to_device(void* to, const void* from, size_t bytes) = 0;
  virtual void do_copy_to_host(void* to, const void* from, size_t bytes) = 0;
  virtual void do_launch(const Kernel& kernel) = 0;
  virtual void do_call(std::function<void()> callback) = 0;
  virtual void do_work_for(std::chrono::nanoseconds time) = 0;
  virtual void do_record(Event& event) = 0;
  virtual void do_wait(const Event& event) = 0;
  virtual void do_synchronize() = 0;
  virtual void do_wait_for(const uint32_t* word, uint32_t number);

  Device& device_;
  std::string name_;
};

struct DeviceStats {
  size_t budget_bytes = 0, used_bytes = 0, peak_bytes = 0, host_bytes = 0;
  uint64_t bytes_to_device = 0, bytes_to_host = 0;  // enqueued copies
  uint64_t copies = 0, kernels = 0;
};

class Device : public MemoryDevice {
 public:
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  const std::string& name() const final { return name_; }

  // For set-up: blocks until the memory is poisoned (bytes of 0xFF, NaN in every format). `what` is
  // for the error. 0 bytes: returns nullptr. release() REQUIRES: no work uses the memory.
  void* allocate(size_t bytes, std::string_view what) final;
  void release(void* memory) final;
  // Pinned, zeroed memory of the host, which the budget does not include.
  void* allocate_host(size_t bytes, std::string_view what);
  void release_host(void* memory);
  // Lets copies read, or read and write, memory that was allocated elsewhere (as a transport's
  // shared memory). REQUIRES: read-only pages are pinned with HostUse::kRead; all devices of a
  // process pin a page as part of the same range.
  void pin_host(const void* memory, size_t bytes, HostUse use, std::string_view what);
  void unpin_host(const void* memory);

  // For set-up and tests, with any memory of the host. They block, and are not ordered with
  // streams.
  void write(void* to, const void* from, size_t bytes) final;
  void read(void* to, const void* from, size_t bytes) final;

  virtual std::unique_ptr<Stream> make_stream(std::string name) = 0;
  virtual std::unique_ptr<Event> make_event() = 0;
  // Throws Error(kUnavailable) if the device has no such thing.
  virtual std::unique_ptr<Signals> make_signals(size_t count);
  // A stream that others made (CUDA: a cudaStream_t, which is null for the default one), and keep
  // until this and its work are gone. Its destructor does not wait.
  virtual std::unique_ptr<Stream> adopt_stream(void* stream, std::string name);

  // Whether work can use all of this as device memory: it is inside one allocation of this device;
  // or the device can reach it, though others allocated it (CUDA: memory of the same GPU).
  bool holds(const void* memory, size_t bytes) const;

  // For NICs; a device of the host needs nothing.
  int cuda_ordinal() const override { return -1; }
  DmaBuf dma_buf(const void* memory, size_t bytes) const override;
  void flush_nic_writes() override {}

  size_t budget_bytes() const { return budget_; }
  // Whether streams can encode this format, with Stream::encode(): a scaled one. (Of a sparse one
  // the host chooses the elements.)
  static constexpr bool may_encode(kernels::DType format) {
    return kernels::format_of(format).coding == kernels::Coding::kScaled;
  }
  // Whether device memory is host memory, in which the calling thread may compute.
  virtual bool in_host_memory() const { return false; }
  DeviceStats stats() const;

 protected:
  Device(std::string name, size_t budget_bytes)
      : name_(std::move(name)), budget_(budget_bytes), arena_(budget_bytes) {}
  // Sets the memory that allocate() divides. REQUIRES: called before anything else.
  void set_memory(void* begin) { memory_ = static_cast<std::byte*>(begin); }

 private:
  friend class Stream;  // uses the checks and the counters

  struct HostRange {
    size_t bytes;
    bool ours;  // allocate_host(), not pin_host()
    HostUse use;
  };

  void check_device(const char* what, const void* memory, size_t bytes) const;
  void check_host(const char* what, const void* memory, size_t bytes, HostUse use) const;
  HostRange take_host_range(const void* memory, bool ours);

  virtual bool holds_of_others(const void* /*memory*/, size_t /*bytes*/) const { return false; }
  virtual void do_allocated(void* memory, size_t bytes) = 0;  // poisons
  virtual void do_released(void* memory, size_t bytes) = 0;   // poisons
  virtual void* do_allocate_host(size_t bytes) = 0;
  virtual void do_release_host(void* memory, size_t bytes) = 0;
  virtual void do_pin_host(const void* memory, size_t bytes, HostUse use,
                           std::string_view what) = 0;
  virtual void do_unpin_host(const void* memory) noexcept = 0;  // destructors call it
  virtual void do_write(void* to, const void* from, size_t bytes) = 0;
  virtual void do_read(void* to, const void* from, size_t bytes) = 0;

  std::string name_;
  size_t budget_;
  std::byte* memory_ = nullptr;

  mutable std::mutex mutex_;  // guards the next four
  Arena arena_;
  std::map<const std::byte*, HostRange> host_;
  size_t host_bytes_ = 0;
  size_t peak_ = 0;

  std::atomic<uint64_t> bytes_to_device_ = 0, bytes_to_host_ = 0, copies_ = 0, kernels_ = 0;
};

}  // namespace phub
