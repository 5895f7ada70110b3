#include "worker/geeps/worker_exchange.h"

#include "worker/geeps/tables.h"
#include "worker/memory/key_arrays.h"

namespace phub::geeps {

// f32 arrays: factors, and what the library has in another format, which its keys use as long as
// this is there. Empty: a key uses the library's.
struct WorkerExchange::OwnMemory {
  OwnMemory(Worker& of_worker, std::span<const size_t> of_gradients,
            std::span<const size_t> of_parameters)
      : worker(of_worker), gradients(of_gradients), parameters(of_parameters) {}
  ~OwnMemory() {
    try {
      for (const size_t key : used) worker.register_memory(key, {});
    } catch (const Error&) {  // the worker has failed: it uses no memory any more
    }
  }
  OwnMemory(const OwnMemory&) = delete;
  OwnMemory& operator=(const OwnMemory&) = delete;

  void use(size_t key, bool gradient, bool result) {
    used.push_back(key);
    worker.register_memory(key, {.gradient = gradient ? gradients[key].data() : nullptr,
                                 .parameters = result ? parameters[key].data() : nullptr,
                                 .gradient_dtype = "f32",
                                 .parameter_dtype = "f32",
                                 .in_place = false});
  }

  Worker& worker;
  KeyArrays gradients, parameters;
  std::vector<size_t> used;
};

WorkerExchange::WorkerExchange(Worker& worker, std::span<const TableSpec> tables)
    : worker_(worker), away_(worker.keys()) {
  if (worker.memory_device() != nullptr) {
    fail(ErrorCode::kInvalid,
         "the host reads and writes gradients and parameters of tables, and those of this worker "
         "lie "
         "in memory of a device: leave memory_device out");
  }
  if (folds(worker.spec())) {
    fail(ErrorCode::kInvalid,
         "tables add up gradients, and job '{}' is of values with operations (optimizer 'fold')",
         worker.spec().name);
  }
  const std::vector<KeySpec> expected = keys_of(tables);
  const std::vector<KeySpec>& keys = worker_.spec().keys;
  for (size_t k = 0; k < expected.size(); ++k) {
    const std::string table = table_name(expected[k].name);
    if (k == keys.size()) {
      fail(ErrorCode::kInvalid, "table '{}' is not in job '{}', which has {} keys", table,
           worker_.spec().name, keys.size());
    }
    if (keys[k].name != expected[k].name) {
      fail(ErrorCode::kInvalid,
           "table '{}' is key '{}', but key {} of job '{}' is '{}': a job's keys are those of "
           "keys_of() for the same tables, in pieces of the same size (piece_bytes)",
           table, expected[k].name, k, worker_.spec().name, keys[k].name);
    }
    if (keys[k].elements != expected[k].elements) {
      fail(ErrorCode::kInvalid, "table '{}' has {} elements here and {} in job '{}'", table,
           expected[k].elements, keys[k].elements, worker_.spec().name);
    }
    names_.push_back(table);
  }
  if (keys.size() > expected.size()) {
    fail(ErrorCode::kInvalid, "key '{}' of job '{}' is no table", keys[expected.size()].name,
         worker_.spec().name);
  }
  if (worker_.spec().quorum > 0) {
    fail(ErrorCode::kInvalid,
         "job '{}' has a quorum: a late rank misses rounds, and a cache counts the rounds of its "
         "tables. Leave the quorum out",
         worker_.spec().name);
  }
  if (worker_.saves_residuals() && !worker_.saves()) {
    fail(ErrorCode::kInvalid,
         "job '{}' has coded gradients, whose residuals the server saves: give the worker a saver, "
         "which may have nothing to save itself, and call save_point()",
         worker_.spec().name);
  }
  make_own_memory();
  worker_.wait_all();
  worker_.save_by_call(true);
  for (size_t k = 0; k < names_.size(); ++k) begun_.push_back(worker_.round(k));
}

// The cache reads and writes f32: where the library's memory has another format, a push converts
// the gradient, and a result that comes back is converted.
void WorkerExchange::make_own_memory() {
  const JobSpec& spec = worker_.spec();
  std::vector<size_t> gradients = floats_of_factors(spec.keys), parameters(spec.keys.size());
  const bool converts = parameter_memory_format(spec) != "f32";
  for (size_t k = 0; k < spec.keys.size(); ++k) {
    const KeySpec& key = spec.keys[k];
    if (is_rows(key)) {
      fail(ErrorCode::kInvalid, "rows of table '{}' are sent, and a cache pushes whole tables",
           names_[k]);
    }
    const bool is_sent = !is_factors(key);
    if (is_sent && gradient_memory_format(spec, key) != "f32") gradients[k] = key.elements;
    if (converts) parameters[k] = key.elements;
  }
  own_ = std::make_unique<OwnMemory>(worker_, gradients, parameters);
  for (size_t k = 0; k < spec.keys.size(); ++k) {
    const bool has_gradient = gradients[k] > 0 && !is_factors(spec.keys[k]);
    if (!has_gradient && !converts) continue;
    own_->use(k, has_gradient, converts);
  }
}

WorkerExchange::~WorkerExchange() {
  worker_.forget_announced();
  worker_.save_by_call(false);
}

std::span<float> WorkerExchange::gradient(size_t key) {
  const std::span<float> own = own_->gradients[key];
  return own.empty() ? worker_.gradient(key) : own;
}

std::span<const float> WorkerExchange::parameters(size_t key) const {
  const std::span<const float> own = own_->parameters[key];
  return own.empty() ? worker_.parameters(key) : own;
}

template <typename Push>
void WorkerExchange::push_with(size_t key, Push push) {
  {
    const std::lock_guard lock(mutex_);
    failure_.check();
    if (away_.at(key)) {
      fail(ErrorCode::kInvalid, "table '{}' was pushed before its last push came back",
           names_[key]);
    }
    away_[key] = true;
  }
  try {
    push();
  } catch (const Error& error) {
    fail_with(error);
  }
}

void WorkerExchange::push(size_t key, int32_t priority) {
  push_with(key, [&] { worker_.push(key, {.priority = priority, .announced = true}); });
}

void WorkerExchange::push_factors(size_t key, std::span<const FactorPairs> factors,
                                  int32_t priority) {
  push_with(key,
            [&] { worker_.push_factors(key, factors, {.priority = priority, .announced = true}); });
}

void WorkerExchange::push_null(size_t key) {
  push_with(key, [&] { worker_.push(key, {.null = true, .announced = true}); });
}

std::optional<size_t> WorkerExchange::next() {
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (stopped_) return std::nullopt;
      failure_.check();
    }
    std::optional<Completion> here;
    try {
      here = worker_.wait_any();
    } catch (const Error& error) {
      fail_with(error);
    }
    if (!here) continue;  // stop() or a failure has called wake()
    if (here->error) fail_with(*here->error);
    const std::lock_guard lock(mutex_);
    away_[here->pushed.key] = false;
    return here->pushed.key;
  }
}

void WorkerExchange::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  worker_.wake();
}

uint64_t WorkerExchange::saved_after(size_t key) const {
  return worker_.saves() ? worker_.next_saved() - begun_.at(key) : kNever;
}

std::optional<Exchange::Branches> WorkerExchange::branches(uint64_t pushes) {
  if (worker_.spec().branches == 0 || begun_.empty()) return std::nullopt;
  return Branches{.round = begun_.front() + pushes + 1, .all = worker_.branches()};
}

std::optional<uint32_t> WorkerExchange::slack() const { return slack_of(worker_.spec()); }

// Throws the failure, and lets all later calls throw it.
void WorkerExchange::fail_with(const Error& error) {
  {
    const std::lock_guard lock(mutex_);
    failure_.keep(error);
  }
  worker_.wake();
  throw Error(error.code(), error.what());
}

}  // namespace phub::geeps
