#include "bench/zerocompute/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <span>

#include "bench/zerocompute/compact_gradients.h"
#include "kernels/whole_key.h"
#include "transport/control/messages.h"
#include "transport/control/rank_tree.h"
#include "transport/error.h"
#include "transport/paced/nic_budget.h"
#include "worker/session/send_order.h"
#include "worker/worker.h"

namespace phub {
namespace {

constexpr uint32_t kMaxWorkers = 512;
constexpr uint32_t kMaxJobs = 64;
constexpr uint64_t kOneRankRounds = 20;
constexpr size_t kMaxSweep = 1000;

constexpr const char* kDescription =
    "Measures how fast a phub server exchanges the gradients of a model for its new parameters, "
    "with real models' key tables and no computation on the workers. Every round's result is "
    "checked, outside of the timed part.";

constexpr const char* kExamples = R"(Examples:
  zerocompute                                        ResNet-50, 4 workers, Nesterov, own server
  zerocompute --model resnet50,vgg19 --workers 2,4,8 a table of six rows
  zerocompute -b 4K -e 256M -f 4 --optimizer none    all-reduce of one key, by size
  zerocompute --model my.json --dtype bf16           {"name": …, "keys": [{"name": …, "elements": …}]}
  zerocompute --chunk-sizes 4K,16K,64K,256K,1M       by the size of a chunk
  zerocompute --format int8 --transport tcp          gradients of 8 bits, results of 32
  zerocompute --model vgg16 --factors 32             matrices as 32 outer products of each worker
  zerocompute --model bert-base --rows 4096          of embeddings 4096 rows of each worker
  zerocompute --no-sum                               notifications only: what the rest costs
  zerocompute --server box:7717 -D 10 --json out.json
  mpirun -np 8 zerocompute --one-rank --server box:7717 --transport tcp -n 50

A round's time is the latest end minus the earliest start of all workers after a common barrier.
With --one-rank it is rank 0's own time, and no clock is shared. Gb/s count one direction: as much
comes back. The limit is how long the same reads and writes of memory take with as many threads as
the server has cores, measured between the rounds. The verdict at the end says which limit binds.
Exit status: 0 if every result was right, 1 if not or if the run failed, 2 for a wrong command line.
)";

template <typename T>
T parse_number(std::string_view text, std::string_view option) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    fail(ErrorCode::kInvalid, "{}: '{}' is not a number", option, text);
  }
  return value;
}

std::vector<std::string_view> format_names() {
  std::vector<std::string_view> names;
  for (const kernels::Format& format : kernels::kFormats) names.push_back(format.name);
  return names;
}

// Of results that come back as differences.
std::vector<std::string_view> difference_names() {
  std::vector<std::string_view> names;
  for (const SlotFormat& format : kSlotFormats) {
    if (!format.is_plain() && format.for_results()) names.push_back(format.name);
  }
  return names;
}

// The text that CLI11 reads. It is converted afterwards, so that messages name the choices.
struct Raw {
  std::vector<std::string> models;
  std::vector<std::string> workers;
  std::string optimizer = "nesterov", dtype = "f32", format, results, from, to;
  std::string factor = "2";
  uint32_t chunk_elements = 8192;
  std::vector<std::string> chunk_sizes;
  std::vector<std::string> factors, rows;
  std::string serve_arguments;
  bool by_seconds = false;
  bool no_sum = false, no_optimize = false, no_limit = false;
};

void declare(CLI::App& app, Raw& raw, ZerocomputeOptions& o) {
  app.footer(kExamples);
  app.add_option(
         "--model", raw.models,
         fmt::format("Model or FILE.json, several with commas: {}", fmt::join(model_names(), ", ")))
      ->delimiter(',');
  app.add_option("-b", raw.from, "Sweep: first size in bytes (4K, 1M, …) of a model of one key");
  app.add_option("-e", raw.to, "Sweep: last size (default: the first)");
  app.add_option("-f", raw.factor, "Sweep: factor between sizes (default 2)");
  app.add_option("--workers", raw.workers, "Worker processes, several with commas (default 4)")
      ->delimiter(',');
  app.add_option("--jobs", o.jobs, "Jobs of that many workers, beside each other (default 1)");
  app.add_flag(
      "--one-rank", o.one_rank,
      "Be one rank, of a job whose others a launcher starts on this host or on others: RANK "
      "and WORLD_SIZE (or Open MPI's or Slurm's) say which; PHUB_JOB names the job. Rank 0 "
      "reports");
  app.add_option(
      "--transport", o.transport,
      "How workers and server talk: shm, tcp, verbs, ofi (default shm); auto: as workers "
      "choose where they are told nothing");
  app.add_option("--groups", o.groups,
                 "Order of additions, as groups of ranks: 4,4. With a box in each rack, each "
                 "group is added in its rack (default: the order of the ranks)");
  app.add_option("--optimizer", raw.optimizer,
                 fmt::format("On the server: {} (default nesterov)",
                             fmt::join(kernels::optimizer_names(), ", ")));
  app.add_option("--dtype", raw.dtype,
                 "Format of gradients and of the parameters that come back: f32, bf16, f16");
  app.add_option("--format", raw.format,
                 fmt::format("Format of the gradients alone: {} (default: --dtype)",
                             fmt::join(format_names(), ", ")));
  app.add_option("--factors", raw.factors,
                 "Matrices go to the server as so many outer products of each worker: 32, or "
                 "PATTERN=32 of those with such names, several with commas")
      ->delimiter(',');
  app.add_option("--rows", raw.rows,
                 "Of embeddings each worker sends so many rows, which it draws anew in each round: "
                 "4096, or PATTERN=4096 of matrices with such names, several with commas")
      ->delimiter(',');
  app.add_option("--results", raw.results,
                 fmt::format("Results come back as differences in this format: {} (default: "
                             "--dtype)",
                             fmt::join(difference_names(), ", ")));
  app.add_option("--chunk-elements", raw.chunk_elements, "Elements per chunk (default 8192)");
  app.add_option("--chunk-sizes", raw.chunk_sizes,
                 "Sweep: bytes of a chunk's gradient, several with commas (4K,32K,1M)")
      ->delimiter(',')
      ->excludes("--chunk-elements");
  app.add_flag("--no-optimize", raw.no_optimize, "The server sums and sends the sums back");
  app.add_flag("--no-sum", raw.no_sum,
               "The server neither sums nor optimizes: notifications travel, results stay zero");
  app.add_flag("--copy{results}", o.copy,
               "Each worker also copies the results into memory of its own, as part of the round; "
               "with --copy=all such memory is registered for gradients, too, and copied where the "
               "transport cannot use it as it is")
      ->check(CLI::IsMember({"results", "all"}));
  const CLI::Range rounds(uint64_t{0}, uint64_t{1} << 32);
  app.add_option("-w", o.warmup, "Rounds before the measurement (default 3)")->check(rounds);
  CLI::Option* count = app.add_option("-n", o.rounds, "Rounds to measure")->check(rounds);
  app.add_option("-D", o.seconds, "Or seconds to measure for (default 5; at least 5 rounds)")
      ->excludes(count);
  app.add_flag("--no-limit", raw.no_limit, "Do not measure the memory's limit");
  app.add_option("--budget", o.budget,
                 "What each NIC of a worker, and of its own server, sends at most: 1gbit, 250mbit, "
                 "or bytes per second (default: no limit)");
  app.add_option("--send-order", o.send_order,
                 "What a worker sends first of what waits for its budget: priority, fifo, random, "
                 "magnitude (default priority)");
  app.add_option("--link-gbps", o.link_gbps,
                 "Of a worker's link each way: lets the verdict say whether the network binds");
  app.add_option("--server", o.server, "HOST:PORT of a running server (default: starts its own)");
  app.add_option("--serve-args", raw.serve_arguments,
                 "More arguments for its own `phub serve`, quoted as in a shell where they have "
                 "spaces: \"--socket-dir '/tmp/my box'\"");
  app.add_option("--json", o.json, "Also write the results to this file");
  app.add_flag("--quiet", o.quiet, "No progress on stderr");
}

void resolve_models(const Raw& raw, ZerocomputeOptions& o) {
  for (const std::string& name : raw.models) o.models.push_back(model_or_file(name));
  if (raw.from.empty() && !raw.to.empty()) fail(ErrorCode::kInvalid, "-e needs a first size, -b");
  if (!raw.from.empty()) {
    const uint64_t from = parse_size(raw.from);
    const uint64_t to = raw.to.empty() ? from : parse_size(raw.to);
    for (uint64_t bytes : sweep_sizes(from, to, parse_number<double>(raw.factor, "-f"))) {
      o.models.push_back(table_of_size(bytes, o.dtype));
    }
  }
  if (o.models.empty()) o.models.push_back(model("resnet50"));
}

// --factors and --rows: which matrices, and how many of each worker.
struct Form {
  std::vector<std::string> patterns;  // fnmatch(3); one of them
  uint32_t count = 0;
};

std::vector<Form> parse_forms(std::string_view option, const std::vector<std::string>& texts,
                              const std::vector<std::string>& otherwise) {
  std::vector<Form> forms;
  for (const std::string& text : texts) {
    const size_t equals = text.rfind('=');
    Form form{.patterns = otherwise};
    if (equals != text.npos) form.patterns = {text.substr(0, equals)};
    form.count = parse_number<uint32_t>(
        equals == text.npos ? text : std::string_view(text).substr(equals + 1), option);
    if (form.count == 0 || form.count > kMaxRankLimit) {
      fail(ErrorCode::kInvalid, "{}: {} is not between 1 and {}", option, form.count,
           kMaxRankLimit);
    }
    forms.push_back(std::move(form));
  }
  return forms;
}

// Calls set(key, count) for the matrices that the forms are of. A key has one form at most.
template <typename Set>
void set_forms(std::string_view option, std::span<const Form> forms, KeyTable& table, Set set) {
  for (const Form& form : forms) {
    size_t found = 0;
    for (KeySpec& key : table.keys) {
      const auto matches = [&key](const std::string& pattern) {
        return fnmatch(pattern.c_str(), key.name.c_str(), 0) == 0;
      };
      if (key.shape.size() != 2 || is_compact(key)) continue;
      if (!std::ranges::any_of(form.patterns, matches)) continue;
      set(key, form.count);
      ++found;
    }
    if (found > 0) continue;
    fail(ErrorCode::kInvalid,
         "{}: model '{}' has no matrix that is not sent otherwise whose name is as {}", option,
         table.name, fmt::join(form.patterns, " or "));
  }
}

void resolve_forms(const Raw& raw, ZerocomputeOptions& o) {
  const std::vector<Form> rows = parse_forms("--rows", raw.rows, {"*emb*", "*wte*", "*wpe*"});
  const std::vector<Form> factors = parse_forms("--factors", raw.factors, {"*"});
  for (KeyTable& table : o.models) {
    set_forms("--rows", rows, table, [](KeySpec& key, uint32_t count) {
      const auto most = static_cast<uint32_t>(std::min<uint64_t>(count, key.shape[0]));
      set_rows_limit(key, most, false);
    });
    set_forms("--factors", factors, table, set_rank_limit);
  }
  const uint64_t workers = std::ranges::max(o.workers);
  for (const Form& form : factors) {
    if (form.count * workers <= kMostPairsOfAllRanks) continue;
    fail(ErrorCode::kInvalid,
         "--factors: {} of each of {} workers are more than {}, whose sums f32 holds exactly",
         form.count, workers, kMostPairsOfAllRanks);
  }
  o.factors = fmt::format("{}", fmt::join(raw.factors, ","));
  o.rows = fmt::format("{}", fmt::join(raw.rows, ","));
  // How much memory they move depends on more than their bytes.
  if (!o.factors.empty() || !o.rows.empty()) o.limit = false;
}

void resolve_chunks(const Raw& raw, ZerocomputeOptions& o) {
  o.chunk_elements = {raw.chunk_elements};
  if (raw.chunk_sizes.empty()) return;
  o.chunk_elements.clear();
  const uint64_t width = kernels::bytes_of(o.dtype);
  for (const std::string& text : raw.chunk_sizes) {
    const uint64_t bytes = parse_size(text);
    const uint64_t elements = bytes / width;
    if (bytes % (width * kChunkAlignment) != 0 || elements > kMaxChunkElements) {
      fail(ErrorCode::kInvalid,
           "--chunk-sizes: {} is not a multiple of {} bytes ({} elements) up to {} MiB", text,
           width * kChunkAlignment, kChunkAlignment, kMaxChunkElements * width >> 20);
    }
    o.chunk_elements.push_back(static_cast<uint32_t>(elements));
  }
}

// The rank, the world and the server of the launcher's environment.
void resolve_one_rank(const Raw& raw, ZerocomputeOptions& o) {
  const WorkerOptions given = options_from_environment();
  if (!given.rank_error.empty()) fail(ErrorCode::kInvalid, "--one-rank: {}", given.rank_error);
  if (given.rank < 0) {
    fail(ErrorCode::kInvalid,
         "--one-rank: RANK and WORLD_SIZE are not in the environment, nor Open MPI's or Slurm's");
  }
  if (!raw.workers.empty()) {
    fail(ErrorCode::kInvalid, "--workers: with --one-rank the environment says how many there are");
  }
  if (raw.by_seconds) {
    fail(ErrorCode::kInvalid,
         "-D: ranks that share no clock count rounds; give -n with --one-rank");
  }
  if (!o.serve_arguments.empty() || o.jobs != 1) {
    fail(ErrorCode::kInvalid, "--one-rank starts neither a server (--serve-args) nor --jobs");
  }
  if (o.server.empty() && std::getenv("PHUB_SERVER") == nullptr) {
    fail(ErrorCode::kInvalid,
         "--one-rank needs a running server: --server HOST:PORT or PHUB_SERVER");
  }
  if (o.server.empty()) o.server = given.server;
  if (o.rounds == 0) o.rounds = kOneRankRounds;
  o.rank = static_cast<uint32_t>(given.rank);
  o.workers = {given.spec.world_size};
  o.job = given.spec.name.empty() ? "zerocompute" : given.spec.name;
  o.limit = false;  // that of the server's machine would matter
}

void resolve_results(const Raw& raw, ZerocomputeOptions& o) {
  o.results = o.dtype;
  if (raw.results.empty()) return;
  const auto names = difference_names();
  if (std::ranges::find(names, raw.results) == names.end()) {
    fail(ErrorCode::kInvalid, "--results: '{}' is not one of {}; plain ones are for --dtype",
         raw.results, fmt::join(names, ", "));
  }
  if (o.dtype != kernels::DType::kF32) {
    fail(ErrorCode::kInvalid, "--results: differences are added in f32; leave --dtype out");
  }
  if (raw.no_optimize || raw.no_sum || o.optimizer == kernels::Optimizer::kNone) {
    fail(ErrorCode::kInvalid,
         "--results: differences are of the parameters that the server's optimizer changes; leave "
         "--no-optimize, --no-sum and --optimizer none out");
  }
  o.results = *kernels::parse_format(raw.results);
}

void resolve(const Raw& raw, ZerocomputeOptions& o) {
  const auto dtype = kernels::parse_dtype(raw.dtype);
  if (!dtype) fail(ErrorCode::kInvalid, "--dtype: '{}' is not f32, bf16 or f16", raw.dtype);
  o.dtype = o.format = *dtype;
  if (!raw.format.empty()) {
    const auto format = kernels::parse_format(raw.format);
    if (!format) {
      fail(ErrorCode::kInvalid, "--format: '{}' is not one of {}", raw.format,
           fmt::join(format_names(), ", "));
    }
    o.format = *format;
  }
  const auto optimizer = kernels::parse_optimizer(raw.optimizer);
  if (!optimizer) {
    fail(ErrorCode::kInvalid, "--optimizer: '{}' is not one of {}", raw.optimizer,
         fmt::join(kernels::optimizer_names(), ", "));
  }
  if (kernels::takes_whole_keys(*optimizer)) {
    fail(ErrorCode::kInvalid,
         "--optimizer: '{}' makes steps of whole keys, which this program does not check: choose "
         "another one",
         raw.optimizer);
  }
  o.optimizer = *optimizer;
  resolve_results(raw, o);
  o.sum = !raw.no_sum;
  o.optimize = !raw.no_optimize && !raw.no_sum;
  // How much memory coded gradients move depends on the encoder, not only on their bytes.
  o.limit = !raw.no_limit && kernels::is_plain(o.format) && kernels::is_plain(o.results);
  if (!raw.workers.empty()) o.workers.clear();
  for (const std::string& text : raw.workers) {
    const uint32_t count = parse_number<uint32_t>(text, "--workers");
    if (count == 0 || count > kMaxWorkers) {
      fail(ErrorCode::kInvalid, "--workers: {} is not between 1 and {}", count, kMaxWorkers);
    }
    o.workers.push_back(count);
  }
  if (!(o.seconds > 0) || o.seconds > 86400) {
    fail(ErrorCode::kInvalid, "-D: {} seconds are not between 0 and 86400", o.seconds);
  }
  if (!o.server.empty() && !o.serve_arguments.empty()) {
    fail(ErrorCode::kInvalid, "--serve-args are for its own server; --server names another");
  }
  if (o.jobs == 0 || o.jobs > kMaxJobs) {
    fail(ErrorCode::kInvalid, "--jobs: {} is not between 1 and {}", o.jobs, kMaxJobs);
  }
  if (!(o.link_gbps >= 0)) {
    fail(ErrorCode::kInvalid, "--link-gbps: {} is not a rate above 0", o.link_gbps);
  }
  if (!o.budget.empty()) parse_rate(o.budget);
  if (!o.budget.empty() && o.transport == "shm") {
    fail(ErrorCode::kInvalid, "--budget: over shared memory nothing is sent; give --transport tcp");
  }
  parse_send_order(o.send_order);
  if (o.one_rank) resolve_one_rank(raw, o);
  for (const uint32_t count : o.workers) RankTree(o.groups, count);  // refuses what does not fit
  resolve_models(raw, o);
  resolve_forms(raw, o);
  resolve_chunks(raw, o);
}

}  // namespace

uint64_t parse_size(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view unit(end, text.data() + text.size());
  int power = -1;
  for (const auto& [letter, exponent] : {std::pair{"K", 10}, {"M", 20}, {"G", 30}}) {
    if (unit == letter || unit == std::string(letter) + "B" || unit == std::string(letter) + "iB") {
      power = exponent;
    }
  }
  if (unit.empty()) power = 0;
  const double bytes = std::ldexp(value, power);
  if (error != std::errc() || power < 0 || !(bytes >= 1) || bytes > 0x1p50 ||
      bytes != std::floor(bytes)) {
    fail(ErrorCode::kInvalid, "'{}' is not a size in bytes such as 4096, 4K, 25M or 1G", text);
  }
  return static_cast<uint64_t>(bytes);
}

std::vector<std::string> shell_words(std::string_view text, std::string_view argument) {
  std::vector<std::string> words;
  char quote = 0;           // that is open; 0: none
  bool is_in_word = false;  // also one of no letter: ''
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quote == 0 && (c == ' ' || c == '\t' || c == '\n')) {
      is_in_word = false;
      continue;
    }
    if (!is_in_word) words.emplace_back();
    is_in_word = true;
    if (quote == 0 && (c == '\'' || c == '"')) {
      quote = c;
    } else if (c == quote) {
      quote = 0;
    } else if (c == '\\' && quote != '\'' && i + 1 < text.size()) {
      // In "quotes" a backslash is one, unless it protects what would end or begin something there.
      if (quote == '"' && text[i + 1] != '"' && text[i + 1] != '\\') words.back() += c;
      words.back() += text[++i];
    } else {
      words.back() += c;
    }
  }
  if (quote != 0) {
    fail(ErrorCode::kInvalid, "{}: the quote {} does not end in '{}'", argument, quote, text);
  }
  return words;
}

std::vector<uint64_t> sweep_sizes(uint64_t from, uint64_t to, double factor) {
  if (!(factor > 1)) fail(ErrorCode::kInvalid, "-f: the factor {} is not above 1", factor);
  if (to < from)
    fail(ErrorCode::kInvalid, "the sweep's last size {} is below its first {}", to, from);
  std::vector<uint64_t> sizes;
  // Whole elements of every format: multiples of four bytes after the first size.
  for (double bytes = static_cast<double>(from); bytes <= static_cast<double>(to);
       bytes = std::max(bytes + 4, std::floor(bytes * factor / 4) * 4)) {
    if (sizes.size() == kMaxSweep)
      fail(ErrorCode::kInvalid, "more than {} sizes to sweep", kMaxSweep);
    sizes.push_back(static_cast<uint64_t>(bytes));
  }
  return sizes;
}

std::string size_text(uint64_t bytes) {
  double value = static_cast<double>(bytes);
  const char* unit = "B";
  for (const char* next : {"KiB", "MiB", "GiB"}) {
    if (value < 1024) break;
    value /= 1024;
    unit = next;
  }
  return fmt::format("{:.4g} {}", value, unit);
}

KeyTable table_of_size(uint64_t bytes, kernels::DType dtype) {
  const uint64_t width = kernels::bytes_of(dtype);
  if (bytes % width != 0) {
    fail(ErrorCode::kInvalid, "{} bytes are not a whole number of {} elements", bytes,
         kernels::name_of(dtype));
  }
  KeyTable table;
  table.name = size_text(bytes);
  table.keys.push_back({.name = "data", .elements = bytes / width});
  return table;
}

std::optional<ZerocomputeOptions> parse_zerocompute_options(int argc, const char* const* argv) {
  CLI::App app(kDescription, "zerocompute");
  Raw raw;
  ZerocomputeOptions options;
  declare(app, raw, options);
  try {
    app.parse(argc, argv);
    raw.by_seconds = app.count("-D") > 0;
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    fail(ErrorCode::kInvalid, "{}; see --help", error.what());
  }
  options.serve_arguments = shell_words(raw.serve_arguments, "--serve-args");
  resolve(raw, options);
  return options;
}

}  // namespace phub
