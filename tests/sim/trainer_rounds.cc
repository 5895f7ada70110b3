// A simulated process trains: what it pushes, waits for, and checks.
#include <algorithm>
#include <span>
#include <utility>

#include "tests/sim/rack.h"
#include "tests/sim/trainer.h"

namespace phub::sim {

bool Trainer::train() {
  if (state_ != State::kRunning) return false;
  if (std::exchange(broadcasting_, broadcasting_ && !session_->all_ready())) return false;
  if (!parts_.empty()) return false;
  if (reply_->first_round > job_.plan.rounds + 1) {  // nobody makes the round before it any more
    finished_rounds_ = true;
    leave();
    return true;
  }
  if (looking_again_) return look_again();
  if (job_.plan.outer) return train_outer();
  return job_.plan.lockstep ? train_in_step() : train_freely();
}

// One more round that changes nothing, when nobody trains any more.
bool Trainer::look_again() {
  if (!session_->all_ready()) return false;
  const auto keys = static_cast<uint32_t>(session_->keys());
  const bool pushed = latest_round() > job_.plan.rounds;
  for (uint32_t key = 0; key < keys; ++key) {
    if (pushed) {
      collect(key);
    } else if (session_->takes_part(key)) {
      const Contribution from{reply_->rank, reply_->incarnation, session_->round(key) + 1};
      session_->set_weight(job_.oracle.weight_of(from, key));
      session_->push(key, 0, true);
    }
  }
  if (pushed && parts_out_ > 0) return false;
  if (pushed) leave();
  return true;
}

// Every key of a round is pushed in any order, and waited for in the order of the keys: of one
// fragment after the other in a job with a quorum, and else of all.
bool Trainer::train_in_step() {
  const auto keys = static_cast<uint32_t>(session_->keys());
  bool moved = false;
  while (to_push_.empty() && wait_key_ < keys && session_->ready(wait_key_)) {
    collect(wait_key_++);
    moved = true;
  }
  if (to_push_.empty()) {
    if (wait_key_ < keys) return moved;
    if (fragment_ == 0 && (leaving_early_ || latest_round() >= job_.plan.rounds)) {
      finish();
      return moved;
    }
    for (uint32_t k = 0; k < keys; ++k) {
      if (fragment_of(k) != fragment_) continue;
      const size_t at = rack_.random().below(to_push_.size() + 1);
      to_push_.insert(to_push_.begin() + static_cast<ptrdiff_t>(at), k);
    }
    const bool is_last = job_.spec.quorum == 0 || fragment_ + 1 == fragments_of(job_.spec);
    fragment_ = is_last ? 0 : fragment_ + 1;
    wait_key_ = 0;
  }
  while (!to_push_.empty() && !hung() && state_ == State::kRunning && !session_->broken()) {
    const uint32_t key = to_push_.back();
    to_push_.pop_back();
    if (session_->takes_part(key)) push(key);
  }
  return true;
}

// Every key on its own: some get far ahead of others.
bool Trainer::train_freely() {
  const auto keys = static_cast<uint32_t>(session_->keys());
  const auto first = static_cast<uint32_t>(rack_.random().below(keys));
  bool moved = false, all = true;
  for (uint32_t i = 0; i < keys; ++i) {
    const uint32_t key = (first + i) % keys;
    if (!session_->ready(key)) {
      all = false;
      continue;
    }
    collect(key);
    if (!session_->takes_part(key)) continue;
    if (!parts_.empty()) return true;
    const bool ends = leaving_early_ || session_->round(key) >= job_.plan.rounds;
    if (ends && !has_begun_round_after(key)) continue;
    if (saved_rounds_->is_due_before(session_->round(key) +
                                     1)) {  // which has others' results first
      all = false;
      continue;
    }
    push(key);
    moved = true;
    all = false;
    if (done() || hung() || state_ != State::kRunning) return true;
    if (rack_.random().chance(0.3)) return true;
  }
  if (all) finish();
  return moved;
}

uint32_t Trainer::fragment_of(uint32_t key) const {
  return job_.spec.quorum > 0 ? job_.spec.keys[key].fragment : 0;
}

// With a quorum a round has no result for who has pushed some of its fragment's keys alone.
bool Trainer::has_begun_round_after(uint32_t key) const {
  if (job_.spec.quorum == 0) return false;
  for (uint32_t k = 0; k < session_->keys(); ++k) {
    const uint64_t latest = session_->round(k) + (session_->ready(k) ? 0 : 1);
    if (fragment_of(k) == fragment_of(key) && latest > session_->round(key)) return true;
  }
  return false;
}

// Of the first key that it takes part in, of which there is one.
uint64_t Trainer::latest_round() const {
  uint32_t key = 0;
  while (!session_->takes_part(key)) ++key;
  return session_->round(key);
}

void Trainer::collect(uint32_t key) {
  const uint64_t round = session_->round(key);
  if (collected_[key] > round) return;
  collected_[key] = round + 1;
  if (saved_rounds_->received(key, round)) save(round);
  if (life_ != rack_.life(job_)) return;  // it is void, and will be done again
  // Over shared memory a fenced worker looks at parameters that are not its own any more.
  if (link_->zero_copy() && SimNet::closed_by_box(*sim_link_)) return;
  const std::string wrong = job_.oracle.saw({reply_->rank, reply_->incarnation, round}, key,
                                            session_->result(key), round >= reply_->first_round);
  if (!wrong.empty()) rack_.fail(wrong);
  const std::string misled =
      job_.oracle.was_told({reply_->rank, reply_->incarnation, round}, session_->verdict(),
                           round >= reply_->first_round);
  if (!misled.empty()) rack_.fail(misled);
}

void Trainer::push(uint32_t key) {
  const Contribution from{reply_->rank, reply_->incarnation, session_->round(key) + 1};
  const bool null = job_.oracle.is_null(from, key);
  if (!null) fill(from, key);
  std::vector<float> magnitudes;
  if (rack_.plan().send_order == SendOrder::kMagnitude) {
    session_->for_each_chunk(key, [&](const ChunkLayout&, size_t) {
      magnitudes.push_back(static_cast<float>(rack_.random().below(4)));
    });
  }
  session_->set_weight(job_.oracle.weight_of(from, key));
  session_->push(key, static_cast<int32_t>(rack_.random().below(3)), null, magnitudes);
  ++pushes_;
  rack_.net().trace("push", id_, key, from.round);
  call_hyper();
  call_state();
  call_branches();
  rack_.pushed(job_, *this);
}

// Now and then, as a wait does.
void Trainer::carry_over() {
  if (!session_->waits_for_room() || !rack_.random().chance(0.2)) return;
  const JobSpec& spec = job_.spec;
  const uint32_t most =
      spec.consistency == "ssp" ? std::min(spec.slack, job_.plan.carry_over) : job_.plan.carry_over;
  const size_t key =
      rack_.random().chance(0.5) ? Session::kAllKeys : rack_.random().below(session_->keys());
  session_->carry_over(key, most, [this](size_t k, const ChunkLayout& chunk, size_t offset) {
    const auto first = std::ranges::find(job_.layout.chunks, k, &ChunkLayout::key);
    const auto id = static_cast<uint32_t>(first - job_.layout.chunks.begin()) +
                    static_cast<uint32_t>(chunk.key_element / job_.spec.chunk_elements);
    job_.oracle.carried({{reply_->rank, reply_->incarnation}, session_->round(k) + 1}, id);
    ++job_.carried;
    return coder_->carry(k, chunk, session_->gradient(k).data() + offset);
  });
}

void Trainer::fill(const Contribution& from, uint32_t key) {
  if (!coder_->codes(key)) {
    job_.oracle.fill_key(from, key, session_->gradient(key));
    if (coder_->carries()) coder_->add_carried(key, session_->gradient(key));
    return;
  }
  const std::span<float> gradient = coder_->gradient(key);
  job_.oracle.fill_key(from, key, std::as_writable_bytes(gradient));
  coder_->encode(*session_, key, from.round, gradient.data(), kernels::DType::kF32, 1);
}

void Trainer::call_hyper() {
  if (reply_->rank != 0) return;
  while (hyper_calls_ < job_.plan.hyper_calls.size() &&
         job_.plan.hyper_calls[hyper_calls_].after_pushes <= pushes_) {
    // Every other one for a round of its own.
    const HyperRequest request{.round = hyper_calls_ % 2 == 0 ? 0 : session_->next_round(),
                               .values = job_.plan.hyper_calls[hyper_calls_].values};
    ++hyper_calls_;
    control().call<HyperReply>(
        "hyper", mail_,
        [this, who = credential(), request](const Reply<HyperReply>& reply) {
          server().set_hyper(who, request, reply);
        },
        [](const Result<HyperReply>&) {});
  }
}

void Trainer::sleep() {
  wake_when_parts_are_due();
  if (job_.plan.outer) return sleep_between_steps();
  if (state_ != State::kRunning || !job_.plan.lockstep || session_->all_ready()) return;
  if (broadcasting_ || wait_key_ >= session_->keys() || session_->ready(wait_key_)) return;
  const bool all = rack_.random().chance(0.5);
  asleep_ = session_->arm(all ? Session::kAllKeys : wait_key_);
  if (!asleep_) return session_->disarm();
  wake_when_there_is_room();
}

// What a switch is sent again then: also where the trainer looks at its keys all the time.
void Trainer::wake_when_parts_are_due() {
  if (behind_switch_ == nullptr) return;
  session_->arm(Session::kAnyKey);
  session_->disarm();
}

void Trainer::wake_when_there_is_room() {
  const auto ns = static_cast<uint64_t>(session_->room_in().count());
  room_at_ns_ = ns > 0 ? rack_.net().now_ns() + ns : ~uint64_t{0};
  if (ns > 0) rack_.net().after(ns, [] {});
}

}  // namespace phub::sim
