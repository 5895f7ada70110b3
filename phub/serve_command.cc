#include "phub/serve_command.h"

#include <fmt/format.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "numa/topology.h"
#include "phub/config.h"
#include "phub/http_server.h"
#include "phub/server.h"
#include "phub/server_loop.h"
#include "transport/error.h"
#include "transport/shm_nic.h"
#include "transport/tcp_nic.h"
#include "transport/text.h"
#include "transport/trace.h"
#include "transport/verbs_nic.h"

namespace phub {
namespace {

numa::Topology find_topology(const std::string& text) {
  if (text == "this") return numa::this_machine();
  const bool is_file = text.find('/') != text.npos || text.ends_with(".xml");
  return is_file ? numa::from_xml(text) : numa::from_synthetic(text);
}

// What the operator reads goes to stdout once; what happens later to stderr, if it matters.
void start_log(const std::string& level) {
  auto logger = spdlog::stderr_logger_st("phub");
  logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e%z %l %v");
  logger->set_level(spdlog::level::from_str(level == "warn" ? "warning" : level));
  spdlog::set_default_logger(std::move(logger));
}

void print_lines(const std::string& text) {
  fmt::print("{}{}", text, text.ends_with('\n') ? "" : "\n");
}

// A wrong option is a wrong command line, wherever it was written.
ServeConfig configuration(const GivenOptions& given) {
  try {
    return load_config(given, [](const char* name) { return std::getenv(name); });
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalid) throw;
    throw CLI::ValidationError(error.what());
  }
}

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

// The RDMA NIC; null where there is no device, or nobody asked for one.
std::unique_ptr<Nic> find_verbs_nic(const ServeConfig& config,
                                    const std::vector<std::string>& hosts, bool asked) {
  std::vector<VerbsChoice> choices;
  for (const std::string& device : config.devices) choices.push_back(parse_verbs_choice(device));
  const bool local = std::all_of(hosts.begin(), hosts.end(), is_loopback);
  if (choices.empty() && local && !asked) return nullptr;
  std::vector<VerbsFinding> passed_over;
  const std::vector<VerbsPort> ports = choose_verbs_ports(choices, hosts, passed_over);
  std::string findings;
  for (const VerbsFinding& finding : passed_over) {
    findings += fmt::format("{}{} port {} {}", findings.empty() ? "" : "; ", finding.device,
                            finding.port, finding.problem);
  }
  if (!findings.empty()) spdlog::warn("RDMA: not used: {}", findings);
  if (!ports.empty()) return make_verbs_nic({.ports = ports, .port = config.data_port});
  if (asked) {
    fail(ErrorCode::kUnavailable, "transport verbs: no RDMA device can be used: {}",
         findings.empty() ? "there are none (ibv_devices lists them)" : findings);
  }
  return nullptr;
}

std::vector<std::unique_ptr<Nic>> make_nics(const ServeConfig& config) {
  std::vector<std::string> hosts;
  for (const std::string& listen : config.listen) hosts.push_back(parse_host_port(listen).host);
  const auto wanted = [&](std::string_view name) {
    return std::find(config.transports.begin(), config.transports.end(), name) !=
           config.transports.end();
  };
  const bool all = config.transports.empty();
  std::vector<std::unique_ptr<Nic>> nics;
  if (all || wanted("shm")) nics.push_back(make_shm_nic({.socket_dir = config.socket_dir}));
  if (all || wanted("tcp")) {
    nics.push_back(
        make_tcp_nic({.addresses = tcp_data_addresses(hosts), .port = config.data_port}));
  }
  if (all || wanted("verbs")) {
    const bool asked = wanted("verbs") || !config.devices.empty();
    if (auto nic = find_verbs_nic(config, hosts, asked)) nics.push_back(std::move(nic));
  } else if (!config.devices.empty()) {
    fail(ErrorCode::kInvalid, "--devices are given, and --transports leaves verbs out");
  }
  return nics;
}

// Connections and ranks need descriptors; the soft limit is for programs that cannot take many.
void raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

void serve(const ServeConfig& config) {
  start_log(config.log_level);
  raise_descriptor_limit();
  std::vector<std::unique_ptr<Nic>> nics = make_nics(config);

  ServerOptions options;
  options.topology = find_topology(config.topology);
  options.cores = config.cores;
  options.pin = config.pin;
  options.spin_us = config.spin_us;
  options.memory_limit_bytes = config.memory_limit_bytes;
  options.note = [](const std::string& line) { spdlog::warn("{}", line); };
  std::optional<TraceWriter> trace;
  if (!config.trace.empty()) {
    trace.emplace(config.trace, "phub serve");
    options.trace_events = config.trace_events;
  }
  const SteadyClock clock;
  Server server(options, std::move(nics), clock);

  boost::asio::io_context io(1);
  std::signal(SIGPIPE, SIG_IGN);
  boost::asio::signal_set signals(io, SIGINT, SIGTERM);
  signals.async_wait([&](const boost::system::error_code& error, int) {
    if (!error) io.stop();
  });
  ServerLoop loop(server, io);
  HttpOptions http;
  http.listen = config.listen;
  http.after_request = [&loop] { loop.poll_soon(); };
  http.background = &server.background();
  HttpServer port(io, server, http);

  server.start_threads();
  print_lines(numa::describe(options.topology));
  print_lines(server.describe());
  for (const std::string& address : port.addresses()) fmt::print("listening on {}\n", address);
  std::fflush(stdout);
  io.run();
  port.stop();
  server.stop_threads();
  if (trace) {
    server.write_trace(*trace);
    trace->close();
  }
}

}  // namespace

void add_serve_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("serve", "Runs the server until SIGTERM or Ctrl-C");
  const auto given = std::make_shared<GivenOptions>();
  add_serve_options(*command, *given);
  command->callback([given] { serve(configuration(*given)); });
}

}  // namespace phub
