// The API: a rank's life, its memory, and the exchange of keys.
#include "worker/worker.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "transport/memory_device.h"
#include "worker/any_error.h"
#include "worker/worker_impl.h"

namespace phub {
namespace {

void check_f32(const JobSpec& spec, const std::string& dtype, const char* what) {
  if (dtype == "f32") return;
  fail(ErrorCode::kInvalid, "{0}s of job '{1}' are {2}: use {0}_bytes()", what, spec.name, dtype);
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
    if (lost.replaced || !lost.keeper.is_rewound()) {
      fail(ErrorCode::kInvalid, "rank {} of job '{}' {}", rank(), spec().name,
           lost.replaced ? "has joined again already: use the worker that rejoin() returned"
                         : "has not lost its server: it need not rejoin");
    }
    {
      const Impl::Lock alone = lost.sleeper.lock();
      lost.keeper.give_up_ports();
    }
    auto next = Impl::joined_again(lost.options, lost.keeper.reply(), lost.over.get_token());
    lost.release_memory();
    {
      const Impl::Lock before = lost.sleeper.lock();
      next->registered = lost.registered;
    }
    Impl::Lock lock = next->sleeper.lock();
    for (const auto& [key, memory] : next->registered) next->memory->set(key, memory, lock);
    lock.unlock();
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
void Worker::save_by_call(bool by_call) { impl_->saver.set_by_call(by_call); }
uint64_t Worker::next_saved() const { return saves() ? impl_->saver.due() : 0; }
void Worker::save(RankState more) {
  only_errors([&] { impl_->saver.save(std::move(more)); });
}
const std::string& Worker::server() const { return impl_->keeper.server(); }
const std::string& Worker::job_token() const { return impl_->keeper.reply().job_token; }
const JobSpec& Worker::spec() const { return impl_->keeper.spec(); }
size_t Worker::keys() const { return spec().keys.size(); }

size_t Worker::key(std::string_view name) const {
  const auto at = impl_->key_by_name.find(name);
  if (at != impl_->key_by_name.end()) return at->second;
  fail(ErrorCode::kNotFound, "job '{}' has no key '{}'", spec().name, name);
}

std::span<std::byte> Worker::gradient_bytes(size_t key) {
  impl_->check_key(key);
  if (is_compact(spec().keys[key])) {
    fail(ErrorCode::kInvalid, "key '{}' has no memory for its gradient: its {} are sent",
         spec().keys[key].name, spec().keys[key].format);
  }
  if (impl_->coder.codes(key)) return std::as_writable_bytes(impl_->coder.gradient(key));
  return impl_->session->gradient(key);
}

std::span<float> Worker::gradient(size_t key) {
  std::span<std::byte> bytes = gradient_bytes(key);
  check_f32(spec(), gradient_memory_format(spec(), spec().keys[key]), "gradient");
  return {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
}

std::span<const std::byte> Worker::parameter_bytes(size_t key) const {
  impl_->check_key(key);
  return impl_->session->result(key);
}

std::span<const float> Worker::parameters(size_t key) const {
  check_f32(spec(), parameter_memory_format(spec()), "parameter");
  std::span<const std::byte> bytes = parameter_bytes(key);
  return {reinterpret_cast<const float*>(bytes.data()), bytes.size() / sizeof(float)};
}

void Worker::register_memory(size_t key, const KeyMemory& memory) {
  impl_->check_key(key);
  if (memory_device() != nullptr && (memory.gradient != nullptr || memory.parameters != nullptr)) {
    fail(ErrorCode::kInvalid,
         "key '{}': a worker whose gradients and parameters lie in memory of {} (memory_device) "
         "registers no other memory",
         spec().keys[key].name, memory_device()->name());
  }
  only_errors([&] {
    Impl::Lock lock = impl_->sleeper.lock();
    try {
      while (impl_->memory->is_lent(key)) impl_->sleeper.wait(lock, key);
    } catch (...) {
      if (!impl_->keeper.failed()) throw;
    }
    impl_->memory->set(key, memory, lock);
    impl_->registered[key] = memory;
  });
}

bool Worker::broadcast(std::span<const float> initial) {
  return only_errors([&] {
    impl_->check_begins_with(!initial.empty());
    std::vector<uint64_t> first;  // element of each key
    uint64_t elements = 0;
    for (const KeySpec& key : spec().keys) {
      first.push_back(elements);
      elements += key.elements;
    }
    return impl_->broadcast([&](size_t key) {
      if (initial.size() == elements) return initial.data() + first[key];
      fail(ErrorCode::kInvalid, "broadcast: {} initial parameters for keys of {} elements in all",
           initial.size(), elements);
    });
  });
}

bool Worker::broadcast_keys(std::span<const float* const> initial) {
  return only_errors([&] {
    impl_->check_begins_with(!initial.empty());
    return impl_->broadcast([&](size_t key) {
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

Pushed Worker::push(size_t key, const PushOptions& how) {
  return only_errors([&] { return impl_->push(key, how); });
}

Pushed Worker::push_factors(size_t key, std::span<const FactorPairs> factors,
                            const PushOptions& how) {
  return only_errors([&] {
    impl_->check_factors(key, factors);
    PushOptions as = how;
    as.null |= std::ranges::all_of(factors, [](const FactorPairs& f) { return f.pairs == 0; });
    return impl_->push(key, as, [&](Impl::Lock& lock) {
      return impl_->memory->copy_factors_in(key, factors, lock);
    });
  });
}

Pushed Worker::push_rows(size_t key, const GradientRows& rows, const PushOptions& how) {
  return only_errors([&] {
    const std::vector<uint32_t> order = impl_->in_order(key, rows);
    PushOptions as = how;
    as.null |= order.empty();
    return impl_->push(key, as, [&](Impl::Lock& lock) {
      return impl_->memory->copy_rows_in(key, rows, order, lock);
    });
  });
}

void Worker::wait(size_t key) {
  impl_->check_key(key);
  only_errors([&] {
    impl_->saver.check_not_within();
    {
      const Impl::Lock lock = impl_->sleeper.lock();
      const auto error = impl_->stalls.passed_over_itself(*impl_->session, key);
      if (error) throw Error(error->code(), error->what());
    }
    impl_->wait(key);
    impl_->received(key);
  });
}

void Worker::wait_all() {
  only_errors([&] {
    impl_->saver.check_not_within();
    impl_->wait(Session::kAllKeys);
    for (size_t key = 0; key < keys(); ++key) impl_->received(key);
  });
}

bool Worker::test(size_t key) {
  impl_->check_key(key);
  impl_->saver.check_not_within();
  impl_->keeper.check();
  return only_errors([&] {
    {
      const Impl::Lock lock = impl_->sleeper.lock();
      impl_->sleeper.poll();
      if (!impl_->session->ready(key)) return false;
    }
    impl_->copy_out(key);
    impl_->received(key);
    return true;
  });
}

size_t Worker::poll() {
  impl_->keeper.check();
  return only_errors([&] {
    const Impl::Lock lock = impl_->sleeper.lock();
    impl_->sleeper.poll();
    return impl_->session->outstanding();
  });
}

std::optional<Completion> Worker::wait_any() {
  return only_errors([&]() -> std::optional<Completion> {
    impl_->saver.check_not_within();
    const auto ended = impl_->sleeper.wait_any();
    if (!ended) return std::nullopt;
    Completion completion{.pushed = ended->pushed, .tag = ended->tag};
    try {
      if (ended->end == CompletionQueue::End::kFailed) impl_->keeper.check();
      if (ended->end == CompletionQueue::End::kLate) {
        completion.error = impl_->stalls.timeout_of(ended->pushed.key);
      } else {
        impl_->copy_out(ended->pushed.key);
      }
    } catch (...) {
      completion.error.emplace(error_in_flight());
    }
    if (completion.error) return completion;
    try {
      impl_->saver.received(ended->pushed.key, ended->pushed.round);
    } catch (...) {
      completion.saver_error.emplace(error_in_flight());
    }
    return completion;
  });
}

void Worker::wake() { impl_->sleeper.wake(); }

void Worker::forget_announced() {
  const Impl::Lock lock = impl_->sleeper.lock();
  impl_->completions->forget();
}

void Worker::end(const std::string& why) {
  only_errors([&] {
    impl_->over.request_stop();
    impl_->keeper.end(why);
  });
}

void Worker::pull(size_t key, std::span<std::byte> into) {
  wait(key);
  Impl::Lock lock = impl_->sleeper.lock();
  const std::span<const std::byte> from = impl_->memory->result(key);
  lock.unlock();
  if (into.size() != from.size()) {
    fail(ErrorCode::kInvalid, "pull: key '{}' has {} bytes, the destination {}",
         spec().keys[key].name, from.size(), into.size());
  }
  if (memory_device() != nullptr) {
    memory_device()->read(into.data(), from.data(), from.size());
  } else {
    std::memcpy(into.data(), from.data(), from.size());
  }
  impl_->memory->bytes_copied += from.size();
}

uint64_t Worker::round(size_t key) const {
  impl_->check_key(key);
  const Impl::Lock lock = impl_->sleeper.lock();
  return impl_->session->round(key);
}

std::optional<RoundVerdict> Worker::verdict() const {
  const Impl::Lock lock = impl_->sleeper.lock();
  return impl_->session->verdict();
}

}  // namespace phub
