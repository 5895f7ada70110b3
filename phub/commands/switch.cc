// `phub switch`: makes a switch of this host's interfaces add what workers send through it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "phub/commands/commands.h"
#include "transport/switch/program.h"

namespace phub {
namespace {

struct SwitchArguments {
  std::vector<std::string> interfaces;
  uint32_t slots = 512;
};

void print_counters(const SwitchProgram& program) {
  const auto counters = program.counters();
  fmt::print(
      "parts: {} added, {} of them made a sum complete; {} repeated a sum, {} came again "
      "before it was complete; {} late, {} refused, {} from a wrong port\n",
      counters[kSwitchAdded] + counters[kSwitchComplete], counters[kSwitchComplete],
      counters[kSwitchRepeated], counters[kSwitchStill], counters[kSwitchLate],
      counters[kSwitchRefused], counters[kSwitchForged]);
}

void run(const SwitchArguments& arguments) {
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGINT);
  sigaddset(&ends, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &ends, nullptr);
  SwitchProgram program(arguments.slots);
  program.attach(arguments.interfaces);
  fmt::print("adds with {} slots; workers 0 to {} are behind {}\n", arguments.slots,
             arguments.interfaces.size() - 1, fmt::join(arguments.interfaces, ", "));
  std::fflush(stdout);
  int signal = 0;
  sigwait(&ends, &signal);
  print_counters(program);
  std::fflush(stdout);
}

}  // namespace

void add_switch_command(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("switch", "Adds in the switch, in the kernel, until SIGTERM or Ctrl-C");
  const auto arguments = std::make_shared<SwitchArguments>();
  command
      ->add_option("--interfaces", arguments->interfaces,
                   "The switch's ports to workers 0, 1, and so on, in this order")
      ->delimiter(',')
      ->required();
  command
      ->add_option("--slots", arguments->slots,
                   "Parts that are being added at a time; each takes 2 KiB of the kernel's memory")
      ->check(CLI::Range(1u, uint32_t{kMostSwitchSlots}))
      ->capture_default_str();
  command->footer(
      "Run it where the interfaces are joined by a bridge. It attaches a program (XDP) to each of\n"
      "them; when it ends, the program is gone, and the bridge passes everything as before. Needs\n"
      "root, or CAP_BPF and CAP_NET_ADMIN.\n"
      "Example:\n"
      "  phub switch --interfaces swp1,swp2,swp3,swp4");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace phub
