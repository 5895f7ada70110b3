// The common beginning of every `phub serve`.
#pragma once

#include <spdlog/spdlog.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "numa/topology.h"
#include "phub/commands/config.h"
#include "phub/control/port.h"
#include "phub/control/tls_front.h"
#include "transport/text.h"
#include "transport/tls/server.h"
#include "transport/transport.h"

namespace boost::asio {
class io_context;
}

namespace phub {

// The log, the limits of this process, and its transports.
struct ServeStart {
  // Throws Error: the options do not go together, or a transport that was asked for cannot be had.
  explicit ServeStart(const ServeConfig& config);

  std::optional<TlsServerContext> tls_of_data;
  std::vector<std::unique_ptr<Transport>> nics;
};

// What the options of both kinds of server have.
template <typename Options>
Options server_options(const ServeConfig& config) {
  Options options;
  options.topology = numa::find_topology(config.topology);
  options.cores = config.cores;
  options.pin = config.pin;
  options.spin_us = config.spin_us;
  options.memory_limit_bytes = config.memory_limit_bytes;
  options.slot_window = config.slot_window;
  options.note = [](const std::string& line) { spdlog::warn("{}", escaped(line)); };
  return options;
}

std::string host_name();  // as people know this box
// Makes TLS for the control port. Returns null if it is plain HTTP.
std::unique_ptr<TlsFront> make_tls(const ServeConfig& config, boost::asio::io_context& io);

// Prints to stdout what serves, for whom, and where; later messages go to stderr.
void announce(const numa::Topology& topology, const std::string& server, const std::string& under,
              const HttpServer& port, bool tls);

// `phub serve --join`: serves under another server until SIGTERM or Ctrl-C.
void serve_under(const ServeConfig& config);

}  // namespace phub
