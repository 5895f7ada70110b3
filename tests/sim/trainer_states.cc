// A simulated process gets and sets the state of keys, as worker/save/key_states.cc does: beside
// its training, one call at a time.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/sim/rack.h"
#include "tests/sim/trainer.h"
#include "tests/sim/virtual_clock.h"

namespace phub::sim {
namespace {

constexpr uint32_t kAttempts = 10;  // while another rank has begun one

}  // namespace

struct Trainer::StateTransfer {
  const StateCall& call;
  Oracle::SetCall set;
  StateReply reply = {};
  std::string bytes = {};
  size_t sent = 0;
  size_t sets_before = 0;  // in the log, when it was answered
  uint32_t attempts = 0;
};

void Trainer::call_state() {
  const std::vector<StateCall>& calls = job_.plan.state_calls;
  while (state_calls_ < calls.size() && calls[state_calls_].after_pushes <= pushes_) {
    if (transfer_) return;  // this one comes later
    const StateCall& call = calls[state_calls_++];
    const uint32_t rack = rack_.rack_of(job_, reply_->rank);
    const bool is_unsure = sets_unsure_ || (box() > 0 && job_.unsure_racks.contains(rack));
    if (call.rank != reply_->rank || (call.sets && is_unsure)) continue;
    transfer_ = std::make_shared<StateTransfer>(
        StateTransfer{call, {{reply_->rank, reply_->incarnation}, transfers_++, call.keys, {}}});
    begin_state(transfer_);
  }
}

void Trainer::begin_state(const Transfer& transfer) {
  ++transfer->attempts;
  StateRequest request{.rank = reply_->rank,
                       .incarnation = reply_->incarnation,
                       .epoch = reply_->epoch,
                       .set = transfer->call.sets,
                       .keys = transfer->call.keys,
                       .steps = {}};
  for (const uint32_t key : request.keys) {
    if (request.set) request.steps.push_back(transfer->set.steps(key));
  }
  control().call<StateReply>(
      "begin state", mail_,
      [this, who = credential(), request, transfer](const Reply<StateReply>& reply) {
        server().begin_state(
            who, request,
            [this, transfer, reply, life = rack_.life(job_)](Result<StateReply> result) {
              if (result && life == rack_.life(job_)) {
                transfer->sets_before = box() == 0 ? rack_.sets_in_log(job_) : sets_before_answer();
              }
              reply(std::move(result));
            });
      },
      [this, transfer](const Result<StateReply>& result) { state_begun(transfer, result); }, false);
}

// A call of it failed, and with it the transfer.
template <typename T>
bool Trainer::has_failed(const Transfer& transfer, const Result<T>& result) {
  if (result) return false;
  if (done() || state_ == State::kLeaving) return true;
  if (result.code == ErrorCode::kRewound) {
    on_error(result.code, result.message);
  } else {
    end_state(transfer);
  }
  return true;
}

void Trainer::state_begun(const Transfer& transfer, const Result<StateReply>& result) {
  if (done() || state_ == State::kLeaving) return;
  if (!result && result.code == ErrorCode::kTaken && transfer->attempts < kAttempts) {
    std::weak_ptr<Mail> mail = mail_;
    rack_.net().after(rack_.random().below(kMs), [this, mail, transfer] {
      if (auto open = mail.lock()) open->push_back([this, transfer] { begin_state(transfer); });
    });
    return;
  }
  if (has_failed(transfer, result)) return;
  transfer->reply = *result.value;
  if (!transfer->call.sets) return read_state(transfer);
  const std::vector<float> state = job_.oracle.state_of(transfer->set);
  transfer->bytes.assign(reinterpret_cast<const char*>(state.data()), state.size() * sizeof(float));
  write_state(transfer);
}

void Trainer::read_state(const Transfer& transfer) {
  control().call<PartBytes>(
      "read state", mail_,
      [this, who = credential(), at = transfer->bytes.size()](const Reply<PartBytes>& reply) {
        server().read_state(who, at, reply);
      },
      [this, transfer](const Result<PartBytes>& result) {
        if (has_failed(transfer, result) || done()) return;
        transfer->bytes += result.value->bytes;
        if (transfer->bytes.size() < transfer->reply.bytes) return read_state(transfer);
        if (life_ == rack_.life(job_)) {
          job_.oracle.got(transfer->call.keys, transfer->reply, transfer->bytes,
                          transfer->sets_before);
        }
        end_state(transfer);
      },
      false);
}

// In pieces of any size.
void Trainer::write_state(const Transfer& transfer) {
  const size_t rest = (transfer->bytes.size() - transfer->sent) / sizeof(float);
  const size_t floats = rack_.random().between(1, rest);
  std::string piece = transfer->bytes.substr(transfer->sent, floats * sizeof(float));
  control().call<Done>(
      "write state", mail_,
      [this, who = credential(), at = transfer->sent, piece](const Reply<Done>& reply) {
        server().check_state_piece(who, at, piece.size());
        server().write_state(who, at, piece, nullptr, reply);
      },
      [this, transfer, bytes = piece.size()](const Result<Done>& result) {
        if (has_failed(transfer, result) || done()) return;
        transfer->sent += bytes;
        if (transfer->sent < transfer->bytes.size()) return write_state(transfer);
        apply_state(transfer);
      },
      false);
}

// Its rack has the answer, and nobody else's since.
size_t Trainer::sets_before_answer() const {
  return job_.sets_before_answer[rack_.rack_of(job_, reply_->rank)];
}

void Trainer::apply_state(const Transfer& transfer) {
  const uint32_t rack = rack_.rack_of(job_, reply_->rank);
  if (box() > 0 && !job_.unsure_racks.insert(rack).second) return end_state(transfer);
  job_.oracle.may_set(transfer->set);
  sets_unsure_ = true;
  control().call<HyperReply>(
      "apply state", mail_,
      [this, who = credential()](const Reply<HyperReply>& reply) {
        server().apply_state(who, reply);
      },
      [this, transfer, rack](const Result<HyperReply>& result) {
        if (has_failed(transfer, result) || done()) return;
        job_.unsure_racks.erase(rack);
        if (life_ == rack_.life(job_)) {
          job_.oracle.did_set(transfer->set, result.value->round);
          sets_unsure_ = false;
        }
        end_state(transfer);
      },
      false);
}

void Trainer::end_state(const Transfer& transfer) {
  control().call<Done>(
      "end state", mail_,
      [this, who = credential()](const Reply<Done>& reply) { server().end_state(who, reply); },
      [this](const Result<Done>&) { transfer_ = nullptr; });
  static_cast<void>(transfer);
}

}  // namespace phub::sim
