// A simulated learner makes steps by itself. Now and then it sends a fragment, and needs the result
// some steps later, as phub.diloco's course has it (worker/python/phub/_outer_course.py).
#include <algorithm>

#include "tests/sim/rack.h"
#include "tests/sim/trainer.h"
#include "tests/sim/virtual_clock.h"

namespace phub::sim {

// It begins with the results of all fragments.
void Trainer::begin_course() {
  course_ = {};
  if (!job_.plan.outer) return;
  const uint32_t fragments = fragments_of(job_.spec);
  course_.sent_ns.resize(fragments);
  for (uint32_t f = 0; f < fragments; ++f) course_.under_way[f] = 0;
  whole_since_ns_ = 0;
}

bool Trainer::train_outer() {
  if (push_rest()) return true;
  if (computes() || !merge_due()) return false;
  const OuterPlan& outer = *job_.plan.outer;
  const bool is_cycle = course_.steps % outer.every == 0 && course_.sent_at != course_.steps;
  if (course_.ends || (is_cycle && (leaving_early_ || latest_round() >= job_.plan.rounds))) {
    course_.ends = true;  // with what is under way still
    if (merge_due()) finish();
    return false;
  }
  if (std::exchange(course_.sent_at, course_.steps) != course_.steps) return send_fragment();
  compute();
  return true;
}

bool Trainer::computes() const { return rack_.net().now_ns() < course_.computes_until_ns; }

bool Trainer::is_ready(uint32_t fragment) const {
  for (uint32_t k = 0; k < session_->keys(); ++k) {
    if (fragment_of(k) == fragment && !session_->ready(k)) return false;
  }
  return true;
}

// Whether all results are here that the next step needs.
bool Trainer::merge_due() {
  std::erase_if(course_.under_way, [this](const auto& each) {
    const auto& [fragment, step] = each;
    if ((step > course_.steps && !course_.ends) || !is_ready(fragment)) return false;
    for (uint32_t k = 0; k < session_->keys(); ++k) {
      if (fragment_of(k) == fragment) collect(k);
    }
    return true;
  });
  return !key_to_wait_for();
}

std::optional<uint32_t> Trainer::key_to_wait_for() const {
  for (uint32_t k = 0; k < session_->keys(); ++k) {
    const auto at = course_.under_way.find(fragment_of(k));
    const bool is_due =
        at != course_.under_way.end() && (at->second <= course_.steps || course_.ends);
    if (is_due && !session_->ready(k)) return k;
  }
  return std::nullopt;
}

// Fragment f goes after step (f + 1) * every / F of each cycle.
uint64_t Trainer::next_step_of(uint32_t fragment, uint64_t after) const {
  const uint64_t every = job_.plan.outer->every;
  const uint64_t end = (fragment + 1) * every / fragments_of(job_.spec);
  const uint64_t step = after / every * every + end % every;
  return step > after ? step : step + every;
}

// That of this step, if there is one.
bool Trainer::send_fragment() {
  if (course_.steps == 0) return true;
  for (uint32_t f = 0; f < fragments_of(job_.spec); ++f) {
    if (next_step_of(f, course_.steps - 1) != course_.steps) continue;
    fragment_ = f;
    course_.under_way[f] = course_.steps + job_.plan.outer->delay;
    for (uint32_t k = 0; k < session_->keys(); ++k) {
      if (fragment_of(k) != f) continue;
      const size_t at = rack_.random().below(to_push_.size() + 1);
      to_push_.insert(to_push_.begin() + static_cast<ptrdiff_t>(at), k);
    }
  }
  return true;
}

// Whether something was sent.
bool Trainer::push_rest() {
  if (to_push_.empty()) return false;
  while (!to_push_.empty() && !hung() && state_ == State::kRunning && !session_->broken()) {
    const uint32_t key = to_push_.back();
    to_push_.pop_back();
    push(key);
  }
  if (!to_push_.empty() || done()) return true;
  course_.sent_ns[fragment_] = rack_.net().now_ns();
  ++job_.outer.sent;
  return true;
}

// Up to the next step at which something is sent or needed.
void Trainer::compute() {
  const OuterPlan& outer = *job_.plan.outer;
  uint64_t next = ~uint64_t{0};
  for (uint32_t f = 0; f < fragments_of(job_.spec); ++f) {
    next = std::min(next, next_step_of(f, course_.steps));
  }
  for (const auto& [fragment, step] : course_.under_way) next = std::min(next, step);
  const uint64_t slowness = outer.is_slow(reply_->rank) ? outer.slowness : 1;
  const uint64_t ns = (next - course_.steps) * outer.step_ms * slowness * kMs;
  const uint64_t takes = rack_.random().between(ns * 3 / 4, ns * 5 / 4);
  course_.steps = next;
  course_.computes_until_ns = rack_.net().now_ns() + takes;
  rack_.net().after(takes, [] {});
}

void Trainer::sleep_between_steps() {
  if (state_ != State::kRunning || broadcasting_ || !to_push_.empty()) return;
  size_t key = Session::kAnyKey;
  if (!computes()) {
    const std::optional<uint32_t> awaited = key_to_wait_for();
    if (!awaited) return;
    key = *awaited;
  }
  asleep_ = session_->arm(key);
  if (!asleep_) return session_->disarm();
  wake_when_there_is_room();
  if (computes()) room_at_ns_ = std::min(room_at_ns_, course_.computes_until_ns);
}

// Since when the box should have all that it has sent of the fragment.
std::optional<uint64_t> Trainer::waits_since_ns(uint32_t fragment) const {
  if (session_ == nullptr || state_ != State::kRunning || hung() || session_->broken()) return {};
  if (!link_->connected() || job_.plan.outer->has_slow_link(reply_->rank)) return {};
  // While it sleeps for another fragment, it does not look at what comes of this one.
  const std::optional<uint32_t> awaited = computes() ? std::nullopt : key_to_wait_for();
  if (awaited && fragment_of(*awaited) != fragment) return {};
  const bool is_sent = course_.sent_ns[fragment] > 0 && (fragment != fragment_ || to_push_.empty());
  const uint64_t since = std::max(course_.sent_ns[fragment], whole_since_ns_);
  if (!is_sent || since > rack_.net().now_ns() || is_ready(fragment)) return {};
  return since;
}

}  // namespace phub::sim
