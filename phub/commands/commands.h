// The subcommands of `phub`. Each add_… adds one to `app`. When CLI11 parses it, the subcommand
// runs: it prints to stdout, and throws Error if it fails.
#pragma once

#include <string>

#include "transport/control/messages.h"

namespace CLI {
class App;
}

namespace phub {

// Prints the topology and the addresses, then serves until SIGTERM or SIGINT. Throws Error if the
// server cannot start.
void add_serve_command(CLI::App& app);

// Prints how a box would distribute a model, before it is bought or started. Throws Error if the
// model, topology or an option is unknown or cannot be met.
void add_plan_command(CLI::App& app);

// Prints the things that this host lacks for phub. Throws Error if a finding has severity error.
void add_doctor_command(CLI::App& app);

// `phub token new`: prints a new token, and its entry for the tokens file.
void add_token_command(CLI::App& app);

// `phub switch`: adds the packets that workers send through this host's interfaces, in the kernel,
// until SIGTERM or SIGINT. Throws Error if the kernel or this build cannot.
void add_switch_command(CLI::App& app);

// Prints the status of a running server. Throws Error if none answers.
void add_status_command(CLI::App& app);

// Lists, shows, verifies and exports checkpoints. Throws Error if one is damaged that is verified
// or needed.
void add_checkpoint_command(CLI::App& app);

// The status as text: a table of jobs, and notes on ranks that are missing or slow.
std::string describe(const ServerStatus& status);

}  // namespace phub
