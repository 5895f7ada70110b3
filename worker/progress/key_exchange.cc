#include "worker/progress/key_exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "transport/contribution_weight.h"
#include "transport/error.h"
#include "transport/memory_device.h"
#include "transport/trace.h"
#include "worker/any_error.h"

namespace phub {

KeyExchange::KeyExchange(LinkKeeper& keeper, StallWatch& stalls, GradientCoder& coder)
    : keeper_(keeper),
      stalls_(stalls),
      coder_(coder),
      options_(keeper.options()),
      order_(parse_send_order(options_.send_order)),
      sleeper_(keeper, stalls) {}

void KeyExchange::connect() {
  keeper_.connect([this] { sleeper_.wake_all(); });
}

void KeyExchange::start(const std::string& trace_file) {
  const JoinReply& reply = keeper_.reply();
  session_ = std::make_unique<Session>(reply, keeper_.link(), order_);
  session_->when_dropped([this](size_t key, const ChunkLayout& chunk, const std::byte* slot) {
    if (coder_.is_coded(key)) coder_.carry(key, chunk, slot);
  });
  if (!trace_file.empty()) {
    trace_ = std::make_unique<WorkerTrace>(trace_file, reply, options_.trace_events);
    session_->trace(trace_->log());
  }
  memory_.emplace(reply.spec, *session_, keeper_.link(), coder_);
  completions_.emplace(reply.spec.keys.size());
  rounds_.emplace(reply, *session_, sleeper_);
  sleeper_.start(*session_, *completions_, *memory_, trace_.get());
}

void KeyExchange::stop() { sleeper_.stop(); }

std::span<std::byte> KeyExchange::gradient(size_t key) {
  if (coder_.codes(key)) return std::as_writable_bytes(coder_.gradient(key));
  return session_->gradient(key);
}

void KeyExchange::register_memory(size_t key, const KeyMemory& memory) {
  Lock lock = sleeper_.lock();
  try {
    while (memory_->is_lent(key)) sleeper_.wait(lock, key);
  } catch (...) {
    if (!keeper_.failure().happened()) throw;
  }
  memory_->set(key, memory, lock);
  registered_[key] = memory;
}

void KeyExchange::take_over(KeyExchange& before) {
  before.release_memory();
  float weight = 1;
  {
    const Lock lock = before.sleeper_.lock();
    registered_ = before.registered_;
    weight = before.session_->weight();
  }
  Lock lock = sleeper_.lock();
  session_->set_weight(weight);
  for (const auto& [key, memory] : registered_) memory_->set(key, memory, lock);
}

void KeyExchange::release_memory() {
  Lock lock = sleeper_.lock();
  memory_->await_copies(Session::kAllKeys, lock);
  memory_->take_all_back();
}

void KeyExchange::give_up_ports() {
  const Lock lock = sleeper_.lock();
  keeper_.give_up_ports();
}

void KeyExchange::await_turn(size_t key) {
  if (!session_->takes_part(key)) {
    fail(ErrorCode::kInvalid,
         "key '{}' was pushed, and this rank joined with the interest to neither write nor read it",
         keeper_.spec().keys[key].name);
  }
  keeper_.failure().check();
  {
    const Lock lock = sleeper_.lock();
    if (session_->is_partly_pushed(key)) fail_partly_pushed(key);
  }
  wait(key);  // for the previous round
}

void KeyExchange::fail_partly_pushed(size_t key) const {
  fail(ErrorCode::kInvalid,
       "{} of the {} parts of key '{}' are pushed: the next push is that of the next part",
       session_->parts_pushed(key), session_->parts(key), keeper_.spec().keys[key].name);
}

// What is computed from a whole gradient needs all of it.
size_t KeyExchange::parts(size_t key) const {
  const bool whole = coder_.codes(key) || coder_.carries() || order_ == SendOrder::kMagnitude;
  return whole ? 1 : session_->parts(key);
}

SessionKeys::Elements KeyExchange::part(size_t key, size_t part) const {
  if (parts(key) == 1) return {0, keeper_.spec().keys[key].elements};
  return session_->part(key, part);
}

Pushed KeyExchange::push_part(size_t key, size_t part, const PushOptions& how) {
  const Lock lock = sleeper_.lock();
  keeper_.failure().check();
  const bool begins = session_->ready(key) && !session_->initial().sending();
  const bool follows = session_->is_partly_pushed(key) && session_->parts_pushed(key) == part;
  const bool is_next = part == 0 ? begins : follows;
  if (!is_next || memory_->is_registered(key) || parts(key) == 1) {
    fail(ErrorCode::kInvalid, "part {} of key '{}' was pushed, {}", part,
         keeper_.spec().keys[key].name,
         is_next ? "which is pushed as a whole: it has one part, or registered memory"
                 : fmt::format("which is not the next of its {} parts", parts(key)));
  }
  const Pushed pushed{
      .key = key, .round = session_->round(key) + 1, .part = static_cast<uint32_t>(part)};
  if (part == 0) memory_->lend(key);
  session_->push_part(key, part, how.priority, how.null);
  if (how.announced) completions_->expect(pushed, how.tag, sleeper_.deadline());
  if (part == 0) ++pushes_;
  sleeper_.pushed(how.announced);
  return pushed;
}

Pushed KeyExchange::push(size_t key, const PushOptions& how, const CopyIn& copy_in) {
  const uint64_t begin_ns = trace_ ? trace_now_ns() : 0;
  Lock lock = sleeper_.lock();
  const bool copied_in = !how.null && copy_in(*memory_, lock);
  std::vector<float> magnitudes;
  if (!how.null && order_ == SendOrder::kMagnitude) magnitudes = memory_->magnitudes(key, lock);
  keeper_.failure().check();
  if (!session_->ready(key) || session_->initial().sending()) {
    fail(ErrorCode::kInvalid, "key '{}' was pushed while another thread {}",
         keeper_.spec().keys[key].name,
         session_->ready(key) ? "sends the initial parameters" : "pushed it too");
  }
  const Pushed pushed{.key = key, .round = session_->round(key) + 1};
  if (trace_ && copied_in) trace_->add("copy in", key, pushed.round, begin_ns);
  memory_->lend(key);
  session_->push(key, how.priority, how.null, magnitudes);
  if (how.announced) completions_->expect(pushed, how.tag, sleeper_.deadline());
  ++pushes_;
  sleeper_.pushed(how.announced);
  return pushed;
}

bool KeyExchange::may_encode(size_t key) const {
  // What the box drops goes back into the residual.
  const bool may_be_dropped = keeper_.spec().late_decay < 1;
  return coder_.codes(key) && coder_.is_coded(key) && !coder_.has_schedule(key) &&
         !coder_.carries() && session_->exchanges_all(key) && !may_be_dropped;
}

CodedSlots KeyExchange::begin_encoding(size_t key) {
  const Lock lock = sleeper_.lock();
  const std::string& name = keeper_.spec().keys[key].name;
  if (!session_->ready(key) || memory_->is_registered(key)) {
    fail(ErrorCode::kInvalid, "begin_encoding: key '{}' {}", name,
         session_->ready(key) ? "has registered memory" : "is pushed by another thread");
  }
  coder_.leave_to_caller(key, true);
  const SessionKeys::Slots slots = session_->slots(key);
  return {.chunk_elements = slots.chunk_elements,
          .chunk_bytes = slots.chunk_bytes,
          .first_element = slots.first_element,
          .residual = coder_.residual(key)};
}

void KeyExchange::end_encoding(size_t key) {
  const Lock lock = sleeper_.lock();
  coder_.leave_to_caller(key, false);
}

void KeyExchange::set_weight(float weight) {
  if (keeper_.spec().weights == Weights::kNo) {
    fail(ErrorCode::kInvalid,
         "set_weight: job '{}' has no weights: create it with the option weights 'yes'",
         keeper_.spec().name);
  }
  if (!is_weight(weight)) {
    fail(ErrorCode::kInvalid,
         "set_weight: the weight of a push must be finite and at least 2^-126 (1.2e-38), got {}",
         weight);
  }
  const Lock lock = sleeper_.lock();
  session_->set_weight(weight);
}

void KeyExchange::flush() {
  const Lock lock = sleeper_.lock();
  session_->flush();
}

bool KeyExchange::broadcast(const std::function<const float*(size_t key)>& initial_of) {
  keeper_.failure().check();
  Lock lock = sleeper_.lock();
  const bool sends = session_->initial().needed();
  if (sends) session_->send_initial(initial_of);
  lock.unlock();
  try {
    wait(Session::kAllKeys);
  } catch (...) {
    if (!sends) throw;
    lock.lock();
    session_->forget_initial();  // the caller may free its memory now
    lock.unlock();
    keeper_.fail_with_exception();
    throw;
  }
  return sends;
}

void KeyExchange::wait(size_t key) {
  Lock lock = sleeper_.lock();
  if (coder_.carries()) carry_over(key);
  sleeper_.wait(lock, key);
  lock.unlock();
  if (key != Session::kAllKeys) return copy_out(key);
  for (size_t k = 0; k < keeper_.spec().keys.size(); ++k) copy_out(k);
}

// What there is no budget for is not waited for. REQUIRES: the lock is held.
void KeyExchange::carry_over(size_t key) {
  const JobSpec& spec = keeper_.spec();
  const bool ssp = spec.consistency == "ssp";
  const uint32_t most = ssp ? std::min(options_.carry_over, spec.slack) : options_.carry_over;
  session_->carry_over(key, most, [this](size_t of, const ChunkLayout& chunk, size_t offset) {
    return coder_.carry(of, chunk, session_->gradient(of).data() + offset);
  });
}

void KeyExchange::copy_out(size_t key) {
  if (options_.memory_device != nullptr) return options_.memory_device->flush_nic_writes();
  Lock lock = sleeper_.lock();
  if (!memory_->must_copy_out(key)) return;
  const TraceSpan span(
      trace_ ? &trace_->log() : nullptr,
      trace_ ? trace_->event("copy out", key, session_->round(key)) : TraceEvent());
  memory_->copy_out(key, lock);
}

void KeyExchange::check_not_left_out(size_t key) {
  const Lock lock = sleeper_.lock();
  const auto error = stalls_.passed_over_itself(*session_, key);
  if (error) throw Error(error->code(), error->what());
}

bool KeyExchange::test(size_t key) {
  {
    const Lock lock = sleeper_.lock();
    sleeper_.poll();
    if (!session_->ready(key)) return false;
  }
  copy_out(key);
  return true;
}

size_t KeyExchange::poll() {
  const Lock lock = sleeper_.lock();
  sleeper_.poll();
  return session_->outstanding();
}

std::optional<Completion> KeyExchange::wait_any() {
  const auto ended = sleeper_.wait_any();
  if (!ended) return std::nullopt;
  Completion completion{.pushed = ended->pushed, .tag = ended->tag};
  try {
    if (ended->end == CompletionQueue::End::kFailed) keeper_.failure().check();
    if (ended->end == CompletionQueue::End::kLate) {
      completion.error = stalls_.timeout_of(ended->pushed.key);
    } else {
      copy_out(ended->pushed.key);
    }
  } catch (...) {
    completion.error.emplace(error_in_flight());
  }
  return completion;
}

void KeyExchange::forget_announced() {
  const Lock lock = sleeper_.lock();
  completions_->forget();
}

void KeyExchange::copy_result(size_t key, std::span<std::byte> into) {
  Lock lock = sleeper_.lock();
  const std::span<const std::byte> from = memory_->result(key);
  lock.unlock();
  if (into.size() != from.size()) {
    fail(ErrorCode::kInvalid, "pull: key '{}' has {} bytes, the destination {}",
         keeper_.spec().keys[key].name, from.size(), into.size());
  }
  if (options_.memory_device != nullptr) {
    options_.memory_device->read(into.data(), from.data(), from.size());
  } else {
    memory_->copy(into.data(), from.data(), from.size());
  }
  memory_->bytes_copied += from.size();
}

WorkerStats KeyExchange::stats() {
  const Lock lock = sleeper_.lock();
  return {.pushes = pushes_,
          .chunks_pushed = session_->chunks_pushed(),
          .chunks_received = session_->chunks_received(),
          .bytes_copied = memory_->bytes_copied,
          .sleeps = sleeper_.sleeps(),
          .reconnections = sleeper_.reconnections(),
          .chunks_carried_over = session_->chunks_carried_over()};
}

}  // namespace phub
