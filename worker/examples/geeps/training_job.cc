#include "worker/examples/geeps/training_job.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <map>

#include "kernels/hyper.h"
#include "transport/error.h"
#include "worker/examples/files.h"
#include "worker/examples/geeps/checkpoint.h"
#include "worker/geeps/tables.h"

namespace phub::examples {
namespace {

std::map<std::string, double> hyper_of(const TrainingOptions& options) {
  std::map<std::string, double> hyper = {{"lr", options.lr}};
  for (const std::string& word : options.hyper) {
    const size_t equals = word.find('=');
    const char* const number = equals == word.npos ? "" : word.c_str() + equals + 1;
    char* end = nullptr;
    const double value = std::strtod(number, &end);
    if (*number == '\0' || *end != '\0') {
      fail(ErrorCode::kInvalid, "--hyper: '{}' is not NAME=VALUE, as momentum=0.9", word);
    }
    const std::string name = word.substr(0, equals);
    if (name == "lr" || name == "lr_rounds_before") {
      fail(ErrorCode::kInvalid, "--hyper: {} is set by the training itself: {}", name,
           name == "lr" ? "use --lr" : "leave it out");
    }
    if (!hyper.emplace(name, value).second) {
      fail(ErrorCode::kInvalid, "--hyper: {} is given twice", name);
    }
    const size_t field = kernels::hyper_field(name);
    if (field == kernels::kHyperFields.size()) continue;  // the job says which there are
    const std::string problem = kernels::unused(*kernels::parse_optimizer(options.optimizer),
                                                kernels::kHyperFields[field], name, value);
    if (!problem.empty()) fail(ErrorCode::kInvalid, "--hyper: {}", problem);
  }
  return hyper;
}

}  // namespace

std::string with_rank(std::string path, uint32_t rank) {
  const size_t at = path.find("%r");
  return at == std::string::npos ? path : path.replace(at, 2, std::to_string(rank));
}

void check_files(const TrainingOptions& options) {
  const uint32_t processes = options.standalone ? 1 : options.worker.spec.world_size;
  const uint64_t ranks = uint64_t{processes} * options.devices;
  const auto check = [ranks](const char* option, const std::string& path) {
    if (ranks == 1 || path.empty() || path.find("%r") != path.npos) return;
    fail(ErrorCode::kInvalid,
         "{} {}: each of the {} ranks writes a file: put %r in its name, which becomes the rank",
         option, path, ranks);
  };
  check("--out", options.out);
  check("--checkpoint", options.checkpoint);
}

void check_can_write(const TrainingOptions& options, uint32_t rank) {
  check_can_write(with_rank(options.out, rank));
  if (options.checkpoint.empty()) return;
  check_can_write(with_rank(options.checkpoint, rank));
  check_can_write(unfinished(with_rank(options.checkpoint, rank)));
}

Share share_of(const TrainingOptions& options, uint32_t rank, uint32_t device) {
  Share share = options.share;
  share.rank = rank * options.devices + device;
  share.world = options.worker.spec.world_size * options.devices;
  return share;
}

double learning_rate(const TrainingOptions& o, uint64_t clock) {
  if (o.lr_every == 0) return o.lr;
  const uint64_t decays = clock / o.lr_every;
  return o.lr * std::pow(o.lr_decay, static_cast<double>(decays));
}

JobSpec job_spec(const TrainingOptions& options, const Tables& tables) {
  JobSpec spec = options.worker.spec;
  spec.keys = geeps::keys_of(tables.specs());
  spec.optimizer = options.optimizer;
  spec.hyper = hyper_of(options);
  spec.reduction = "sum";
  spec.initial = "broadcast";
  spec.on_loss = "fail";
  spec.consistency = options.consistency;
  spec.slack = options.slack;
  if (!options.checkpoint.empty() &&
      (spec.gradient_dtype != "f32" || spec.parameter_dtype != "f32")) {
    fail(ErrorCode::kInvalid,
         "--checkpoint: the file would have parameters of {} and no residuals of {}, so that a "
         "resumed training would go on with others; leave out --gradients and --results",
         spec.parameter_dtype, spec.gradient_dtype);
  }
  const bool keeps_state = !optimizer_states(spec).empty();
  if (keeps_state && !options.checkpoint.empty() && options.consistency != "bsp") {
    fail(ErrorCode::kInvalid,
         "--checkpoint: the state of {} can be saved in lock-step only (--consistency bsp); "
         "sgd has none",
         spec.optimizer);
  }
  return spec;
}

std::vector<std::string> settings_of(const std::string& name, const TrainingOptions& options) {
  std::string optimizer = options.optimizer;
  for (const auto& [parameter, value] : hyper_of(options)) {
    optimizer += fmt::format(" {}={}", parameter, value);
  }
  if (options.lr_every > 0) {
    optimizer += fmt::format(" lr_decay={} every {}", options.lr_decay, options.lr_every);
  }
  const Share& share = options.share;
  return {name, optimizer, fmt::format("seed {}", share.seed),
          fmt::format("{} mini-batches of {}", share.mini_batches, share.samples)};
}

std::string identity(const std::string& name, const TrainingOptions& options, const Share& share) {
  return fmt::format("{}, rank {} of {}", fmt::join(settings_of(name, options), ", "), share.rank,
                     share.world);
}

}  // namespace phub::examples
