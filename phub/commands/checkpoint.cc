#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phub/checkpoint/store.h"
#include "phub/commands/commands.h"
#include "phub/text_table.h"
#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

constexpr uint64_t kExportBytes = uint64_t{4} << 20;  // at a time
constexpr size_t kShownTensors = 20;

struct CheckpointArguments {
  std::string directory;
  std::string job;
  std::optional<uint64_t> round, epoch;
  std::string to;
};

// The name in a table's last column, or why it is not there.
struct CheckpointLine {
  std::string job;
  CheckpointId id;
  std::unique_ptr<CheckpointReader> reader;  // null: see `problem`
  std::string problem;
};

CheckpointLine open_line(Checkpoints& checkpoints, const std::string& job,
                         const Checkpoints::Named& named) {
  CheckpointLine line{job, named.id, nullptr, ""};
  if (!named.problem.empty()) {
    line.problem = fmt::format("{}/{}: {}", encode_name(job), folder_name(named.id), named.problem);
    return line;
  }
  try {
    line.reader = checkpoints.open(job, named.id);
  } catch (const Error& error) {
    line.problem = error.what();
  }
  return line;
}

std::vector<std::string> jobs_of(Checkpoints& checkpoints, const std::string& job) {
  if (job.empty()) return checkpoints.jobs();
  return {job};
}

// Ends with an error where nothing was found, but in the folder of a box that has saved nothing
// yet.
void check_found(const CheckpointArguments& arguments, size_t found) {
  if (found > 0) return;
  if (!arguments.job.empty()) {
    fail(ErrorCode::kNotFound, "{} has no checkpoint of job '{}'; 'phub checkpoint list' shows all",
         arguments.directory, printable(arguments.job));
  }
  const std::vector<FolderEntry> there = system_files().list(arguments.directory);
  if (std::ranges::count(there, ".lock", &FolderEntry::name) > 0) return;
  fail(ErrorCode::kNotFound,
       "{} has no checkpoints, and no box has written there; name the folder that 'phub serve "
       "--checkpoints' names",
       arguments.directory);
}

uint64_t total_bytes(const Manifest& manifest) {
  uint64_t bytes = 0;
  for (const CheckpointFile& file : manifest.files) bytes += file.bytes;
  return bytes;
}

void list_checkpoints(const CheckpointArguments& arguments) {
  Checkpoints checkpoints(arguments.directory);
  TextTable table({"EPOCH", "ROUND", "FILES", "SIZE", "RANKS", "BRANCHES", "JOB"}, true);
  size_t found = 0;
  for (const std::string& job : jobs_of(checkpoints, arguments.job)) {
    for (const Checkpoints::Named& named : checkpoints.named(job)) {
      const CheckpointLine line = open_line(checkpoints, job, named);
      const CheckpointId id = named.id;
      std::string files = "-", size = "-", ranks = "-", branches = "-", name = printable(job);
      if (line.reader != nullptr) {
        const Manifest& manifest = line.reader->manifest();
        files = fmt::format("{}", manifest.files.size());
        size = human_bytes(total_bytes(manifest));
        ranks = fmt::format("{}", manifest.live_ranks.size());
        const size_t count = manifest.branches.branches.size();
        if (count > 0) branches = fmt::format("{}", count);
      } else {
        name += " (damaged: see 'phub checkpoint verify')";
      }
      table.add({fmt::format("{}", id.epoch), fmt::format("{}", id.round), files, size, ranks,
                 branches, name});
      ++found;
    }
  }
  check_found(arguments, found);
  fmt::print("{}", table.text());
}

// Those that the options name, newest first.
std::vector<CheckpointId> chosen(Checkpoints& checkpoints, const CheckpointArguments& arguments) {
  std::vector<CheckpointId> ids = checkpoints.list(arguments.job);
  std::erase_if(ids, [&](CheckpointId id) {
    return (arguments.round && id.round != *arguments.round) ||
           (arguments.epoch && id.epoch != *arguments.epoch);
  });
  if (ids.empty()) {
    fail(ErrorCode::kNotFound,
         "{} has no such checkpoint of job '{}'; 'phub checkpoint list' shows all",
         arguments.directory, printable(arguments.job));
  }
  return ids;
}

std::string shape_text(const TensorInfo& tensor) {
  return fmt::format("{} [{}]", word_of(tensor.type), fmt::join(tensor.shape, ", "));
}

// Of a job that has some: a line for each, and for the rounds that are to come.
std::string branches_text(const Manifest& manifest) {
  const SavedBranches& saved = manifest.branches;
  std::string text;
  for (const SavedBranch& branch : saved.branches) {
    text += fmt::format("branch {}", branch.branch);
    if (is_on_disk(branch, manifest))
      text += fmt::format(", killed before round {}", branch.killed);
    if (branch.round > 0) {
      text += fmt::format(", forked from {} before round {}", branch.parent, branch.round);
    }
    for (const auto& [name, value] : branch.values) {
      text += fmt::format(" {}={}", printable(name), value);
    }
    text += '\n';
  }
  for (const BranchRun& run : saved.runs) {
    text += fmt::format("branch {} runs from round {} on\n", run.branch, run.round);
  }
  return text;
}

void show_checkpoint(const CheckpointArguments& arguments) {
  Checkpoints checkpoints(arguments.directory);
  const auto reader = checkpoints.open(arguments.job, chosen(checkpoints, arguments).front());
  const Manifest& manifest = reader->manifest();
  std::string text = fmt::format(
      "{}\njob '{}', epoch {}, after round {}: {} keys, optimizer {}\nlive ranks: {}\n",
      reader->folder(), printable(manifest.spec.name), manifest.epoch, manifest.round,
      manifest.spec.keys.size(), manifest.spec.optimizer, fmt::join(manifest.live_ranks, ", "));
  for (const HyperChange& change : manifest.hyper) {
    text += fmt::format("from round {}:", change.round);
    for (const auto& [name, value] : change.values)
      text += fmt::format(" {}={}", printable(name), value);
    text += '\n';
  }
  text += branches_text(manifest);
  for (const auto& [name, seed] : manifest.seeds) {
    text += fmt::format("seed '{}': {}\n", printable(name), seed);
  }
  for (const CheckpointFile& file : manifest.files) {
    const std::optional<PartId> part = parse_part_name(file.name);
    text += fmt::format("\n{}  {}", file.name, human_bytes(file.bytes));
    if (part) {
      text += fmt::format("  saved by rank {} as '{}'", part->rank, printable(part->name));
      continue;
    }
    const TensorTable& table = reader->tensors(file.name);
    text += fmt::format(", {} tensors\n", table.tensors.size());
    for (size_t i = 0; i < std::min(table.tensors.size(), kShownTensors); ++i) {
      text +=
          fmt::format("  {}  {}\n", shape_text(table.tensors[i]), printable(table.tensors[i].name));
    }
    if (table.tensors.size() > kShownTensors) {
      text += fmt::format("  … and {} more\n", table.tensors.size() - kShownTensors);
    }
  }
  fmt::print("{}\n", text);
}

void verify_checkpoints(const CheckpointArguments& arguments) {
  Checkpoints checkpoints(arguments.directory);
  size_t whole = 0, damaged = 0;
  for (const std::string& job : jobs_of(checkpoints, arguments.job)) {
    for (const Checkpoints::Named& named : checkpoints.named(job)) {
      const CheckpointLine line = open_line(checkpoints, job, named);
      const CheckpointId id = named.id;
      std::vector<std::string> problems;
      if (line.reader != nullptr) {
        problems = line.reader->verify();
      } else {
        problems = {line.problem};
      }
      ++(problems.empty() ? whole : damaged);
      fmt::print("{}  job '{}', epoch {}, round {}\n", problems.empty() ? "whole  " : "DAMAGED",
                 printable(job), id.epoch, id.round);
      for (const std::string& problem : problems) fmt::print("  {}\n", problem);
    }
  }
  if (damaged > 0) {
    fail(ErrorCode::kInvalid, "{} of {} checkpoints in {} are damaged", damaged, damaged + whole,
         arguments.directory);
  }
  check_found(arguments, whole);
  fmt::print("{} checkpoints, all whole\n", whole);
}

void export_file(CheckpointReader& reader, const CheckpointFile& file, const std::string& path) {
  const std::string partial = path + ".part";
  const std::unique_ptr<OutputFile> output = system_files().create(partial);
  std::vector<std::byte> bytes;
  for (uint64_t at = 0; at < file.bytes; at += bytes.size()) {
    bytes.resize(std::min(kExportBytes, file.bytes - at));
    reader.read_file(file.name, at, bytes);
    output->write(bytes);
  }
  output->sync();
  output->close();
  system_files().rename(partial, path);
}

void export_checkpoint(const CheckpointArguments& arguments) {
  Checkpoints checkpoints(arguments.directory);
  const auto reader = checkpoints.open(arguments.job, chosen(checkpoints, arguments).front());
  system_files().make_folder(arguments.to);
  const std::vector<FolderEntry> there = system_files().list(arguments.to);
  for (const CheckpointFile& file : reader->manifest().files) {
    if (parse_part_name(file.name)) continue;
    const std::string path = fmt::format("{}/{}", arguments.to, file.name);
    if (std::any_of(there.begin(), there.end(),
                    [&](const FolderEntry& entry) { return entry.name == file.name; })) {
      fail(ErrorCode::kTaken, "{} is there already; export to another folder", path);
    }
    export_file(*reader, file, path);
    fmt::print("{}  {}\n", path, human_bytes(file.bytes));
  }
}

}  // namespace

void add_checkpoint_command(CLI::App& app) {
  const auto arguments = std::make_shared<CheckpointArguments>();
  CLI::App* command =
      app.add_subcommand("checkpoint", "Lists, shows, verifies and exports checkpoints");
  command->require_subcommand(1);
  command->footer(
      "DIR is that of 'phub serve --checkpoints DIR'. All of these may be used while the box "
      "runs.\n"
      "Examples:\n"
      "  phub checkpoint list /var/lib/phub\n"
      "  phub checkpoint verify /var/lib/phub\n"
      "  phub checkpoint export /var/lib/phub resnet50 /tmp/resnet50");
  const auto add = [&](const char* name, const char* help, auto run) {
    CLI::App* sub = command->add_subcommand(name, help);
    sub->add_option("DIR", arguments->directory, "The directory of the checkpoints")->required();
    sub->callback([arguments, run] { run(*arguments); });
    return sub;
  };
  const auto add_choice = [&](CLI::App* sub) {
    sub->add_option("JOB", arguments->job, "Name of the job")->required();
    sub->add_option("--round", arguments->round, "Default: the newest");
    sub->add_option("--epoch", arguments->epoch, "Default: the newest");
    return sub;
  };
  add("list", "A line for every checkpoint, newest first", list_checkpoints)
      ->add_option("JOB", arguments->job, "Only this one's");
  add_choice(add("show", "What a checkpoint holds", show_checkpoint));
  add("verify", "Reads everything; exit status 1 if anything is damaged, or nothing is there",
      verify_checkpoints)
      ->add_option("JOB", arguments->job, "Only this one's");
  add_choice(add("export", "Copies tensors to a folder, as safetensors files", export_checkpoint))
      ->add_option("TO", arguments->to, "A folder; it is made if it is not there")
      ->required();
}

}  // namespace phub
