// Keys whose gradients and results are in the memory of a device, where they come and go on its
// streams: no call waits, neither for the caller's stream nor for the box. (A driver may hold a
// call up while earlier work fills its queues.)
//
//   DeviceKeys keys(worker, *device);
//   keys.push(0, gradient, stream);      // taken when `stream` comes here
//   keys.pull(0, parameters, stream);    // later work of `stream` has the result
//   keys.wait();                         // for what must be known here: all is sent and received
//
// If the worker's gradients and parameters lie in memory of this device (WorkerOptions::
// memory_device), the NIC reads and writes them there: push and pull copy on the device, and
// nothing where the caller computes in Worker::gradient_bytes() and reads Worker::parameter_bytes()
// themselves. Otherwise both go through pinned memory of the host:
//
// push: a stream of phub's waits for the caller's, converts the gradient to the key's format on the
// device, and copies it to pinned memory, the worker's own if that can be pinned. A thread pushes
// it when the copy is done. pull: another stream waits until a second thread has the result,
// converts it and copies it back, and the caller's stream waits for that.
//
//   caller's ──▶ in: convert, copy ──▶ phub-send: push ──▶ box ──▶ phub-receive: raise
//   caller's ◀── out: copy, convert ◀── waits for the key's signal ◀───────────┘
//
// Through pinned memory a large key goes part by part (Worker::parts()): while one part is copied,
// the box has the ones before it, and results are copied back as they come.
//
// Scaled formats (kernels/encode.h) are encoded on the device as well, with the residual there, so
// that only codes cross the bus. The worker encodes the others, from a copy in f32, and all of them
// if the device has no room for the residuals, gives other bits in a trial, or if the worker needs
// the residuals (Worker::may_encode: a job whose state of ranks the server saves, carry_over, a
// rank with a part of the key, a format that goes by the round). The bits are the same. A null, or
// a chunk that is not finite, leaves the residual alone; it is the rank's, whatever branch runs.
// The destructor gives it back to the worker; after a failure it is zero then, as for a rank that
// begins.
//
// Threads. Any thread may call anything, except that the destructor comes last. A push takes the
// gradient in the order of its stream; pushes and pulls of one key take effect in the order of the
// calls. The caller's memory is lent from push (pull) until its stream is behind the key's next
// pull (this pull).
//
// Errors are phub::Error. kInvalid, a wrong call, which changes nothing: the message names the key.
// If the worker or the device fails, results that are not here yet become bytes of 0xFF (NaN),
// streams go on at once, and every later call throws the failure. Memory that is lent then stays
// lent until the destructor: copies may be under way still.
//
// Streams of a GPU may share its hardware's queues, so that a stream that waits for a result holds
// another one up. Ranks that push their keys in the same order cannot block each other by that.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "kernels/kernels.h"
#include "transport/error.h"
#include "worker/device/device.h"
#include "worker/worker.h"

namespace phub {

struct DevicePush {
  std::optional<kernels::DType> dtype;  // the gradient's format; nullopt: the key's
  float scale = 1;                      // multiplies every element
  int32_t priority = 0;                 // as PushOptions
};

class DeviceCoder;

class DeviceKeys {
 public:
  // The size of each of two buffers, in which keys are converted piece by piece.
  static constexpr size_t kPieceBytes = 8 << 20;
  // The memory that the device must have left, if the worker's memory is the host's.
  static constexpr size_t kDeviceBytes = 2 * kPieceBytes;
  // The memory with which coded keys are encoded on the device: these, and their residuals.
  // Before this is made.
  static size_t encoding_bytes(const Worker& worker);

  // From now on only this pushes to the worker and calls its wait_any(); registered memory is
  // registered no more. Throws Error: kFull, too little memory on the device, or pinned memory of
  // the host; kUnavailable, its streams cannot wait for the host; kInvalid, the worker's memory
  // lies on another device. REQUIRES: both outlive this; if the job needs initial parameters,
  // Worker::broadcast() was called.
  DeviceKeys(Worker& worker, Device& device);
  // Waits until all pushes are sent. Results that are not here yet become bytes of 0xFF.
  ~DeviceKeys();
  DeviceKeys(const DeviceKeys&) = delete;
  DeviceKeys& operator=(const DeviceKeys&) = delete;

  // Takes part in the key's next round, with the key's elements at `gradient`, which is memory of
  // the device; null: with a gradient of zero. REQUIRES: `stream` is the device's.
  void push(size_t key, const void* gradient, Stream& stream, const DevicePush& how = {});
  // Does the same for a matrix whose factors are sent (KeySpec::rank_limit), as
  // Worker::push_factors(): those of each part of a batch, for example, in memory of the device.
  // They are copied to pinned memory of the host as they are, and no matrix is made on the device.
  // No pair at all: a gradient of zero. kInvalid: all together are more than rank_limit; they have
  // a dtype other than f32, or a scale.
  void push_factors(size_t key, std::span<const FactorPairs> factors, Stream& stream,
                    const DevicePush& how = {});
  // Leaves the result of the latest push (none: the present parameters) at `result`, in this format
  // (nothing: the job's). It may be the gradient's memory.
  void pull(size_t key, void* result, Stream& stream, std::optional<kernels::DType> dtype = {});
  // Returns when the results of all pushes are here, and those that were pulled are in their place.
  void wait();
  bool encodes(size_t key) const;  // on the device
  void check();                    // throws the failure of the worker or the device

 private:
  struct Key {
    kernels::DType gradient_dtype = {};
    std::span<std::byte> gradient;      // phub's streams copy the gradient or its factors here
    std::span<const std::byte> result;  // phub's streams copy the result from here
    std::unique_ptr<Event> pulled;      // recorded by the latest pull
    size_t parts = 1;                   // 1: it goes as a whole
    size_t first_signal = 0;            // of its parts; of a single one, the key's own
    uint32_t pushes = 0, here = 0;      // counted modulo 2^32
    uint64_t round = 0;                 // of the latest push
    size_t parts_here = 0;              // of the next result
  };
  struct Push {
    size_t key = 0;
    int32_t priority = 0;
    bool null = false;
    std::vector<FactorPairs> factors;           // they lie in the memory of the key's gradient
    std::vector<std::unique_ptr<Event>> taken;  // by part
  };

  size_t place_signals();
  Worker::Elements part_of(size_t key, size_t part) const;
  void place_factors();
  void pin_or_stage();
  bool pin(const std::vector<std::span<const std::byte>>& memory, HostUse use);
  const KeySpec& check_key(size_t key, const char* what, const Stream& stream) const;
  void check_memory(const KeySpec& key, const char* what, const void* memory, uint64_t elements,
                    kernels::DType dtype) const;
  void check_factors(const KeySpec& key, std::span<const FactorPairs> factors,
                     const DevicePush& how) const;
  void check_alive() const;
  template <typename Work>
  void enqueue(Work work);
  std::unique_ptr<Event> spare_event();
  template <typename CopyIn>
  void push(Push push, Stream& stream, CopyIn copy_in);
  void copy_in(Key& key, Worker::Elements part, const void* gradient, kernels::DType dtype,
               float scale);
  void encode_in(size_t key, Worker::Elements part, const void* gradient, kernels::DType dtype,
                 float scale);
  std::span<std::byte> slots_of(std::span<std::byte> gradient, size_t key,
                                Worker::Elements part) const;
  void copy_out(const Key& key, Worker::Elements part, void* result, kernels::DType dtype);
  void send(const std::stop_token& stop);
  void send(const Push& push, size_t part);
  void end_half_pushed(size_t key);
  void receive(const std::stop_token& stop);
  void stage_result(const Pushed& of);
  void take_result(const Pushed& of);
  void fail(const Error& error);

  Worker& worker_;
  Device& device_;
  const bool on_device_;                          // the worker's memory is the device's
  const kernels::DType parameter_dtype_;          // the job's
  std::vector<PinnedMemory> pinned_;              // the worker's memory
  HostMemory staged_gradients_, staged_results_;  // empty: the worker's is pinned
  HostMemory factors_;                            // the factors of all keys that send factors
  DeviceMemory in_piece_, out_piece_;             // empty if on_device_
  const std::unique_ptr<DeviceCoder> coder_;

  std::mutex calls_;  // a call's work is enqueued together; taken before the next one
  std::mutex mutex_;  // guards signals_ and the members below it
  std::condition_variable_any changed_;
  std::vector<Key> keys_;             // calls_, and of the receiver: Key::here, parts_here
  std::unique_ptr<Event> ready_;      // calls_: the caller's stream is, in the call in progress
  std::unique_ptr<Signals> signals_;  // by key, then by part: how many results are here
  std::deque<Push> to_send_;
  std::vector<std::unique_ptr<Event>> spare_;  // events that the next pushes use
  uint64_t outstanding_ = 0;                   // pushes whose result is not here
  std::optional<Error> failure_;
  std::unique_ptr<Stream> in_, out_;  // destroyed before the members that their work uses

  std::jthread sender_, receiver_;
};

}  // namespace phub
