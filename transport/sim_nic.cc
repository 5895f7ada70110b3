#include "transport/sim_nic.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/error.h"

namespace phub {

SimEndpoint::SimEndpoint(SimNet& net, SimSide side, uint32_t qps, SimBoxLink* owner, uint32_t core)
    : net_(net), side_(side), owner_(owner), core_(core), pairs_(qps) {}

SimEndpoint::~SimEndpoint() {
  for (uint32_t qp = 0; qp < qps(); ++qp) release(qp);
}

void SimEndpoint::check_alive() const {
  if (!failure_.empty()) fail(ErrorCode::kInternal, "{}", failure_);
}

// May stop before everything is taken: callers must not conclude that a short answer means empty.
size_t SimEndpoint::poll(std::span<Arrival> out) {
  check_alive();
  size_t taken = 0;
  uint32_t empty = 0;
  while (taken < out.size() && empty < qps()) {
    next_qp_ = (next_qp_ + 1) % qps();
    const std::shared_ptr<SimPair>& pair = pairs_[next_qp_];
    if (pair == nullptr || pair->end(side_).inbox.empty()) {
      ++empty;
      continue;
    }
    empty = 0;
    out[taken] = pair->end(side_).inbox.front();
    pair->end(side_).inbox.pop_front();
    pair->taken(side_, out[taken++]);
    if (net_.random().chance(0.1)) break;
  }
  return taken;
}

bool SimEndpoint::post(uint32_t qp, const Write& write) {
  check_alive();
  PHUB_CHECK(qp < qps());
  return pairs_[qp] != nullptr && pairs_[qp]->post(side_, write);
}

void SimEndpoint::flush() {
  check_alive();
  for (const auto& pair : pairs_) {
    if (pair != nullptr) pair->flush(side_);
  }
}

bool SimEndpoint::arm(std::span<const uint32_t> wake_after) {
  check_alive();
  PHUB_CHECK(wake_after.empty() || wake_after.size() >= qps());
  for (const auto& pair : pairs_) {
    if (pair != nullptr && !pair->end(side_).inbox.empty()) return false;
  }
  wake_after_.assign(qps(), 1);
  if (!wake_after.empty()) std::copy_n(wake_after.begin(), qps(), wake_after_.begin());
  armed_ = true;
  woken_ = false;
  return true;
}

void SimEndpoint::wake_if_armed(const SimPair& pair, bool always) {
  if (!armed_) return;
  for (uint32_t qp = 0; qp < qps(); ++qp) {
    if (pairs_[qp].get() != &pair) continue;
    const size_t waiting = pairs_[qp]->end(side_).inbox.size();
    if (always || (wake_after_[qp] > 0 && waiting >= wake_after_[qp])) woken_ = true;
  }
}

void SimEndpoint::take_over(uint32_t qp, std::shared_ptr<SimPair> pair) {
  release(qp);
  pair->end(side_).endpoint = this;
  pair->end(side_).qp = qp;
  for (Arrival& arrival : pair->end(side_).inbox) arrival.qp = qp;
  pairs_[qp] = std::move(pair);
}

void SimEndpoint::release(uint32_t qp) {
  if (pairs_[qp] == nullptr) return;
  pairs_[qp]->close(side_);
  pairs_[qp] = nullptr;
}

void SimEndpoint::attach(uint32_t rank, uint32_t incarnation) {
  check_alive();
  PHUB_CHECK(owner_ != nullptr && rank < qps());
  take_over(rank, owner_->pair(rank, core_, incarnation));
  net_.trace("attach", core_, rank, incarnation);
}

void SimEndpoint::detach(uint32_t rank) {
  PHUB_CHECK(owner_ != nullptr && rank < qps());
  release(rank);
  net_.trace("detach", core_, rank);
}

SimWorkerLink::SimWorkerLink(SimNic& nic, SimBoxLink* box, uint32_t rank, SimMemory gradients,
                             SimMemory results, uint32_t queues)
    : nic_(nic),
      box_(box),
      rank_(rank),
      gradients_(std::move(gradients)),
      results_(std::move(results)),
      results_bytes_(results_->size()),
      endpoint_(nic.net(), kSimWorker, queues, nullptr, 0) {}

SimWorkerLink::~SimWorkerLink() { die(false); }

bool SimWorkerLink::zero_copy() const { return nic_.net().options().shared_memory; }

void SimWorkerLink::reconnect(const Offer& offer) {
  if (zero_copy()) WorkerLink::reconnect(offer);
  const SimNic::Place place = nic_.place(offer);
  if (place.link != box_ || place.rank != rank_) {
    fail(ErrorCode::kUnauthorized, "rank {}: the offer is for another rank or job", rank_);
  }
  box_->reconnect(rank_, *this);
}

void SimWorkerLink::take_pairs(std::span<const std::shared_ptr<SimPair>> pairs) {
  for (uint32_t q = 0; q < pairs.size(); ++q) {
    SimPair::End& end = pairs[q]->end(kSimWorker);
    end.source = gradients_;
    if (!zero_copy()) end.target = results_;
    endpoint_.take_over(q, pairs[q]);
  }
}

void SimWorkerLink::die(bool silent) {
  *connected_ = false;
  for (uint32_t q = 0; q < endpoint_.qps(); ++q) {
    if (endpoint_.pair(q) == nullptr) continue;
    endpoint_.pair(q)->crash(silent);
    endpoint_.release(q);
  }
  if (box_ != nullptr) box_->worker_ended(rank_, this, silent);
  box_ = nullptr;
}

bool SimWorkerLink::break_one() {
  if (zero_copy()) return false;
  std::vector<SimPair*> whole;
  for (uint32_t q = 0; q < endpoint_.qps(); ++q) {
    if (endpoint_.pair(q) != nullptr && endpoint_.pair(q)->whole()) {
      whole.push_back(endpoint_.pair(q).get());
    }
  }
  if (whole.empty()) return false;
  whole[nic_.net().random().below(whole.size())]->break_now();
  return true;
}

bool SimWorkerLink::closed_by_box() const {
  for (uint32_t q = 0; q < endpoint_.qps(); ++q) {
    if (endpoint_.pair(q) == nullptr || endpoint_.pair(q)->end(kSimBox).closed) return true;
  }
  return false;
}

SimBoxLink::SimBoxLink(SimNic& nic, const LinkLayout& layout)
    : nic_(nic),
      self_(std::make_shared<SimBoxLink*>(this)),
      layout_(layout),
      egress_(std::make_shared<std::vector<std::byte>>(layout.all_egress_bytes())),
      slots_(layout.max_ranks),
      members_(layout.max_ranks) {
  for (uint32_t core = 0; core < layout.cores; ++core) {
    endpoints_.push_back(
        std::make_unique<SimEndpoint>(nic.net(), kSimBox, layout.max_ranks, this, core));
  }
  nic_.remember(this);
}

SimBoxLink::~SimBoxLink() {
  endpoints_.clear();
  for (Member& member : members_) {
    if (member.admitted) disconnect(member);
  }
  nic_.forget(this);
}

Offer SimBoxLink::admit(uint32_t rank, uint32_t incarnation) {
  PHUB_CHECK(rank < layout_.max_ranks && !members_[rank].admitted);
  Member& member = members_[rank];
  member.admitted = true;
  member.incarnation = incarnation;
  // The box's own slots are the same for every incarnation; in shared memory each brings new ones.
  if (slots_[rank] == nullptr || slots_belong_to_worker()) {
    slots_[rank] = nic_.garbage(layout_.ingress_bytes);
  }
  member.slots = slots_[rank];
  nic_.net().trace("admit", rank, incarnation);
  return make_pairs(rank);
}

Offer SimBoxLink::make_pairs(uint32_t rank) {
  Member& member = members_[rank];
  member.pairs.clear();
  for (uint32_t core = 0; core < layout_.cores; ++core) {
    auto pair = std::make_shared<SimPair>(nic_.net(), nic_.next_pair_id());
    SimPair::End& end = pair->end(kSimBox);
    end.source = egress_;
    if (!slots_belong_to_worker()) end.target = member.slots;
    member.pairs.push_back(std::move(pair));
  }
  member.used = false;
  member.ticket = nic_.give_ticket({this, rank});
  return {"sim", "", member.ticket};
}

std::span<const std::byte> SimBoxLink::ingress(uint32_t rank) {
  PHUB_CHECK(rank < layout_.max_ranks && slots_[rank] != nullptr);
  return *slots_[rank];
}

BoxLink::Rest SimBoxLink::revoke(uint32_t rank) {
  PHUB_CHECK(rank < layout_.max_ranks && members_[rank].admitted);
  Member& member = members_[rank];
  for (const auto& pair : member.pairs) PHUB_CHECK(pair->end(kSimBox).endpoint == nullptr);
  nic_.net().trace("revoke", rank, member.incarnation);
  if (slots_belong_to_worker()) slots_[rank] = nullptr;
  disconnect(member);
  return nullptr;
}

void SimBoxLink::disconnect(Member& member) {
  for (const auto& pair : member.pairs) pair->close(kSimBox);
  if (member.worker != nullptr) {
    nic_.net().after(nic_.net().some_delay(),
                     [flag = member.worker->connection()] { *flag = false; });
    member.worker->forget_box();
  }
  nic_.take_ticket(member.ticket);
  member = Member{};
}

bool SimBoxLink::slots_belong_to_worker() const { return nic_.net().options().shared_memory; }
bool SimBoxLink::can_reconnect() const { return !nic_.net().options().shared_memory; }

Offer SimBoxLink::reconnect(uint32_t rank) {
  if (!can_reconnect()) return BoxLink::reconnect(rank);
  PHUB_CHECK(rank < layout_.max_ranks && members_[rank].admitted);
  for (const auto& pair : members_[rank].pairs) {
    PHUB_CHECK(pair->end(kSimBox).endpoint == nullptr);
    pair->close(kSimBox);
  }
  nic_.take_ticket(members_[rank].ticket);
  nic_.net().trace("reconnect", rank, members_[rank].incarnation);
  return make_pairs(rank);
}

void SimBoxLink::fail_device(uint32_t core, bool said) {
  const std::string reason = fmt::format("the simulated device of core {} died", core);
  nic_.net().trace("device failed", core, said);
  if (said) return nic_.raise({.kind = NicEvent::kFailed, .link = this, .reason = reason});
  endpoints_[core]->die(reason);
}

const std::shared_ptr<SimPair>& SimBoxLink::pair(uint32_t rank, uint32_t core,
                                                 uint32_t incarnation) const {
  PHUB_CHECK(is_member(rank, incarnation) && core < layout_.cores);
  return members_[rank].pairs[core];
}

std::unique_ptr<WorkerLink> SimBoxLink::connect(uint32_t rank) {
  Member& member = members_[rank];
  if (member.used || member.worker != nullptr) {
    fail(ErrorCode::kUnauthorized, "rank {}: this ticket was used already", rank);
  }
  const bool shared = slots_belong_to_worker();
  auto worker = std::make_unique<SimWorkerLink>(
      nic_, this, rank, shared ? member.slots : nic_.garbage(layout_.gradients_at_worker()),
      shared ? egress_ : nic_.garbage(layout_.results_at_worker()), layout_.cores);
  if (shared && layout_.egress_copies > 1) {
    worker->narrow_results(rank * layout_.egress_bytes, layout_.egress_bytes);
  }
  member.worker = worker.get();
  worker->take_pairs(member.pairs);
  shake_hands(rank);
  return worker;
}

void SimBoxLink::reconnect(uint32_t rank, SimWorkerLink& worker) {
  Member& member = members_[rank];
  if (member.used) fail(ErrorCode::kUnauthorized, "rank {}: this ticket was used already", rank);
  worker.take_pairs(member.pairs);
  shake_hands(rank);
}

void SimBoxLink::shake_hands(uint32_t rank) {
  Member& member = members_[rank];
  member.used = true;
  const uint32_t incarnation = member.incarnation;
  std::weak_ptr<SimBoxLink*> self = self_;
  nic_.net().after(nic_.net().some_delay(), [self, pairs = member.pairs, rank, incarnation] {
    auto link = self.lock();
    if (link == nullptr || !(*link)->is_member(rank, incarnation)) return;
    if ((*link)->members_[rank].worker == nullptr) return;  // died meanwhile
    for (const auto& pair : pairs) pair->establish();
    (*link)->nic_.raise({NicEvent::kConnected, *link, rank, incarnation});
  });
}

void SimBoxLink::worker_ended(uint32_t rank, SimWorkerLink* worker, bool silent) {
  Member& member = members_[rank];
  if (member.worker != worker) return;
  member.worker = nullptr;
  if (silent) return;
  std::weak_ptr<SimBoxLink*> self = self_;
  nic_.net().after(nic_.net().some_delay(), [self, rank, incarnation = member.incarnation] {
    auto link = self.lock();
    if (link == nullptr || !(*link)->is_member(rank, incarnation)) return;
    (*link)->nic_.net().trace("disconnected", rank, incarnation);
    (*link)->nic_.raise({NicEvent::kDisconnected, *link, rank, incarnation});
  });
}

std::string SimNic::describe() const {
  return fmt::format("sim: a simulated network, seed {}", net_.options().seed);
}

std::unique_ptr<BoxLink> SimNic::open_job(const LinkLayout& layout) {
  return std::make_unique<SimBoxLink>(*this, layout);
}

void SimNic::handle_events(std::vector<NicEvent>& out) {
  out.insert(out.end(), raised_.begin(), raised_.end());
  raised_.clear();
}

std::unique_ptr<WorkerLink> SimNic::connect(const Offer& offer) {
  const Place& to = place(offer);
  return to.link->connect(to.rank);
}

const SimNic::Place& SimNic::place(const Offer& offer) const {
  auto found = tickets_.find(offer.ticket);
  if (found == tickets_.end()) {
    fail(ErrorCode::kUnauthorized, "ticket '{}' is not known, or no more", offer.ticket);
  }
  return found->second;
}

std::string SimNic::give_ticket(const Place& place) {
  std::string ticket = fmt::format("{:016x}{:016x}", net_.random().next(), net_.random().next());
  tickets_[ticket] = place;
  return ticket;
}

bool SimNic::core_awake(uint32_t core) const {
  return std::ranges::any_of(links_, [core](const SimBoxLink* l) { return l->core_awake(core); });
}

void SimNic::forget(const SimBoxLink* link) {
  std::erase(links_, link);
  std::erase_if(raised_, [&](const NicEvent& event) { return event.link == link; });
  std::erase_if(tickets_, [&](const auto& entry) { return entry.second.link == link; });
}

SimMemory SimNic::garbage(uint64_t bytes) {
  auto memory = std::make_shared<std::vector<std::byte>>(bytes);
  for (uint64_t i = 0; i < bytes; i += sizeof(uint64_t)) {
    const uint64_t word = net_.random().next();
    std::memcpy(memory->data() + i, &word, std::min<uint64_t>(sizeof(word), bytes - i));
  }
  return memory;
}

}  // namespace phub
