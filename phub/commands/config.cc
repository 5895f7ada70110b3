#include "phub/commands/config.h"

#include <toml++/toml.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <fstream>
#include <sstream>

#include "phub/commands/container_memory.h"
#include "phub/text_file.h"
#include "phub/text_table.h"
#include "transport/control/server_address.h"
#include "transport/error.h"
#include "transport/ofi/providers.h"
#include "transport/paced/nic_budget.h"
#include "transport/switch/packet.h"
#include "transport/switch/socket.h"
#include "transport/text.h"
#include "transport/verbs/devices.h"

namespace phub {
namespace {

constexpr size_t kMaxConfigBytes = 1u << 20;

using Values = const std::vector<std::string>&;

// The type of the value in a TOML file. Flags and variables are always text.
enum class Kind { kText, kTexts, kInteger, kBytes, kSwitch };

struct Option {
  std::string_view name;         // of the flag, without dashes
  std::string_view placeholder;  // in the help
  Kind kind;
  std::string_view help;
  void (*set)(ServeConfig&, Values);  // throws Error without a source
};

int64_t parse_integer(const std::string& text, int64_t min, int64_t max) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < min || value > max) {
    fail(ErrorCode::kInvalid, "must be an integer from {} to {}, got '{}'", min, max,
         printable(text));
  }
  return value;
}

bool parse_switch(const std::string& text) {
  for (const std::string_view yes : {"true", "yes", "on", "1"}) {
    if (text == yes) return true;
  }
  for (const std::string_view no : {"false", "no", "off", "0"}) {
    if (text == no) return false;
  }
  fail(ErrorCode::kInvalid, "must be true or false, got '{}'", printable(text));
}

std::string parse_word(const std::string& text, const std::vector<std::string_view>& words) {
  if (std::find(words.begin(), words.end(), text) != words.end()) return text;
  fail(ErrorCode::kInvalid, "must be one of {}, got '{}'", fmt::join(words, ", "), printable(text));
}

std::string parse_text(const std::string& text) {
  if (text.empty()) fail(ErrorCode::kInvalid, "must not be empty");
  if (text.find('\0') != text.npos) fail(ErrorCode::kInvalid, "must not hold a zero byte");
  return text;
}

std::vector<std::string> split_list(std::string_view text) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

constexpr std::array<Option, 36> kOptions = {{
    {"listen", "HOST:PORT", Kind::kTexts,
     "Address of the control port; may be given several times. Port 0: any free port; *:PORT: all "
     "addresses of this machine. [127.0.0.1:7717; with --join 127.0.0.1:0]",
     [](ServeConfig& config, Values values) {
       for (const std::string& value : values) parse_host_port(value);
       config.listen = values;
     }},
    {"join", "HOST:PORT", Kind::kText,
     "Serve under this server: this box gets a part of the chunks of its jobs over tcp and verbs. "
     "--listen then says where data is taken, and where /healthz and /readyz are; the token is "
     "PHUB_TOKEN's, of role admin. [alone]",
     [](ServeConfig& config, Values values) {
       parse_server_address(values[0]);
       config.join = values[0];
     }},
    {"parent", "HOST:PORT", Kind::kText,
     "This box is a rack of that server: it sums the gradients of one group of a job's ranks, and "
     "sends the sum there; the token is PHUB_TOKEN's, of role train. [alone]",
     [](ServeConfig& config, Values values) {
       parse_server_address(values[0]);
       config.parent = values[0];
     }},
    {"parent-transport", "NAME", Kind::kText,
     "With --parent: over what gradients go there, tcp, verbs, ofi, or auto: that of the job where "
     "the parent has it, else verbs where both can, else tcp, and memory where the parent is on "
     "this host. [auto]",
     [](ServeConfig& config, Values values) {
       parse_word(values[0], {"auto", "tcp", "verbs", "ofi"});
       config.parent_transport = values[0];
     }},
    {"parent-budget", "RATE", Kind::kText,
     "With --parent: what each NIC sends there at most, with headers: 1gbit, 250mbit, or bytes per "
     "second. What the parent sends down has the parent's --nic-budget. [no limit]",
     [](ServeConfig& config, Values values) { config.parent_bytes_per_s = parse_rate(values[0]); }},
    {"standby", "HOST:PORT", Kind::kText,
     "That server stands by for this one: it makes the same steps, and goes on with the jobs when "
     "this one dies; the token is PHUB_TOKEN's, of role train. [none]",
     [](ServeConfig& config, Values values) {
       parse_server_address(values[0]);
       config.standby = values[0];
     }},
    {"standby-of", "HOST:PORT", Kind::kText,
     "This server stands by for that one, which has it as its --standby: it makes no jobs of its "
     "own, and needs --checkpoints. [none]",
     [](ServeConfig& config, Values values) {
       parse_server_address(values[0]);
       config.standby_of = values[0];
     }},
    {"tokens", "FILE", Kind::kText,
     "Who may use the server: a TOML file of mode 0600 with the entries that 'phub token new' "
     "prints, read again on SIGHUP. [whoever reaches the port may]",
     [](ServeConfig& config, Values values) { config.tokens = parse_text(values[0]); }},
    {"tls-cert", "FILE", Kind::kText,
     "Certificate of the control port, which then speaks TLS: PEM, those that lead to its "
     "authority after it. Read again on SIGHUP. [plain HTTP]",
     [](ServeConfig& config, Values values) { config.tls_cert = parse_text(values[0]); }},
    {"tls-key", "FILE", Kind::kText, "Its key: PEM, of mode 0600 or 0640. [none]",
     [](ServeConfig& config, Values values) { config.tls_key = parse_text(values[0]); }},
    {"tls-client-ca", "FILE", Kind::kText,
     "Let in only clients with a certificate of one of these authorities (PEM). [all]",
     [](ServeConfig& config, Values values) { config.tls_client_ca = parse_text(values[0]); }},
    {"tls-data", "[BOOL]", Kind::kSwitch,
     "Gradients and parameters over tcp go over TLS, too; shm and verbs stay as they are. [false]",
     [](ServeConfig& config, Values values) { config.tls_data = parse_switch(values[0]); }},
    {"insecure", "[BOOL]", Kind::kSwitch,
     "Listen beyond this machine although whoever is on the network can use the server, or read "
     "along. [false]",
     [](ServeConfig& config, Values values) { config.insecure = parse_switch(values[0]); }},
    {"transports", "NAME", Kind::kTexts,
     "shm, tcp, verbs or ofi; may be given several times, or separated by commas. [all that are "
     "available, but ofi: tcp at the --listen addresses, verbs unless these are loopback]",
     [](ServeConfig& config, Values values) {
       config.transports.clear();
       for (const std::string& value : values) {
         for (const std::string& name : split_list(value)) {
           config.transports.push_back(parse_word(name, {"shm", "tcp", "verbs", "ofi"}));
         }
       }
     }},
    {"devices", "DEVICE[:PORT[:GID]]", Kind::kTexts,
     "RDMA devices to use; may be given several times, or separated by commas. [every active port, "
     "with the GID of the --listen address, or else its first RoCE v2 GID]",
     [](ServeConfig& config, Values values) {
       config.devices.clear();
       for (const std::string& value : values) {
         for (const std::string& device : split_list(value)) {
           parse_verbs_choice(device);
           config.devices.push_back(device);
         }
       }
     }},
    {"ofi-provider", "NAME", Kind::kText,
     "The provider of libfabric that ofi uses, by libfabric's name, such as efa or 'tcp;ofi_rxm'. "
     "[the first of those that 'phub doctor' lists]",
     [](ServeConfig& config, Values values) {
       check_ofi_provider_name(values[0]);
       config.ofi_provider = values[0];
     }},
    {"data-port", "PORT", Kind::kInteger,
     "Port for the workers' tcp and verbs connections, to be opened in a firewall; those of ofi "
     "have the next one. 0: any free port. [0]",
     [](ServeConfig& config, Values values) {
       config.data_port = static_cast<uint16_t>(parse_integer(values[0], 0, 65535));
     }},
    {"switch", "ADDRESS:PORT", Kind::kText,
     "The workers' hosts and this one are behind a switch that adds ('phub switch'): keys in int32 "
     "go through it to this IPv4 address of the NIC there, one job's at a time. The UDP port is "
     "the first core's, the others have the next ones. [none]",
     [](ServeConfig& config, Values values) {
       switch_address(values[0]);
       config.through_switch = values[0];
     }},
    {"switch-slots", "N", Kind::kInteger, "Slots of that switch, for all cores together. [512]",
     [](ServeConfig& config, Values values) {
       config.switch_slots = static_cast<uint32_t>(parse_integer(values[0], 1, kMostSwitchSlots));
     }},
    {"nic-budget", "RATE", Kind::kText,
     "What each NIC sends to workers at most, with headers: 1gbit, 250mbit, or bytes per second. "
     "Each core has its part of it. [no limit]",
     [](ServeConfig& config, Values values) { config.nic_bytes_per_s = parse_rate(values[0]); }},
    {"cores", "N", Kind::kInteger, "Number of cores that sum and optimize; 0: all. [0]",
     [](ServeConfig& config, Values values) {
       config.cores = static_cast<uint32_t>(parse_integer(values[0], 0, 65536));
     }},
    {"pin", "BOOL", Kind::kSwitch, "Pin each thread to its core. [true]",
     [](ServeConfig& config, Values values) { config.pin = parse_switch(values[0]); }},
    {"memory-limit", "BYTES", Kind::kBytes,
     "Memory that all jobs together may use, with K, M, G or T. [80% of the available memory]",
     [](ServeConfig& config, Values values) {
       config.memory_limit_bytes = parse_bytes(values[0]);
     }},
    {"slot-window", "BYTES", Kind::kBytes,
     "Over NICs: room for the gradients of each rank of a job while they are summed, at least for "
     "a chunk at each core, with K, M, G or T; 0: for all of them. [64M]",
     [](ServeConfig& config, Values values) { config.slot_window = parse_bytes_or_0(values[0]); }},
    {"socket-dir", "DIR", Kind::kText,
     "Directory of the shared-memory transport's Unix socket; only its owner may enter. "
     "[$XDG_RUNTIME_DIR/phub, or /tmp/phub-UID]",
     [](ServeConfig& config, Values values) { config.socket_dir = parse_text(values[0]); }},
    {"topology", "TOPOLOGY", Kind::kText,
     "'this' for this machine, an hwloc XML file, or hwloc's synthetic form such as 'pack:2 core:8 "
     "pu:1'. [this]",
     [](ServeConfig& config, Values values) { config.topology = parse_text(values[0]); }},
    {"spin-us", "MICROSECONDS", Kind::kInteger,
     "How long an idle core spins before it sleeps; -1 chooses by the number of CPUs. [-1]",
     [](ServeConfig& config, Values values) {
       config.spin_us = static_cast<int32_t>(parse_integer(values[0], -1, 1'000'000));
     }},
    {"log-level", "LEVEL", Kind::kText, "trace, debug, info, warn, error or off. [info]",
     [](ServeConfig& config, Values values) {
       config.log_level = parse_word(values[0], {"trace", "debug", "info", "warn", "error", "off"});
     }},
    {"trace", "FILE", Kind::kText,
     "On exit, write a trace of the cores (arrivals, waits, sums, write-backs of every chunk) to "
     "FILE, for ui.perfetto.dev. [no trace]",
     [](ServeConfig& config, Values values) { config.trace = parse_text(values[0]); }},
    {"checkpoints", "DIR", Kind::kText,
     "Directory for checkpoints: jobs that did not end go on from them when the server is started "
     "again. Made if it is not there; one server at a time. [none are written]",
     [](ServeConfig& config, Values values) { config.checkpoints.folder = parse_text(values[0]); }},
    {"checkpoint-every", "ROUNDS", Kind::kInteger,
     "Rounds from one checkpoint of a job to the next. [100]",
     [](ServeConfig& config, Values values) {
       config.checkpoints.every = parse_integer(values[0], 1, 1'000'000'000);
     }},
    {"checkpoint-keep", "N", Kind::kInteger, "Checkpoints that are kept of each job. [3]",
     [](ServeConfig& config, Values values) {
       config.checkpoints.keep = static_cast<uint32_t>(parse_integer(values[0], 1, 1000));
     }},
    {"save-limit-ms", "MS", Kind::kInteger,
     "After SIGTERM or Ctrl-C the server saves its jobs for so many milliseconds at most. [10000]",
     [](ServeConfig& config, Values values) {
       config.save_limit_ms = static_cast<uint32_t>(parse_integer(values[0], 10, 3'600'000));
     }},
    {"end-with-input", "[BOOL]", Kind::kSwitch,
     "End, as after SIGTERM, when the standard input does: a pipe that those hold open who need "
     "the "
     "server. [false]",
     [](ServeConfig& config, Values values) { config.end_with_input = parse_switch(values[0]); }},
    {"shard-lease-ms", "MS", Kind::kInteger,
     "A shard that sends no mail for so many milliseconds is lost, and its jobs with it. [10000]",
     [](ServeConfig& config, Values values) {
       config.shard_lease_ms = static_cast<uint32_t>(parse_integer(values[0], 100, 3'600'000));
     }},
    {"trace-events", "N", Kind::kInteger,
     "The trace keeps so many of each core's latest events, 48 bytes each. [200000]",
     [](ServeConfig& config, Values values) {
       config.trace_events = static_cast<size_t>(parse_integer(values[0], 1, 1'000'000'000));
     }},
}};

// memory-limit is memory_limit in a file and PHUB_MEMORY_LIMIT in the environment.
std::string file_key(std::string_view name) {
  std::string key(name);
  std::replace(key.begin(), key.end(), '-', '_');
  return key;
}
std::string variable(std::string_view name) {
  std::string text = "PHUB_" + file_key(name);
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return toupper(c); });
  return text;
}

std::string place(std::string_view path, const toml::source_region& source) {
  return fmt::format("{}:{}:{}", path, source.begin.line, source.begin.column);
}

std::string_view in_words(Kind kind) {
  switch (kind) {
    case Kind::kText:
      return "a string";
    case Kind::kTexts:
      return "a string or a list of strings";
    case Kind::kInteger:
      return "an integer";
    case Kind::kBytes:
      return "an integer, or a string such as \"64G\"";
    case Kind::kSwitch:
      return "true or false";
  }
  return "";
}

// Converts a value of the file to the text of a flag. Nothing: it has the wrong type.
std::vector<std::string> texts_of(const toml::node& node, Kind kind) {
  const bool takes_text = kind == Kind::kText || kind == Kind::kTexts || kind == Kind::kBytes;
  const bool takes_integer = kind == Kind::kInteger || kind == Kind::kBytes;
  if (const auto* text = node.as_string(); text != nullptr && takes_text) return {text->get()};
  if (const auto* number = node.as_integer(); number != nullptr && takes_integer) {
    return {std::to_string(number->get())};
  }
  if (const auto* flag = node.as_boolean(); flag != nullptr && kind == Kind::kSwitch) {
    return {flag->get() ? "true" : "false"};
  }
  std::vector<std::string> texts;
  if (const auto* list = node.as_array(); list != nullptr && kind == Kind::kTexts) {
    for (const toml::node& entry : *list) {
      if (!entry.is_string()) return {};
      texts.push_back(entry.as_string()->get());
    }
  }
  return texts;
}

void apply(ServeConfig& config, const Option& option, const std::vector<std::string>& values,
           std::string_view source) {
  try {
    option.set(config, values);
  } catch (const Error& error) {
    fail(error.code(), "{}: {}", source, error.what());
  }
}

void add_flag(CLI::App& app, const Option& option, GivenOptions& given) {
  const std::string name(option.name);
  const std::string help = fmt::format("{} (env {})", option.help, variable(name));
  CLI::Option* flag = nullptr;
  if (option.kind == Kind::kTexts) {
    flag = app.add_option_function<std::vector<std::string>>(
        "--" + name, [&given, name](const std::vector<std::string>& v) { given[name] = v; }, help);
    flag->type_size(1)->allow_extra_args(false);
  } else {
    flag = app.add_option_function<std::string>(
        "--" + name, [&given, name](const std::string& value) { given[name] = {value}; }, help);
  }
  flag->type_name(std::string(option.placeholder));
  if (option.placeholder.starts_with('[')) flag->expected(0, 1)->default_str("true");
}

// The control port of a box under another is not the default one, and that of verbs no port of tcp.
void check_data_port(const ServeConfig& config) {
  const bool over_tcp =
      config.transports.empty() || std::ranges::count(config.transports, "tcp") > 0;
  const bool is_chosen = config.join.empty() || config.listen != ServeConfig{}.listen;
  if (config.data_port == 0 || !over_tcp || !is_chosen) return;
  for (const std::string& listen : config.listen) {
    if (parse_host_port(listen).port != config.data_port) continue;
    fail(ErrorCode::kInvalid,
         "--data-port {} is the port of --listen {}, too: choose another for data",
         config.data_port, listen);
  }
}

}  // namespace

void add_serve_options(CLI::App& app, GivenOptions& given) {
  app.add_option_function<std::string>(
         "--config", [&given](const std::string& path) { given["config"] = {path}; },
         "TOML file with the options below, '-' written as '_' (env PHUB_CONFIG)")
      ->type_name("FILE");
  for (const Option& option : kOptions) {
    add_flag(app, option, given);
  }
  app.footer(
      "Examples:\n"
      "  phub serve                                  workers on this machine, shared memory\n"
      "  phub serve --listen '*:7717' --insecure     for every host of a network that is trusted\n"
      "  phub serve --listen '*:7717' --tokens /etc/phub/tokens.toml --insecure --cores 8\n"
      "  phub serve --devices mlx5_0:1:3,mlx5_1\n"
      "  phub serve --config /etc/phub.toml          with  listen = [\"10.0.0.1:7717\"]\n"
      "                                                    memory_limit = \"64G\"\n"
      "Flags override PHUB_* variables, and these override the file.");
}

ServeConfig load_config(const GivenOptions& flags, const Environment& environment) {
  ServeConfig config;
  std::string path;
  if (const char* variable_path = environment("PHUB_CONFIG")) path = variable_path;
  if (const auto given = flags.find("config"); given != flags.end()) path = given->second.at(0);
  GivenOptions file;
  if (!path.empty()) file = parse_config_file(read_file(path, kMaxConfigBytes), path);

  for (const Option& option : kOptions) {
    const std::string name(option.name);
    const std::string env_name = variable(name);
    if (const auto flag = flags.find(name); flag != flags.end()) {
      apply(config, option, flag->second, "--" + name);
    } else if (const char* value = environment(env_name.c_str())) {
      const bool is_list = option.kind == Kind::kTexts;
      apply(config, option, is_list ? split_list(value) : std::vector<std::string>{value},
            env_name);
    } else if (const auto entry = file.find(name); entry != file.end()) {
      apply(config, option, entry->second, path + ": " + file_key(name));
    }
  }
  if (config.memory_limit_bytes == 0) config.memory_limit_bytes = default_memory_limit();
  check_data_port(config);
  return config;
}

GivenOptions parse_config_file(std::string_view text, std::string_view path) {
  toml::table table;
  try {
    table = toml::parse(text);
  } catch (const toml::parse_error& error) {
    fail(ErrorCode::kInvalid, "{}: {}", place(path, error.source()), error.description());
  }
  std::vector<std::string> keys;
  for (const Option& option : kOptions) keys.push_back(file_key(option.name));
  GivenOptions given;
  for (const auto& [key, node] : table) {
    const auto known = std::find(keys.begin(), keys.end(), key.str());
    if (known == keys.end()) {
      const std::string close = nearest(key.str(), {keys.begin(), keys.end()});
      fail(ErrorCode::kInvalid, "{}: unknown option '{}'{}", place(path, key.source()),
           printable(key.str()),
           close.empty() ? fmt::format("; there are {}", fmt::join(keys, ", "))
                         : fmt::format("; did you mean '{}'?", close));
    }
    const Option& option = kOptions[static_cast<size_t>(known - keys.begin())];
    std::vector<std::string> values = texts_of(node, option.kind);
    if (values.empty()) {
      fail(ErrorCode::kInvalid, "{}: {} must be {}", place(path, node.source()), *known,
           in_words(option.kind));
    }
    ServeConfig scratch;
    apply(scratch, option, values, fmt::format("{}: {}", place(path, node.source()), *known));
    given[std::string(option.name)] = std::move(values);
  }
  return given;
}

std::optional<uint64_t> available_memory(const std::string& root) {
  std::ifstream file(root + "/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    uint64_t kib = 0;
    if (!(words >> name >> kib) || name != "MemAvailable:") continue;
    return kib * 1024;
  }
  return std::nullopt;
}

uint64_t default_memory_limit(const std::string& root) {
  if (const std::optional<uint64_t> machine = available_memory(root)) {
    return std::min(*machine, container_memory(root).available) / 5 * 4;
  }
  fail(ErrorCode::kUnavailable,
       "/proc/meminfo does not say how much memory is available; give --memory-limit");
}

}  // namespace phub
