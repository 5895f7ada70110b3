#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>

#include "phub/commands/commands.h"
#include "phub/commands/doctor.h"
#include "transport/error.h"
#include "transport/text.h"

namespace phub {

void add_doctor_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "doctor", "Checks this host's RDMA, network, memory and processors, and tells what to do");
  const auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print JSON, for programs");
  command->footer(
      "Run it as the user and with the limits of 'phub serve'. Exit status: 1 if there are "
      "errors.");
  command->callback([json] {
    const std::vector<Finding> findings = judge(gather_facts(this_host()));
    const std::string text = *json ? to_json(findings) + "\n" : escaped_lines(describe(findings));
    std::fwrite(text.data(), 1, text.size(), stdout);
    const auto errors = std::count_if(findings.begin(), findings.end(), [](const Finding& f) {
      return f.severity == Severity::kError;
    });
    if (errors > 0) {
      std::fflush(stdout);
      fail(ErrorCode::kUnavailable, "doctor: {} of {} findings {}", errors, findings.size(),
           errors == 1 ? "is an error" : "are errors");
    }
  });
}

}  // namespace phub
