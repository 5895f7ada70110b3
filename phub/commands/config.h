// The options of `phub serve`. Each is one row of a table that drives the flag (--listen), the
// environment variable (PHUB_LISTEN), the key in a TOML file (listen = …) and the help alike.
//
// Precedence: flags, environment, file, defaults.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "phub/checkpoint/options.h"

namespace CLI {
class App;
}

namespace phub {

struct ServeConfig {
  std::vector<std::string> listen = {"127.0.0.1:7717"};
  std::string standby;                    // a server that stands by for this one; empty: none
  std::string standby_of;                 // the server for which this one stands by; empty: none
  std::string parent;                     // a server whose rack this is; empty: it has none
  std::string parent_transport = "auto";  // for the gradients that go there
  uint64_t parent_bytes_per_s = 0;        // limit of each NIC for the way there; 0: none
  std::string join;                       // a server to serve under; empty: on its own
  std::string tokens;                     // file; empty: everybody who reaches the port may use it
  std::string tls_cert, tls_key;          // PEM files; empty: plain HTTP
  std::string tls_client_ca;              // PEM file; empty: clients need no certificate
  bool tls_data = false;                  // data over tcp speaks TLS, too
  bool insecure = false;                  // other hosts may reach the port without tokens and TLS
  std::vector<std::string> transports;    // "shm", "tcp", "verbs", "ofi"; empty: all but ofi
  std::vector<std::string> devices;       // for verbs: parse_verbs_choice(); empty: all usable
  std::string ofi_provider;               // libfabric's name; empty: chosen
  uint16_t data_port = 0;                 // for tcp and verbs, ofi has the next; 0: any free port
  std::string through_switch;             // IPv4 address and UDP port, for its sums; empty: none
  uint32_t switch_slots = 512;
  uint64_t nic_bytes_per_s = 0;     // limit of each NIC towards workers; 0: none
  uint32_t cores = 0;               // for the data path; 0: all
  bool pin = true;                  // one thread per core, pinned to it
  uint64_t memory_limit_bytes = 0;  // limit for all jobs; 0 becomes default_memory_limit()
  uint64_t slot_window = 64 << 20;  // MachineOptions
  std::string socket_dir;           // for the shm transport; "": its default
  std::string topology = "this";    // this machine, an hwloc XML file, or hwloc's synthetic form
  int32_t spin_us = -1;             // before a core sleeps; -1: by the number of CPUs
  std::string log_level = "info";
  std::string trace;              // file; empty: no trace
  size_t trace_events = 200'000;  // the latest of each core
  CheckpointOptions checkpoints;
  uint32_t save_limit_ms = 10'000;   // at its end
  bool end_with_input = false;       // it ends when its standard input does
  uint32_t shard_lease_ms = 10'000;  // a shard that sends no mail for so long is lost
};

// The given values by option name ("memory-limit"), not parsed yet.
using GivenOptions = std::map<std::string, std::vector<std::string>>;
// Like getenv: null if the variable is not set.
using Environment = std::function<const char*(const char*)>;

// Adds a flag per option, and --config. Parsing the command line fills `given`.
void add_serve_options(CLI::App& app, GivenOptions& given);

// Merges flags, environment, the TOML file (named by --config or PHUB_CONFIG) and defaults. Throws
// Error(kInvalid), which names the source ("--cores", "PHUB_CORES", "phub.toml:3:9") and the
// problem; for an unknown key of the file, also the nearest known one.
ServeConfig load_config(const GivenOptions& flags, const Environment& environment);

// Only the file's part of load_config(), given its text; for fuzzing and tests.
GivenOptions parse_config_file(std::string_view text, std::string_view path);

// Bytes of the machine's memory that are available now; nullopt if that is unknown.
std::optional<uint64_t> available_memory(const std::string& root = "");
// 80% of the memory that is available now, on this machine and in the control groups of this
// process. `root` comes before /proc and /sys; tests have files of their own there.
uint64_t default_memory_limit(const std::string& root = "");

}  // namespace phub
