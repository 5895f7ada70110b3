#include "tests/worker/any_job.h"

#include <fmt/format.h>

#include <map>

#include "kernels/kernels.h"
#include "tests/oracle/groups.h"
#include "transport/control/rank_tree.h"
#include "transport/control/rules.h"
#include "transport/error.h"
#include "transport/format_schedule.h"

namespace phub::testing {
namespace {

const std::map<std::string, double> kRates[] = {
    {},
    {{"lr_exponential", 0.9}},
    {{"lr_inverse", 0.1}, {"lr_inverse_power", 0.75}},
    {{"lr_polynomial", 6}, {"lr_polynomial_power", 1.5}},
    {{"lr_cosine", 5}, {"lr_end", 0.0625}},
    {{"lr_warmup", 3}, {"lr_warmup_from", 0.25}},
    {{"lr_warmup", 2}, {"lr_cosine", 5}, {"lr_exponential", 0.95}},
};

KeySpec matrix(const std::string& name, uint64_t rows, uint64_t columns, uint32_t tile_rows) {
  return {
      .name = name, .elements = rows * columns, .shape = {rows, columns}, .tile_rows = tile_rows};
}

void add_factors(JobSpec& spec, KeySpec key, uint32_t rank_limit) {
  key.name = "factors-" + key.name;
  key.format = "factors";
  key.rank_limit = rank_limit;
  spec.keys.push_back(std::move(key));
}

void add_rows(JobSpec& spec, KeySpec key, uint32_t rows_limit, bool lazy) {
  key.name = "rows-" + key.name;
  key.format = "rows";
  key.rows_limit = rows_limit;
  key.lazy = lazy;
  spec.keys.push_back(std::move(key));
}

// Its options go together.
bool may_have(const JobSpec& spec) {
  try {
    check_rules(spec);
  } catch (const Error&) {
    return false;
  }
  return true;
}

// Every operation on every type that it is of, as whole keys and as rows.
void add_folds(JobSpec& spec, bool lazy) {
  spec.keys.clear();
  for (const std::string operation : {"add", "multiply", "min", "max", "or"}) {
    for (const std::string type : {"f32", "f64", "i32", "i64"}) {
      if (operation == "or" && type[0] == 'f') continue;
      const uint64_t values = 150 + 7 * spec.keys.size();
      spec.keys.push_back({.name = operation + type,
                           .elements = type.ends_with("64") ? 2 * values : values,
                           .operation = operation,
                           .value_type = type});
      KeySpec table = matrix(operation + type, 60, 6, 16);
      table.operation = operation;
      table.value_type = type;
      add_rows(spec, std::move(table), 20, lazy && spec.keys.size() % 4 == 1);
    }
  }
}

// Where nothing else keeps a state.
void fold_by_round(JobSpec& spec) {
  spec.optimizer = "none";
  for (KeySpec& key : spec.keys) key.lazy = false;
}

}  // namespace

std::vector<std::string> Jobs::optimizers() {
  const auto names = kernels::optimizer_names();
  std::vector<std::string> all(names.begin(), names.end());
  all.push_back("fold");
  return all;
}

GroupedTraining Jobs::draw() {
  const auto ranks =
      static_cast<uint32_t>(in_racks_ ? 2 + random_() % 5 : std::stoul(ranks_.draw()));
  const uint32_t places = ranks + (!in_racks_ && spare_.yes() ? 3 : 0);
  std::string groups;
  while (in_racks_ ? RankTree(groups, ranks).levels() == 1 : groups.empty() && grouped_.yes()) {
    groups = reference::some_groups(places, [this](uint64_t n) { return random_() % n; });
  }
  GroupedTraining run{.spec = grouped_spec(fmt::format("any{}", ++drawn_), ranks, groups),
                      .seed = random_() % 1000,
                      .has_nulls = nulls_.yes(),
                      .rounds = 8,
                      .own_memory = own_memory_.yes()};
  run.spec.max_ranks = places;
  run.spec.keys[0].elements = 500;
  run.spec.keys[0].shape = {20, 25};
  run.spec.keys[0].priority = -1;
  run.spec.keys[0].decay_scale = 0;
  run.spec.keys[1].lr_scale = 0.5;
  run.spec.optimizer = optimizer_.draw();
  if (folds(run.spec)) {
    add_folds(run.spec, !in_racks_);
    if (random_() % 2 == 0) fold_by_round(run.spec);
    draw_quorum(run.spec);
    return run;
  }
  draw_formats(run.spec);
  draw_steps(run);
  draw_matrices(run.spec);
  draw_quorum(run.spec);
  draw_weights(run.spec);
  return run;
}

// Where it can be. The grace is long, so nobody is late, and the results are those of all ranks;
// late_decay decides only where the sums of factors and rows are rounded.
void Jobs::draw_quorum(JobSpec& spec) {
  if (in_racks_ || !quorum_.yes()) return;
  JobSpec with = spec;
  with.quorum = static_cast<uint32_t>(1 + random_() % spec.world_size);
  with.grace_ms = 60'000;
  if (late_decay_.yes() && may_have(with)) with.late_decay = 0.5;
  if (fragments_.yes()) {
    const size_t fragments = 2 + random_() % (with.keys.size() - 1);
    for (size_t k = 0; k < with.keys.size(); ++k) {
      with.keys[k].fragment = static_cast<uint32_t>(k < fragments ? k : random_() % fragments);
    }
  }
  if (may_have(with)) spec = with;
}

// Where they can be.
void Jobs::draw_weights(JobSpec& spec) {
  if (in_racks_ || !weights_.yes()) return;
  JobSpec with = spec;
  with.weights = Weights::kYes;
  if (may_have(with)) spec = with;
}

void Jobs::draw_formats(JobSpec& spec) {
  // Whole numbers are added in one order only where there are no groups.
  const auto of = [&spec](const std::string& format) {
    return format == kInt32 && !spec.groups.empty() ? "int8" : format;
  };
  spec.gradient_dtype = of(gradient_.draw());
  spec.keys[0].format = of(key_format_.draw());
  spec.parameter_dtype = in_racks_ ? plain_.draw() : parameter_.draw();
  spec.rounding = rounding_.draw();
  spec.reduction = reduction_.draw();
  if (spec.optimizer == "none" && difference_format(spec)) spec.optimizer = "sgd";
}

void Jobs::draw_steps(GroupedTraining& run) {
  JobSpec& spec = run.spec;
  const std::string policy = policy_.draw();
  run.has_nans = spec.world_size > 1 && policy != "stop";  // one of the ranks is always left
  if (run.has_nans) spec.on_nonfinite = policy;
  spec.hyper["grad_scale"] = scale_.yes() ? 8 : 1;
  if (spec.on_nonfinite == "pass") {
    // What passes must not stay: in sums of one round it does not.
    spec.optimizer = "none";
    if (difference_format(spec)) spec.parameter_dtype = "f32";
  }
  if (spec.on_nonfinite == "skip" && spec.optimizer == "none") spec.optimizer = "momentum";
  if (spec.optimizer == "none") return;
  if (broadcasts_.yes()) spec.initial = "broadcast";
  const auto& rates = kRates[std::stoul(rates_.draw())];
  spec.hyper.insert(rates.begin(), rates.end());
  if (unused_.yes()) spec.unused = "skip";
  const bool by_key = adapts_by_key(spec), by_whole_key = steps_whole_keys(spec);
  if (by_key && always_.yes()) spec.hyper["always_adapt"] = 1;
  if (spec.optimizer == "muon" && always_.yes()) spec.hyper["match_rms"] = 1;
  if (spec.optimizer == "adafactor" && always_.yes()) spec.hyper["beta2_power"] = 0.5;
  if (spec.optimizer == "lars" && always_.yes()) spec.hyper["trust_coeff"] = 0.25;
  if (state8_.yes() && spec.optimizer != "sgd" && !by_key && !by_whole_key)
    spec.state_dtype = "8bit";
  if (decay_.yes() || by_key) spec.hyper["weight_decay"] = 0.1;
  const bool may_clip = spec.on_nonfinite != "exclude" && spec.optimizer != "lamb" && !by_whole_key;
  if (norm_.yes() && may_clip) spec.hyper["max_norm"] = 3;
  if (!changes_.yes()) return;
  spec.schedule = {{3, {{"lr", 0.5}}}, {5, {{"lr", 0.125}}}};
  if (!spec.hyper.contains("max_norm")) return;
  spec.schedule[0].values["max_norm"] = 0.5;
  spec.schedule[1].values["max_norm"] = 0;
}

void Jobs::draw_matrices(JobSpec& spec) {
  if (factors_.yes()) {
    add_factors(spec, matrix("wide", 5, 1000, 4), 3);
    add_factors(spec, matrix("tall", 300, 2, 48), 1);
    add_factors(spec, matrix("odd", 67, 33, 32), 4);
    add_factors(spec, matrix("row", 1, 40, 1), 2);
  }
  if (!rows_.yes()) return;
  const bool may_be_lazy =
      spec.state_dtype == "f32" && spec.optimizer != "none" && !is_gated(spec) && !in_racks_;
  const auto lazy = [&] { return may_be_lazy && random_() % 2 == 0; };
  add_rows(spec, matrix("wide", 5, 1000, 4), 3, lazy());
  add_rows(spec, matrix("tall", 300, 2, 48), 40, lazy());
  add_rows(spec, matrix("odd", 67, 33, 32), 20, lazy());
  add_rows(spec, matrix("row", 1, 40, 1), 2, lazy());
  add_rows(spec, matrix("one", 70, 16, 2), 1, lazy());
  if (!either_.yes()) return;
  add_rows(spec, matrix("either", 67, 33, 32), 67, false);
  spec.keys.back().rank_limit = 4;
  add_rows(spec, matrix("small", 3, 40, 3), 3, false);
  spec.keys.back().rank_limit = 9;  // with more room than rows take
}

std::set<std::string> features_of(const GroupedTraining& run) {
  const JobSpec& spec = run.spec;
  std::set<std::string> features = {
      spec.optimizer, "gradients-" + spec.gradient_dtype, "parameters-" + spec.parameter_dtype,
      std::string(spec.reduction.word()), std::string(spec.rounding.word())};
  const auto add = [&](bool has, const std::string& feature) {
    if (has) features.insert(feature);
  };
  add(!spec.groups.empty(), "groups");
  add(spec.quorum > 0, "quorum");
  add(spec.late_decay < 1, "late-decay");
  add(fragments_of(spec) > 1, "fragments");
  add(spec.weights == Weights::kYes, "weights");
  add(spec.max_ranks > spec.world_size, "spare-places");
  add(run.has_nulls, "nulls");
  add(run.own_memory, "own-memory");
  add(spec.initial == "broadcast", "broadcast");
  for (const auto& [name, value] : spec.hyper) add(name.starts_with("lr_"), name);
  add(run.has_nans, fmt::format("nonfinite-{}", spec.on_nonfinite));
  add(spec.unused == "skip", "unused-skip");
  add(spec.state_dtype == "8bit", "states-of-8-bits");
  add(!spec.schedule.empty(), "schedule");
  add(spec.hyper.contains("max_norm"), "max-norm");
  add(spec.hyper.contains("weight_decay"), "weight-decay");
  add(spec.hyper.contains("always_adapt"), "always-adapt");
  for (const KeySpec& key : spec.keys) {
    add(!is_compact(key) && !key.format.empty(), "format-of-a-key");
    add(is_schedule(gradient_format(spec, key)), "schedule-of-formats");
    add(is_factors(key), "factors");
    add(is_rows(key), key.lazy ? "lazy-rows" : "rows");
    add(is_rows(key) && key.rank_limit > 0, "rows-or-factors");
  }
  return features;
}

}  // namespace phub::testing
