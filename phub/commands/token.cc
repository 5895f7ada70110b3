// `phub token new`: a token for a user, and the entry of the tokens file that knows it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "phub/commands/commands.h"
#include "phub/control/tokens.h"

namespace phub {
namespace {

struct TokenArguments {
  std::string name;
  std::string role = "train";
  std::vector<std::string> jobs = {"*"};
  uint32_t days = 0;  // 0: it does not expire
};

std::string expiry(uint32_t days) {
  using namespace std::chrono;
  const std::time_t at = system_clock::to_time_t(system_clock::now() + hours(24) * days);
  std::tm utc{};
  gmtime_r(&at, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

void make(const TokenArguments& arguments) {
  const std::string token = make_token();
  std::string entry = fmt::format(
      "[[token]]\nname = \"{}\"\nrole = \"{}\"\njobs = [\"{}\"]\nsha256 = \"{}\"\n", arguments.name,
      arguments.role, fmt::join(arguments.jobs, "\", \""), hex_of(sha256(token)));
  if (arguments.days > 0) entry += fmt::format("expires = {}\n", expiry(arguments.days));
  parse_tokens(entry, "phub token new");  // what the server would refuse is refused here
  fmt::print(
      "# For {}, as PHUB_TOKEN or in a file of mode 0600 that PHUB_TOKEN_FILE names. It is not "
      "shown again.\n{}\n\n# For the tokens file of the server, which gets SIGHUP then:\n{}",
      arguments.name, token, entry);
}

}  // namespace

void add_token_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("token", "Makes tokens for 'phub serve --tokens'");
  command->require_subcommand(1);
  CLI::App* fresh = command->add_subcommand("new", "Prints a new token and its entry for the file");
  const auto arguments = std::make_shared<TokenArguments>();
  fresh->add_option("--name", arguments->name, "Whose it is; it is in the server's log")
      ->required();
  fresh->add_option("--role", arguments->role, "observe, train (and observe) or admin (everything)")
      ->check(CLI::IsMember({"observe", "train", "admin"}))
      ->capture_default_str();
  fresh->add_option("--jobs", arguments->jobs, "Patterns of the jobs' names, with * and ?")
      ->type_name("PATTERN")
      ->capture_default_str();
  fresh->add_option("--days", arguments->days, "It expires after so many days; 0: never")
      ->check(CLI::Range(0u, 36500u))
      ->capture_default_str();
  fresh->footer(
      "Examples:\n"
      "  phub token new --name alice --jobs 'alice-*'\n"
      "  phub token new --name prometheus --role observe\n"
      "  phub token new --name root --role admin --days 90");
  fresh->callback([arguments] { make(*arguments); });
}

}  // namespace phub
