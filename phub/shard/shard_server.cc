#include "phub/shard/shard_server.h"

#include <utility>

namespace phub {

ShardServer::ShardServer(ShardServerOptions options,
                         std::vector<std::unique_ptr<Transport>> transports, const Clock& clock)
    : options_(std::move(options)),
      clock_(clock),
      machine_(options_, std::move(transports), clock),
      mail_(machine_.all_cores()),
      budget_(options_.memory_limit_bytes),
      notes_(options_.note),
      host_{machine_, mail_, budget_, builder_, options_.store, reports_} {}

ShardServer::~ShardServer() {
  stop_threads();
  builder_.drop();
  for (auto& [number, part] : parts_) part.detach_all();
  parts_.clear();  // links before their transports
}

void ShardServer::start_threads() {
  builder_.start();
  machine_.start_threads();
}

void ShardServer::stop_threads() {
  builder_.stop();
  machine_.stop_threads();
}

std::vector<int> ShardServer::event_fds() const {
  std::vector<int> fds = machine_.event_fds();
  fds.push_back(builder_.event_fd());
  return fds;
}

ShardHello ShardServer::hello() const {
  ShardHello hello{.name = options_.name};
  const numa::Topology& topology = machine_.topology();
  hello.host = topology.nodes.front().host;
  for (const numa::Node& node : topology.nodes) {
    hello.nodes.push_back({node.os_node, node.memory_bytes});
  }
  for (const numa::Core& core : topology.cores) hello.cores.push_back({core.node, core.os_cpu});
  for (const auto& transport : machine_.transports()) {
    const std::string name(transport->name());
    hello.transports.push_back(name);
    for (const numa::NicInfo& nic : machine_.topology_for(*transport).nics) {
      hello.nics.push_back({name, nic.name, nic.node});
    }
  }
  return hello;
}

void ShardServer::handle(const ShardOrder& order) {
  if (order.kind == ShardDo::kMake) {
    if (order.part.empty()) return;
    const auto [at, is_new] = parts_.try_emplace(order.job, order.job, host_);
    if (is_new) at->second.make(order.part.front());
    return;
  }
  const auto at = parts_.find(order.job);
  if (at == parts_.end()) return;  // it could not be made, or has ended
  ServedPart& part = at->second;
  if (order.kind == ShardDo::kStart && part.is_made()) {
    for (uint32_t core = 0; core < part.job().cores(); ++core) {
      by_core_job_[&part.job().core_job(core)] = {&part, core};
    }
  }
  part.handle(order);
}

void ShardServer::poll() {
  mail_.flush();
  for (const auto& core : machine_.all_cores()) {
    core->clear_report_fd();
    CoreReport said;
    while (core->receive(said)) {
      const auto at = by_core_job_.find(said.job);
      if (at != by_core_job_.end()) at->second.part->handle(at->second.core, said);
    }
  }
  builder_.finish();
  events_.clear();
  for (const auto& transport : machine_.transports()) transport->handle_events(events_);
  for (const TransportEvent& event : events_) handle(event);
  for (auto at = parts_.begin(); at != parts_.end();) {
    ServedPart& part = at->second;
    part.tell_if_active();
    if (part.is_made() && !part.ending()) {
      const std::string note = part.job().note_of_windows();
      if (!note.empty()) notes_.add(clock_.now_ms(), note);
    }
    if (!part.gone()) {
      ++at;
      continue;
    }
    std::erase_if(by_core_job_, [&part](const auto& each) { return each.second.part == &part; });
    part.free();
    at = parts_.erase(at);
  }
}

void ShardServer::handle(const TransportEvent& event) {
  if (event.kind == TransportEvent::kRefused) return notes_.add(clock_.now_ms(), event.reason);
  for (auto& [number, part] : parts_) {
    const bool is_its = part.is_made() && &part.job().link() == event.link;
    if (is_its && !part.ending()) part.handle(event);
  }
}

// A rank waits for a state, so its pieces go first.
std::optional<ShardPiece> ShardServer::next_piece() {
  for (const bool of_state : {true, false}) {
    for (auto& [number, part] : parts_) {
      if (auto piece = part.next_piece(of_state)) return piece;
    }
  }
  return std::nullopt;
}

void ShardServer::moved(const ShardPiece& piece, const std::optional<Error>& failed) {
  parts_.at(piece.place.job).moved(piece, failed);
}

void ShardServer::end_all() {
  for (auto& [number, part] : parts_) part.end();
  reports_.clear();
}

}  // namespace phub
