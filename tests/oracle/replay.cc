#include "tests/oracle/replay.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "tests/kernels/slots.h"
#include "tests/oracle/folds.h"
#include "transport/error.h"

namespace phub {
namespace {

const std::map<std::string, double reference::Hyper::*> kFields = {
    {"lr", &reference::Hyper::lr},
    {"momentum", &reference::Hyper::momentum},
    {"weight_decay", &reference::Hyper::weight_decay},
    {"grad_scale", &reference::Hyper::grad_scale},
    {"rmsprop_momentum", &reference::Hyper::rmsprop_momentum},
    {"max_norm", &reference::Hyper::max_norm},
    {"trust_coeff", &reference::Hyper::trust_coeff},
    {"always_adapt", &reference::Hyper::always_adapt},
    {"nesterov", &reference::Hyper::nesterov},
    {"ns_steps", &reference::Hyper::ns_steps},
    {"match_rms", &reference::Hyper::match_rms},
    {"beta2_power", &reference::Hyper::beta2_power},
    {"lr_rounds_before", &reference::Hyper::lr_rounds_before},
    {"lr_warmup", &reference::Hyper::lr_warmup},
    {"lr_warmup_from", &reference::Hyper::lr_warmup_from},
    {"lr_exponential", &reference::Hyper::lr_exponential},
    {"lr_inverse", &reference::Hyper::lr_inverse},
    {"lr_inverse_power", &reference::Hyper::lr_inverse_power},
    {"lr_polynomial", &reference::Hyper::lr_polynomial},
    {"lr_polynomial_power", &reference::Hyper::lr_polynomial_power},
    {"lr_cosine", &reference::Hyper::lr_cosine},
    {"lr_end", &reference::Hyper::lr_end},
    {"slack", &reference::Hyper::slack},
    {"batch", &reference::Hyper::batch},
};

// Those of all groups come before the group's own, as a map has them.
void apply(const std::map<std::string, double>& values, uint32_t group, reference::Hyper& hyper) {
  for (const auto& [full_name, value] : values) {
    const size_t at = full_name.find('@');
    if (at != full_name.npos && full_name.substr(at + 1) != std::to_string(group)) continue;
    const std::string name = full_name.substr(0, at);
    const auto field = kFields.find(name);
    if (field == kFields.end()) {
      fail(ErrorCode::kInvalid, "the oracle does not know the hyperparameter '{}'", name);
    }
    hyper.*field->second = value;
  }
}

uint32_t ranks_of(const JobSpec& spec) { return std::max(spec.max_ranks, spec.world_size); }

bool contains(const std::vector<Member>& members, uint32_t rank) {
  return std::ranges::find(members, rank, &Member::rank) != members.end();
}

// Whole numbers are added within a group of ranks, and the sums of groups in f32. Nothing: nobody
// of the group has sent any.
std::optional<std::vector<float>> sum_of(const reference::Group& group,
                                         std::span<const void* const> slots, size_t elements) {
  std::vector<const void*> own;
  std::optional<std::vector<float>> total;
  for (const reference::Group& part : group.parts) {
    if (part.parts.empty()) {  // then all are ranks
      if (slots[part.rank]) own.push_back(slots[part.rank]);
      continue;
    }
    const auto value = sum_of(part, slots, elements);
    if (!value) continue;
    for (size_t i = 0; i < elements && total; ++i) (*total)[i] = (*total)[i] + (*value)[i];
    if (!total) total = value;
  }
  if (own.empty()) return total;
  std::vector<float> sum(elements);
  reference::sum_coded(own, kernels::DType::kInt32, 1, sum.data(), elements);
  return sum;
}

bool sum_int32(const reference::Group& group, std::span<const void* const> slots, float factor,
               std::vector<float>& sum) {
  sum = sum_of(group, slots, sum.size()).value_or(std::vector<float>(sum.size()));
  for (float& element : sum) element = element * factor;
  return std::ranges::all_of(sum, [](float element) { return std::isfinite(element); });
}

}  // namespace

HyperHistory::HyperHistory(const JobSpec& spec, std::span<const LogRecord> log)
    : spec_(spec), changes_(spec.schedule) {
  for (const LogRecord& record : log) {
    if (record.kind == LogRecord::Kind::kHyper) changes_.push_back({record.round, record.values});
  }
  std::ranges::stable_sort(changes_, {}, &HyperChange::round);
  for (const LogRecord& record : log) {
    const bool of_branches = record.kind == LogRecord::Kind::kForked ||
                             record.kind == LogRecord::Kind::kScheduled ||
                             record.kind == LogRecord::Kind::kDiscarded;
    if (of_branches) branches_.push_back(record);
    const bool of_killed =
        record.kind == LogRecord::Kind::kKilled || record.kind == LogRecord::Kind::kRevived;
    if (of_killed) kills_.push_back(record);
  }
  if (!std::ranges::is_sorted(branches_, {}, &LogRecord::round)) {
    fail(ErrorCode::kInvalid, "what the log says of branches goes back to an earlier round");
  }
  follow_killed(log);
}

// One that is killed neither runs nor is forked until it is revived. (That it has then what it had
// is seen in its rounds: to the replay nothing happens to it.)
void HyperHistory::follow_killed(std::span<const LogRecord> log) {
  using Kind = LogRecord::Kind;
  std::set<uint32_t> killed, once;
  uint32_t runs = 0;
  uint64_t last = 0;
  for (const LogRecord& record : log) {
    const uint32_t branch = record.kind == Kind::kForked ? record.parent : record.branch;
    const bool is_killed = killed.contains(branch);
    bool fits = true;
    switch (record.kind) {
      case Kind::kForked:
        fits = !is_killed;
        break;
      case Kind::kScheduled:
        fits = !is_killed;
        runs = branch;
        if (once.contains(branch)) revived_.push_back(record.round);
        break;
      case Kind::kDiscarded:
        fits = branch != runs;
        killed.erase(branch);
        break;
      case Kind::kKilled:
        fits = !is_killed && branch != runs;
        killed.insert(branch);
        once.insert(branch);
        break;
      case Kind::kRevived:
        fits = is_killed;
        killed.erase(branch);
        break;
      default:
        continue;
    }
    if (!fits || record.round < last) {
      fail(ErrorCode::kInvalid,
           "the log says of branch {} before round {} what cannot be: it {}, and what was said "
           "before is about rounds up to {}",
           branch, record.round,
           is_killed        ? "is killed"
           : branch == runs ? "runs"
                            : "is not killed",
           last);
    }
    last = record.round;
  }
}

uint64_t HyperHistory::revived_runs(uint64_t last) const {
  return static_cast<uint64_t>(
      std::ranges::count_if(revived_, [last](uint64_t round) { return round <= last; }));
}

uint32_t HyperHistory::branch_in(uint64_t round) const {
  uint32_t branch = 0;
  for (const LogRecord& record : branches_) {
    if (record.kind == LogRecord::Kind::kScheduled && record.round <= round) branch = record.branch;
  }
  return branch;
}

reference::Hyper HyperHistory::of(uint32_t key, uint64_t round) const {
  reference::Hyper hyper = kernels::default_hyper(*kernels::parse_optimizer(spec_.optimizer));
  const uint32_t group = spec_.keys[key].group;
  apply(spec_.hyper, group, hyper);
  for (const HyperChange& change : changes_) {
    if (change.round <= round) apply(change.values, group, hyper);
  }
  hyper.lr = reference::learning_rate(hyper, round) * spec_.keys[key].lr_scale;
  hyper.weight_decay *= spec_.keys[key].decay_scale;
  return hyper;
}

Replay::Replay(const JobSpec& spec, const Participation& participation, const HyperHistory& hyper,
               uint32_t chunk, std::vector<float> initial, Gradient gradient, Heritage heritage,
               Weight weight)
    : spec_(spec),
      participation_(participation),
      hyper_(hyper),
      chunk_(chunk),
      place_(chunks_of(spec)[chunk]),
      groups_(reference::parse_groups(spec.groups, ranks_of(spec))),
      coded_(is_coded(spec, place_.key)),
      int32_(is_int32(spec, place_.key)),
      gradient_dtype_(memory_dtype(spec, place_.key)),
      result_dtype_(*kernels::parse_dtype(parameter_memory_format(spec))),
      gradient_(std::move(gradient)),
      heritage_(std::move(heritage)),
      weight_(std::move(weight)),
      weighs_(spec.weights == Weights::kYes || spec.late_decay < 1),
      model_(*kernels::parse_optimizer(spec.optimizer), {}, std::move(initial)) {
  PHUB_CHECK(model_.params.size() == place_.elements);
  model_.state8 = spec.state_dtype == StateFormat::k8Bit;
  if (difference_format(spec)) view_ = model_.params;
}

void Replay::next_round() {
  sum_round();
  apply_round(1);
  end_round();
}

void Replay::end_round() {
  for (const LogRecord& record : hyper_.branches()) {
    if (record.round != round_ + 1) continue;
    const auto kept =
        others_.find(record.kind == LogRecord::Kind::kForked ? record.parent : record.branch);
    const bool runs = kept == others_.end();
    switch (record.kind) {
      case LogRecord::Kind::kForked:
        if (runs && record.parent != branch_) {
          fail(ErrorCode::kInvalid, "branch {} is forked from {}, which is not there",
               record.branch, record.parent);
        }
        others_[record.branch] = runs ? state() : kept->second;
        break;
      case LogRecord::Kind::kScheduled:
        if (runs) fail(ErrorCode::kInvalid, "branch {} is not there, or runs", record.branch);
        others_[branch_] = state();
        set(std::move(others_.at(record.branch)));
        others_.erase(record.branch);
        branch_ = record.branch;
        break;
      default:
        if (runs) fail(ErrorCode::kInvalid, "branch {} is not there, or runs", record.branch);
        others_.erase(record.branch);
    }
  }
}

void Replay::sum_round() {
  ++round_;
  sum_.clear();
  counted_ = participation_.members(round_, chunk_);
  if (counted_.empty()) return;
  model_.hyper = hyper_.of(place_.key, round_);
  receive();
  std::vector<float> sum(place_.elements);
  const auto add_all = [&] {
    double divisor = 1;
    if (spec_.reduction == "mean") {
      divisor = weighs_ ? sum_of_weights() : static_cast<double>(counted_.size());
    }
    if (divisor == 0) divisor = 1;  // all of them came too late
    return add(static_cast<float>(1.0 / (model_.hyper.grad_scale * divisor)), sum);
  };
  const bool finite = add_all();
  if (!finite && spec_.on_nonfinite == "stop") {
    fail(ErrorCode::kInvalid, "round {} cannot complete: a gradient is not finite", round_);
  }
  const std::vector<Member> members = counted_;
  if (!finite && spec_.on_nonfinite == "exclude") {
    std::erase_if(counted_, [this](const Member& from) { return !is_finite(from); });
    if (!add_all())
      fail(ErrorCode::kInvalid, "round {} cannot complete: its sum overflows", round_);
  }
  for (uint32_t rank = 0; rank < ranks_of(spec_); ++rank) {
    const bool excluded = contains(members, rank) && !contains(counted_, rank);
    if (excluded == participation_.excluded(round_, chunk_, rank)) continue;
    fail(ErrorCode::kInvalid, "round {}: rank {} is {}excluded in the log", round_, rank,
         excluded ? "not " : "");
  }
  sum_ = std::move(sum);
}

bool Replay::leaves_out() const {
  const KeySpec& key = spec_.keys[place_.key];
  const bool skips = key.rows_limit == 0 || key.rank_limit > 0;
  const bool nobody_counts = weighs_ && sum_of_weights() == 0 && spec_.optimizer != "none";
  return (unused_ && spec_.unused == "skip" && skips) || nobody_counts;
}

reference::Norms Replay::squares() const {
  if (sum_.empty() || leaves_out()) return {};
  return reference::squares(model_.optimizer, model_.hyper, round_ + steps_offset_ - skipped_, sum_,
                            model_.params, model_.state0, model_.state1);
}

void Replay::apply_round(float factor, const reference::Norms& norms) {
  if (sum_.empty()) return;
  if (leaves_out()) return skip_round();
  if (factor != 1) {
    const void* slot = sum_.data();
    reference::sum({&slot, 1}, kernels::DType::kF32, factor, sum_.data(), sum_.size());
  }
  model_.steps = round_ - 1 + steps_offset_ - skipped_;
  if (folds(spec_) && spec_.optimizer == "none") {
    model_.params = sum_;
    ++model_.steps;
  } else if (folds(spec_)) {
    reference::Fold(spec_.keys[place_.key]).add(sum_, model_.params);
    ++model_.steps;
  } else if (spec_.keys[place_.key].lazy) {
    step_rows();
  } else {
    const reference::Norms clipped = {norms.parameters, norms.update * static_cast<double>(factor)};
    model_.step(sum_, reference::trust_ratio(model_.optimizer, model_.hyper, clipped));
  }
  send_difference();
}

// Those that somebody has sent who is counted.
void Replay::step_rows() {
  ++model_.steps;
  const size_t columns = place_.rows.columns;
  for (size_t row = 0; row < place_.rows.rows; ++row) {
    const bool sent = std::ranges::any_of(counted_, [&](const Member& from) {
      const auto at = gradients_.find(from);
      return at != gradients_.end() && place_.rows.has(at->second.data(), row);
    });
    const size_t at = row * columns;
    if (!sent) continue;
    reference::step(model_.optimizer, model_.hyper, model_.steps, sum_.data() + at,
                    model_.params.data() + at, model_.state0.data() + at, model_.state1.data() + at,
                    columns);
  }
}

void Replay::apply_part(const reference::WholeStep& step, size_t first) {
  for (size_t i = 0; i < model_.params.size(); ++i) {
    model_.params[i] = step.apply(model_.params[i], first + i);
    model_.state0[i] = step.state[first + i];
  }
  send_difference();
}

void Replay::skip_round() {
  if (sum_.empty()) return;
  ++skipped_;
  send_difference();
}

void Replay::send_difference() {
  if (!view_.empty()) move_view(spec_, place_, round_, model_.params, view_);
}

void Replay::set(State state) {
  steps_offset_ = state.steps - round_ + skipped_;
  model_.params = std::move(state.parameters);
  model_.state0 = std::move(state.state0);
  model_.state1 = std::move(state.state1);
  model_.state0.resize(model_.params.size());
  model_.state1.resize(model_.params.size());
  model_.round_states();
  // Elements without state do not keep any.
  const KeySpec& key = spec_.keys[place_.key];
  for (size_t array = 0; array < 2; ++array) {
    std::vector<float>& kept = array == 0 ? model_.state0 : model_.state1;
    const size_t with_state = reference::elements_with_state(
        model_.optimizer, hyper_.of(place_.key, 1), key.shape, key.elements, array);
    for (size_t i = 0; i < kept.size(); ++i) {
      if (place_.begin + i >= with_state) kept[i] = 0;
    }
  }
}

Replay::State Replay::state() const {
  const size_t arrays = optimizer_states(spec_).size();
  State state{.parameters = model_.params,
              .state0 = {},
              .state1 = {},
              .steps = round_ + steps_offset_ - skipped_};
  if (arrays > 0) state.state0 = model_.state0;
  if (arrays > 1) state.state1 = model_.state1;
  return state;
}

// What the box gets of everyone in this round: coded gradients as it decodes them.
void Replay::receive() {
  gradients_.clear();
  weights_.clear();
  weighted_.clear();
  for (const Member& from : counted_) {
    std::vector<std::byte> gradient(sent_bytes(spec_, place_));
    const uint64_t round = sent_for(from.rank);
    if (weighs_) weights_[from] = weight_of(from, round);
    if (!gradient_(from, round, gradient.data())) continue;
    gradient = received(from, round, std::move(gradient));
    if (weighs_ && weights_[from] == 0) continue;
    gradients_[from] = std::move(gradient);
    if (weighs_) weigh(from);
  }
}

std::vector<std::byte> Replay::received(const Member& from, uint64_t round,
                                        std::vector<std::byte> gradient) {
  if (!coded_) {
    // A gradient with a weight is f32 in memory, and rounded when it is sent.
    const auto sent = kernels::parse_dtype(gradient_format(spec_, spec_.keys[place_.key]));
    if (place_.is_compact() || sent == gradient_dtype_) return gradient;
    std::vector<std::byte> rounded(gradient.size());
    reference::convert(gradient.data(), gradient_dtype_, rounded.data(), *sent, place_.elements);
    reference::convert(rounded.data(), *sent, gradient.data(), gradient_dtype_, place_.elements);
    return gradient;
  }
  std::vector<float> pushed(place_.elements);
  std::memcpy(pushed.data(), gradient.data(), gradient.size());
  std::vector<float>& residual = residual_of(from);
  if (int32_) return encode_coded(spec_, place_, from.rank, round, pushed, residual);
  const auto sent = send_coded(spec_, place_, from.rank, round, pushed, residual);
  std::memcpy(gradient.data(), sent.data(), gradient.size());
  const bool is_dropped = weighs_ && weights_[from] == 0;
  const bool is_finite = std::ranges::all_of(sent, [](float x) { return std::isfinite(x); });
  for (size_t i = 0; is_dropped && is_finite && i < sent.size(); ++i) {
    residual[i] = residual[i] + sent[i];  // it is sent later
  }
  return gradient;
}

// Each round that it is late multiplies it by late_decay; what is no normal number any more is 0.
float Replay::weight_of(const Member& from, uint64_t sent_for) const {
  const float said = spec_.weights == Weights::kYes ? weight_(from, sent_for) : 1.0f;
  const auto decay = static_cast<float>(spec_.late_decay);
  float factor = 1;
  for (uint64_t round = sent_for; round < round_; ++round) factor = factor * decay;
  const float weight = said * factor;
  return std::isnormal(weight) ? weight : 0.0f;
}

void Replay::weigh(const Member& from) {
  const void* slot = gradients_.at(from).data();
  std::vector<float>& values = weighted_[from];
  values.resize(place_.elements);
  const reference::Group alone = reference::parse_groups("", 1);
  if (place_.factors.pairs > 0) {
    reference::sum(alone, {&slot, 1}, place_.factors, 1, values.data());
  } else if (place_.rows.columns > 0) {
    reference::sum(alone, {&slot, 1}, place_.rows, 1, values.data());
  } else {
    reference::sum({&slot, 1}, gradient_dtype_, 1, values.data(), values.size());
  }
  const float weight = weights_.at(from);
  for (float& value : values) value = value * weight;
}

double Replay::sum_of_weights() const {
  double sum = 0;
  for (const Member& from : counted_) sum = sum + static_cast<double>(weights_.at(from));
  return sum;
}

std::vector<float>& Replay::residual_of(const Member& who) {
  const auto [at, is_new] = residuals_.try_emplace(who, place_.elements);
  const auto before = is_new && heritage_ ? heritage_(who) : std::nullopt;
  if (before) at->second = residual_of(*before);
  return at->second;
}

// The sum of those counted, times `factor`. False: it is not finite.
bool Replay::add(float factor, std::vector<float>& sum) {
  const bool of_factors = place_.factors.pairs > 0;
  const bool of_rows = place_.rows.columns > 0;
  const bool has_groups = !spec_.groups.empty() || place_.is_compact() || folds(spec_);
  std::vector<const void*> slots(has_groups ? ranks_of(spec_) : 0);
  unused_ = true;
  for (const Member& from : counted_) {
    const auto gradient = gradients_.find(from);
    if (gradient == gradients_.end()) continue;
    unused_ = false;
    const void* const slot =
        weighs_ ? static_cast<const void*>(weighted_.at(from).data()) : gradient->second.data();
    (has_groups ? slots[from.rank] : slots.emplace_back()) = slot;
  }
  if (weighs_ && has_groups) {
    return reference::sum(groups_, slots, kernels::DType::kF32, factor, sum.data(), sum.size());
  }
  if (weighs_) {
    return reference::sum(slots, kernels::DType::kF32, factor, sum.data(), sum.size());
  }
  if (folds(spec_)) {
    sum = reference::Fold(spec_.keys[place_.key]).all(groups_, slots, place_.rows, sum.size());
    return true;
  }
  if (int32_) {
    if (has_groups) return sum_int32(groups_, slots, factor, sum);
    return reference::sum_coded(slots, kernels::DType::kInt32, factor, sum.data(), sum.size());
  }
  if (of_factors) return reference::sum(groups_, slots, place_.factors, factor, sum.data());
  if (of_rows) return reference::sum(groups_, slots, place_.rows, factor, sum.data());
  const kernels::DType type = gradient_dtype_;
  return has_groups ? reference::sum(groups_, slots, type, factor, sum.data(), sum.size())
                    : reference::sum(slots, type, factor, sum.data(), sum.size());
}

bool Replay::is_finite(const Member& from) const {
  const auto gradient = gradients_.find(from);
  if (gradient == gradients_.end()) return true;
  const void* slot = gradient->second.data();
  if (int32_) return reference::is_finite(slot, kernels::DType::kInt32, place_.elements);
  if (place_.factors.pairs > 0) return reference::is_finite(place_.factors, slot);
  if (place_.rows.columns > 0) return reference::is_finite(place_.rows, slot);
  std::vector<float> alone(place_.elements);
  return reference::sum({&slot, 1}, gradient_dtype_, 1, alone.data(), alone.size());
}

std::vector<std::byte> Replay::result() const {
  std::vector<std::byte> result(place_.elements * kernels::bytes_of(result_dtype_));
  const std::vector<float>& values = view_.empty() ? model_.params : view_;
  if (folds(spec_)) {  // words, and not numbers of which some are NaN
    std::memcpy(result.data(), values.data(), result.size());
    return result;
  }
  reference::convert(values.data(), kernels::DType::kF32, result.data(), result_dtype_,
                     place_.elements);
  return result;
}

bool GatedReplay::is_gated(const JobSpec& spec) {
  const auto clips = [](const HyperChange& change) { return change.values.contains("max_norm"); };
  return spec.on_nonfinite == "skip" || spec.hyper.contains("max_norm") ||
         reference::has_trust(*kernels::parse_optimizer(spec.optimizer)) ||
         steps_whole_keys(spec) || std::ranges::any_of(spec.schedule, clips);
}

GatedReplay::GatedReplay(const JobSpec& spec, const HyperHistory& hyper, std::vector<Replay> chunks)
    : spec_(spec), hyper_(hyper), chunks_(std::move(chunks)) {}

void GatedReplay::next_round() {
  double squares = 0;
  for (Replay& chunk : chunks_) {
    chunk.sum_round();
    squares = squares + reference::sum_of_squares(chunk.gradient());
  }
  const uint64_t round = chunks_.front().round();
  const bool finite = std::isfinite(squares);
  verdict_ = {round, std::sqrt(squares), spec_.on_nonfinite == "skip" && !finite};
  const float factor = reference::clip_factor(hyper_.of(0, round).max_norm, verdict_.norm);
  const std::vector<reference::Norms> norms = norms_of_keys();
  for (size_t first = 0, end = 0; first < chunks_.size(); first = end) {
    const uint32_t key = chunks_[first].key();
    while (end < chunks_.size() && chunks_[end].key() == key) ++end;
    const std::span<Replay> chunks = std::span(chunks_).subspan(first, end - first);
    if (verdict_.skipped) {
      for (Replay& chunk : chunks) chunk.skip_round();
    } else if (reference::steps_whole(*kernels::parse_optimizer(spec_.optimizer),
                                      hyper_.of(key, round), spec_.keys[key].shape)) {
      step_whole_key(chunks);
    } else {
      for (Replay& chunk : chunks) chunk.apply_round(factor, norms[key]);
    }
    for (Replay& chunk : chunks) chunk.end_round();
  }
}

// Chunks without members have a gradient of zero, and are not stepped.
void GatedReplay::step_whole_key(std::span<Replay> chunks) {
  std::vector<float> gradient, state;
  double squares = 0;
  const Replay* used = nullptr;
  for (const Replay& chunk : chunks) {
    const auto& parameters = chunk.parameters();
    squares += reference::sum_of_squares(parameters);
    const auto& sum = chunk.gradient();
    const bool counts = !sum.empty() && !chunk.leaves_out();
    if (counts && used == nullptr) used = &chunk;
    gradient.insert(gradient.end(), sum.begin(), sum.end());
    if (sum.empty()) gradient.resize(gradient.size() + parameters.size());
    const auto before = chunk.state().state0;
    state.insert(state.end(), before.begin(), before.end());
  }
  if (used == nullptr) {
    for (Replay& chunk : chunks) chunk.skip_round();
    return;
  }
  const uint32_t key = used->key();
  const reference::WholeStep step = reference::whole_step(
      *kernels::parse_optimizer(spec_.optimizer), used->hyper(), used->step_number(),
      spec_.keys[key].shape, std::move(gradient), squares, std::move(state));
  size_t first = 0;
  for (Replay& chunk : chunks) {
    if (!chunk.gradient().empty()) chunk.apply_part(step, first);
    first += chunk.parameters().size();
  }
}

std::vector<reference::Norms> GatedReplay::norms_of_keys() const {
  std::vector<reference::Norms> norms(spec_.keys.size());
  if (!reference::has_trust(*kernels::parse_optimizer(spec_.optimizer))) return norms;
  for (const Replay& chunk : chunks_) {
    const reference::Norms part = chunk.squares();
    norms[chunk.key()].parameters += part.parameters;
    norms[chunk.key()].update += part.update;
  }
  for (auto& [parameters, update] : norms) {
    parameters = std::sqrt(parameters);
    update = std::sqrt(update);
  }
  return norms;
}

std::string check_digits(float sum, uint32_t first, uint32_t ranks,
                         const std::function<bool(uint32_t rank)>& counted) {
  auto rest = static_cast<uint64_t>(sum);
  for (uint32_t rank = first; rank < first + ranks; ++rank, rest /= 4) {
    const uint64_t expected = counted(rank) ? 1 : 0;
    if (rest % 4 == expected) continue;
    return fmt::format("rank {} was counted {} times instead of {}", rank, rest % 4, expected);
  }
  return "";
}

}  // namespace phub
