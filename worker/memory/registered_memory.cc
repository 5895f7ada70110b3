#include "worker/memory/registered_memory.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "kernels/convert_scaled.h"
#include "kernels/copy.h"
#include "transport/error.h"
#include "worker/memory/magnitude.h"

namespace phub {
namespace {

using kernels::DType;

constexpr uint64_t kStreamedBytes = 4 << 20;  // twice the second cache of a core

DType dtype_of(const std::string& name, const char* what) {
  const auto dtype = kernels::parse_dtype(name);
  if (!dtype) fail(ErrorCode::kInvalid, "{} '{}' is not f32, bf16 or f16", what, name);
  return *dtype;
}

}  // namespace

RegisteredMemory::RegisteredMemory(const JobSpec& spec, Session& session, WorkerLink& link,
                                   GradientCoder& coder)
    : spec_(spec),
      session_(session),
      link_(link),
      in_place_(link.in_place()),
      coder_(coder),
      parameter_dtype_(dtype_of(parameter_memory_format(spec), "parameter_dtype")),
      has_parameters_(spec.optimizer != "none" || spec.consistency != "bsp"),
      entries_(spec.keys.size()),
      streams_(link.results().size() >= kStreamedBytes) {
  for (const KeySpec& key : spec.keys) {
    gradient_dtypes_.push_back(dtype_of(gradient_memory_format(spec, key), "gradient_dtype"));
  }
}

void RegisteredMemory::set(size_t key, const KeyMemory& memory, Lock& lock) {
  Entry entry{.gradient = memory.gradient,
              .parameters = memory.parameters,
              .gradient_dtype = gradient_dtypes_[key],
              .parameter_dtype = parameter_dtype_,
              .gradient_scale = memory.gradient_scale,
              .in_place = memory.in_place && in_place_ != nullptr};
  if (!memory.gradient_dtype.empty()) {
    entry.gradient_dtype = dtype_of(memory.gradient_dtype, "gradient_dtype");
  }
  if (!memory.parameter_dtype.empty()) {
    entry.parameter_dtype = dtype_of(memory.parameter_dtype, "parameter_dtype");
  }
  if (memory.gradient && is_compact(spec_.keys[key])) {
    fail(ErrorCode::kInvalid, "key '{}' can have no memory for its gradient: its {} are sent",
         spec_.keys[key].name, spec_.keys[key].format);
  }
  if (memory.gradient && coder_.left_to_caller(key)) {
    fail(ErrorCode::kInvalid,
         "key '{}' can have no memory for its gradient: its caller encodes it (begin_encoding)",
         spec_.keys[key].name);
  }
  if (!std::isfinite(memory.gradient_scale)) {
    fail(ErrorCode::kInvalid, "gradient_scale {} is not finite", memory.gradient_scale);
  }
  const bool as_it_is = entry.gradient_dtype == kernels::DType::kF32 &&
                        entry.parameter_dtype == kernels::DType::kF32 && entry.gradient_scale == 1;
  if (folds(spec_) && !as_it_is) {
    fail(
        ErrorCode::kInvalid,
        "the values of key '{}' are sent and come back as they are: words, without a type of their "
        "own or a gradient_scale",
        spec_.keys[key].name);
  }
  await_copies(key, lock);  // the caller may free the old memory when this returns
  if (entry.in_place) {
    in_place_->gradients.add(gradient_offset(key), session_.gradient(key).size());
    in_place_->results.add(result_offset(key), session_.result(key).size());
  }
  // The present parameters must not overwrite the next gradient.
  if (overlap(key, entry)) entry.copied_round = session_.round(key);
  take_back(key);
  entries_[key] = entry;
}

uint64_t RegisteredMemory::gradient_offset(size_t key) const {
  return static_cast<uint64_t>(session_.gradient(key).data() - link_.gradients().data());
}

uint64_t RegisteredMemory::result_offset(size_t key) const {
  return static_cast<uint64_t>(session_.result(key).data() - link_.results().data());
}

bool RegisteredMemory::overlap(size_t key, const Entry& entry) const {
  if (!entry.gradient || !entry.parameters) return false;
  const auto* gradient = static_cast<const std::byte*>(entry.gradient);
  const auto* result = static_cast<const std::byte*>(entry.parameters);
  return gradient < result + elements(key) * kernels::bytes_of(entry.parameter_dtype) &&
         result < gradient + elements(key) * kernels::bytes_of(entry.gradient_dtype);
}

bool RegisteredMemory::is_lent(size_t key) const {
  const Entry& entry = entries_[key];
  return !session_.ready(key) && (sends_in_place(key) || entry.result_lent);
}

bool RegisteredMemory::sends_in_place(size_t key) const {
  const Entry& entry = entries_[key];
  return entry.in_place && entry.gradient && entry.gradient_scale == 1 &&
         entry.gradient_dtype == gradient_dtypes_[key] && !coder_.codes(key) && !coder_.carries();
}

// Of what has not changed nothing comes: only memory of the library's has it.
bool RegisteredMemory::receives_in_place(size_t key) const {
  const Entry& entry = entries_[key];
  return entry.in_place && entry.parameters && entry.parameter_dtype == parameter_dtype_ &&
         !difference_format(spec_) && !spec_.keys[key].lazy;
}

void RegisteredMemory::lend(size_t key) {
  Entry& entry = entries_[key];
  entry.result_is_there = false;
  if (!entry.in_place) return;
  const auto* gradient = static_cast<const std::byte*>(entry.gradient);
  auto* result = static_cast<std::byte*>(entry.parameters);
  const bool sends = sends_in_place(key);
  // After a reconnection the result of the round before comes again. It must not overwrite a
  // gradient that is still to be sent.
  entry.result_lent = receives_in_place(key) && !(sends && overlap(key, entry));
  in_place_->gradients.move(gradient_offset(key),
                            sends ? const_cast<std::byte*>(gradient) : nullptr);
  in_place_->results.move(result_offset(key), entry.result_lent ? result : nullptr);
}

void RegisteredMemory::arrived(size_t key) {
  Entry& entry = entries_[key];
  if (!entry.result_lent) return;
  in_place_->results.move(result_offset(key), nullptr);
  entry.result_lent = false;
  entry.result_is_there = true;
  entry.copied_round = session_.round(key);
}

void RegisteredMemory::take_back(size_t key) {
  if (!entries_[key].in_place) return;
  in_place_->gradients.move(gradient_offset(key), nullptr);
  in_place_->results.move(result_offset(key), nullptr);
  entries_[key].result_lent = false;
}

void RegisteredMemory::take_all_back() {
  ended_ = true;
  for (size_t key = 0; key < entries_.size(); ++key) take_back(key);
}

std::span<const std::byte> RegisteredMemory::result(size_t key) const {
  const std::span<const std::byte> result = session_.result(key);
  if (ended_ || !entries_[key].result_is_there) return result;
  return {static_cast<const std::byte*>(entries_[key].parameters), result.size()};
}

bool RegisteredMemory::copy_in(size_t key, Lock& lock) {
  Entry& entry = entries_[key];
  await_copies(key, lock);
  if (ended_ || sends_in_place(key)) return false;
  if (coder_.codes(key)) return encode(key, lock), true;
  if (!entry.gradient && !coder_.carries()) return false;
  const std::span<std::byte> slot = session_.gradient(key);
  unlocked(entry, lock, [&, entry] {
    if (entry.gradient) {
      convert(entry.gradient, entry.gradient_dtype, entry.gradient_scale, slot.data(),
              gradient_dtypes_[key], elements(key));
    }
    if (coder_.carries()) coder_.add_carried(key, slot);
  });
  if (entry.gradient) bytes_copied += slot.size();
  return entry.gradient != nullptr;
}

bool RegisteredMemory::copy_in_from(size_t key, const void* gradient, Lock& lock) {
  await_copies(key, lock);
  if (ended_) return false;
  if (entries_[key].gradient != nullptr) {
    fail(ErrorCode::kInvalid,
         "push_copy: memory is registered for the gradient of key '{}', and push() sends that",
         spec_.keys[key].name);
  }
  const std::span<std::byte> into =
      coder_.codes(key) ? std::as_writable_bytes(coder_.gradient(key)) : session_.gradient(key);
  unlocked(entries_[key], lock, [&] { copy(into.data(), gradient, into.size()); });
  bytes_copied += into.size();
  copy_in(key, lock);
  return true;
}

bool RegisteredMemory::copy_factors_in(size_t key, std::span<const FactorPairs> factors,
                                       Lock& lock) {
  Entry& entry = entries_[key];
  await_copies(key, lock);
  if (ended_) return false;
  const KeySpec& of = spec_.keys[key];
  const size_t rows = of.shape[0], columns = of.shape[1];
  const std::span<std::byte> slots = session_.gradient(key);
  unlocked(entry, lock, [&] {
    session_.for_each_chunk(key, [&](const ChunkLayout& chunk, size_t slot) {
      const kernels::SlotShape shape = compact_shape(of, chunk);
      const size_t first_row = chunk.key_element / columns;
      size_t first = 0, pairs = 0;
      for (const FactorPairs& part : factors) pairs += part.pairs;
      kernels::clear_factors(shape, pairs, slots.data() + slot);
      for (const FactorPairs& part : factors) {
        if (part.pairs == 0) continue;  // it may have no memory
        kernels::store_factors(shape, part.left + first_row, rows, part.right, first, part.pairs,
                               slots.data() + slot);
        first += part.pairs;
      }
    });
  });
  bytes_copied += slots.size();
  return true;
}

bool RegisteredMemory::copy_rows_in(size_t key, const GradientRows& rows,
                                    std::span<const uint32_t> order, Lock& lock) {
  Entry& entry = entries_[key];
  await_copies(key, lock);
  if (ended_) return false;
  const KeySpec& of = spec_.keys[key];
  const uint64_t columns = of.shape[1];
  const std::span<std::byte> slots = session_.gradient(key);
  unlocked(entry, lock, [&] {
    auto next = order.begin();
    session_.for_each_chunk(key, [&](const ChunkLayout& chunk, size_t slot) {
      const kernels::SlotShape shape = compact_shape(of, chunk);
      const uint64_t first = chunk.key_element / columns, end = first + shape.rows();
      kernels::clear_rows(slots.data() + slot);
      for (; next != order.end(); ++next) {
        const auto row = static_cast<uint64_t>(rows.indices[*next]);
        if (row >= end) break;
        kernels::append_row(shape, static_cast<uint32_t>(row - first),
                            rows.elements.data() + *next * columns, slots.data() + slot);
      }
    });
  });
  bytes_copied += rows.elements.size_bytes();
  return true;
}

std::vector<float> RegisteredMemory::magnitudes(size_t key, Lock& lock) {
  Entry& entry = entries_[key];
  await_copies(key, lock);
  std::vector<float> all;
  if (ended_) return all;
  KeyBytes gradient{session_.gradient(key).data(), coder_.format(key, session_.round(key) + 1)};
  gradient.in_slots = coder_.codes(key);
  if (is_compact(spec_.keys[key])) gradient.compact = &spec_.keys[key];
  if (sends_in_place(key)) gradient.data = static_cast<const std::byte*>(entry.gradient);
  KeyBytes parameters{has_parameters_ ? result(key).data() : nullptr, parameter_dtype_};
  unlocked(entry, lock, [&] { relative_magnitudes(session_, key, gradient, parameters, all); });
  return all;
}

void RegisteredMemory::encode(size_t key, Lock& lock) {
  Entry& entry = entries_[key];
  const uint64_t round = session_.round(key) + 1;
  unlocked(entry, lock, [&, entry] {
    if (entry.gradient) {
      coder_.encode(session_, key, round, entry.gradient, entry.gradient_dtype,
                    entry.gradient_scale);
    } else {
      coder_.encode(session_, key, round, coder_.gradient(key).data(), DType::kF32, 1);
    }
  });
  bytes_copied += session_.gradient(key).size();
}

bool RegisteredMemory::must_copy_out(size_t key) const {
  const Entry& entry = entries_[key];
  return !ended_ && entry.parameters && entry.copied_round != session_.round(key);
}

void RegisteredMemory::copy_out(size_t key, Lock& lock) {
  Entry& entry = entries_[key];
  await_copies(key, lock);  // another thread may copy the same key
  if (!must_copy_out(key)) return;
  const std::span<const std::byte> result = session_.result(key);
  entry.copied_round = session_.round(key);
  unlocked(entry, lock, [&, entry] {
    convert(result.data(), parameter_dtype_, 1, entry.parameters, entry.parameter_dtype,
            elements(key));
  });
  bytes_copied += result.size();
}

void RegisteredMemory::convert(const void* from, DType from_dtype, float scale, void* to,
                               DType to_dtype, size_t elements) const {
  if (from_dtype == to_dtype && scale == 1) {
    return copy(to, from, elements * kernels::bytes_of(to_dtype));
  }
  kernels::convert_scaled(from, from_dtype, scale, to, to_dtype, elements);
}

void RegisteredMemory::copy(void* to, const void* from, size_t bytes) const {
  if (!streams_) {
    std::memcpy(to, from, bytes);
    return;
  }
  kernels::stream_copy(to, from, bytes);
  kernels::finish_streaming();
}

template <typename Copy>
void RegisteredMemory::unlocked(Entry& entry, Lock& lock, Copy copy) {
  entry.copying = true;
  lock.unlock();
  copy();
  lock.lock();
  entry.copying = false;
  copied_.notify_all();
}

void RegisteredMemory::await_copies(size_t key, Lock& lock) {
  const auto copying = [](const Entry& entry) { return entry.copying; };
  copied_.wait(lock, [&] {
    return key == Session::kAllKeys ? std::none_of(entries_.begin(), entries_.end(), copying)
                                    : !copying(entries_[key]);
  });
}

}  // namespace phub
