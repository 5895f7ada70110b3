#include "tests/worker/box.h"

#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <cstdlib>
#include <exception>
#include <optional>
#include <thread>
#include <utility>

#include "numa/topology.h"
#include "phub/control/port.h"
#include "phub/rack/parent_client.h"
#include "phub/server.h"
#include "phub/server_loop.h"
#include "phub/shard/shard_link.h"
#include "phub/shard/shard_loop.h"
#include "phub/shard/shard_server.h"
#include "phub/text_table.h"
#include "transport/beside/transport.h"
#include "transport/control/control_client.h"
#include "transport/ofi/transport.h"
#include "transport/shm/transport.h"
#include "transport/tcp/transport.h"

namespace phub::testing {

namespace {

std::string text_of(const char* variable) {
  const char* text = std::getenv(variable);
  return text ? text : "";
}

// As `phub serve` reads it.
uint64_t slot_window_wanted() {
  const std::string text = text_of("PHUB_SLOT_WINDOW");
  return text.empty() ? 0 : parse_bytes_or_0(text);
}

// A box that serves under the server at `address`.
class Shard {
 public:
  Shard(const numa::Topology& topology, const std::string& address)
      : server_(options(topology), transports(), clock_),
        link_({.server = address, .note = [](const std::string&) {}}, server_.hello()),
        loop_(std::make_unique<ShardLoop>(server_, link_, io_)) {
    server_.start_threads();
    thread_ = std::thread([this] { io_.run(); });
  }
  ~Shard() {
    io_.stop();
    thread_.join();
    loop_.reset();
    server_.stop_threads();
  }

 private:
  static ShardServerOptions options(const numa::Topology& topology) {
    ShardServerOptions options;
    options.topology = topology;
    options.pin = false;
    options.name = "a shard of the test";
    options.slot_window = slot_window_wanted();
    return options;
  }
  static std::vector<std::unique_ptr<Transport>> transports() {
    std::vector<std::unique_ptr<Transport>> transports;
    transports.push_back(make_tcp_transport());
    return transports;
  }

  SteadyClock clock_;
  boost::asio::io_context io_{1};
  ShardServer server_;
  ShardLink link_;
  std::unique_ptr<ShardLoop> loop_;
  std::thread thread_;
};

numa::Topology on_host(uint64_t host, numa::Topology topology) {
  for (numa::Node& node : topology.nodes) node.host = host;
  return topology;
}

size_t shards_wanted() {
  const std::string text = text_of("PHUB_TEST_SHARDS");
  return text.empty() ? 0 : std::stoul(text);
}

bool is_ofi_wanted() { return text_of("PHUB_TRANSPORT") == "ofi"; }
// Over memory of this host, where the workers are asked for nothing else.
std::string transport_to_parent() {
  const std::string wanted = text_of("PHUB_TRANSPORT");
  return wanted == "tcp" || wanted == "ofi" ? wanted : "auto";
}

}  // namespace

struct Box::Running {
  SteadyClock clock;
  boost::asio::io_context io{1};
  std::unique_ptr<ParentClient> parent;  // null: there is none
  std::unique_ptr<Server> server;
  std::unique_ptr<ServerLoop> loop;
  std::unique_ptr<HttpServer> port;
  std::string address;
  std::thread thread;
  std::vector<std::unique_ptr<Shard>> shards;
  std::vector<std::string> notes;  // control thread only
};

Box::Box(uint32_t cores, uint64_t memory_limit_bytes, const Wrap& wrap)
    : Box("pack:1 core:" + std::to_string(cores) + " pu:1", memory_limit_bytes, wrap) {}

Box::Box(const std::string& topology, uint64_t memory_limit_bytes, const Wrap& wrap,
         const CheckpointOptions& checkpoints, const std::string& parent,
         const SwitchOptions* through_switch, const Uplink& uplink, const std::string& listen)
    : running_(std::make_unique<Running>()) {
  Running& box = *running_;
  ServerOptions options;
  options.topology = on_host(1, numa::from_synthetic(topology));
  options.pin = false;
  options.memory_limit_bytes = memory_limit_bytes;
  options.slot_window = slot_window_wanted();
  options.checkpoints = checkpoints;
  options.note = [&box](const std::string& line) { box.notes.push_back(line); };
  if (through_switch) options.through_switch = *through_switch;
  options.standby_of = uplink.standby_of;
  if (!parent.empty()) {
    box.parent = std::make_unique<ParentClient>(ParentClient::Options{
        .server = parent,
        .transport = uplink.transport.empty() ? transport_to_parent() : uplink.transport,
        .nic_bytes_per_s = uplink.nic_bytes_per_s});
    (uplink.is_standby ? options.standby : options.parent) = box.parent.get();
  }
  std::vector<std::unique_ptr<Transport>> transports;
  transports.push_back(make_shm_transport());
  transports.push_back(make_tcp_transport());
  if (is_ofi_wanted()) {
    transports.push_back(
        make_beside(make_ofi_transport({.provider = text_of("PHUB_OFI_PROVIDER")})));
  }
  for (auto& transport : transports) {
    if (wrap) transport = wrap(std::move(transport));
  }
  box.server = std::make_unique<Server>(std::move(options), std::move(transports), box.clock);
  box.loop = std::make_unique<ServerLoop>(*box.server, box.io);
  HttpOptions http;
  http.listen = {listen};
  http.after_request = [&box] { box.loop->poll_soon(); };
  http.background = &box.server->background();
  box.port = std::make_unique<HttpServer>(box.io, *box.server, http);
  box.address = box.port->addresses().front();
  box.server->start_threads();
  box.thread = std::thread([&box] { box.io.run(); });
  const size_t wanted = checkpoints.folder.empty() && parent.empty() ? shards_wanted() : 0;
  while (box.shards.size() < wanted) {
    box.shards.push_back(std::make_unique<Shard>(
        on_host(box.shards.size() + 2, numa::from_synthetic(topology)), box.address));
    while (status().shards.size() < box.shards.size()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
    }
  }
}

Box::~Box() {
  running_->shards.clear();
  running_->io.stop();
  running_->thread.join();
  running_->port.reset();
  running_->loop.reset();
  running_->server->stop_threads();
}

const std::string& Box::address() const { return running_->address; }
std::vector<LogRecord> Box::log(const std::string& job) {
  return ControlClient(address()).log(job);
}
std::vector<std::string> Box::notes() {
  std::vector<std::string> notes;
  on_control([&](Server&) { notes = running_->notes; });
  return notes;
}
ServerStatus Box::status() { return ControlClient(address()).status(); }

bool Box::becomes_empty() {
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  for (;;) {
    const ServerStatus now = status();
    if (now.jobs.empty() && now.memory_bytes == 0) return true;
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
  }
}

void Box::on_control(const std::function<void(Server&)>& f) {
  std::promise<void> done;
  boost::asio::post(running_->io, [&] {
    f(*running_->server);
    done.set_value();
  });
  done.get_future().get();
}

JoinReply join_parent(ParentClient& parent, const JoinRequest& request) {
  std::optional<Result<JoinReply>> answer;
  parent.join(request, [&answer](Result<JoinReply> result) { answer = std::move(result); });
  while (!answer) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    parent.poll();
  }
  if (!*answer) throw Error(answer->code, answer->message);
  return *answer->value;
}

void each_rank(uint32_t ranks, const std::function<void(uint32_t rank)>& body) {
  std::vector<std::future<void>> threads;
  for (uint32_t r = 0; r < ranks; ++r) {
    threads.push_back(std::async(std::launch::async, [&body, r] { body(r); }));
  }
  std::exception_ptr first;
  for (auto& thread : threads) {
    try {
      thread.get();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

void each_worker(const Box& box, const JobSpec& spec,
                 const std::function<void(Worker& worker, uint32_t rank)>& body,
                 const std::string& transport) {
  each_rank(spec.world_size, [&](uint32_t rank) {
    WorkerOptions options = box.options(spec, rank);
    if (!transport.empty()) options.transport = transport;
    Worker worker(options);
    worker.wait_all();
    body(worker, rank);
  });
}

}  // namespace phub::testing
