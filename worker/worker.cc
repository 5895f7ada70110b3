// The API: a rank's life, its memory, and the exchange of keys.
#include "worker/worker.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "transport/memory_device.h"
#include "worker/any_error.h"
#include "worker/memory/factor_pairs.h"
#include "worker/memory/gradient_rows.h"
#include "worker/worker_impl.h"

namespace phub {
namespace {

void check_f32(const JobSpec& spec, const std::string& dtype, const char* what) {
  if (dtype == "f32") return;
  fail(ErrorCode::kInvalid, "{0}s of job '{1}' are {2}: use {0}_bytes()", what, spec.name, dtype);
}

// `given`: the caller has initial parameters, and somebody must look at them.
void check_begins_with(const JobSpec& spec, bool given) {
  if (!given || spec.initial == "broadcast") return;
  fail(ErrorCode::kInvalid,
       "broadcast: job '{}' begins with zeros, and these parameters would not count: say "
       "'broadcast' "
       "in the option initial, on all ranks, or give none",
       spec.name);
}

}  // namespace

Worker::Worker(const WorkerOptions& options)
    : impl_(only_errors([&] {
        Joined joined = join(options);
        const JoinReply first = joined.reply;
        try {
          return Impl::started(options, std::move(joined), options.trace);
        } catch (const Error& error) {
          if (error.code() != ErrorCode::kRewound) throw;
        }
        return Impl::joined_again(options, first, {});
      })) {
  impl_->made = true;
}
Worker::Worker(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) { impl_->made = true; }
Worker::~Worker() = default;

std::unique_ptr<Worker> Worker::rejoin() {
  return only_errors([&] {
    Impl& lost = *impl_;
    const std::lock_guard one(lost.rejoining);
    if (lost.replaced || !lost.keeper.failure().is(ErrorCode::kRewound)) {
      fail(ErrorCode::kInvalid, "rank {} of job '{}' {}", rank(), spec().name,
           lost.replaced ? "has joined again already: use the worker that rejoin() returned"
                         : "has not lost its server: it need not rejoin");
    }
    lost.exchange.give_up_ports();
    WorkerOptions options = lost.options;
    if (const std::string only = lost.keeper.only_server(); !only.empty()) options.server = only;
    auto next = Impl::joined_again(options, lost.keeper.reply(), lost.over.get_token());
    next->exchange.take_over(lost.exchange);
    lost.replaced = true;
    return std::unique_ptr<Worker>(new Worker(std::move(next)));
  });
}

uint32_t Worker::rank() const { return impl_->keeper.reply().rank; }
uint32_t Worker::incarnation() const { return impl_->keeper.reply().incarnation; }
uint32_t Worker::world_size() const { return spec().world_size; }
uint64_t Worker::first_round() const { return impl_->keeper.reply().first_round; }
bool Worker::initial_counts() const { return impl_->keeper.reply().send_initial; }
std::optional<std::span<const std::byte>> Worker::restored(std::string_view name) const {
  return impl_->saver.restored(name);
}
bool Worker::saves() const { return impl_->options.saver && impl_->saver.is_active(); }
bool Worker::saves_residuals() const {
  return phub::saves_residuals(spec()) && impl_->saver.is_active();
}
void Worker::save_by_call(bool by_call) { impl_->saver.set_by_call(by_call); }
uint64_t Worker::next_saved() const { return saves() ? impl_->saver.due() : 0; }
void Worker::save(RankState more) {
  only_errors([&] { impl_->saver.save(std::move(more)); });
}
const std::string& Worker::server() const { return impl_->keeper.server(); }
const std::string& Worker::job_token() const { return impl_->keeper.reply().job_token; }
const JobSpec& Worker::spec() const { return impl_->keeper.spec(); }
size_t Worker::keys() const { return spec().keys.size(); }
size_t Worker::queues() const { return impl_->keeper.reply().layout.queue_chunks.size(); }

size_t Worker::key(std::string_view name) const {
  const auto at = impl_->key_by_name.find(name);
  if (at != impl_->key_by_name.end()) return at->second;
  fail(ErrorCode::kNotFound, "job '{}' has no key '{}'", spec().name, name);
}

std::span<std::byte> Worker::gradient_bytes(size_t key) {
  const KeySpec& of = impl_->key(key);
  if (is_compact(of)) {
    fail(ErrorCode::kInvalid, "key '{}' has no memory for its gradient: its {} are sent", of.name,
         of.format);
  }
  return impl_->exchange.gradient(key);
}

std::span<float> Worker::gradient(size_t key) {
  std::span<std::byte> bytes = gradient_bytes(key);
  const KeySpec& of = spec().keys[key];
  check_f32(spec(), gradient_memory_format(spec(), of), "gradient");
  if (bytes.size() != of.elements * sizeof(float)) {
    fail(ErrorCode::kInvalid, "gradient: the caller of key '{}' encodes it: use gradient_bytes()",
         of.name);
  }
  return {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
}

std::span<const std::byte> Worker::parameter_bytes(size_t key) const {
  impl_->key(key);
  return impl_->exchange.parameters(key);
}

std::span<const float> Worker::parameters(size_t key) const {
  check_f32(spec(), parameter_memory_format(spec()), "parameter");
  std::span<const std::byte> bytes = parameter_bytes(key);
  return {reinterpret_cast<const float*>(bytes.data()), bytes.size() / sizeof(float)};
}

void Worker::register_memory(size_t key, const KeyMemory& memory) {
  const KeySpec& of = impl_->key(key);
  if (memory_device() != nullptr && (memory.gradient != nullptr || memory.parameters != nullptr)) {
    fail(ErrorCode::kInvalid,
         "key '{}': a worker whose gradients and parameters lie in memory of {} (memory_device) "
         "registers no other memory",
         of.name, memory_device()->name());
  }
  only_errors([&] { impl_->exchange.register_memory(key, memory); });
}

bool Worker::broadcast(std::span<const float> initial) {
  return only_errors([&] {
    check_begins_with(spec(), !initial.empty());
    std::vector<uint64_t> first;  // element of each key
    uint64_t elements = 0;
    for (const KeySpec& key : spec().keys) {
      first.push_back(elements);
      elements += key.elements;
    }
    return impl_->exchange.broadcast([&](size_t key) {
      if (initial.size() == elements) return initial.data() + first[key];
      fail(ErrorCode::kInvalid, "broadcast: {} initial parameters for keys of {} elements in all",
           initial.size(), elements);
    });
  });
}

bool Worker::broadcast_keys(std::span<const float* const> initial) {
  return only_errors([&] {
    check_begins_with(spec(), !initial.empty());
    return impl_->exchange.broadcast([&](size_t key) {
      if (initial.size() != keys()) {
        fail(ErrorCode::kInvalid, "broadcast: initial parameters of {} keys, the job has {}",
             initial.size(), keys());
      }
      if (initial[key] == nullptr) {
        fail(ErrorCode::kInvalid, "broadcast: the initial parameters of key '{}' are null",
             spec().keys[key].name);
      }
      return initial[key];
    });
  });
}

void Worker::set_weight(float weight) {
  only_errors([&] { impl_->exchange.set_weight(weight); });
}

Pushed Worker::push(size_t key, const PushOptions& how) {
  return only_errors([&] {
    const KeySpec& of = impl_->key(key);
    if (is_compact(of) && !how.null) {
      const bool is_either = of.rank_limit > 0 && of.rows_limit > 0;
      fail(ErrorCode::kInvalid, "the {} of key '{}' are sent: use push_{}(){}",
           is_either ? "rows or factors" : of.format, of.name, of.format,
           is_either ? " or push_factors()" : "");
    }
    return impl_->push(key, how, [&](RegisteredMemory& memory, KeyExchange::Lock& lock) {
      return memory.copy_in(key, lock);
    });
  });
}

size_t Worker::parts(size_t key) const {
  impl_->key(key);
  return impl_->exchange.parts(key);
}

Worker::Elements Worker::part(size_t key, size_t part) const {
  const std::string& name = impl_->key(key).name;
  if (part >= parts(key)) {
    fail(ErrorCode::kInvalid, "part {} of key '{}', which has {}", part, name, parts(key));
  }
  const SessionKeys::Elements of = impl_->exchange.part(key, part);
  return {of.begin, of.end};
}

Pushed Worker::push_part(size_t key, size_t part, const PushOptions& how) {
  if (part == 0 && parts(key) == 1) return push(key, how);
  return only_errors([&] {
    impl_->key(key);
    return impl_->push_part(key, part, how);
  });
}

Pushed Worker::push_copy(size_t key, std::span<const std::byte> gradient, const PushOptions& how) {
  return only_errors([&] {
    const size_t bytes = gradient_bytes(key).size();
    if (memory_device() != nullptr) {
      fail(ErrorCode::kInvalid, "push_copy: gradients of this worker lie in memory of {}",
           memory_device()->name());
    }
    if (gradient.size() != bytes) {
      fail(ErrorCode::kInvalid,
           "push_copy: the gradient of key '{}' has {} bytes, and {} are given",
           spec().keys[key].name, bytes, gradient.size());
    }
    return impl_->push(key, how, [&](RegisteredMemory& memory, KeyExchange::Lock& lock) {
      return memory.copy_in_from(key, gradient.data(), lock);
    });
  });
}

Pushed Worker::push_factors(size_t key, std::span<const FactorPairs> factors,
                            const PushOptions& how) {
  return only_errors([&] {
    check_factors(impl_->key(key), factors);
    PushOptions as = how;
    as.null |= std::ranges::all_of(factors, [](const FactorPairs& f) { return f.pairs == 0; });
    return impl_->push(key, as, [&](RegisteredMemory& memory, KeyExchange::Lock& lock) {
      return memory.copy_factors_in(key, factors, lock);
    });
  });
}

Pushed Worker::push_rows(size_t key, const GradientRows& rows, const PushOptions& how) {
  return only_errors([&] {
    const std::vector<uint32_t> order = rows_in_order(impl_->key(key), rows);
    PushOptions as = how;
    as.null |= order.empty();
    return impl_->push(key, as, [&](RegisteredMemory& memory, KeyExchange::Lock& lock) {
      return memory.copy_rows_in(key, rows, order, lock);
    });
  });
}

bool Worker::may_encode(size_t key) const {
  impl_->key(key);
  return impl_->exchange.may_encode(key) && !impl_->saver.is_active();
}

CodedSlots Worker::begin_encoding(size_t key) {
  return only_errors([&] {
    if (!may_encode(key)) {
      fail(ErrorCode::kInvalid,
           "begin_encoding: the gradient of key '{}' is not coded, its caller encodes it already, "
           "or the worker must: its format goes by the round, carry_over, or the server saves the "
           "residuals, or this rank exchanges some of its elements only",
           impl_->key(key).name);
    }
    impl_->exchange.await_turn(key);
    return impl_->exchange.begin_encoding(key);
  });
}

void Worker::end_encoding(size_t key) {
  impl_->key(key);
  impl_->exchange.end_encoding(key);
}

void Worker::wait(size_t key) {
  impl_->key(key);
  only_errors([&] {
    impl_->saver.check_not_within();
    impl_->exchange.check_not_left_out(key);
    impl_->exchange.wait(key);
    impl_->received(key);
  });
}

void Worker::wait_all() {
  only_errors([&] {
    impl_->saver.check_not_within();
    impl_->exchange.wait(Session::kAllKeys);
    for (size_t key = 0; key < keys(); ++key) impl_->received(key);
  });
}

bool Worker::test(size_t key) {
  impl_->key(key);
  impl_->saver.check_not_within();
  impl_->keeper.failure().check();
  return only_errors([&] {
    if (!impl_->exchange.test(key)) return false;
    impl_->received(key);
    return true;
  });
}

size_t Worker::poll() {
  impl_->keeper.failure().check();
  return only_errors([&] { return impl_->exchange.poll(); });
}

std::optional<Completion> Worker::wait_any() {
  return only_errors([&]() -> std::optional<Completion> {
    impl_->saver.check_not_within();
    std::optional<Completion> ended = impl_->exchange.wait_any();
    if (!ended || ended->error) return ended;
    const auto& [key, round, part] = ended->pushed;
    if (impl_->exchange.rounds().of(key) < round) return ended;  // other parts are still to come
    try {
      impl_->saver.received(key, round);
    } catch (...) {
      ended->saver_error.emplace(error_in_flight());
    }
    return ended;
  });
}

void Worker::wake() { impl_->exchange.wake(); }
void Worker::forget_announced() { impl_->exchange.forget_announced(); }

void Worker::end(const std::string& why) {
  only_errors([&] {
    impl_->over.request_stop();
    impl_->keeper.end(why);
  });
}

void Worker::pull(size_t key, std::span<std::byte> into) {
  wait(key);
  impl_->exchange.copy_result(key, into);
}

uint64_t Worker::round(size_t key) const {
  impl_->key(key);
  return impl_->exchange.rounds().of(key);
}

std::optional<RoundVerdict> Worker::verdict() const { return impl_->exchange.rounds().verdict(); }

}  // namespace phub
