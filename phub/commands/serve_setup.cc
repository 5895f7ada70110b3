#include "phub/commands/serve_setup.h"

#include <fmt/format.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

#include "phub/commands/container_memory.h"
#include "phub/text_table.h"
#include "transport/beside/transport.h"
#include "transport/error.h"
#include "transport/ofi/transport.h"
#include "transport/paced/transport.h"
#include "transport/shm/transport.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/transport.h"
#include "transport/text.h"
#include "transport/verbs/library.h"
#include "transport/verbs/transport.h"

namespace phub {
namespace {

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

// Throws Error for an address to which no worker can connect. Warns where only workers on this host
// can, although no loopback address was named.
void check_addresses(std::vector<std::string> hosts) {
  const bool has_every = std::erase_if(hosts, is_every_address) > 0;
  const std::vector<std::string> numbers = tcp_data_addresses(hosts);
  const auto is_local = [](const std::string& number) {
    return tcp_address(number, 0).is_loopback();
  };
  if (has_every || std::ranges::any_of(hosts, is_loopback)) return;
  if (!std::ranges::all_of(numbers, is_local)) return;
  spdlog::warn(
      "on this host '{}' means {} (see /etc/hosts), which workers on other hosts cannot reach; "
      "name an address of the network with --listen, or '*' for all",
      escaped(hosts.front()), numbers.front());
}

// The RDMA transport; null if there is no usable device, or none is wanted.
std::unique_ptr<Transport> find_verbs(const ServeConfig& config,
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
  if (!ports.empty()) return make_verbs_transport({.ports = ports, .port = config.data_port});
  if (asked) {
    if (findings.empty()) findings = verbs_library_problem();
    fail(ErrorCode::kUnavailable, "transport verbs: no usable RDMA device: {}",
         findings.empty() ? "this host has none (ibv_devices lists them)" : findings);
  }
  return nullptr;
}

// Puts the budget around the transports that have NICs.
void pace(const ServeConfig& config, std::vector<std::unique_ptr<Transport>>& nics) {
  bool any = false;
  for (std::unique_ptr<Transport>& nic : nics) {
    if (nic->shares_memory()) continue;
    nic = make_paced(std::move(nic), {.bytes_per_s = config.nic_bytes_per_s});
    any = true;
  }
  if (!any) {
    fail(ErrorCode::kInvalid,
         "--nic-budget needs a transport over a NIC (tcp, verbs, ofi): over shared memory nothing "
         "is sent");
  }
}

void start_log(const std::string& level) {
  auto logger = spdlog::stderr_logger_st("phub");
  logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e%z %l %v");
  logger->set_level(spdlog::level::from_str(level == "warn" ? "warning" : level));
  spdlog::set_default_logger(std::move(logger));
}

void print_lines(const std::string& text) {
  fmt::print("{}{}", escaped_lines(text), text.ends_with('\n') ? "" : "\n");
}

// Throws Error: one that was asked for cannot be had.
std::vector<std::unique_ptr<Transport>> make_transports(const ServeConfig& config,
                                                        const TlsServerContext* tls) {
  std::vector<std::string> hosts;
  for (const std::string& listen : config.listen) hosts.push_back(parse_host_port(listen).host);
  check_addresses(hosts);
  const auto wanted = [&](std::string_view name) {
    return std::find(config.transports.begin(), config.transports.end(), name) !=
           config.transports.end();
  };
  const bool all = config.transports.empty();
  std::vector<std::unique_ptr<Transport>> nics;
  if (all || wanted("shm")) nics.push_back(make_shm_transport({.socket_dir = config.socket_dir}));
  if (all || wanted("tcp")) {
    nics.push_back(
        make_tcp_transport({.nics = tcp_nics(hosts), .port = config.data_port, .tls = tls}));
  }
  if (all || wanted("verbs")) {
    const bool asked = wanted("verbs") || !config.devices.empty();
    if (auto nic = find_verbs(config, hosts, asked)) {
      if (tls != nullptr) {
        spdlog::warn(
            "--tls-data: what goes over RDMA is not encrypted; --transports shm,tcp leaves "
            "it out");
      }
      nics.push_back(make_beside(std::move(nic)));
    }
  } else if (!config.devices.empty()) {
    fail(ErrorCode::kInvalid, "--devices needs verbs among --transports");
  }
  if (wanted("ofi")) {
    if (tls != nullptr) {
      spdlog::warn("--tls-data: what goes over ofi is not encrypted by phub");
    }
    const auto port = static_cast<uint16_t>(config.data_port == 0 ? 0 : config.data_port + 1);
    nics.push_back(make_beside(make_ofi_transport(
        {.addresses = tcp_data_addresses(hosts), .port = port, .provider = config.ofi_provider})));
  } else if (!config.ofi_provider.empty()) {
    fail(ErrorCode::kInvalid, "--ofi-provider needs ofi among --transports");
  }
  if (config.nic_bytes_per_s > 0) pace(config, nics);
  return nics;
}

// The soft limit of descriptors, which connections and ranks need, becomes the hard limit.
void raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// Logs what the control groups of this process allow, and warns of a --memory-limit above that, or
// above the machine's available memory.
void log_memory_limit(const ServeConfig& config) {
  const ContainerMemory allowed = container_memory();
  const std::string limit = human_bytes(config.memory_limit_bytes);
  if (!allowed.unknown.empty()) {
    spdlog::warn(
        "{}: a limit of this container's memory may be there that is not seen, and the kernel "
        "kills "
        "a box that exceeds it; jobs may take {} (--memory-limit)",
        escaped(allowed.unknown), limit);
  }
  const std::optional<uint64_t> machine = available_memory();
  if (machine && *machine < std::min(config.memory_limit_bytes, allowed.available)) {
    spdlog::warn(
        "--memory-limit is {}, and {} of this machine's memory are available: the kernel kills the "
        "box, or another program, when its jobs take more. Lower --memory-limit",
        limit, human_bytes(*machine));
    return;
  }
  if (allowed.file.empty()) return;
  const std::string groups = fmt::format("{} of the {} that its control group may use ({})",
                                         human_bytes(allowed.available), human_bytes(allowed.limit),
                                         escaped(allowed.file));
  if (config.memory_limit_bytes > allowed.available) {
    spdlog::warn(
        "--memory-limit is {}, and this box has {}: the kernel kills it when its jobs take more. "
        "Lower --memory-limit, or raise the limit of the container or unit (MemoryMax)",
        limit, groups);
  } else {
    spdlog::info("jobs may take {} of memory; this box has {}", limit, groups);
  }
}

TlsServerFiles tls_files(const ServeConfig& config) {
  return {config.tls_cert, config.tls_key, config.tls_client_ca};
}

void check_tls_options(const ServeConfig& config) {
  if (config.tls_cert.empty() != config.tls_key.empty()) {
    fail(ErrorCode::kInvalid, "--tls-cert and --tls-key go together: a certificate, and its key");
  }
  if (!config.tls_cert.empty()) return;
  if (!config.tls_client_ca.empty()) {
    fail(ErrorCode::kInvalid, "--tls-client-ca needs --tls-cert and --tls-key");
  }
  if (config.tls_data) fail(ErrorCode::kInvalid, "--tls-data needs --tls-cert and --tls-key");
}

}  // namespace

ServeStart::ServeStart(const ServeConfig& config) {
  start_log(config.log_level);
  raise_descriptor_limit();
  log_memory_limit(config);
  check_tls_options(config);
  if (config.tls_data) tls_of_data.emplace(tls_files(config), TlsServerContext::Use::kData);
  nics = make_transports(config, tls_of_data ? &*tls_of_data : nullptr);
}

void announce(const numa::Topology& topology, const std::string& server, const std::string& under,
              const HttpServer& port, bool tls) {
  print_lines(numa::describe(topology));
  print_lines(server);
  if (!under.empty()) fmt::print("{}\n", under);
  for (const std::string& address : port.addresses()) {
    fmt::print("listening on {}{}\n", tls ? "https://" : "", address);
  }
  std::fflush(stdout);
}

std::string host_name() {
  std::array<char, 256> name = {};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "a box without a name";
}

std::unique_ptr<TlsFront> make_tls(const ServeConfig& config, boost::asio::io_context& io) {
  if (config.tls_cert.empty()) return nullptr;
  TlsOptions options;
  options.files = tls_files(config);
  options.note = [&io](const std::string& line) {
    boost::asio::post(io, [line] { spdlog::info("{}", escaped(line)); });
  };
  return std::make_unique<TlsFront>(std::move(options));
}

}  // namespace phub
