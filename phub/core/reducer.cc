#include "phub/core/reducer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/encode.h"
#include "kernels/fixed_point.h"
#include "phub/core/round_gate.h"
#include "transport/layout.h"

namespace phub {
namespace {

size_t largest_of(std::span<const CoreChunk> chunks) {
  uint32_t elements = 0;
  for (const CoreChunk& chunk : chunks) elements = std::max(elements, chunk.elements);
  return elements;
}

size_t most_lazy_rows(std::span<const CoreChunk> chunks) {
  size_t rows = 0;
  for (const CoreChunk& chunk : chunks) {
    if (chunk.lazy) rows = std::max(rows, chunk.slot().rows());
  }
  return rows;
}

}  // namespace

Reducer::Reducer(const JobParameters& parameters, const JobArrays& arrays, const Places& places,
                 const HyperView& hyper, ChunkTable& table, Reports& reports,
                 const CoreTrace& trace)
    : parameters_(parameters),
      arrays_(arrays),
      places_(places),
      table_(table),
      reports_(reports),
      trace_(trace),
      hyper_(hyper),
      steps_(hyper.scales.size()),
      scratch_(largest_of(table.chunks())),
      result_format_(result_format(parameters)),
      decoded_(parameters.differences ? scratch_.size() : 0),
      stepped_(bit_words(most_lazy_rows(table.chunks()))),
      tree_sum_(parameters.tree, scratch_.size(), parameters.rules.weighs()) {
  slots_.reserve(parameters.max_ranks);
  slot_ranks_.reserve(parameters.max_ranks);
  if (parameters.rules.weighs()) slot_weights_.reserve(parameters.max_ranks);
}

void Reducer::set_hyper(const HyperView& hyper) {
  hyper_ = hyper;
  for (CachedStep& cached : steps_) cached.round = kNever;
}

const Reducer::CachedStep& Reducer::step_of(const CoreChunk& chunk) {
  CachedStep& cached = steps_[chunk.hyper_class];
  if (cached.round != chunk.round || cached.step_offset != chunk.step_offset) {
    const kernels::Hyper hyper = hyper_.of(chunk.round, chunk.hyper_class);
    cached.round = chunk.round;
    cached.step_offset = chunk.step_offset;
    cached.step = kernels::make_step(parameters_.rules.optimizer, hyper,
                                     chunk.round + static_cast<uint64_t>(chunk.step_offset));
    cached.grad_scale = hyper.grad_scale;
  }
  return cached;
}

// `participants` have not been left out.
float Reducer::factor_of(uint32_t index, uint32_t participants) {
  double divisor = 1;
  if (parameters_.rules.mean()) {
    divisor = table_.has_weights() ? table_.sum_of_weights(index) : participants;
    if (divisor == 0) divisor = 1;  // nobody counts
  }
  return static_cast<float>(1.0 / (step_of(table_[index]).grad_scale * divisor));
}

void Reducer::gather(uint32_t index) {
  slots_.clear();
  slot_ranks_.clear();
  slot_weights_.clear();
  table_.for_each_gradient(index, [&](uint32_t rank) {
    slots_.push_back(table_.slot(rank, index));
    slot_ranks_.push_back(rank);
    if (table_.has_weights()) slot_weights_.push_back(table_.weight(rank, index));
  });
}

// A rack whose ranks all sent a NaN or Inf, if the others do not go on without it: no other rank
// took part, or ranks are not to be left out. Returns nullopt if there is none.
std::optional<uint32_t> Reducer::stopping_rack(uint32_t index) const {
  const bool go_on =
      parameters_.rules.on_nonfinite == OnNonFinite::kExclude && table_.participants(index) > 0;
  return go_on ? std::nullopt : table_.left_out_rack(index);
}

// False: it cannot be summed now.
bool Reducer::sum(uint32_t index, float* to) {
  CoreChunk& chunk = table_[index];
  if (const auto rack = stopping_rack(index)) {
    if (reports_.room_for_exclusions(1)) stop(*rack, index);
    return false;
  }
  gather(index);
  const uint32_t participants = table_.participants(index);
  const bool finite = add_up(index, factor_of(index, participants), to);
  const bool passes = parameters_.rules.on_nonfinite == OnNonFinite::kPass ||
                      parameters_.rules.on_nonfinite == OnNonFinite::kSkip;
  if (!finite && !passes && !resolve_nonfinite(index, to)) return false;
  const bool skips = parameters_.rules.unused == Unused::kSkip && chunk.skips;
  const bool nobody_counts = table_.has_weights() && table_.sum_of_weights(index) == 0;
  chunk.unused = (skips && slots_.empty()) || participants == 0 || nobody_counts;
  return true;
}

// Returns true if every result is finite.
bool Reducer::add_up(uint32_t index, float factor, float* to) {
  if (made_ == nullptr) {
    return tree_sum_.add({slots_, slot_ranks_, slot_weights_}, table_[index].slot(), factor, to);
  }
  return kernels::from_fixed_point(made_->codes, made_->exponent, factor, to);
}

// Where results lie beside the parameters; null: they are the same memory, or differences.
void* Reducer::separate_result(const CoreChunk& chunk) const {
  const bool separate = !parameters_.differences && !places_.parameters_are_results() &&
                        !parameters_.rules.own_results();
  return separate ? result_of(chunk.offset) : nullptr;
}

bool Reducer::reduce(uint32_t index, kernels::Store store) {
  if (parameters_.rules.work == Work::kNone) return true;
  CoreChunk& chunk = table_[index];
  chunk.same = false;
  if (table_.participants(index) == 0 && !table_.left_out_rack(index)) {
    // No rack has a rank in this round: the parameters stay, as in a skipped round.
    if (parameters_.rules.optimizer != kernels::Optimizer::kNone) leave_out(index);
    return true;
  }
  const TraceSpan span = trace_.span("sum and optimize", chunk);
  const bool copies = parameters_.rules.own_results();  // copy_result() comes next
  const bool in_place = parameters_.rules.optimizer == kernels::Optimizer::kNone &&
                        (copies || parameters_.rules.parameter_dtype == kernels::DType::kF32);
  float* to = !in_place ? scratch_.data()
              : copies  ? parameters_at(chunk)
                        : reinterpret_cast<float*>(result_of(chunk.offset));
  if (!sum(index, to)) return false;
  if (in_place || parameters_.rules.work == Work::kSumOnly) return true;
  if (chunk.unused) return leave_out(index), true;
  if (chunk.lazy) {
    const bool stepped = optimize_rows(step_of(chunk).step, chunk, 0, slots_, to);
    chunk.same = !stepped && !parameters_.differences;
    return publish(index), true;
  }
  optimize(step_of(chunk).step, chunk, 0, to, separate_result(chunk), store);
  return true;
}

bool Reducer::sum_for_gate(uint32_t index, ChunkSquares& squares) {
  const CoreChunk& chunk = table_[index];
  const TraceSpan span = trace_.span("sum", chunk);
  float* to = arrays_.sums + chunk.offset;
  if (!sum(index, to)) return false;
  squares.gradient = kernels::sum_of_squares(to, chunk.elements);
  if (kernels::adapts(parameters_.rules.optimizer) && !chunk.unused) {
    squares.key = kernels::measure(
        step_of(chunk).step, to, parameters_at(chunk), places_.running(Places::kState0, chunk),
        places_.running(Places::kState1, chunk), chunk.elements, scratch_.data());
  }
  return true;
}

bool Reducer::sum_aside(uint32_t index, float* to, bool& null) {
  const CoreChunk& chunk = table_[index];
  const TraceSpan span = trace_.span("sum", chunk);
  if (!sum(index, to)) return false;
  null = chunk.unused;
  return true;
}

void Reducer::apply(uint32_t index, const float* gradient, kernels::Store store) {
  const CoreChunk& chunk = table_[index];
  if (chunk.unused) return leave_out(index);
  const TraceSpan span = trace_.span("optimize", chunk);
  optimize(step_of(chunk).step, chunk, 0, gradient, separate_result(chunk), store);
}

std::optional<Reducer::PartialSum> Reducer::sum_for_parent(uint32_t index, float* to) {
  const CoreChunk& chunk = table_[index];
  const TraceSpan span = trace_.span("sum", chunk);
  if (!reports_.room_for_exclusions(chunk.arrived)) return std::nullopt;  // they are read soon
  gather(index);
  PartialSum sum{.participants = table_.participants(index)};
  bool excluded = false;
  while (!slots_.empty() && !tree_sum_.add({slots_, slot_ranks_}, chunk.slot(), 1, to)) {
    const int at = kernels::find_nonfinite(slots_, chunk.slot());
    const auto rank = at < 0 ? CoreReport::kNoRank : slot_ranks_[static_cast<size_t>(at)];
    if (at < 0 || !excludes()) {
      const bool stops = parameters_.rules.on_nonfinite == OnNonFinite::kStop ||
                         parameters_.rules.on_nonfinite == OnNonFinite::kExclude;
      if (stops && !std::exchange(nonfinite_reported_, true)) {
        reports_.add(CoreReport::kNonFinite, rank, index);
      }
      break;
    }
    exclude(at, index);
    excluded = true;
    --sum.participants;
  }
  sum.null = slots_.empty();
  const bool stops = stopping_rack(index).has_value();
  if (stops) sum.null = true;
  if (stops || (sum.participants == 0 && excluded)) sum.participants = kNoneLeft;
  return sum;
}

// Of lars, the only optimizer with a trust ratio that may be clipped, the gradient is measured: it
// is clipped by the same factor.
void Reducer::apply(uint32_t index, float factor, const kernels::KeyNorms& norms,
                    kernels::Store store) {
  const CoreChunk& chunk = table_[index];
  if (chunk.unused) return leave_out(index);
  const TraceSpan span = trace_.span("optimize", chunk);
  const float* gradient = arrays_.sums + chunk.offset;
  if (factor != 1) {
    const void* slot = gradient;
    kernels::sum({&slot, 1}, kernels::DType::kF32, factor, scratch_.data(), chunk.elements);
    gradient = scratch_.data();
  }
  kernels::Step step = step_of(chunk).step;
  step.trust = kernels::trust_ratio(step, {norms.parameters, norms.update * double{factor}});
  optimize(step, chunk, 0, gradient, separate_result(chunk), store);
}

void Reducer::apply(uint32_t index, const KeySteps::Part& part) {
  if (part.unused || table_.participants(index) == 0) return leave_out(index);
  const CoreChunk& chunk = table_[index];
  const TraceSpan span = trace_.span("optimize", chunk);
  kernels::apply_direction(part.step, part.direction, parameters_at(chunk), chunk.elements);
  std::ranges::copy(part.new_state, part.state);
  publish(index);
}

void Reducer::publish(uint32_t index) {
  const CoreChunk& chunk = table_[index];
  if (parameters_.differences) {
    // A round without ranks needs no result.
    return table_.participants(index) > 0 ? make_difference(chunk) : void();
  }
  publish_to(separate_result(chunk), chunk);
}

void Reducer::publish_to(void* result, const CoreChunk& chunk) const {
  if (result == nullptr) return;
  kernels::convert(parameters_at(chunk), kernels::DType::kF32, result,
                   parameters_.rules.parameter_dtype, chunk.elements);
}

// The round is not a step of the optimizer on this chunk. But a round without ranks counts as a
// step, as rounds that are passed over do.
void Reducer::leave_out(uint32_t index) {
  if (table_.participants(index) > 0) --table_[index].step_offset;
  publish(index);
}

// `out`: where the new parameters, then of the branch that runs, go as well; null: nowhere.
void Reducer::optimize(const kernels::Step& step, const CoreChunk& chunk, uint32_t place,
                       const float* sum, void* out, kernels::Store store) {
  float* const parameters = places_.at(place, Places::kParameters, chunk);
  if (chunk.fold()) {
    kernels::fold(chunk.fold(), sum, parameters, chunk.elements);
    return publish_to(out, chunk);
  }
  const auto optimize_with = [&](const auto& state0, const auto& state1) {
    kernels::optimize(step, sum, parameters, state0, state1, chunk.elements, out,
                      parameters_.rules.parameter_dtype, store);
  };
  if (places_.has_8_bits(Places::kState0)) {
    optimize_with(places_.state8(Places::kState0, chunk), places_.state8(Places::kState1, chunk));
  } else {
    optimize_with(places_.at(place, Places::kState0, chunk),
                  places_.at(place, Places::kState1, chunk));
  }
  if (parameters_.differences) make_difference(chunk);
}

// Once each, the rows that the slots have. False: there are none.
bool Reducer::optimize_rows(const kernels::Step& step, const CoreChunk& chunk, uint32_t place,
                            std::span<const void* const> slots, const float* sum) {
  std::ranges::fill(stepped_, 0);
  bool any = false;
  for (const void* slot : slots) {
    kernels::for_each_row(slot, chunk.slot(), [&](size_t row, const float*) {
      uint64_t& word = stepped_[row / 64];
      const uint64_t bit = uint64_t{1} << (row % 64);
      if ((word & bit) != 0) return;
      word |= bit;
      any = true;
      const uint64_t first = row * chunk.columns;
      const auto at = [&](Places::Array array) {
        float* const all = places_.at(place, array, chunk);
        return all ? all + first : nullptr;
      };
      float* const parameters = at(Places::kParameters);
      if (chunk.fold()) {
        return kernels::fold(chunk.fold(), sum + first, parameters, chunk.columns);
      }
      kernels::optimize(step, sum + first, parameters, at(Places::kState0), at(Places::kState1),
                        chunk.columns, nullptr, kernels::DType::kF32, kernels::Store::kCached);
    });
  }
  return any;
}

// The view becomes what the ranks have: they add the decoded difference.
void Reducer::make_difference(const CoreChunk& chunk) {
  const Differences& differences = *parameters_.differences;
  const float* parameters = parameters_at(chunk);
  float* view = arrays_.view + chunk.offset;
  for (size_t i = 0; i < chunk.elements; ++i) scratch_[i] = parameters[i] - view[i];
  std::byte* slot =
      arrays_.results +
      difference_place(result_format_, differences.box_elements, chunk.offset, chunk.elements).byte;
  kernels::encode(scratch_.data(), nullptr, differences.format,
                  {.stochastic = differences.stochastic,
                   .job = differences.job,
                   .rank = kernels::kRoundingOfResults,
                   .round = chunk.round,
                   .element = chunk.worker_offset},
                  slot, chunk.elements);
  kernels::add_decoded(slot, differences.format, decoded_.data(), view, chunk.elements);
}

// The sum holds a NaN or an infinity. Stop: the job ends here, its parameters untouched. Exclude:
// the ranks that sent it are left out of this chunk, which is recorded. False: the chunk cannot
// complete.
bool Reducer::resolve_nonfinite(uint32_t index, float* sum) {
  const CoreChunk& chunk = table_[index];
  uint32_t participants = table_.participants(index);
  if (!reports_.room_for_exclusions(participants)) return false;  // they are read soon: again
  const size_t reports_before = reports_.size();
  for (;;) {
    // A sum that something else has made does not tell whose it is.
    const int at = made_ != nullptr ? -1 : kernels::find_nonfinite(slots_, chunk.slot());
    if (at < 0 || !excludes() || participants == 1) {
      reports_.withdraw(reports_before);
      stop(at < 0 ? CoreReport::kNoRank : slot_ranks_[static_cast<size_t>(at)], index);
      return false;
    }
    exclude(at, index);
    --participants;
    if (add_up(index, factor_of(index, participants), sum)) return true;
  }
}

void Reducer::stop(uint32_t rank, uint32_t index) {
  stopped_ = true;
  reports_.add(CoreReport::kNonFinite, rank, index);
}

// Leaves a rank out of the sum, which is recorded.
void Reducer::exclude(int at, uint32_t index) {
  if (table_.has_weights()) {
    table_.set_weight(slot_ranks_[static_cast<size_t>(at)], index, 0);
    slot_weights_.erase(slot_weights_.begin() + at);
  }
  reports_.add(CoreReport::kExcluded, slot_ranks_[static_cast<size_t>(at)], index);
  slots_.erase(slots_.begin() + at);
  slot_ranks_.erase(slot_ranks_.begin() + at);
}

bool Reducer::update(uint32_t rank, uint32_t index, uint64_t round, uint32_t place,
                     uint64_t& steps) {
  const CoreChunk& chunk = table_[index];
  const TraceSpan span = trace_.span("update", chunk, round, rank);

  const kernels::Hyper hyper = hyper_.of(round, chunk.hyper_class);
  const auto factor = static_cast<float>(
      1.0 / (hyper.grad_scale * (parameters_.rules.mean() ? table_.expected_count() : 1)));
  const void* slot = table_.slot(rank, index);
  const bool finite = kernels::sum({&slot, 1}, chunk.slot(), factor, scratch_.data());
  if (!finite && parameters_.rules.on_nonfinite != OnNonFinite::kPass) {
    if (!reports_.room_for_exclusions(1)) return false;  // they are read soon: again
    stopped_ = parameters_.rules.on_nonfinite == OnNonFinite::kStop;
    reports_.add(stopped_ ? CoreReport::kNonFinite : CoreReport::kExcluded, rank, index).round =
        round;
    return !stopped_;  // an excluded contribution changes nothing
  }

  // Without an optimizer the parameters are the running sum: p − (−1)·g is p + g, to the bit.
  const bool adds = parameters_.rules.optimizer == kernels::Optimizer::kNone;
  const kernels::Step step = adds ? kernels::make_step(kernels::Optimizer::kSgd, {.lr = -1}, 1)
                                  : kernels::make_step(parameters_.rules.optimizer, hyper, ++steps);
  if (chunk.lazy) {
    optimize_rows(step, chunk, place, {&slot, 1}, scratch_.data());
  } else {
    optimize(step, chunk, place, scratch_.data(), nullptr, kernels::Store::kCached);
  }
  return true;
}

void Reducer::copy_result(uint32_t rank, const CoreChunk& chunk, uint32_t place) {
  kernels::convert(places_.at(place, Places::kParameters, chunk), kernels::DType::kF32,
                   result_of(chunk.offset) + rank * arrays_.result_stride,
                   parameters_.rules.parameter_dtype, chunk.elements);
}

void Reducer::store_initial(const CoreChunk& chunk, uint32_t part) {
  const auto [begin, count] = initial_part(chunk.elements, table_.most_slot_bytes(chunk), part);
  const std::byte* slot = table_.slot(0, table_.index_of(chunk));
  if (places_.has(Places::kParameters)) {
    std::memcpy(parameters_at(chunk) + begin, slot, count * sizeof(float));
  }
  const bool separate = parameters_.rules.parameter_dtype != kernels::DType::kF32 || arrays_.view;
  if (separate && !parameters_.rules.own_results()) {
    kernels::convert(slot, kernels::DType::kF32, result_of(chunk.offset + begin),
                     parameters_.rules.parameter_dtype, count);
  }
}

}  // namespace phub
