// A whole box in the test's process: production server, cores' threads, control port. Workers use
// shared memory, or what PHUB_TRANSPORT says.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "numa/topology.h"
#include "phub/http_server.h"
#include "phub/server.h"
#include "phub/server_loop.h"
#include "tests/worker/options.h"
#include "transport/control_client.h"
#include "transport/shm_nic.h"
#include "transport/tcp_nic.h"

namespace phub::testing {

class Box {
 public:
  // What a test puts around a transport.
  using Wrap = std::function<std::unique_ptr<Nic>(std::unique_ptr<Nic>)>;

  explicit Box(uint32_t cores = 2, uint64_t memory_limit_bytes = uint64_t{1} << 33,
               const Wrap& wrap = {})
      : Box("pack:1 core:" + std::to_string(cores) + " pu:1", memory_limit_bytes, wrap) {}
  explicit Box(const std::string& topology, uint64_t memory_limit_bytes = uint64_t{1} << 33,
               const Wrap& wrap = {}) {
    ServerOptions options;
    options.topology = numa::from_synthetic(topology);
    options.pin = false;
    options.memory_limit_bytes = memory_limit_bytes;
    std::vector<std::unique_ptr<Nic>> nics;
    nics.push_back(make_shm_nic());
    nics.push_back(make_tcp_nic());
    for (auto& nic : nics) {
      if (wrap) nic = wrap(std::move(nic));
    }
    server_ = std::make_unique<Server>(std::move(options), std::move(nics), clock_);
    loop_ = std::make_unique<ServerLoop>(*server_, io_);
    HttpOptions http;
    http.listen = {"127.0.0.1:0"};
    http.after_request = [this] { loop_->poll_soon(); };
    http.background = &server_->background();
    port_ = std::make_unique<HttpServer>(io_, *server_, http);
    address_ = port_->addresses().front();
    server_->start_threads();
    thread_ = std::thread([this] { io_.run(); });
  }
  ~Box() {
    io_.stop();
    thread_.join();
    port_.reset();
    loop_.reset();
    server_->stop_threads();
  }

  const std::string& address() const { return address_; }
  WorkerOptions options(JobSpec spec) const { return options_of(address_, std::move(spec)); }
  std::vector<LogRecord> log(const std::string& job) { return ControlClient(address_).log(job); }
  ServerStatus status() { return ControlClient(address_).status(); }
  // Calls `f(server)` on the control thread, and waits for it.
  template <typename F>
  void on_control(F f) {
    std::promise<void> done;
    boost::asio::post(io_, [&] {
      f(*server_);
      done.set_value();
    });
    done.get_future().get();
  }

 private:
  SteadyClock clock_;
  boost::asio::io_context io_{1};
  std::unique_ptr<Server> server_;
  std::unique_ptr<ServerLoop> loop_;
  std::unique_ptr<HttpServer> port_;
  std::string address_;
  std::thread thread_;
};

// Runs `body(rank)` in a thread per rank; the first exception is thrown on.
template <typename Body>
void each_rank(uint32_t ranks, Body body) {
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

}  // namespace phub::testing
