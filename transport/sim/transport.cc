#include "transport/sim/transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/error.h"
#include "transport/greeting.h"

namespace phub {

SimEndpoint::SimEndpoint(SimNet& net, SimSide side, uint32_t qps)
    : net_(net), side_(side), pairs_(qps) {}

SimEndpoint::~SimEndpoint() {
  for (uint32_t qp = 0; qp < qps(); ++qp) release(qp);
  if (window_ != nullptr) net_.stats().window_growths += window_->grown();
}

void SimEndpoint::check_alive() const {
  if (!failure_.empty()) fail(ErrorCode::kInternal, "{}", failure_);
}

// In memory of the box, from the worker's or from what came with it.
void SimEndpoint::land_in_window(const SimPair& pair, const SimPair::Arrived& next) const {
  const Arrival& arrival = next.arrival;
  if (window_ == nullptr || !arrival.ok || arrival.bytes == 0) return;
  std::byte* const place =
      window_->take(arrival.rank, arrival.queue, decode(arrival.imm).chunk, arrival.offset);
  const std::byte* const from =
      pair.near() ? pair.end(kSimWorker).source->data() + next.source : next.payload.data();
  std::memcpy(place, from, arrival.bytes);
  ++net_.stats().window_writes;
}

bool SimEndpoint::waits_for_place(const SimPair::Arrived& next) const {
  const Arrival& arrival = next.arrival;
  return window_ != nullptr && arrival.ok && arrival.bytes > 0 &&
         !window_->has_room(arrival.rank, arrival.queue, decode(arrival.imm).chunk);
}

// If the queue pair is broken, what came before that gets places.
bool SimEndpoint::has_arrivals(const std::shared_ptr<SimPair>& pair) const {
  if (pair == nullptr) return false;
  std::deque<SimPair::Arrived>& inbox = pair->end(side_).inbox;
  while (!inbox.empty() && waits_for_place(inbox.front())) {
    if (inbox.back().arrival.ok) return false;
    if (!window_->grow(inbox.front().arrival.rank, 1)) return false;
  }
  return !inbox.empty();
}

// May stop before everything is taken: callers must not conclude that a short answer means empty.
size_t SimEndpoint::poll(std::span<Arrival> out) {
  check_alive();
  size_t taken = 0;
  uint32_t empty = 0;
  while (taken < out.size() && empty < qps()) {
    next_qp_ = (next_qp_ + 1) % qps();
    const std::shared_ptr<SimPair>& pair = pairs_[next_qp_];
    if (!has_arrivals(pair)) {
      ++empty;
      continue;
    }
    empty = 0;
    const SimPair::Arrived next = std::move(pair->end(side_).inbox.front());
    pair->end(side_).inbox.pop_front();
    land_in_window(*pair, next);
    pair->taken(side_, next);
    out[taken++] = next.arrival;
    if (net_.random().chance(0.1)) break;
  }
  return taken;
}

bool SimEndpoint::post(QueuePair to, const Write& write) {
  check_alive();
  const uint32_t qp = side_ == kSimBox ? to.rank : to.queue;
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
    if (has_arrivals(pair)) return false;
    if (pair != nullptr && std::exchange(pair->end(side_).has_room, false)) return false;
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
    // Over memory no more comes than there is room for (real rings have room for all chunks).
    const SimOptions& net = net_.options();
    const size_t most = net.shared_memory || pair.near() ? net.send_depth : ~size_t{0};
    const size_t enough = std::min<size_t>(wake_after_[qp], most);
    if (always || (enough > 0 && waiting >= enough)) woken_ = true;
  }
}

bool SimEndpoint::crosses_nic(QueuePair to) const {
  const auto& pair = pairs_[side_ == kSimBox ? to.rank : to.queue];
  return pair == nullptr || !pair->near();
}

void SimEndpoint::take_over(uint32_t qp, std::shared_ptr<SimPair> pair) {
  release(qp);
  pair->end(side_).endpoint = this;
  const QueuePair name = name_of(qp);
  pair->end(side_).name = name;
  for (SimPair::Arrived& arrived : pair->end(side_).inbox) {
    arrived.arrival.queue = name.queue, arrived.arrival.rank = name.rank;
  }
  pairs_[qp] = std::move(pair);
}

void SimEndpoint::release(uint32_t qp) {
  if (pairs_[qp] == nullptr) return;
  pairs_[qp]->close(side_);
  pairs_[qp] = nullptr;
}

void SimCoreEndpoint::attach(uint32_t rank, uint32_t incarnation) {
  check_alive();
  PHUB_CHECK(rank < qps());
  const auto& attached = static_cast<const SimIncarnation&>(link_.attach(rank, incarnation));
  take_over(rank, attached.pairs[core_]);
  net_.trace("attach", core_, rank, incarnation);
}

void SimCoreEndpoint::detach_all() {
  for (uint32_t rank = 0; rank < qps(); ++rank) {
    if (pair(rank) != nullptr) detach(rank);
  }
}

void SimCoreEndpoint::detach(uint32_t rank) {
  PHUB_CHECK(rank < qps());
  release(rank);
  link_.detach(rank);
  net_.trace("detach", core_, rank);
}

SimWorkerLink::SimWorkerLink(SimNet& net, const std::vector<SimIncarnation*>& incarnations,
                             const LinkLayout& layout, SimTransport* below,
                             const SimTransport* near)
    : net_(net),
      rank_(incarnations.front()->rank),
      below_(below),
      near_(near),
      queue_thread_(layout.queue_thread) {
  const SimBoxLink& box = incarnations.front()->box();
  const LinkLayout& there = box.layout();
  for (uint32_t thread = 0; thread < layout.threads; ++thread) {
    endpoints_.push_back(std::make_unique<SimEndpoint>(
        net, kSimWorker, static_cast<uint32_t>(there.queues_in_all())));
  }
  const LinkLayout& here = below == nullptr ? there : layout;
  gradients_ = zero_copy() ? box.slots_of(rank_) : net.garbage(here.gradients_at_worker());
  results_ = zero_copy() ? box.results_of_box() : net.garbage(here.results_at_worker());
  results_bytes_ = results_->size();
  if (zero_copy() && there.result_copies > 1) {  // the one that is this rank's
    results_first_ = rank_ * there.results_bytes, results_bytes_ = there.results_bytes;
  }
  for (SimIncarnation* incarnation : incarnations) incarnation->use(nullptr);
  for (SimIncarnation* incarnation : incarnations) boxes_.push_back(&incarnation->box());
  welcome(incarnations);
  count_link();
  if (below_ != nullptr) below_->links_above().push_back(this);
}

SimWorkerLink::~SimWorkerLink() {
  die(false);
  if (below_ != nullptr) std::erase(below_->links_above(), this);
}

SimEndpoint& SimWorkerLink::endpoint_for(uint32_t queue) const {
  return *endpoints_[queue_thread_.empty() ? 0 : queue_thread_[queue]];
}

bool SimWorkerLink::thread_woken(uint32_t thread) const {
  return thread < endpoints_.size() && endpoints_[thread]->woken();
}

bool SimWorkerLink::zero_copy() const { return net_.options().shared_memory; }

void SimWorkerLink::reconnect(const Offer& offer) {
  if (zero_copy()) WorkerLink::reconnect(offer);
  const std::vector<SimIncarnation*> incarnations = net_.find(offer);
  for (const SimIncarnation* incarnation : incarnations) {
    if (std::ranges::count(boxes_, &incarnation->box()) == 0 || incarnation->rank != rank_) {
      fail(ErrorCode::kUnauthorized, "rank {}: the offer is for another rank or job", rank_);
    }
  }
  for (SimIncarnation* incarnation : incarnations) incarnation->use(this);
  welcome(incarnations);
}

bool SimWorkerLink::is_near(const SimBoxLink& box) const {
  return near_ == &box.transport() && !zero_copy();
}

std::string SimWorkerLink::nic_of(uint32_t queue) const {
  return endpoint_for(queue).crosses_nic({.queue = queue}) ? "the NIC" : "";
}

void SimWorkerLink::count_link() {
  const auto near = std::ranges::count_if(boxes_, [this](auto* box) { return is_near(*box); });
  if (near == 0) return;
  ++(std::cmp_equal(near, boxes_.size()) ? net_.stats().near_links : net_.stats().mixed_links);
}

void SimWorkerLink::welcome(const std::vector<SimIncarnation*>& incarnations) {
  for (SimIncarnation* incarnation : incarnations) {
    for (const auto& pair : incarnation->pairs) {
      if (is_near(incarnation->box())) pair->make_near();
    }
    take_pairs(incarnation->box().layout().first_queue, incarnation->pairs);
    incarnation->box().welcome(*incarnation, *this);
  }
}

void SimWorkerLink::take_pairs(uint32_t first_queue,
                               std::span<const std::shared_ptr<SimPair>> pairs) {
  for (uint32_t q = 0; q < pairs.size(); ++q) {
    SimPair::End& end = pairs[q]->end(kSimWorker);
    end.source = gradients_;
    if (!zero_copy()) end.target = results_;
    endpoint_for(first_queue + q).take_over(first_queue + q, pairs[q]);
  }
}

void SimWorkerLink::die(bool silent) {
  *connected_ = false;
  for (uint32_t q = 0; q < queues(); ++q) {
    if (pair(q) == nullptr) continue;
    pair(q)->crash(silent);
    endpoint_for(q).release(q);
  }
  for (SimBoxLink*& box : boxes_) {
    if (box == nullptr) continue;
    // A box on its host hears the end of it.
    const bool unheard = silent && !is_near(*box);
    std::exchange(box, nullptr)->worker_ended(rank_, this, unheard);
  }
}

void SimWorkerLink::box_closed(const AdmissionLink* box) {
  net_.after(net_.some_delay(), [flag = connected_] { *flag = false; });
  std::ranges::replace(boxes_, box, nullptr);
}

bool SimWorkerLink::fail_device(uint32_t core, bool said) {
  for (SimBoxLink* const box : boxes_) {
    if (box == nullptr) return false;
    const uint32_t cores = box->layout().cores;
    if (core < cores) return box->fail_device(core, said), true;
    core -= cores;
  }
  return false;
}

bool SimWorkerLink::break_one() {
  if (zero_copy()) return false;
  std::vector<SimPair*> whole;
  for (uint32_t q = 0; q < queues(); ++q) {
    if (pair(q) != nullptr && pair(q)->whole()) whole.push_back(pair(q).get());
  }
  if (whole.empty()) return false;
  whole[net_.random().below(whole.size())]->break_now();
  return true;
}

bool SimWorkerLink::closed_by_box() const {
  for (uint32_t q = 0; q < queues(); ++q) {
    if (pair(q) == nullptr || pair(q)->end(kSimBox).closed) return true;
  }
  return false;
}

SimIncarnation::~SimIncarnation() {
  if (worker != nullptr) worker->box_closed(link);
}

SimBoxLink& SimIncarnation::box() const { return static_cast<SimBoxLink&>(*link); }

void SimIncarnation::use(const SimWorkerLink* by) {
  if (used || worker != by) {
    fail(ErrorCode::kUnauthorized, "rank {}: this ticket was used already; join again", rank);
  }
  used = true;
}

SimBoxLink::SimBoxLink(SimTransport& transport, const LinkLayout& layout)
    : AdmissionLink(transport.admissions(), layout.max_ranks),
      transport_(transport),
      self_(std::make_shared<SimBoxLink*>(this)),
      layout_(layout),
      results_(std::make_shared<std::vector<std::byte>>(layout.all_results_bytes())),
      slots_(layout.max_ranks) {
  for (uint32_t core = 0; core < layout.cores; ++core) {
    endpoints_.push_back(
        std::make_unique<SimCoreEndpoint>(transport.net(), layout.max_ranks, *this, core));
  }
  transport_.remember(this);
}

SimBoxLink::~SimBoxLink() {
  for (const auto& endpoint : endpoints_) endpoint->detach_all();
  revoke_all();
  transport_.forget(this);
}

std::unique_ptr<Incarnation> SimBoxLink::make(uint32_t rank) {
  // The box's own slots are the same for every incarnation; in shared memory each brings new ones.
  if (slots_[rank] == nullptr || slots_belong_to_worker()) {
    slots_[rank] = transport_.net().garbage(layout_.slots_bytes);
  }
  transport_.net().trace("admit", rank);
  return std::make_unique<SimIncarnation>();
}

Offer SimBoxLink::open(Incarnation& opened) {
  auto& incarnation = static_cast<SimIncarnation&>(opened);
  Offer offer{.transport = "sim"};
  incarnation.pairs.clear();
  incarnation.used = false;
  for (uint32_t core = 0; core < layout_.cores; ++core) {
    auto pair = std::make_shared<SimPair>(transport_.net(), transport_.net().next_pair_id());
    SimPair::End& end = pair->end(kSimBox);
    end.source = results_;
    if (!slots_belong_to_worker()) end.target = slots_[incarnation.rank];
    end.windowed = layout_.windowed;
    incarnation.pairs.push_back(std::move(pair));
    offer.queues.push_back({.address = transport_.address()});
  }
  transport_.net().trace("open", incarnation.rank, incarnation.incarnation);
  return offer;
}

void SimBoxLink::disconnect(Incarnation& disconnected) {
  const auto& incarnation = static_cast<const SimIncarnation&>(disconnected);
  transport_.net().trace("disconnect", incarnation.rank, incarnation.incarnation);
  for (const auto& pair : incarnation.pairs) {
    PHUB_CHECK(pair->end(kSimBox).endpoint == nullptr);
    pair->close(kSimBox);
  }
  if (slots_belong_to_worker()) slots_[incarnation.rank] = nullptr;
}

std::span<const std::byte> SimBoxLink::slots(uint32_t rank) {
  PHUB_CHECK(rank < layout_.max_ranks && slots_[rank] != nullptr);
  return *slots_[rank];
}

bool SimBoxLink::slots_belong_to_worker() const { return transport_.net().options().shared_memory; }

Offer SimBoxLink::reconnect(uint32_t rank) {
  return can_reconnect() ? open_again(rank) : BoxLink::reconnect(rank);
}

void SimBoxLink::fail_device(uint32_t core, bool said) {
  const std::string reason = fmt::format("the simulated device of core {} died", core);
  transport_.net().trace("device failed", core, said);
  if (!said) return endpoints_[core]->die(reason);
  transport_.raised().push_back({.kind = TransportEvent::kFailed, .link = this, .reason = reason});
}

SimIncarnation* SimBoxLink::find(uint32_t rank, uint32_t incarnation) const {
  auto* found = static_cast<SimIncarnation*>(current(rank));
  return found != nullptr && found->incarnation == incarnation ? found : nullptr;
}

void SimBoxLink::welcome(SimIncarnation& incarnation, SimWorkerLink& worker) {
  incarnation.worker = &worker;
  std::weak_ptr<SimBoxLink*> self = self_;
  transport_.net().after(
      transport_.net().some_delay(),
      [self, pairs = incarnation.pairs, rank = incarnation.rank, number = incarnation.incarnation] {
        auto link = self.lock();
        if (link == nullptr) return;
        const SimIncarnation* now = (*link)->find(rank, number);
        if (now == nullptr || now->worker == nullptr) return;  // died meanwhile
        for (const auto& pair : pairs) pair->establish();
      });
}

void SimBoxLink::worker_ended(uint32_t rank, SimWorkerLink* worker, bool silent) {
  auto* incarnation = static_cast<SimIncarnation*>(current(rank));
  if (incarnation == nullptr || incarnation->worker != worker) return;
  incarnation->worker = nullptr;
  if (silent) return;
  std::weak_ptr<SimBoxLink*> self = self_;
  transport_.net().after(transport_.net().some_delay(),
                         [self, rank, number = incarnation->incarnation] {
                           auto link = self.lock();
                           if (link == nullptr) return;
                           SimIncarnation* ended = (*link)->find(rank, number);
                           if (ended == nullptr) return;
                           (*link)->transport_.net().trace("disconnected", rank, number);
                           (*link)->report_end(*ended, (*link)->transport_.raised());
                         });
}

// Tickets come from the seed, as everything does.
SimTransport::SimTransport(SimNet& net, uint32_t box)
    : net_(net), address_(fmt::format("box {}", box)) {
  admissions_.new_ticket = [this] {
    return fmt::format("{:016x}{:016x}", net_.random().next(), net_.random().next());
  };
}

std::string SimTransport::describe() const {
  return fmt::format("sim: a simulated network, seed {}", net_.options().seed);
}

std::unique_ptr<BoxLink> SimTransport::open_job(const LinkLayout& layout) {
  return std::make_unique<SimBoxLink>(*this, layout);
}

Windows SimTransport::windows() const {
  if (shares_memory()) return Windows::kNone;
  return net_.options().shared_slots ? Windows::kShared : Windows::kPlaces;
}

void SimTransport::handle_events(std::vector<TransportEvent>& out) {
  out.insert(out.end(), raised_.begin(), raised_.end());
  raised_.clear();
}

SimIncarnation& SimTransport::find(std::string_view ticket) const {
  return static_cast<SimIncarnation&>(admissions_.find_ticket(ticket));
}

bool SimTransport::core_awake(uint32_t core) const {
  return std::ranges::any_of(links_, [core](const SimBoxLink* l) { return l->core_awake(core); }) ||
         std::ranges::any_of(links_above_,
                             [core](const SimWorkerLink* l) { return l->thread_woken(core); });
}

void SimTransport::forget(const SimBoxLink* link) {
  std::erase(links_, link);
  std::erase_if(raised_, [&](const TransportEvent& event) { return event.link == link; });
}

}  // namespace phub
