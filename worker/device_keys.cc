#include "worker/device_keys.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <utility>

#include "worker/any_error.h"
#include "worker/device_coder.h"

namespace phub {
namespace {

using kernels::DType;

// Whether the worker's gradients and parameters lie in memory of this device.
bool lies_on(const Worker& worker, const Device& device) {
  const MemoryDevice* const of_worker = worker.memory_device();
  if (of_worker == nullptr || of_worker == &device) return of_worker != nullptr;
  fail(
      ErrorCode::kInvalid,
      "the worker's gradients and parameters lie in memory of {} (memory_device), and the keys are "
      "to be on {}: use one device for both",
      of_worker->name(), device.name());
}

}  // namespace

DeviceKeys::DeviceKeys(Worker& worker, Device& device)
    : worker_(worker),
      device_(device),
      on_device_(lies_on(worker, device)),
      parameter_dtype_(*kernels::parse_dtype(parameter_memory_format(worker.spec()))),
      in_piece_(device, on_device_ ? 0 : kPieceBytes, "gradients that are converted"),
      out_piece_(device, on_device_ ? 0 : kPieceBytes, "results that are converted"),
      coder_(std::make_unique<DeviceCoder>(worker, device, in_piece_)),
      keys_(worker.keys()),
      ready_(device.make_event()),
      signals_(device.make_signals(place_signals())),
      in_(device.make_stream("phub in")),
      out_(device.make_stream("phub out")) {
  if (folds(worker.spec())) {
    phub::fail(
        ErrorCode::kInvalid,
        "job '{}' is of values with operations (optimizer 'fold'), which only the host pushes",
        worker.spec().name);
  }
  for (size_t key = 0; key < keys_.size(); ++key) {
    worker_.register_memory(key, {});
    worker_.wait(key);
    const KeySpec& of = worker_.spec().keys[key];
    if (!is_factors(of)) {
      keys_[key].gradient_dtype = *kernels::parse_dtype(gradient_memory_format(worker_.spec(), of));
      keys_[key].gradient = worker_.gradient_bytes(key);
    }
    keys_[key].result = worker_.parameter_bytes(key);
    keys_[key].round = worker_.round(key);
    keys_[key].pulled = device_.make_event();
  }
  if (!on_device_) pin_or_stage();
  place_factors();
  sender_ = start_thread("phub-send", [this](const std::stop_token& stop) { send(stop); });
  receiver_ = start_thread("phub-receive", [this](const std::stop_token& stop) { receive(stop); });
}

size_t DeviceKeys::encoding_bytes(const Worker& worker) {
  return kDeviceBytes + DeviceCoder::residual_bytes(worker);
}

bool DeviceKeys::encodes(size_t key) const { return coder_->encodes(key); }

// Returns how many there are: of each key, and then of the parts of those that have several. Where
// the NIC itself reads and writes, no copies are worth parts.
size_t DeviceKeys::place_signals() {
  size_t signals = keys_.size();
  for (size_t key = 0; key < keys_.size(); ++key) {
    Key& of = keys_[key];
    of.parts = on_device_ ? 1 : worker_.parts(key);
    of.first_signal = of.parts == 1 ? key : std::exchange(signals, signals + of.parts);
  }
  return signals;
}

Worker::Elements DeviceKeys::part_of(size_t key, size_t part) const {
  if (keys_[key].parts == 1) return {0, worker_.spec().keys[key].elements};
  return worker_.part(key, part);
}

// Room for as many as a rank may send in a round.
void DeviceKeys::place_factors() {
  const auto bytes_of = [](const KeySpec& key) -> size_t {
    if (!is_factors(key)) return 0;
    return key.rank_limit * (size_t{key.shape[0]} + key.shape[1]) * sizeof(float);
  };
  size_t all = 0;
  for (const KeySpec& key : worker_.spec().keys) all += bytes_of(key);
  factors_ = HostMemory(device_, all, "factors");
  auto* place = static_cast<std::byte*>(factors_.data());
  for (size_t key = 0; key < keys_.size(); ++key) {
    const size_t bytes = bytes_of(worker_.spec().keys[key]);
    if (bytes == 0) continue;
    keys_[key].gradient = {place, bytes};
    place += bytes;
  }
}

// Copies are fast with pinned memory only.
void DeviceKeys::pin_or_stage() {
  std::vector<std::span<const std::byte>> gradients, results;
  for (const Key& key : keys_) {
    if (!key.gradient.empty()) gradients.emplace_back(key.gradient);
    results.emplace_back(key.result);
  }
  const auto bytes_of_all = [](const auto& memory) {
    size_t bytes = 0;
    for (const auto& each : memory) bytes += each.size();
    return bytes;
  };
  if (!pin(gradients, HostUse::kReadWrite)) {
    staged_gradients_ = HostMemory(device_, bytes_of_all(gradients), "gradients");
    auto* place = static_cast<std::byte*>(staged_gradients_.data());
    for (Key& key : keys_) {
      key.gradient = {place, key.gradient.size()};
      place += key.gradient.size();
    }
  }
  if (!pin(results, HostUse::kRead)) {
    staged_results_ = HostMemory(device_, bytes_of_all(results), "results");
    auto* place = static_cast<std::byte*>(staged_results_.data());
    for (Key& key : keys_) {
      std::memcpy(place, key.result.data(), key.result.size());
      key.result = {place, key.result.size()};
      place += key.result.size();
    }
  }
}

DeviceKeys::~DeviceKeys() {
  sender_.request_stop();
  sender_.join();
  receiver_.request_stop();
  worker_.wake();
  receiver_.join();
  worker_.forget_announced();
  const std::lock_guard lock(mutex_);
  if (failure_) coder_->lose();
  fail(Error(ErrorCode::kFenced, "the keys are not on a device any more"));
}

// Whether the driver takes it: over shared memory, results are pages that cannot be written.
bool DeviceKeys::pin(const std::vector<std::span<const std::byte>>& memory, HostUse use) {
  std::vector<PageRange> ranges;
  for (const auto& each : memory) ranges.push_back(pages_of(each, use));
  std::vector<PinnedMemory> pinned;
  try {
    for (const PageRange& range : merged(std::move(ranges))) {
      pinned.emplace_back(device_, reinterpret_cast<const void*>(range.begin),
                          range.end - range.begin, range.use, "memory of the worker");
    }
  } catch (const Error&) {
    return false;
  }
  std::move(pinned.begin(), pinned.end(), std::back_inserter(pinned_));
  return true;
}

const KeySpec& DeviceKeys::check_key(size_t key, const char* what, const Stream& stream) const {
  const JobSpec& spec = worker_.spec();
  if (key >= keys_.size()) {
    phub::fail(ErrorCode::kInvalid, "key {} is out of range: job '{}' has {} keys", key, spec.name,
               keys_.size());
  }
  const KeySpec& of = spec.keys[key];
  if (&stream.device() != &device_) {
    phub::fail(ErrorCode::kInvalid, "{} of key '{}': stream '{}' is of {}, and the keys are on {}",
               what, of.name, stream.name(), stream.device().name(), device_.name());
  }
  return of;
}

void DeviceKeys::check_memory(const KeySpec& key, const char* what, const void* memory,
                              uint64_t elements, DType dtype) const {
  const size_t bytes = kernels::slot_bytes(dtype, elements);
  if (device_.holds(memory, bytes)) return;
  phub::fail(ErrorCode::kInvalid,
             "{} of key '{}': {} bytes ({} elements of {}) at {} are not inside memory of {}", what,
             key.name, bytes, elements, kernels::name_of(dtype), memory, device_.name());
}

void DeviceKeys::check_factors(const KeySpec& key, std::span<const FactorPairs> factors,
                               const DevicePush& how) const {
  if (!is_factors(key)) {
    phub::fail(
        ErrorCode::kInvalid,
        "push_factors: the gradient of key '{}' is sent as it is; to send its factors the job "
        "must give it a rank_limit",
        key.name);
  }
  uint64_t pairs = 0;
  for (const FactorPairs& part : factors) pairs += part.pairs;
  if (pairs > key.rank_limit) {
    phub::fail(ErrorCode::kInvalid, "push_factors: {} pairs for key '{}', whose rank_limit is {}",
               pairs, key.name, key.rank_limit);
  }
  if (how.scale != 1 || how.dtype.value_or(DType::kF32) != DType::kF32) {
    phub::fail(ErrorCode::kInvalid,
               "push_factors of key '{}': factors are sent as they are, in f32 and without a scale",
               key.name);
  }
  for (const FactorPairs& part : factors) {
    if (part.pairs == 0) continue;
    check_memory(key, "push_factors", part.left, part.pairs * key.shape[0], DType::kF32);
    check_memory(key, "push_factors", part.right, part.pairs * key.shape[1], DType::kF32);
  }
}

void DeviceKeys::check_alive() const {
  if (failure_) throw Error(failure_->code(), failure_->what());
}

// One call after another. What `work` throws is the device's failure: arguments were checked. The
// threads do not wait for it: a driver whose queues are full holds it up until results are here.
template <typename Work>
void DeviceKeys::enqueue(Work work) {
  const std::lock_guard calls(calls_);
  check();
  try {
    work();
  } catch (...) {
    const std::lock_guard lock(mutex_);
    fail(error_in_flight());
    check_alive();
  }
}

std::unique_ptr<Event> DeviceKeys::spare_event() {
  {
    const std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      std::unique_ptr<Event> event = std::move(spare_.back());
      spare_.pop_back();
      return event;
    }
  }
  return device_.make_event();
}

// `copy_in(pushed, push, part)` enqueues the copies of a part of the gradient.
template <typename CopyIn>
void DeviceKeys::push(Push push, Stream& stream, CopyIn copy_in) {
  enqueue([&] {
    Key& pushed = keys_[push.key];
    ++pushed.round;
    stream.record(*ready_);
    in_->wait(*ready_);
    in_->wait(*signals_, push.key, pushed.pushes);  // the gradient's memory is ours again
    in_->wait(*pushed.pulled);                      // and the result may be replaced
    for (size_t part = 0; part < pushed.parts; ++part) {
      if (!push.null) copy_in(pushed, push, part);
      push.taken.push_back(spare_event());
      in_->record(*push.taken.back());
    }
    ++pushed.pushes;
    const std::lock_guard lock(mutex_);
    to_send_.push_back(std::move(push));
    ++outstanding_;
    changed_.notify_all();
  });
}

void DeviceKeys::push(size_t key, const void* gradient, Stream& stream, const DevicePush& how) {
  const KeySpec& of = check_key(key, "push", stream);
  const bool null = gradient == nullptr;
  if (!null && is_factors(of)) {
    phub::fail(ErrorCode::kInvalid, "the factors of key '{}' are sent: use push_factors()",
               of.name);
  }
  const DType dtype = how.dtype.value_or(keys_[key].gradient_dtype);
  if (!null) check_memory(of, "push", gradient, of.elements, dtype);
  if (!std::isfinite(how.scale)) {
    phub::fail(ErrorCode::kInvalid, "push of key '{}': the scale {} is not finite", of.name,
               how.scale);
  }
  push({.key = key, .priority = how.priority, .null = null, .factors = {}, .taken = {}}, stream,
       [&](Key& pushed, const Push& /*push*/, size_t part) {
         if (encodes(key)) return encode_in(key, part_of(key, part), gradient, dtype, how.scale);
         copy_in(pushed, part_of(key, part), gradient, dtype, how.scale);
       });
}

void DeviceKeys::push_factors(size_t key, std::span<const FactorPairs> factors, Stream& stream,
                              const DevicePush& how) {
  const KeySpec& of = check_key(key, "push_factors", stream);
  check_factors(of, factors, how);
  const auto copy_factors_in = [&](Key& pushed, Push& push, size_t /*part*/) {
    auto* place = reinterpret_cast<float*>(pushed.gradient.data());
    const auto copy = [&](const float* from, uint64_t floats) {
      in_->copy_to_host(place, from, floats * sizeof(float));
      return std::exchange(place, place + floats);
    };
    for (const FactorPairs& part : factors) {
      if (part.pairs == 0) continue;
      const float* const left = copy(part.left, uint64_t{part.pairs} * of.shape[0]);
      const float* const right = copy(part.right, uint64_t{part.pairs} * of.shape[1]);
      push.factors.push_back({left, right, part.pairs});
    }
  };
  const bool null = std::ranges::all_of(factors, [](const FactorPairs& f) { return f.pairs == 0; });
  push({.key = key, .priority = how.priority, .null = null, .factors = {}, .taken = {}}, stream,
       copy_factors_in);
}

void DeviceKeys::pull(size_t key, void* result, Stream& stream, std::optional<DType> given) {
  const DType dtype = given.value_or(parameter_dtype_);
  const KeySpec& of = check_key(key, "pull", stream);
  check_memory(of, "pull", result, of.elements, dtype);
  enqueue([&] {
    const Key& pulled = keys_[key];
    stream.record(*ready_);
    out_->wait(*ready_);
    for (size_t part = 0; part < pulled.parts; ++part) {
      out_->wait(*signals_, pulled.first_signal + part, pulled.pushes);
      copy_out(pulled, part_of(key, part), result, dtype);
    }
    out_->poison_if_failed(*signals_, result, kernels::slot_bytes(dtype, of.elements));
    out_->record(*pulled.pulled);
    stream.wait(*pulled.pulled);
  });
}

void DeviceKeys::copy_in(Key& key, Worker::Elements part, const void* of_gradient, DType dtype,
                         float scale) {
  const DType of_key = key.gradient_dtype;
  const size_t elements = part.end - part.begin;
  const auto* const gradient =
      static_cast<const std::byte*>(of_gradient) + kernels::slot_bytes(dtype, part.begin);
  const std::span<std::byte> to = key.gradient.subspan(kernels::slot_bytes(of_key, part.begin),
                                                       kernels::slot_bytes(of_key, elements));
  const bool as_it_is = dtype == of_key && scale == 1;
  if (on_device_) {
    if (!as_it_is) return in_->convert(gradient, dtype, to.data(), of_key, elements, scale);
    if (gradient != to.data()) in_->copy_on_device(to.data(), gradient, to.size());
    return;
  }
  if (as_it_is) return in_->copy_to_host(to.data(), gradient, to.size());
  const size_t step = kPieceBytes / kernels::bytes_of(of_key);
  for (size_t at = 0; at < elements; at += step) {
    const size_t count = std::min(step, elements - at);
    const size_t bytes = kernels::slot_bytes(of_key, count);
    in_->convert(gradient + kernels::slot_bytes(dtype, at), dtype, in_piece_.data(), of_key, count,
                 scale);
    in_->copy_to_host(to.data() + kernels::slot_bytes(of_key, at), in_piece_.data(), bytes);
  }
}

void DeviceKeys::encode_in(size_t key, Worker::Elements part, const void* of_gradient, DType dtype,
                           float scale) {
  const auto* const gradient = static_cast<const std::byte*>(of_gradient);
  const uint64_t step = coder_->elements_in(key, kPieceBytes);
  for (uint64_t at = part.begin; at < part.end; at += step) {
    const Worker::Elements piece{at, std::min(at + step, part.end)};
    coder_->encode(*in_, key, piece, gradient + kernels::slot_bytes(dtype, at), dtype, scale,
                   keys_[key].round, in_piece_.data());
    const std::span<std::byte> to = slots_of(keys_[key].gradient, key, piece);
    in_->copy_to_host(to.data(), in_piece_.data(), to.size());
  }
}

// The part of a key's gradient in the worker's memory, or in ours that is laid out alike.
std::span<std::byte> DeviceKeys::slots_of(std::span<std::byte> gradient, size_t key,
                                          Worker::Elements part) const {
  if (encodes(key)) {
    const DeviceCoder::Slots slots = coder_->slots(key, part);
    return gradient.subspan(slots.begin, slots.bytes);
  }
  const DType dtype = keys_[key].gradient_dtype;
  return gradient.subspan(kernels::slot_bytes(dtype, part.begin),
                          kernels::slot_bytes(dtype, part.end - part.begin));
}

void DeviceKeys::copy_out(const Key& key, Worker::Elements part, void* of_result, DType dtype) {
  const size_t elements = part.end - part.begin;
  auto* const result = static_cast<std::byte*>(of_result) + kernels::slot_bytes(dtype, part.begin);
  const std::span<const std::byte> from =
      key.result.subspan(kernels::slot_bytes(parameter_dtype_, part.begin),
                         kernels::slot_bytes(parameter_dtype_, elements));
  const bool as_it_is = dtype == parameter_dtype_;
  if (on_device_) {
    if (!as_it_is) return out_->convert(from.data(), parameter_dtype_, result, dtype, elements);
    if (result != from.data()) out_->copy_on_device(result, from.data(), from.size());
    return;
  }
  if (as_it_is) return out_->copy_to_device(result, from.data(), from.size());
  const size_t step = kPieceBytes / kernels::bytes_of(parameter_dtype_);
  for (size_t at = 0; at < elements; at += step) {
    const size_t count = std::min(step, elements - at);
    const size_t bytes = kernels::slot_bytes(parameter_dtype_, count);
    out_->copy_to_device(out_piece_.data(), from.data() + kernels::slot_bytes(parameter_dtype_, at),
                         bytes);
    out_->convert(out_piece_.data(), parameter_dtype_, result + kernels::slot_bytes(dtype, at),
                  dtype, count);
  }
}

void DeviceKeys::wait() {
  only_errors([&] {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return failure_ || outstanding_ == 0; });
      check_alive();
    }
    out_->synchronize();
    check();
  });
}

void DeviceKeys::check() {
  const std::lock_guard lock(mutex_);
  check_alive();
}

// The thread that pushes, in the order of the calls.
void DeviceKeys::send(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (changed_.wait(lock, stop, [&] { return !to_send_.empty(); })) {
    Push push = std::move(to_send_.front());
    to_send_.pop_front();
    lock.unlock();
    std::optional<Error> error;
    size_t sent = 0;
    try {
      for (; sent < push.taken.size(); ++sent) send(push, sent);
    } catch (...) {
      error.emplace(error_in_flight());
    }
    lock.lock();
    if (error) fail(*error);
    std::move(push.taken.begin(), push.taken.end(), std::back_inserter(spare_));
    if (!error || sent == 0) continue;
    lock.unlock();
    end_half_pushed(push.key);
    lock.lock();
  }
}

void DeviceKeys::send(const Push& push, size_t part) {
  push.taken[part]->wait();
  check();  // after a failure a result may have taken the gradient's place while it was copied
  const PushOptions how{.priority = push.priority, .null = push.null, .announced = true};
  if (!push.factors.empty()) {
    worker_.push_factors(push.key, push.factors, how);
    return;
  }
  const Key& key = keys_[push.key];
  if (!push.null && staged_gradients_.bytes() > 0) {
    const Worker::Elements of = part_of(push.key, part);
    const std::span<std::byte> from = slots_of(key.gradient, push.key, of);
    std::memcpy(slots_of(worker_.gradient_bytes(push.key), push.key, of).data(), from.data(),
                from.size());
  }
  if (key.parts == 1) {
    worker_.push(push.key, how);
  } else {
    worker_.push_part(push.key, part, how);
  }
}

// The rest of the gradient is lost, and no round may go on with half of it.
void DeviceKeys::end_half_pushed(size_t key) {
  try {
    worker_.poll();
  } catch (const Error&) {
    return;  // the worker has failed by itself, and may join again
  }
  worker_.end(fmt::format(
      "a copy of key '{}' from {} failed when a part of it was pushed: this rank cannot go on",
      worker_.spec().keys[key].name, device_.name()));
}

// The thread that lets the streams go on.
void DeviceKeys::receive(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    std::optional<Completion> one;
    std::optional<Error> error;
    try {
      one = worker_.wait_any();
      if (one) error = one->error;
    } catch (...) {
      error.emplace(error_in_flight());
    }
    if (!one && !error) continue;  // woken
    if (one && one->saver_error) fmt::print(stderr, "phub: {}\n", one->saver_error->what());
    if (!error && staged_results_.bytes() > 0) stage_result(one->pushed);
    const std::lock_guard lock(mutex_);
    if (error) return fail(*error);
    take_result(one->pushed);
  }
}

void DeviceKeys::stage_result(const Pushed& of) {
  const auto [begin, end] = part_of(of.key, of.part);
  const size_t at = kernels::slot_bytes(parameter_dtype_, begin);
  auto* const staged = static_cast<std::byte*>(staged_results_.data());
  const auto key_at = keys_[of.key].result.data() - staged;
  std::memcpy(staged + key_at + at, worker_.parameter_bytes(of.key).data() + at,
              kernels::slot_bytes(parameter_dtype_, end - begin));
}

// REQUIRES: the lock is held.
void DeviceKeys::take_result(const Pushed& of) {
  Key& key = keys_[of.key];
  if (key.parts > 1) signals_->raise(key.first_signal + of.part, key.here + 1);
  if (++key.parts_here < key.parts) return;
  key.parts_here = 0;
  signals_->raise(of.key, ++key.here);
  --outstanding_;
  changed_.notify_all();
}

// REQUIRES: the lock is held.
void DeviceKeys::fail(const Error& error) {
  if (failure_) return;
  failure_.emplace(error);
  to_send_.clear();
  signals_->fail();
  changed_.notify_all();
}

}  // namespace phub
