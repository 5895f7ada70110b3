#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "numa/topology.h"
#include "phub/commands/commands.h"
#include "phub/commands/config.h"
#include "phub/commands/serve_setup.h"
#include "phub/control/access.h"
#include "phub/control/port.h"
#include "phub/control/tls_front.h"
#include "phub/rack/parent_client.h"
#include "phub/server.h"
#include "phub/server_loop.h"
#include "transport/control/control_client.h"
#include "transport/control/token.h"
#include "transport/error.h"
#include "transport/paced/nic_budget.h"
#include "transport/switch/socket.h"
#include "transport/text.h"
#include "transport/tls/server.h"
#include "transport/trace.h"
#include "transport/variables.h"

namespace phub {
namespace {

// A wrong option is an error of the command line, also if a variable or the file has it.
ServeConfig configuration(const GivenOptions& given) {
  try {
    say_misspelt_variables();
    return load_config(given, [](const char* name) { return std::getenv(name); });
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalid) throw;
    throw CLI::ValidationError(error.what());
  }
}

// Whether only this machine reaches the address, as HttpServer::addresses() writes it.
bool is_local(const std::string& address) {
  const std::string host = parse_host_port(address).host;
  return host == "::1" || host.starts_with("127.");
}

// Other hosts must not come in by accident.
void check_exposed(const ServeConfig& config, const HttpServer& port) {
  std::vector<std::string> open;
  if (config.tls_cert.empty()) {
    open.push_back("without TLS whoever is on the network can read along (--tls-cert)");
  }
  if (config.tokens.empty()) {
    open.push_back("without tokens they create jobs, join and delete them (--tokens)");
  }
  for (const std::string& address : port.addresses()) {
    if (config.insecure || open.empty() || is_local(address)) continue;
    fail(ErrorCode::kInvalid,
         "other hosts can reach {}: {}; listen on 127.0.0.1, or give --insecure if everybody on "
         "the network is trusted",
         address, fmt::join(open, ", "));
  }
}

void warn_of_no_tokens(const Access& access) {
  if (access.is_empty()) spdlog::warn("the file of --tokens holds no token: everybody is refused");
}

// Says at the start what each worker of this rack would have to be told.
void look_at_parent(const ServeConfig& config) {
  constexpr uint32_t kLookMs = 2000;
  try {
    ControlClient(config.parent, token_from_environment()).status(kLookMs);
  } catch (const Error& error) {
    spdlog::warn("the parent does not take this rack yet: {}; its workers cannot join meanwhile",
                 escaped(error.what()));
  }
}

// Reads tokens, keys and certificates again on SIGHUP, and ends the ranks whose token is no longer
// good. Without them SIGHUP does nothing, but would end the server.
class SecretsWatch {
 public:
  SecretsWatch(boost::asio::io_context& io, std::optional<Access>& access, TlsFront* tls,
               TlsServerContext* tls_of_data, Server& server)
      : access_(access),
        tls_(tls),
        tls_of_data_(tls_of_data),
        server_(server),
        signals_(io, SIGHUP),
        timer_(io) {
    await_signal();
    if (access_) await_time();
  }

 private:
  void await_signal() {
    signals_.async_wait([this](const boost::system::error_code& error, int) {
      if (error) return;
      if (access_) {
        reload("tokens", *access_);
        warn_of_no_tokens(*access_);
        access_->sweep(server_);
      }
      if (tls_of_data_ != nullptr) reload("certificate and its key for data", *tls_of_data_);
      if (tls_ != nullptr) reload("certificate and its key", *tls_);
      if (!access_ && tls_ == nullptr) {
        spdlog::warn(
            "SIGHUP: this server has no --tokens and no --tls-cert to read again; restart it to "
            "add them");
      }
      await_signal();
    });
  }
  template <typename Secrets>
  static void reload(std::string_view name, Secrets& secrets) {
    try {
      secrets.reload();
      spdlog::info("the {} were read again", name);
    } catch (const std::exception& failed) {
      spdlog::error("the {} stay as they were: {}", name, escaped(failed.what()));
    }
  }
  void await_time() {
    timer_.expires_after(std::chrono::seconds(1));
    timer_.async_wait([this](const boost::system::error_code& error) {
      if (error) return;
      access_->sweep(server_);
      await_time();
    });
  }

  std::optional<Access>& access_;
  TlsFront* const tls_;
  TlsServerContext* const tls_of_data_;
  Server& server_;
  boost::asio::signal_set signals_;
  boost::asio::steady_timer timer_;
};

// A signal ends the server when every job is saved, at the latest after `most_ms`; a second one at
// once. What is being written then stays unfinished, and the checkpoint before it stands. So does
// the end of the standard input, with `with_input`.
class SavingEnd {
 public:
  SavingEnd(boost::asio::io_context& io, boost::asio::signal_set& signals, Server& server,
            uint32_t most_ms, bool with_input)
      : io_(io), signals_(signals), server_(server), most_ms_(most_ms), timer_(io), input_(io) {
    signals_.async_wait([this](const boost::system::error_code& error, int) {
      if (!error) begin();
    });
    if (!with_input) return;
    boost::system::error_code failed;
    input_.assign(dup(STDIN_FILENO), failed);
    if (failed) {
      fail(ErrorCode::kInvalid,
           "--end-with-input: the standard input is to be a pipe, a socket or a terminal: {}",
           failed.message());
    }
    read_input();
  }

 private:
  static constexpr uint32_t kLookMs = 10;

  // The writer may wait for a disk: nobody waits for the writer.
  [[noreturn]] static void end_unsaved(std::string_view why) {
    spdlog::warn("not every job was saved: {}", why);
    spdlog::shutdown();
    std::_Exit(1);
  }

  void begin() {
    if (std::exchange(has_begun_, true)) return;
    server_.save_all();
    signals_.cancel();
    signals_.async_wait([](const boost::system::error_code& error, int) {
      if (!error) end_unsaved("a second signal came");
    });
    wait(most_ms_);
  }

  // What it says does not matter.
  void read_input() {
    input_.async_read_some(
        boost::asio::buffer(read_),
        [this](const boost::system::error_code& error, size_t) { error ? begin() : read_input(); });
  }

  void wait(uint32_t left_ms) {
    if (!server_.is_saving()) return io_.stop();
    if (left_ms < kLookMs) end_unsaved(fmt::format("{} ms are over", most_ms_));
    timer_.expires_after(std::chrono::milliseconds(kLookMs));
    timer_.async_wait([this, left_ms](const boost::system::error_code& error) {
      if (!error) wait(left_ms - kLookMs);
    });
  }

  boost::asio::io_context& io_;
  boost::asio::signal_set& signals_;
  Server& server_;
  const uint32_t most_ms_;
  boost::asio::steady_timer timer_;
  boost::asio::posix::stream_descriptor input_;
  std::array<char, 64> read_;
  bool has_begun_ = false;
};

// Null: the box has none.
std::unique_ptr<ParentClient> make_parent(const ServeConfig& config) {
  if (config.parent.empty()) {
    if (config.parent_bytes_per_s == 0 || !config.standby.empty()) return nullptr;
    fail(ErrorCode::kInvalid,
         "--parent-budget needs --parent: it is of what a rack sends to its parent");
  }
  if (!config.checkpoints.folder.empty()) {
    fail(ErrorCode::kInvalid,
         "--parent and --checkpoints do not go together: the parent has what there is to save");
  }
  return std::make_unique<ParentClient>(
      ParentClient::Options{.server = config.parent,
                            .token = token_from_environment(),
                            .transport = config.parent_transport,
                            .nic_bytes_per_s = config.parent_bytes_per_s,
                            .tls = client_tls_from_environment(),
                            .rack_name = host_name()});
}

// Null: the box has none.
std::unique_ptr<ParentClient> make_standby(const ServeConfig& config) {
  if (!config.standby_of.empty() && config.checkpoints.folder.empty()) {
    fail(ErrorCode::kInvalid,
         "--standby-of needs --checkpoints: jobs go on from what a standby has written there");
  }
  if (config.standby.empty()) return nullptr;
  const auto refuse = [](bool given, std::string_view option, std::string_view why) {
    if (given) fail(ErrorCode::kInvalid, "--standby and {} do not go together: {}", option, why);
  };
  refuse(!config.checkpoints.folder.empty(), "--checkpoints",
         "the standby has what is to be saved");
  refuse(!config.standby_of.empty(), "--standby-of", "a standby has none itself");
  refuse(!config.parent.empty(), "--parent", "the parent has what is to be saved");
  refuse(!config.through_switch.empty(), "--switch", "the standby gets the sums of ranks");
  return std::make_unique<ParentClient>(
      ParentClient::Options{.server = config.standby,
                            .token = token_from_environment(),
                            .transport = config.parent_transport,
                            .nic_bytes_per_s = config.parent_bytes_per_s,
                            .tls = client_tls_from_environment(),
                            .rack_name = host_name(),
                            .title = "standby"});
}

std::string under(const Parent& parent, const std::string& server) {
  std::string text = "a rack of " + server;
  if (parent.nic_bytes_per_s() == 0) return text;
  return text + fmt::format(", at most {} from each NIC", describe_rate(parent.nic_bytes_per_s()));
}

void serve(const ServeConfig& config) {
  ServeStart start(config);
  auto options = server_options<ServerOptions>(config);
  options.checkpoints = config.checkpoints;
  options.shard_lease_ms = config.shard_lease_ms;
  std::optional<TraceWriter> trace;
  if (!config.trace.empty()) {
    trace.emplace(config.trace, "phub serve");
    options.trace_events = config.trace_events;
  }
  std::optional<Access> access;
  if (!config.tokens.empty()) {
    access.emplace(config.tokens);
    warn_of_no_tokens(*access);
    options.quota_of = [&access](const Caller& creator) { return access->quota_of(creator); };
  }
  const std::unique_ptr<ParentClient> parent = make_parent(config);
  options.parent = parent.get();
  const std::unique_ptr<ParentClient> standby = make_standby(config);
  options.standby = standby.get();
  options.standby_of = config.standby_of;
  if (!config.through_switch.empty()) {
    options.through_switch = {.address = config.through_switch, .slots = config.switch_slots};
    // What no job could use is better known now.
    broadcast_of(switch_address(config.through_switch), kSwitchPort);
  }
  const SteadyClock clock;
  Server server(options, std::move(start.nics), clock);

  boost::asio::io_context io(1);
  std::signal(SIGPIPE, SIG_IGN);
  boost::asio::signal_set signals(io, SIGINT, SIGTERM);
  SavingEnd end(io, signals, server, config.save_limit_ms, config.end_with_input);
  const std::unique_ptr<TlsFront> tls = make_tls(config, io);
  const SecretsWatch watch(io, access, tls.get(), start.tls_of_data ? &*start.tls_of_data : nullptr,
                           server);
  ServerLoop loop(server, io);
  HttpOptions http;
  http.listen = config.listen;
  http.after_request = [&loop] { loop.poll_soon(); };
  http.background = &server.background();
  if (access) http.access = &*access;
  http.tls = tls.get();
  http.audit = [](const std::string& line) { spdlog::info("{}", escaped(line)); };
  HttpServer port(io, server, http);
  check_exposed(config, port);

  server.start_threads();
  announce(options.topology, server.machine().describe(),
           parent ? under(*parent, config.parent) : "", port, tls != nullptr);
  if (parent) server.background().run([&config] { look_at_parent(config); });
  io.run();
  // The rest is short. A signal that comes twice, from a launcher and to its group, is no failure.
  signals.clear();
  for (const int signal : {SIGINT, SIGTERM}) std::signal(signal, SIG_IGN);
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
  command->callback([given] {
    const ServeConfig config = configuration(*given);
    if (!config.through_switch.empty() && !(config.join.empty() && config.parent.empty())) {
      fail(ErrorCode::kInvalid,
           "--switch does not go with --join or --parent: one box takes the sums of a switch, and "
           "serves alone");
    }
    if (!config.join.empty() && !config.parent.empty()) {
      fail(ErrorCode::kInvalid,
           "--join and --parent do not go together: a box has a part of a server's jobs, or is a "
           "rack of it");
    }
    config.join.empty() ? serve(config) : serve_under(config);
  });
}

}  // namespace phub
