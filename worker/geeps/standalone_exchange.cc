#include "worker/geeps/standalone_exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <iterator>
#include <mutex>
#include <queue>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/hyper.h"
#include "kernels/kernels.h"
#include "kernels/products.h"
#include "transport/error.h"
#include "worker/geeps/key_queue.h"
#include "worker/geeps/tables.h"
#include "worker/memory/key_arrays.h"

namespace phub::geeps {
namespace {

using kernels::DType;
using kernels::Optimizer;

// Throws Error(kInvalid) unless gradients and parameters are f32: nothing is sent here.
void check_formats(const JobSpec& spec) {
  const auto check_format = [&](const char* field, const std::string& format) {
    if (format != "f32") {
      fail(ErrorCode::kInvalid, "job '{}': {} is {}; formats of what is sent need a server",
           spec.name, field, format);
    }
  };
  for (const KeySpec& key : spec.keys) {
    if (!is_factors(key)) check_format("gradient_dtype", gradient_format(spec, key));
  }
  check_format("parameter_dtype", parameter_memory_format(spec));
}

JobSpec checked(JobSpec spec) {
  validate(spec);
  check_formats(spec);
  if (spec.world_size != 1) {
    fail(ErrorCode::kInvalid, "job '{}' is for {} workers, which need a server", spec.name,
         spec.world_size);
  }
  if (hyper_groups(spec) > 1) {
    fail(ErrorCode::kInvalid, "job '{}' has groups of hyperparameters, which need a server",
         spec.name);
  }
  if (spec.on_nonfinite == "skip" || spec.hyper.contains("max_norm")) {
    fail(ErrorCode::kInvalid,
         "job '{}': a norm of all keys (max_norm), and rounds that are skipped, need a server",
         spec.name);
  }
  if (adapts_by_key(spec) || steps_whole_keys(spec)) {
    fail(ErrorCode::kInvalid,
         "job '{}': optimizer '{}' makes steps of whole keys, which need a server", spec.name,
         spec.optimizer);
  }
  if (spec.weights != Weights::kNo) {
    fail(ErrorCode::kInvalid, "job '{}': weights of gradients (weights 'yes') need a server",
         spec.name);
  }
  if (spec.work != "all") {
    fail(ErrorCode::kInvalid, "job '{}': work is '{}', for servers only", spec.name, spec.work);
  }
  if (spec.state_dtype == "8bit") {
    fail(ErrorCode::kInvalid, "job '{}': states of 8 bits (state_dtype '8bit') need a server",
         spec.name);
  }
  if (folds(spec)) {
    fail(ErrorCode::kInvalid, "job '{}': values with operations (optimizer 'fold') need a server",
         spec.name);
  }
  const bool has_factors = std::ranges::any_of(spec.keys, is_factors);
  if (has_factors && spec.on_nonfinite == "exclude") {
    fail(ErrorCode::kInvalid, "job '{}': factors with on_nonfinite 'exclude' need a server",
         spec.name);
  }
  return spec;
}

Optimizer optimizer_of(const JobSpec& spec) {
  const std::optional<Optimizer> optimizer = kernels::parse_optimizer(spec.optimizer);
  if (!optimizer) {
    fail(ErrorCode::kInvalid, "job '{}': there is no optimizer '{}'", spec.name, spec.optimizer);
  }
  return *optimizer;
}

std::vector<size_t> elements_by_key(const JobSpec& spec) {
  std::vector<size_t> elements;
  for (const KeySpec& key : spec.keys) elements.push_back(key.elements);
  return elements;
}

void set(kernels::Hyper& hyper, const std::map<std::string, double>& values) {
  for (const auto& [name, value] : values) {
    const std::string problem = kernels::set(hyper, name, value);
    if (!problem.empty()) fail(ErrorCode::kInvalid, "{}", problem);
  }
}

bool is_before(uint64_t round, const HyperChange& change) { return round < change.round; }

// The hyperparameters of every round: those a job begins with, its schedule, and later changes.
// Not thread-safe. Errors are Error(kInvalid), and change nothing.
class HyperSchedule {
 public:
  HyperSchedule(kernels::Optimizer optimizer, const JobSpec& spec);

  const kernels::Hyper& at(uint64_t round) const;
  // Changes values from `round` on; they override the schedule's for that round. Rounds before
  // `oldest` are forgotten. REQUIRES: oldest <= round.
  void change(uint64_t round, const std::map<std::string, double>& values, uint64_t oldest);

 private:
  void check(const std::map<std::string, double>& values) const;
  void lay_out();

  const kernels::Optimizer optimizer_;
  kernels::Hyper first_;
  std::vector<HyperChange> changes_;                         // by ascending round
  std::vector<std::pair<uint64_t, kernels::Hyper>> rounds_;  // from each of these rounds on
};

HyperSchedule::HyperSchedule(kernels::Optimizer optimizer, const JobSpec& spec)
    : optimizer_(optimizer), first_(kernels::default_hyper(optimizer)), changes_(spec.schedule) {
  set(first_, spec.hyper);
  for (const HyperChange& change : changes_) check(change.values);
  lay_out();
}

const kernels::Hyper& HyperSchedule::at(uint64_t round) const {
  const auto after = std::upper_bound(rounds_.begin(), rounds_.end(), round,
                                      [](uint64_t r, const auto& from) { return r < from.first; });
  return std::prev(after)->second;  // the first are from round 0 on
}

void HyperSchedule::change(uint64_t round, const std::map<std::string, double>& values,
                           uint64_t oldest) {
  check(values);
  changes_.insert(std::upper_bound(changes_.begin(), changes_.end(), round, is_before),
                  {.round = round, .values = values});
  const auto past = std::upper_bound(changes_.begin(), changes_.end(), oldest, is_before);
  for (auto change = changes_.begin(); change != past; ++change) set(first_, change->values);
  changes_.erase(changes_.begin(), past);
  lay_out();
}

void HyperSchedule::check(const std::map<std::string, double>& values) const {
  kernels::Hyper changed = first_;
  set(changed, values);
  if (values.contains("max_norm")) fail(ErrorCode::kInvalid, "max_norm needs a server");
  if (optimizer_ == kernels::Optimizer::kRmsprop && values.contains("rmsprop_momentum")) {
    fail(ErrorCode::kInvalid, "rmsprop_momentum cannot change: it decides how much state there is");
  }
}

void HyperSchedule::lay_out() {
  rounds_ = {{0, first_}};
  for (const HyperChange& change : changes_) {
    kernels::Hyper hyper = rounds_.back().second;
    set(hyper, change.values);
    rounds_.emplace_back(change.round, hyper);
  }
}

}  // namespace

// The caller's threads push; one thread applies the updates.
struct StandaloneExchange::Impl {
  Impl(const JobSpec& job, std::span<const float> initial);

  struct Update {
    int32_t priority;
    uint64_t order;
    size_t key;
    bool null;
    std::vector<FactorPairs> factors;
    // The first of a heap: higher priority, then what was pushed before.
    bool operator<(const Update& other) const {
      return std::tuple(priority, other.order) < std::tuple(other.priority, order);
    }
  };
  struct Round {
    uint64_t number, step;
    kernels::Hyper hyper;  // of the key
  };

  void set_initial(std::span<const float> initial);
  void push(size_t key, int32_t priority, bool null, std::span<const FactorPairs> factors = {});
  void run(const std::stop_token& stop);
  template <typename State>
  std::vector<std::span<float>> check_state(const State& state);
  Round begin_round(size_t key);
  void apply(const Update& update, const Round& round);
  std::span<const float> gradient_of(const Update& update) const;
  bool admit(size_t key, bool finite, const float* gradient, size_t first, size_t elements) const;

  const JobSpec spec;
  const Optimizer optimizer;
  const bool lock_step;
  std::vector<std::string> names;
  KeyArrays gradients, parameters, state0, state1;
  KeyArrays matrices;  // of factors, which lie in `gradients`
  KeyQueue done;

  // Used by the thread only.
  std::vector<float> sum;                      // of a chunk
  std::vector<std::vector<uint64_t>> updates;  // by key and chunk; in lock-step rounds say as much

  std::mutex mutex;  // guards what follows
  std::condition_variable_any changed;
  std::priority_queue<Update> pushed;
  std::vector<bool> away;        // by key: pushed and not yet named by next()
  std::vector<uint64_t> rounds;  // by key: begun
  std::vector<uint64_t> steps;   // by key, in lock-step: made by the optimizer
  HyperSchedule hyper;
  uint64_t pushes = 0;

  std::jthread thread;
};

StandaloneExchange::Impl::Impl(const JobSpec& job, std::span<const float> initial)
    : spec(checked(job)),
      optimizer(optimizer_of(spec)),
      lock_step(spec.consistency == "bsp"),
      sum(spec.chunk_elements),
      away(spec.keys.size()),
      rounds(spec.keys.size()),
      steps(spec.keys.size()),
      hyper(optimizer, spec) {
  for (const KeySpec& key : spec.keys) {
    names.push_back(table_name(key.name));
    updates.emplace_back((key.elements + spec.chunk_elements - 1) / spec.chunk_elements);
  }
  const std::vector<size_t> elements = elements_by_key(spec);
  const size_t states = kernels::state_arrays(optimizer, hyper.at(1));
  std::vector<size_t> sent = floats_of_factors(spec.keys), multiplied(elements.size());
  for (size_t key = 0; key < elements.size(); ++key) {
    (sent[key] > 0 ? multiplied[key] : sent[key]) = elements[key];
  }
  gradients = KeyArrays(sent);
  matrices = KeyArrays(multiplied);
  parameters = KeyArrays(elements);
  if (states > 0) state0 = KeyArrays(elements);
  if (states > 1) state1 = KeyArrays(elements);
  set_initial(initial);
  thread = std::jthread([this](const std::stop_token& stop) { run(stop); });
}

void StandaloneExchange::Impl::set_initial(std::span<const float> initial) {
  if (initial.empty() && spec.initial == "zeros") return;
  size_t elements = 0;
  for (const KeySpec& key : spec.keys) elements += key.elements;
  if (initial.size() != elements) {
    fail(ErrorCode::kInvalid, "job '{}': {} initial parameters for keys of {} elements in all",
         spec.name, initial.size(), elements);
  }
  for (size_t key = 0; key < spec.keys.size(); ++key) {
    const std::span<float> to = parameters[key];
    std::copy_n(initial.begin(), to.size(), to.begin());
    initial = initial.subspan(to.size());
  }
}

void StandaloneExchange::Impl::push(size_t key, int32_t priority, bool null,
                                    std::span<const FactorPairs> factors) {
  done.check();
  {
    const std::lock_guard lock(mutex);
    if (away.at(key)) {
      fail(ErrorCode::kInvalid, "table '{}' was pushed before its last push came back", names[key]);
    }
    away[key] = true;
    pushed.push({.priority = priority,
                 .order = pushes++,
                 .key = key,
                 .null = null,
                 .factors = {factors.begin(), factors.end()}});
  }
  changed.notify_one();
}

void StandaloneExchange::Impl::run(const std::stop_token& stop) {
  std::unique_lock lock(mutex);
  try {
    while (changed.wait(lock, stop, [this] { return !pushed.empty(); }), !stop.stop_requested()) {
      const Update update = pushed.top();
      pushed.pop();
      const Round round = begin_round(update.key);
      lock.unlock();
      apply(update, round);
      lock.lock();
      done.add(update.key);
    }
  } catch (const std::exception& error) {
    done.fail(error);
  }
}

// REQUIRES: the lock is held.
StandaloneExchange::Impl::Round StandaloneExchange::Impl::begin_round(size_t key) {
  Round round{.number = ++rounds[key], .step = ++steps[key], .hyper = hyper.at(rounds[key])};
  round.hyper.lr = kernels::learning_rate(round.hyper, round.number) * spec.keys[key].lr_scale;
  round.hyper.weight_decay *= spec.keys[key].decay_scale;
  return round;
}

// In lock-step a gradient of zero is a step of the optimizer; otherwise it has no effect.
void StandaloneExchange::Impl::apply(const Update& update, const Round& round) {
  const size_t key = update.key;
  const bool null = update.null;
  if (null && !lock_step) return;
  const std::span<const float> all = gradient_of(update);
  const float* const gradient = all.data();
  const auto factor = static_cast<float>(1.0 / round.hyper.grad_scale);
  kernels::Step step = kernels::make_step(optimizer, round.hyper, round.step);
  for (size_t chunk = 0, at = 0; chunk < updates[key].size(); ++chunk, at += sum.size()) {
    const size_t elements = std::min(sum.size(), all.size() - at);
    const std::array<const void*, 1> slot = {gradient + at};
    const bool finite = kernels::sum(std::span(slot).first(null ? 0 : 1), DType::kF32, factor,
                                     sum.data(), elements);
    if (!admit(key, finite, gradient, at, elements)) continue;
    if (!lock_step) {
      // Without an optimizer the parameters are the running sum: p − (−1)·g is p + g, to the bit.
      step = optimizer == Optimizer::kNone
                 ? kernels::make_step(Optimizer::kSgd, {.lr = -1}, 1)
                 : kernels::make_step(optimizer, round.hyper, ++updates[key][chunk]);
    }
    float* const to = parameters[key].data() + at;
    const bool replaces = step.optimizer == Optimizer::kNone;  // the sum is the result
    const auto state = [&](const KeyArrays& memory) {
      return memory.keys() > 0 ? memory[key].data() + at : nullptr;
    };
    kernels::optimize(step, sum.data(), replaces ? nullptr : to, state(state0), state(state1),
                      elements, replaces ? to : nullptr, DType::kF32, kernels::Store::kCached);
  }
}

// Factors are multiplied as the server does it.
std::span<const float> StandaloneExchange::Impl::gradient_of(const Update& update) const {
  const KeySpec& key = spec.keys[update.key];
  if (!is_factors(key)) return gradients[update.key];
  const std::span<float> matrix = matrices[update.key];
  std::ranges::fill(matrix, 0.0f);
  for (const FactorPairs& part : update.factors) {
    kernels::add_products(part.left, part.right, part.pairs, key.shape[0], key.shape[1],
                          matrix.data());
  }
  return matrix;
}

// Whether a chunk's gradient is applied. According to on_nonfinite, a NaN or infinity throws, is
// excluded, or is applied. In lock-step a round needs a gradient.
bool StandaloneExchange::Impl::admit(size_t key, bool finite, const float* gradient, size_t first,
                                     size_t elements) const {
  if (finite || spec.on_nonfinite == "pass") return true;
  if (spec.on_nonfinite == "exclude" && !lock_step) return false;
  const std::array<const void*, 1> slot = {gradient + first};
  fail(ErrorCode::kNonFinite, "{} in key '{}', elements {} to {}",
       kernels::find_nonfinite(slot, DType::kF32, elements) < 0 ? "a finite gradient overflowed"
                                                                : "there is a NaN or an infinity",
       names[key], first, first + elements - 1);
}

// The key's parameters and arrays of state, if `state` is of them. REQUIRES: the lock is held.
template <typename State>
std::vector<std::span<float>> StandaloneExchange::Impl::check_state(const State& state) {
  if (!lock_step || optimizer == Optimizer::kNone) {
    fail(ErrorCode::kInvalid,
         "job '{}': consistency '{}' with optimizer '{}' has no state to read or set, which is of "
         "rounds in lock-step and of an optimizer",
         spec.name, spec.consistency, spec.optimizer);
  }
  if (state.key >= names.size()) {
    fail(ErrorCode::kInvalid, "key {} of job '{}', which has {}", state.key, spec.name,
         names.size());
  }
  if (away[state.key]) {
    fail(ErrorCode::kInvalid, "the state of table '{}', whose push has not come back",
         names[state.key]);
  }
  std::vector<std::span<float>> arrays = {parameters[state.key]};
  for (const KeyArrays* memory : {&state0, &state1}) {
    if (memory->keys() > 0) arrays.push_back((*memory)[state.key]);
  }
  const auto same_size = [](const auto& a, const auto& b) { return a.size() == b.size(); };
  if (!std::ranges::equal(arrays, state.arrays, same_size)) {
    fail(ErrorCode::kInvalid,
         "the state of table '{}' is {} arrays of {} elements: its parameters, and what '{}' keeps",
         names[state.key], arrays.size(), arrays[0].size(), spec.optimizer);
  }
  return arrays;
}

StandaloneExchange::StandaloneExchange(const JobSpec& spec, std::span<const float> initial)
    : impl_(std::make_unique<Impl>(spec, initial)) {}
StandaloneExchange::~StandaloneExchange() = default;

size_t StandaloneExchange::keys() const { return impl_->names.size(); }
const std::string& StandaloneExchange::name(size_t key) const { return impl_->names.at(key); }
size_t StandaloneExchange::elements(size_t key) const { return impl_->parameters[key].size(); }
uint32_t StandaloneExchange::samples(size_t key) const {
  return impl_->spec.keys.at(key).rank_limit;
}
std::span<float> StandaloneExchange::gradient(size_t key) { return impl_->gradients[key]; }
std::span<const float> StandaloneExchange::parameters(size_t key) const {
  return impl_->parameters[key];
}

void StandaloneExchange::push(size_t key, int32_t priority) { impl_->push(key, priority, false); }
void StandaloneExchange::push_factors(size_t key, std::span<const FactorPairs> factors,
                                      int32_t priority) {
  impl_->push(key, priority, false, factors);
}
void StandaloneExchange::push_null(size_t key) { impl_->push(key, 0, true); }

std::optional<size_t> StandaloneExchange::next() {
  const std::optional<size_t> key = impl_->done.next();
  const std::lock_guard lock(impl_->mutex);
  if (key) impl_->away[*key] = false;
  return key;
}

void StandaloneExchange::stop() { impl_->done.stop(); }
void StandaloneExchange::get_state(std::span<KeyState> states) {
  impl_->done.check();
  const std::lock_guard lock(impl_->mutex);
  for (KeyState& state : states) {
    const std::vector<std::span<float>> arrays = impl_->check_state(state);
    for (size_t i = 0; i < arrays.size(); ++i) {
      std::ranges::copy(arrays[i], state.arrays[i].begin());
    }
    state.step = impl_->steps[state.key];
  }
}

void StandaloneExchange::set_state(std::span<const KeyState> states) {
  impl_->done.check();
  const std::lock_guard lock(impl_->mutex);
  for (const KeyState& state : states) impl_->check_state(state);
  for (const KeyState& state : states) {
    const std::vector<std::span<float>> arrays = impl_->check_state(state);
    for (size_t i = 0; i < arrays.size(); ++i) {
      std::ranges::copy(state.arrays[i], arrays[i].begin());
    }
    impl_->steps[state.key] = state.step;
  }
}

std::optional<uint32_t> StandaloneExchange::slack() const { return slack_of(impl_->spec); }

void StandaloneExchange::set_hyper(const std::map<std::string, double>& values) {
  impl_->done.check();
  const std::lock_guard lock(impl_->mutex);
  const auto [slowest, fastest] = std::ranges::minmax(impl_->rounds);
  impl_->hyper.change(fastest + 1, values, slowest + 1);
}

}  // namespace phub::geeps
