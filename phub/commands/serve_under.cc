#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <csignal>
#include <cstdio>
#include <memory>
#include <optional>
#include <vector>

#include "numa/topology.h"
#include "phub/commands/serve_setup.h"
#include "phub/commands/shard_health.h"
#include "phub/control/port.h"
#include "phub/shard/shard_link.h"
#include "phub/shard/shard_loop.h"
#include "phub/shard/shard_server.h"
#include "transport/control/token.h"
#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

namespace asio = boost::asio;

void check_options(const ServeConfig& config) {
  const auto refuse = [](bool given, std::string_view option) {
    if (given)
      fail(ErrorCode::kInvalid,
           "--join and {} do not go together: the other server has "
           "the jobs",
           option);
  };
  refuse(!config.tokens.empty(), "--tokens");
  refuse(!config.checkpoints.folder.empty(), "--checkpoints");
  refuse(!config.trace.empty(), "--trace");
  refuse(config.parent_bytes_per_s > 0, "--parent-budget");
}

}  // namespace

void serve_under(const ServeConfig& config) {
  start_log(config.log_level);
  raise_descriptor_limit();
  log_memory_limit(config);
  check_options(config);
  check_tls_options(config);
  std::optional<TlsServerContext> tls_of_data;
  if (config.tls_data) tls_of_data.emplace(tls_files(config), TlsServerContext::Use::kData);
  std::vector<std::unique_ptr<Transport>> nics =
      make_transports(config, tls_of_data ? &*tls_of_data : nullptr);

  ShardServerOptions options;
  options.topology = numa::find_topology(config.topology);
  options.cores = config.cores;
  options.pin = config.pin;
  options.spin_us = config.spin_us;
  options.name = host_name();
  options.memory_limit_bytes = config.memory_limit_bytes;
  options.note = [](const std::string& line) { spdlog::warn("{}", escaped(line)); };
  const SteadyClock clock;
  ShardServer shard(options, std::move(nics), clock);

  asio::io_context io(1);
  std::signal(SIGPIPE, SIG_IGN);
  asio::signal_set signals(io, SIGINT, SIGTERM);
  signals.async_wait([&io](const boost::system::error_code& error, int) {
    if (!error) io.stop();
  });
  ShardLink link({.server = config.join,
                  .token = token_from_environment(),
                  .tls = client_tls_from_environment(),
                  .note = [](const std::string& line) { spdlog::info("{}", escaped(line)); }},
                 shard.hello());
  ShardHealth health(config.join, [&link] { return link.has_joined(); });
  const std::unique_ptr<TlsFront> tls = make_tls(config, io);
  HttpOptions http;
  http.listen = config.listen;
  // That of the server, which may be on this machine.
  if (http.listen == ServeConfig{}.listen) http.listen = {"127.0.0.1:0"};
  http.tls = tls.get();
  HttpServer port(io, health, http);
  shard.start_threads();
  print_lines(numa::describe(options.topology));
  print_lines(shard.describe());
  fmt::print("a shard of {}\n", config.join);
  for (const std::string& address : port.addresses()) {
    fmt::print("listening on {}{}\n", tls ? "https://" : "", address);
  }
  std::fflush(stdout);
  {
    const ShardLoop loop(shard, link, io);
    io.run();
  }
  port.stop();
  link.leave();
  shard.stop_threads();
}

}  // namespace phub
