#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "phub/commands/commands.h"
#include "phub/text_table.h"
#include "transport/control/control_client.h"
#include "transport/control/messages_json.h"
#include "transport/control/server_address.h"
#include "transport/control/token.h"
#include "transport/error.h"
#include "transport/paced/nic_budget.h"
#include "transport/text.h"

namespace phub {
namespace {

constexpr double kDefaultWatchS = 1;
constexpr size_t kMostNotes = 20;  // of a kind and job

std::string rate(double bytes_per_s) { return fmt::format("{:.2f} GB/s", bytes_per_s / 1e9); }

std::string duration(double seconds) {
  const auto s = static_cast<uint64_t>(std::max(0.0, seconds));
  if (s < 10) return fmt::format("{:.1f} s", std::max(0.0, seconds));
  if (s < 60) return fmt::format("{} s", s);
  if (s < 3600) return fmt::format("{} min {} s", s / 60, s % 60);
  return fmt::format("{} h {} min", s / 3600, s / 60 % 60);
}

std::vector<std::string> job_row(const JobStatus& job) {
  const auto live = std::count_if(job.ranks.begin(), job.ranks.end(),
                                  [](const RankStatus& rank) { return rank.state == "live"; });
  return {printable(job.name),
          job.state,
          job.transport,
          fmt::format("{} of {}", live, std::max<size_t>(job.max_ranks, job.ranks.size())),
          fmt::format("{}", job.completed_round),
          job.durable_round > 0 ? fmt::format("{}", job.durable_round) : "-",
          fmt::format("{:.1f}", job.rounds_per_s),
          fmt::format("{:.0f}", job.flow.chunks_per_s),
          rate(job.flow.bytes_in_per_s),
          rate(job.flow.bytes_out_per_s),
          fmt::format("{}", job.keys),
          fmt::format("{}", job.chunks),
          human_bytes(job.memory_bytes),
          job.optimizer};
}

// "round 418 waits for rank 1: key 'conv1.weight' and others, 12 chunks; nothing from it for 3.2 s"
std::string waiting(const RankStatus& rank) {
  if (rank.waited_chunks == 0) {
    return fmt::format("waits for the initial parameters from rank {}", rank.rank);
  }
  std::string text = fmt::format("round {} waits for rank {}: key '{}'", rank.waited_round,
                                 rank.rank, printable(rank.waited_key));
  if (rank.waited_chunks > 1) {
    text += fmt::format(" and others, {} chunks", rank.waited_chunks);
  }
  if (rank.waited_s > 0) text += fmt::format("; nothing from it for {}", duration(rank.waited_s));
  return text;
}

// "rank 3 is late: 12 rounds went on without it"
std::string late_note(const RankStatus& rank) {
  return fmt::format("rank {} is late: {} round{} went on without it", rank.rank, rank.late,
                     rank.late == 1 ? "" : "s");
}

// "branch 1 runs: forked from 0 before round 30, 45 rounds"
std::string branch_note(const BranchStatus& branch) {
  const std::string_view state = branch.runs         ? " runs"
                                 : branch.on_disk    ? " killed"
                                 : branch.killed > 0 ? " killed, and not on disk yet"
                                                     : "";
  std::string text = fmt::format("branch {}{}: ", branch.branch, state);
  if (branch.round > 0) {
    text += fmt::format("forked from {} before round {}, ", branch.parent, branch.round);
  }
  text += fmt::format("{} rounds", branch.rounds);
  return branch.batch > 0 ? text + fmt::format(", batches of {}", branch.batch) : text;
}

// "" where no switch that adds was used, and none was to be.
std::string through_switch(const JobStatus& job) {
  if (job.switch_chunks == 0 && job.switch_ended.empty()) return "";
  std::string text = fmt::format("{} chunks came through the switch", job.switch_chunks);
  if (!job.switch_ended.empty()) {
    text += fmt::format(", and none do now: {}", printable(job.switch_ended));
  }
  return text;
}

// "windows of gradients have 76.00 MiB, 12.00 MiB more than at first", while they are larger.
std::string windows_note(const JobStatus& job) {
  if (job.window_grown_bytes == 0) return "";
  return fmt::format("windows of gradients have {}, {} more than at first",
                     human_bytes(job.window_bytes), human_bytes(job.window_grown_bytes));
}

// "losses: train 0.25 in round 416, validation 0.5 in round 400"; "" if none was reported.
std::string losses_note(const JobStatus& job) {
  std::vector<std::string> all;
  for (const RoundLoss& of : job.losses) {
    const std::string loss = of.nonfinite ? "not finite" : fmt::format("{:.6g}", of.loss);
    all.push_back(fmt::format("{} {} in round {}", printable(of.name), loss, of.round));
  }
  return all.empty() ? "" : fmt::format("losses: {}", fmt::join(all, ", "));
}

// The lines below the table: missing and slow ranks, branches, losses, what came through a switch,
// windows that have grown, and what was decided.
std::string job_notes(const JobStatus& job) {
  std::vector<std::string> ranks, waits;
  for (const RankStatus& rank : job.ranks) {
    if (rank.state != "live") {
      std::string text = fmt::format("rank {} is {}", rank.rank, rank.state);
      if (rank.incarnation != 0) text += fmt::format(" (incarnation {})", rank.incarnation);
      if (!rank.reason.empty()) text += ": " + printable(rank.reason);
      ranks.push_back(std::move(text));
    }
    if (rank.state == "live" && !rank.rack.empty()) {
      ranks.push_back(fmt::format("rank {} is rack '{}' with ranks {}", rank.rank,
                                  printable(rank.rack), fmt::join(rank.rack_live, ", ")));
    }
    if (std::count(job.waiting_for.begin(), job.waiting_for.end(), rank.rank) > 0) {
      waits.push_back(waiting(rank));
    }
    if (rank.late > 0) waits.push_back(late_note(rank));
  }
  const std::string name = printable(job.name);
  std::string out;
  if (!job.error.empty()) out += fmt::format("{}: failed: {}\n", name, printable(job.error));
  for (const std::string& note : {through_switch(job), windows_note(job), losses_note(job)}) {
    if (!note.empty()) out += fmt::format("{}: {}\n", name, note);
  }
  if (!job.missing.empty()) {
    out += fmt::format("{}: missing: rank {}\n", name, fmt::join(job.missing, ", "));
  }
  for (const Remark& remark : job.remarks) {
    out += fmt::format("{}: {}: {}\n", name, printable(remark.subject), printable(remark.text));
  }
  std::vector<std::string> branches;
  for (const BranchStatus& branch : job.branches) branches.push_back(branch_note(branch));
  for (const auto& list : {ranks, waits, branches}) {
    for (size_t i = 0; i < std::min(list.size(), kMostNotes); ++i) {
      out += fmt::format("{}: {}\n", name, list[i]);
    }
    if (list.size() > kMostNotes) {
      out += fmt::format("{}: … and {} more\n", name, list.size() - kMostNotes);
    }
  }
  return out;
}

std::string box_tables(const std::vector<NodeStatus>& nodes) {
  TextTable nics({"NIC", "TRANSPORT", "NODE", "IN", "OUT", "AT MOST"}, false, 2);
  TextTable cores({"CORE", "NODE", "CPU", "AWAKE", "CHUNKS/S", "IN", "OUT"});
  for (const NodeStatus& node : nodes) {
    const std::string number = fmt::format("{}", node.node);
    for (const NicStatus& nic : node.nics) {
      nics.add(
          {printable(nic.name), nic.transport, number, rate(nic.flow.bytes_in_per_s),
           rate(nic.flow.bytes_out_per_s),
           nic.budget_bytes_per_s == 0 ? "-" : rate(static_cast<double>(nic.budget_bytes_per_s))});
    }
    for (const CoreStatus& core : node.cores) {
      cores.add({fmt::format("{}", core.core), number, fmt::format("{}", core.cpu),
                 fmt::format("{:.0f}%", core.awake * 100),
                 fmt::format("{:.0f}", core.flow.chunks_per_s), rate(core.flow.bytes_in_per_s),
                 rate(core.flow.bytes_out_per_s)});
    }
  }
  std::string out;
  if (!nics.is_empty()) out += '\n' + nics.text();
  if (!cores.is_empty()) out += '\n' + cores.text();
  return out;
}

struct Arguments {
  std::string server = "127.0.0.1:7717";
  bool json = false;
  double watch_s = 0;  // 0: once
};

// The servers that may be asked, and a connection to the one that answered.
class Asker {
 public:
  explicit Asker(const std::string& servers) : servers_(servers_of(servers)) {}

  ServerStatus status() {
    for (size_t tried = 1;; ++tried) {
      if (!client_) {
        client_ = std::make_unique<ControlClient>(servers_[at_], token_from_environment());
      }
      try {
        return client_->status();
      } catch (const Error& error) {
        const bool silent =
            error.code() == ErrorCode::kUnavailable || error.code() == ErrorCode::kTimeout;
        if (!silent) throw;
        at_ = (at_ + 1) % servers_.size();
        client_.reset();
        if (tried == servers_.size()) throw;
      }
    }
  }

 private:
  const std::vector<std::string> servers_;
  size_t at_ = 0;
  std::unique_ptr<ControlClient> client_;
};

// The lines that fit the terminal; all if its size is unknown.
std::string cut(const std::string& text) {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row < 2) return text;
  size_t end = 0;
  for (int line = 0; line + 1 < size.ws_row && end < text.size(); ++line) {
    end = std::min(text.find('\n', end), text.size() - 1) + 1;
  }
  return text.substr(0, end);
}

// Writes each screen with one write and changes no setting of the terminal, so that an interruption
// leaves it as it was.
[[noreturn]] void watch(Asker& asker, const Arguments& arguments) {
  const bool in_place = isatty(STDOUT_FILENO) != 0 && !arguments.json;
  std::string text;
  for (bool first = true;; first = false) {
    try {
      const ServerStatus status = asker.status();
      text = arguments.json ? to_json(status) + "\n" : describe(status);
    } catch (const Error& error) {
      if (first) throw;
      text = arguments.json ? error_json(error.code(), error.what())
                            : fmt::format("no answer: {}", escaped(error.what()));
      text += '\n';
    }
    if (in_place) text = "\x1b[H\x1b[2J" + cut(text);
    if (!in_place && !arguments.json && !first) text.insert(0, "\n");
    fmt::print("{}", text);
    if (std::fflush(stdout) != 0) fail(ErrorCode::kUnavailable, "the output was closed");
    std::this_thread::sleep_for(std::chrono::duration<double>(arguments.watch_s));
  }
}

}  // namespace

std::string describe(const ServerStatus& status) {
  std::string out = fmt::format(
      "{}\n{} cores, {} of {} in use, transports: {}, up {}\n", status.topology, status.cores,
      status.memory_bytes == 0 ? "nothing" : human_bytes(status.memory_bytes),
      human_bytes(status.memory_limit_bytes), fmt::join(status.transports, ", "),
      duration(status.uptime_s));
  for (const std::string& nic : status.nics) out += nic + '\n';
  if (!status.parent.empty()) {
    out += fmt::format("a rack of {}", printable(status.parent));
    if (status.parent_budget_bytes_per_s > 0) {
      out += fmt::format(", to which each NIC sends at most {}",
                         describe_rate(status.parent_budget_bytes_per_s));
    }
    out += '\n';
  }
  for (const ShardStatus& shard : status.shards) {
    out += fmt::format("with it serves {}: {} cores\n", shard.name, shard.cores);
  }
  if (status.jobs.empty()) return escaped_lines(out + "no jobs\n" + box_tables(status.nodes));
  TextTable table({"JOB", "STATE", "OVER", "RANKS", "ROUND", "SAVED", "ROUNDS/S", "CHUNKS/S", "IN",
                   "OUT", "KEYS", "CHUNKS", "MEMORY", "OPTIMIZER"},
                  false, 3);
  std::string notes;
  for (const JobStatus& job : status.jobs) {
    table.add(job_row(job));
    notes += job_notes(job);
  }
  return escaped_lines(out + '\n' + table.text() + (notes.empty() ? "" : '\n' + notes) +
                       box_tables(status.nodes));
}

void add_status_command(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand(
      "status", "Shows a running server: jobs, ranks, rounds, who is missing, cores, NICs");
  command
      ->add_option("--server", arguments->server,
                   "The server's control port; of several with commas, the first that answers (env "
                   "PHUB_SERVER)")
      ->type_name("HOST:PORT")
      ->envname("PHUB_SERVER")
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "Print the server's JSON, for programs");
  CLI::Option* watch_option =
      command->add_option("--watch", arguments->watch_s, "Repeat until Ctrl-C")
          ->type_name("[SECONDS=1]")
          ->expected(0, 1)
          ->check(CLI::Range(0.1, 3600.0));
  command->footer(
      "Examples:\n"
      "  phub status\n"
      "  phub status --watch=5\n"
      "  phub status --server box:7717 --json\n"
      "PHUB_TOKEN or PHUB_TOKEN_FILE has the token, if the server asks for one. Where it has TLS:\n"
      "--server https://HOST:PORT, and PHUB_CA names the file of the authority.\n"
      "A page for people is at http://HOST:PORT/, metrics for Prometheus at /metrics");
  command->callback([arguments, watch_option] {
    Asker asker(arguments->server);
    if (watch_option->count() > 0) {
      if (arguments->watch_s == 0) arguments->watch_s = kDefaultWatchS;
      watch(asker, *arguments);
    }
    const ServerStatus status = asker.status();
    fmt::print("{}", arguments->json ? to_json(status) + "\n" : describe(status));
  });
}

}  // namespace phub
