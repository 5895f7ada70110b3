// The options of `phub serve`. Each is one row of a table that drives the flag (--listen), the
// environment variable (PHUB_LISTEN), the key in a TOML file (listen = …) and the help alike.
//
// Precedence: flags, environment, file, defaults.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace CLI {
class App;
}

namespace phub {

struct ServeConfig {
  std::vector<std::string> listen = {"127.0.0.1:7717"};
  std::vector<std::string> transports;  // "shm", "tcp", "verbs"; empty: all that can be had
  std::vector<std::string> devices;     // for verbs: see parse_verbs_choice(); empty: chosen
  uint16_t data_port = 0;               // of tcp and verbs; 0: any that is free
  uint32_t cores = 0;                   // for the data path; 0: all
  bool pin = true;                      // one thread per core, pinned to it
  uint64_t memory_limit_bytes = 0;  // of all jobs; 0 becomes 80% of the memory available at start
  std::string socket_dir;           // of the shm transport; "": its default
  std::string topology = "this";    // or an hwloc XML file, or hwloc's synthetic description
  int32_t spin_us = -1;             // before a core sleeps; -1: by the number of CPUs
  std::string log_level = "info";
  std::string trace;              // file; empty: no trace
  size_t trace_events = 200'000;  // of each core, the last ones
};

// What was given, by option name ("memory-limit"), before it is looked at.
using GivenOptions = std::map<std::string, std::vector<std::string>>;
// Like getenv: null if the variable is not set.
using Environment = std::function<const char*(const char*)>;

// Adds a flag per option, and --config. `given` is filled when the command line is parsed.
void add_serve_options(CLI::App& app, GivenOptions& given);

// Merges flags, environment, the TOML file (of "config", flag or PHUB_CONFIG) and defaults. Throws
// Error(kInvalid) that names the source ("--cores", "PHUB_CORES", "phub.toml:3:9") and what is
// wrong; unknown keys of the file are refused, with the nearest known one.
ServeConfig load_config(const GivenOptions& flags, const Environment& environment);

// The file's part alone, as text, for fuzzing and tests.
GivenOptions parse_config_file(std::string_view text, std::string_view path);

// "64G", "512M", "1048576", "1.5T". Throws Error(kInvalid).
uint64_t parse_bytes(std::string_view text);

// 80% of the memory that is available now.
uint64_t default_memory_limit();

}  // namespace phub
