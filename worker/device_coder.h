// Encodes the gradients of coded keys (kernels/encode.h) beside them, on a device, so that only
// their codes cross its bus. The residuals are in the device's memory meanwhile.
//
// A key is encoded there if devices encode its format (Device::may_encode), this one gives the bits
// of kernels::encode in a trial, and Worker::may_encode(): not of a job of which the server saves
// the residuals, nor with carry_over, nor of a part of a key. If the device has no room for the
// residuals of these keys, all of them are left to the worker, and so are the others: push() sends
// the f32 gradient to it.
//
// At the end the worker has the residuals, and goes on with them. After a failure they are zero, as
// for a rank that begins: what the device encoded last may not have been sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/kernels.h"
#include "worker/device/device.h"
#include "worker/worker.h"

namespace phub {

// Of one thread; const functions of any. REQUIRES: no push of these keys is under way when it is
// made, and no work of the device encodes any when it is destroyed.
class DeviceCoder {
 public:
  // REQUIRES: both outlive this; `scratch` has 16 KiB, if any key is coded. Throws Error, the
  // worker's or the device's failure.
  DeviceCoder(Worker& worker, Device& device, const DeviceMemory& scratch);
  ~DeviceCoder();
  DeviceCoder(const DeviceCoder&) = delete;
  DeviceCoder& operator=(const DeviceCoder&) = delete;

  // The memory that residuals take on a device, before it is made.
  static size_t residual_bytes(const Worker& worker);

  bool encodes(size_t key) const { return keys_[key].residual.bytes() > 0; }

  // The slots of some chunks in Worker::gradient_bytes(). REQUIRES of all below: encodes(key);
  // `elements` are whole chunks, or end with the key.
  struct Slots {
    size_t begin = 0, bytes = 0;
  };
  Slots slots(size_t key, Worker::Elements elements) const;
  // The most elements, whole chunks, whose slots are no more than `bytes`; one chunk, at least.
  uint64_t elements_in(size_t key, size_t bytes) const;
  // Enqueues it: their slots are at `to` then. The gradient of these elements is in this format,
  // and is multiplied by `scale`.
  void encode(Stream& stream, size_t key, Worker::Elements elements, const void* gradient,
              kernels::DType dtype, float scale, uint64_t round, void* to) const;
  // The residuals are lost: the device or the worker has failed.
  void lose() { is_lost_ = true; }

 private:
  struct Key {
    kernels::DType format = {};
    CodedSlots slots;
    DeviceMemory residual;
  };
  void give_all_back();
  void give_back(size_t key);

  Worker& worker_;
  Device& device_;
  const uint64_t seed_;
  std::vector<Key> keys_;
  bool is_lost_ = false;
};

}  // namespace phub
