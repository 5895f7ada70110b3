#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <csignal>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "phub/commands/serve_setup.h"
#include "phub/control/handler.h"
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
    if (!given) return;
    fail(ErrorCode::kInvalid, "--join and {} do not go together: the other server has the jobs",
         option);
  };
  refuse(!config.tokens.empty(), "--tokens");
  refuse(!config.checkpoints.folder.empty(), "--checkpoints");
  refuse(!config.trace.empty(), "--trace");
  refuse(!config.standby.empty(), "--standby");
  refuse(!config.standby_of.empty(), "--standby-of");
  refuse(config.parent_bytes_per_s > 0, "--parent-budget");
}

// What the box answers at its own control port: whether it lives and is ready. Jobs are the
// server's.
class ShardHealth final : public ControlHandler {
 public:
  ShardHealth(std::string server, std::function<bool()> has_joined)
      : server_(std::move(server)), has_joined_(std::move(has_joined)) {}

  void check_ready(Reply<Done> reply) override {
    if (!has_joined_()) fail(ErrorCode::kUnavailable, "this box has not joined {}", server_);
    reply(Done{});
  }

 private:
  std::string why_not_here() const override {
    return fmt::format("this box serves under {}: ask there", server_);
  }

  const std::string server_;
  const std::function<bool()> has_joined_;
};

}  // namespace

void serve_under(const ServeConfig& config) {
  check_options(config);
  ServeStart start(config);
  auto options = server_options<ShardServerOptions>(config);
  options.name = host_name();
  const SteadyClock clock;
  ShardServer shard(options, std::move(start.nics), clock);

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
  announce(options.topology, shard.describe(), "a shard of " + config.join, port, tls != nullptr);
  {
    const ShardLoop loop(shard, link, io);
    io.run();
  }
  port.stop();
  link.leave();
  shard.stop_threads();
}

}  // namespace phub
