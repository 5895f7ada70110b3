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

// Start-up information goes to stdout, later messages to stderr.
void start_log(const std::string& level);
void print_lines(const std::string& text);
// Throws Error if one that was asked for cannot be had.
std::vector<std::unique_ptr<Transport>> make_transports(const ServeConfig& config,
                                                        const TlsServerContext* tls);
// The soft limit of descriptors, which connections and ranks need, becomes the hard limit.
void raise_descriptor_limit();
// Logs the memory that the control groups of this process allow, and warns of a --memory-limit
// above that, or above the machine's available memory.
void log_memory_limit(const ServeConfig& config);
TlsServerFiles tls_files(const ServeConfig& config);
void check_tls_options(const ServeConfig& config);
std::string host_name();  // as people know this box
// Makes TLS for the control port. Returns null if it is plain HTTP.
std::unique_ptr<TlsFront> make_tls(const ServeConfig& config, boost::asio::io_context& io);

// Prints to stdout what serves, for whom, and where; later messages go to stderr.
void announce(const numa::Topology& topology, const std::string& server, const std::string& under,
              const HttpServer& port, bool tls);

// `phub serve --join`: serves under another server until SIGTERM or Ctrl-C.
void serve_under(const ServeConfig& config);

}  // namespace phub
