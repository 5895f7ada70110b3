// The pieces of the simulated network behind transport/transport.h. Use them through SimNet.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/admission.h"
#include "transport/sim/net.h"
#include "transport/slot_window.h"
#include "transport/transport.h"

namespace phub {

class SimBoxLink;
class SimEndpoint;
class SimWorkerLink;

enum SimSide : uint8_t { kSimBox = 0, kSimWorker = 1 };

// A queue pair with both its ends. Kept alive by the endpoints and by its scheduled events.
class SimPair : public std::enable_shared_from_this<SimPair> {
 public:
  SimPair(SimNet& net, uint32_t id) : net_(net), id_(id) {}

  struct Flying : Write {
    uint64_t number = 0;  // among those of its end
  };
  struct Arrived {
    Arrival arrival;
    uint64_t source = 0;                  // place of the payload at the end that sent it
    std::vector<std::byte> payload = {};  // to a windowed end, unless it is near
  };

  // The state of one end. A write posted at an end is read from its `source` and lands in the other
  // end's `target`; without a target only the immediate moves.
  struct End {
    SimEndpoint* endpoint = nullptr;  // null: nobody polls here (not yet, or no more)
    QueuePair name;                   // its name for this queue pair
    SimMemory source;
    SimMemory target;
    bool windowed = false;         // what arrives gets a place of a window when it is polled
    std::deque<Write> posted;      // not flushed
    std::deque<Flying> in_flight;  // flushed, not landed
    uint64_t launched = 0;
    uint64_t last_arrival = 0;  // the last arrival among those that keep their order
    uint32_t unacknowledged = 0;
    std::deque<Arrived> inbox;
    bool refused = false;   // a post found no room: the end wants to know when there is some
    bool has_room = false;  // since then; the end does not know
    bool noticing = false;  // ok == false is on its way
    bool noticed = false;   // ok == false was seen
    bool closed = false;
  };
  End& end(SimSide side) { return ends_[side]; }
  const End& end(SimSide side) const { return ends_[side]; }
  uint32_t id() const { return id_; }
  // Both ends are of one host: writes go through a socket of it, and memory.
  void make_near() { near_ = true; }
  bool near() const { return near_; }
  bool whole() const { return established_ && !dead_; }
  bool dead() const { return dead_; }

  void establish();
  bool post(SimSide side, const Write& write);
  void flush(SimSide side);
  void taken(SimSide side, const Arrived& arrived);  // polled

  void break_now();          // a fault of the network
  void close(SimSide side);  // this end takes nothing and sends nothing any more
  void crash(bool silent);   // the worker's end dies

 private:
  void launch(SimSide side, const Write& write);
  bool lands_inside(const Write& write, SimSide from) const;
  void land_part(const Write& write, SimSide from, size_t bytes);
  void land(SimSide from, uint64_t number);
  void arrive(SimSide from, const Write& write);
  void settle(SimSide from, bool immediates);
  void acknowledge(SimSide side);
  void make_room(SimSide side);
  void notice(SimSide side, uint64_t delay_ns);

  SimNet& net_;
  const uint32_t id_;
  bool near_ = false;
  bool established_ = false;
  bool dead_ = false;
  std::array<End, 2> ends_;
};

class SimEndpoint : public virtual Endpoint {
 public:
  // A core of the box has one queue pair per rank, a worker one per queue.
  SimEndpoint(SimNet& net, SimSide side, uint32_t qps);
  ~SimEndpoint() override;

  size_t poll(std::span<Arrival> out) override;
  bool post(QueuePair to, const Write& write) override;
  void flush() override;
  bool arm(std::span<const uint32_t> wake_after) override;
  void disarm() override { armed_ = false; }
  int wake_fd() const override { return -1; }
  bool crosses_nic(QueuePair to) const override;

  void take_over(uint32_t qp, std::shared_ptr<SimPair> pair);
  void release(uint32_t qp);  // closes this end of the pair
  const std::shared_ptr<SimPair>& pair(uint32_t qp) const { return pairs_[qp]; }
  QueuePair name_of(uint32_t qp) const {
    return side_ == kSimBox ? QueuePair{.rank = qp} : QueuePair{.queue = qp};
  }
  uint32_t qps() const { return static_cast<uint32_t>(pairs_.size()); }
  void wake_if_armed(const SimPair& pair, bool always);
  bool awake() const { return !armed_ || woken_; }
  bool woken() const { return armed_ && woken_; }
  void die(std::string reason) { failure_ = std::move(reason), woken_ = true; }

 protected:
  void check_alive() const;
  void set_window(SlotWindow& window) { window_ = &window; }

  SimNet& net_;

 private:
  bool has_arrivals(const std::shared_ptr<SimPair>& pair) const;
  bool waits_for_place(const SimPair::Arrived& next) const;
  void land_in_window(const SimPair& pair, const SimPair::Arrived& next) const;

  const SimSide side_;
  SlotWindow* window_ = nullptr;
  std::vector<std::shared_ptr<SimPair>> pairs_;
  uint32_t next_qp_ = 0;
  bool armed_ = false;
  bool woken_ = false;
  std::string failure_;  // the failure of its device; empty: none
  std::vector<uint32_t> wake_after_;
};

class SimCoreEndpoint final : public SimEndpoint, public BoxEndpoint {
 public:
  SimCoreEndpoint(SimNet& net, uint32_t max_ranks, SimBoxLink& link, uint32_t core)
      : SimEndpoint(net, kSimBox, max_ranks), link_(link), core_(core) {}
  void attach(uint32_t rank, uint32_t incarnation) override;
  void detach(uint32_t rank) override;
  void detach_all();
  void use_window(SlotWindow& window) override { set_window(window); }
  uint64_t now_ns() const override { return net_.now_ns(); }

 private:
  SimBoxLink& link_;
  const uint32_t core_;
};

class SimWorkerLink : public WorkerLink {
 public:
  // Uses the tickets of these incarnations, one of each box that has queues of the job. Throws
  // Error. `below`: the worker is this box, with the layout's threads; null: it is a process.
  // `near`: the box on its host; null: there is none.
  SimWorkerLink(SimNet& net, const std::vector<SimIncarnation*>& incarnations,
                const LinkLayout& layout, SimTransport* below, const SimTransport* near);
  ~SimWorkerLink() override;

  std::span<std::byte> gradients() override { return *gradients_; }
  std::span<const std::byte> results() override {
    return std::span<const std::byte>(*results_).subspan(results_first_, results_bytes_);
  }
  std::span<std::byte> writable_results() override {
    return zero_copy() ? std::span<std::byte>() : std::span(*results_);
  }
  Endpoint& endpoint() override { return *endpoints_.front(); }
  Endpoint& endpoint_of(uint32_t thread) override { return *endpoints_[thread]; }
  bool thread_woken(uint32_t thread) const;
  bool connected() override { return *connected_; }
  std::string nic_of(uint32_t queue) const override;
  bool zero_copy() const override;
  void reconnect(const Offer& offer) override;

  void die(bool silent);
  bool break_one();
  bool closed_by_box() const;
  bool fail_device(uint32_t core, bool said);  // false: its box closed the connection
  void box_closed(const AdmissionLink* box);   // the worker notices after a while

 private:
  uint32_t queues() const { return endpoints_.front()->qps(); }
  SimEndpoint& endpoint_for(uint32_t queue) const;
  const std::shared_ptr<SimPair>& pair(uint32_t queue) const {
    return endpoint_for(queue).pair(queue);
  }
  void take_pairs(uint32_t first_queue, std::span<const std::shared_ptr<SimPair>> pairs);
  void welcome(const std::vector<SimIncarnation*>& incarnations);
  bool is_near(const SimBoxLink& box) const;
  void count_link();

  SimNet& net_;
  std::vector<SimBoxLink*> boxes_;  // null: it closed the connection
  const uint32_t rank_;
  SimTransport* const below_;
  const SimTransport* const near_;
  const std::vector<uint32_t> queue_thread_;  // empty: there is one thread
  SimMemory gradients_, results_;
  uint64_t results_first_ = 0, results_bytes_ = 0;
  std::vector<std::unique_ptr<SimEndpoint>> endpoints_;  // by thread
  std::shared_ptr<bool> connected_ = std::make_shared<bool>(true);
};

struct SimIncarnation final : Incarnation {
  SimBoxLink& box() const;
  ~SimIncarnation() override;  // the worker, if there is one, sees the end of its connection
  // Uses its ticket. Throws Error(kUnauthorized) when it was used, or by another worker than the
  // one that is there (null: none).
  void use(const SimWorkerLink* by);

  std::vector<std::shared_ptr<SimPair>> pairs;  // per core
  bool used = false;
  SimWorkerLink* worker = nullptr;
};

class SimBoxLink final : public AdmissionLink {
 public:
  SimBoxLink(SimTransport& transport, const LinkLayout& layout);
  ~SimBoxLink() override;

  std::span<std::byte> results() override { return *results_; }
  BoxEndpoint& endpoint(uint32_t core) override { return *endpoints_[core]; }
  std::span<const std::byte> slots(uint32_t rank) override;
  bool slots_belong_to_worker() const override;
  bool can_reconnect() const override { return !slots_belong_to_worker(); }
  Offer reconnect(uint32_t rank) override;

  const SimTransport& transport() const { return transport_; }
  bool core_awake(uint32_t core) const { return endpoints_[core]->awake(); }
  void fail_device(uint32_t core, bool said);
  // A worker has used the incarnation's ticket.
  void welcome(SimIncarnation& incarnation, SimWorkerLink& worker);
  // The layout of the worker's memory, or of memory as large.
  const LinkLayout& layout() const { return layout_; }
  const SimMemory& slots_of(uint32_t rank) const { return slots_[rank]; }
  const SimMemory& results_of_box() const { return results_; }
  void worker_ended(uint32_t rank, SimWorkerLink* worker, bool silent);

 private:
  std::unique_ptr<Incarnation> make(uint32_t rank) override;
  Offer open(Incarnation& opened) override;
  void disconnect(Incarnation& disconnected) override;
  SimIncarnation* find(uint32_t rank, uint32_t incarnation) const;  // null: it is gone

  SimTransport& transport_;
  const std::shared_ptr<SimBoxLink*> self_;  // events outlive the link: they hold it weakly
  const LinkLayout layout_;
  SimMemory results_;
  std::vector<std::unique_ptr<SimCoreEndpoint>> endpoints_;
  std::vector<SimMemory> slots_;  // per rank
};

class SimTransport : public Transport {
 public:
  SimTransport(SimNet& net, uint32_t box);

  std::string_view name() const override { return "sim"; }
  std::string describe() const override;
  bool shares_memory() const override { return net_.options().shared_memory; }
  Windows windows() const override;
  std::unique_ptr<BoxLink> open_job(const LinkLayout& layout) override;
  int event_fd() const override { return -1; }
  void handle_events(std::vector<TransportEvent>& out) override;

  // There are no half-open connections here: a worker that connects shows a ticket at once.
  SimIncarnation& find(std::string_view ticket) const;  // throws Error
  const std::string& address() const { return address_; }

  // Its links use these.
  SimNet& net() { return net_; }
  Admissions& admissions() { return admissions_; }
  std::vector<TransportEvent>& raised() { return raised_; }
  void remember(const SimBoxLink* link) { links_.push_back(link); }
  void forget(const SimBoxLink* link);
  // The links of this box as a worker of boxes above it.
  std::vector<SimWorkerLink*>& links_above() { return links_above_; }
  bool core_awake(uint32_t core) const;

 private:
  SimNet& net_;
  const std::string address_;
  Admissions admissions_;
  std::vector<const SimBoxLink*> links_;
  std::vector<SimWorkerLink*> links_above_;
  std::vector<TransportEvent> raised_;
};

}  // namespace phub
