#include "worker/examples/geeps/training.h"

#include <fmt/format.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <map>
#include <optional>
#include <thread>

#include "transport/error.h"
#include "worker/examples/agreement.h"
#include "worker/examples/geeps/checkpoint.h"
#include "worker/examples/geeps/devices.h"
#include "worker/examples/geeps/store_exchange.h"
#include "worker/examples/geeps/training_job.h"
#include "worker/geeps/device_group.h"
#include "worker/geeps/standalone_exchange.h"
#include "worker/geeps/worker_exchange.h"

namespace phub::examples {

using geeps::Cache;
using geeps::CacheStats;
using geeps::Exchange;
using std::chrono::steady_clock;

namespace {

void write(const std::string& path, std::span<const float> values) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(values.data()),
             static_cast<std::streamsize>(values.size_bytes()));
  if (!file.flush()) fail(ErrorCode::kInternal, "{}: {}", path, std::strerror(errno));
}

size_t floats_of(const geeps::TableSpec& table) { return table.keys.size() * table.row_floats; }

// What the optimizer keeps of the tables of parameters, in one array: of each table one kind behind
// the other.
class OptimizerState {
 public:
  OptimizerState(std::span<const geeps::TableSpec> tables, size_t arrays_of_table) {
    std::vector<size_t> begin;  // by table
    size_t elements = 0;
    for (const geeps::TableSpec& table : tables) {
      begin.push_back(elements);
      if (!table.local) elements += floats_of(table);
    }
    parameters_.resize(elements);
    arrays_.resize(elements * arrays_of_table);
    for (const geeps::RowsOfKey& rows : geeps::rows_of_keys(tables)) {
      const geeps::TableSpec& table = tables[rows.table];
      const size_t at = begin[rows.table], within = size_t{rows.first_row} * table.row_floats;
      const size_t count = size_t{rows.rows} * table.row_floats;
      KeyState& state = states_.emplace_back(KeyState{.key = states_.size(), .arrays = {}});
      state.arrays.push_back(std::span(parameters_).subspan(at + within, count));
      for (size_t i = 0; i < arrays_of_table; ++i) {
        const size_t array = at * arrays_of_table + i * floats_of(table);
        state.arrays.push_back(std::span(arrays_).subspan(array + within, count));
      }
    }
  }
  OptimizerState(const OptimizerState&) = delete;
  OptimizerState& operator=(const OptimizerState&) = delete;

  std::vector<float> get(Exchange& exchange) {
    exchange.get_state(states_);
    return arrays_;
  }
  // As a checkpoint has it: after so many clocks.
  void set(Exchange& exchange, const Checkpoint& checkpoint) {
    if (checkpoint.parameters.size() != parameters_.size() ||
        checkpoint.optimizer.size() != arrays_.size()) {
      fail(ErrorCode::kMismatch,
           "the checkpoint has {} parameters and {} elements of the optimizer's state, and this "
           "training {} and {}",
           checkpoint.parameters.size(), checkpoint.optimizer.size(), parameters_.size(),
           arrays_.size());
    }
    std::ranges::copy(checkpoint.parameters, parameters_.begin());
    std::ranges::copy(checkpoint.optimizer, arrays_.begin());
    for (KeyState& state : states_) state.step = checkpoint.clock;
    exchange.set_state(states_);
  }

 private:
  std::vector<float> parameters_, arrays_;
  std::vector<KeyState> states_;
};

geeps::CacheOptions cache_options(const TrainingOptions& options, uint32_t rank, Stream* compute) {
  return {.peak_first = options.peak_first,
          .prefetch = options.prefetch,
          .poison = options.poison,
          .partitions = options.partitions,
          .compute = compute,
          .trace = with_rank(options.trace, rank)};
}

// A device, and the model that is trained on it. Used by one thread.
class Trainer {
 public:
  using SetHyper = std::function<void(const std::map<std::string, double>&)>;

  Trainer(const TrainingOptions& options, std::string name, const Share& share, uint64_t budget,
          uint32_t device, const MakeModel& make)
      : options_(options),
        share_(share),
        name_(identity(name, options, share)),
        make_(make),
        model_(make(share)),
        device_(make_device(options, device, budget)) {
    check_can_write(options, share.rank);
    if (!options.resume) return;
    checkpoint_ = load(path(), name_);
    model_->restore_state(checkpoint_.state);
  }

  const Tables& tables() const { return model_->tables(); }
  std::vector<float> initial() const {
    return options_.resume ? checkpoint_.parameters : model_->initial();
  }
  const Checkpoint& checkpoint() const { return checkpoint_; }  // that it goes on from

  // REQUIRES: the exchange outlives this. With `set_hyper` this one keeps the learning rate, and
  // saves the optimizer's state, of so many arrays.
  void begin(Exchange& exchange, SetHyper set_hyper, size_t state_arrays) {
    exchange_ = &exchange;
    set_hyper_ = std::move(set_hyper);
    if (set_hyper_ && state_arrays > 0) optimizer_.emplace(tables().specs(), state_arrays);
    cache_.emplace(*device_.device, exchange, model_->tables().specs(),
                   cache_options(options_, share_.rank, device_.compute.get()));
    if (options_.gather != "virtual") return;
    cache_->begin_virtual();
    model_->train(*cache_, nullptr, checkpoint_.clock);
    cache_->finish_sequence();
    if (share_.rank == 0) print_placement();
  }

  void run() {
    reported_at_ = steady_clock::now();
    const uint64_t first = checkpoint_.clock;
    double rate = options_.lr;
    for (uint64_t clock = first; clock < options_.clocks; ++clock) {
      if (set_hyper_ && learning_rate(options_, clock) != rate) {
        cache_->wait_all();  // from this clock on, not from the one before
        set_hyper_({{"lr", rate = learning_rate(options_, clock)}});
      }
      train(clock, options_.gather == "first" && clock == first);
      after(clock + 1);
    }
    cache_->wait_all();
    const std::vector<float> all = all_parameters();
    if (!options_.out.empty()) write(with_rank(options_.out, share_.rank), all);
    fmt::print("rank {}: digest {:016x}\n", share_.rank, digest(std::as_bytes(std::span(all))));
    std::fflush(stdout);
  }

 private:
  std::string path() const { return with_rank(options_.checkpoint, share_.rank); }

  void train(uint64_t clock, bool gathers) try {
    if (gathers) cache_->begin_gathering();
    loss_ += model_->train(*cache_, device_.math.get(), clock);
    if (gathers) cache_->finish_sequence();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kFull || options_.gather == "virtual") throw;
    TrainingOptions least = options_;
    least.budget = "least";
    fail(ErrorCode::kFull,
         "{}. With --gather {} this training needs a --budget of at least {} bytes, as buffers are "
         "not placed before the sequence is known",
         error.what(), options_.gather, budget_bytes(least, make_));
  }

  void after(uint64_t clocks) {
    if (share_.rank == 0 && clocks % options_.report_every == 0) report(clocks);
    const bool due = options_.checkpoint_every > 0 && clocks % options_.checkpoint_every == 0;
    if (!options_.checkpoint.empty() && (due || clocks == options_.clocks)) {
      cache_->wait_all();
      save(path(), {.of = name_,
                    .clock = clocks,
                    .parameters = all_parameters(),
                    .state = model_->state(),
                    .optimizer = optimizer_ ? optimizer_->get(*exchange_) : std::vector<float>()});
    }
  }

  // One table behind the other. REQUIRES: wait_all(), and no clock since.
  std::vector<float> all_parameters() const {
    std::vector<float> all;
    for (size_t key = 0; key < exchange_->keys(); ++key) {
      const std::span<const float> piece = exchange_->parameters(key);
      all.insert(all.end(), piece.begin(), piece.end());
    }
    return all;
  }
  std::string evaluate() const {
    const std::vector<float> all = all_parameters();
    std::span<const float> left = all;
    Parameters by_table;
    for (const geeps::TableSpec& table : tables().specs()) {
      if (table.local) continue;
      by_table.push_back(left.first(floats_of(table)));
      left = left.subspan(floats_of(table));
    }
    return model_->evaluate(by_table);
  }

  void print_placement() const {
    const geeps::Placement& p = cache_->placement();
    const auto mega = [](uint64_t bytes) { return static_cast<double>(bytes) / 1e6; };
    uint64_t floats = 0;
    for (const auto& table : tables().specs()) floats += table.keys.size() * table.row_floats;
    fmt::print(
        "tables of {:.2f} MB; device memory {:.2f} MB of {:.2f} MB: pinned {:.2f}, {}-"
        "buffered {:.2f}; {:.2f} MB moved per iteration\n",
        mega(floats * sizeof(float)), mega(p.total_bytes()), mega(device_.device->budget_bytes()),
        mega(p.pinned_bytes), p.buffering == geeps::Buffering::kDouble ? "double" : "single",
        mega(p.pool_bytes), mega(p.moved_bytes));
  }

  void report(uint64_t clocks) {
    using Milliseconds = std::chrono::duration<double, std::milli>;
    cache_->wait_all();
    const Milliseconds time = steady_clock::now() - reported_at_;
    const CacheStats stats = cache_->stats();
    const Milliseconds stalled = stats.stalled - reported_stall_;
    const auto iterations =
        static_cast<double>(clocks - std::max(reported_clocks_, checkpoint_.clock));
    fmt::print("iteration {:>6}   loss {:.4f}   {}   {:.2f} ms each, {:.0f}% stalled\n", clocks,
               loss_ / iterations, evaluate(), time.count() / iterations, 100 * stalled / time);
    std::fflush(stdout);
    loss_ = 0;
    reported_clocks_ = clocks;
    reported_stall_ = stats.stalled;
    reported_at_ = steady_clock::now();
  }

  const TrainingOptions& options_;
  Share share_;
  std::string name_;
  MakeModel make_;
  std::unique_ptr<Model> model_;
  ComputeDevice device_;
  Exchange* exchange_ = nullptr;
  SetHyper set_hyper_;
  std::optional<OptimizerState> optimizer_;
  Checkpoint checkpoint_;  // that the training goes on from
  std::optional<Cache> cache_;

  double loss_ = 0;  // since the last report
  uint64_t reported_clocks_ = 0;
  std::chrono::nanoseconds reported_stall_{0};
  steady_clock::time_point reported_at_;
};

using Trainers = std::vector<std::unique_ptr<Trainer>>;

Trainers trainers(const TrainingOptions& options, const std::string& name, uint32_t rank,
                  const MakeModel& make) {
  const uint64_t budget = budget_bytes(options, make);
  Trainers trainers;
  for (uint32_t device = 0; device < options.devices; ++device) {
    trainers.push_back(std::make_unique<Trainer>(options, name, share_of(options, rank, device),
                                                 budget, device, make));
  }
  return trainers;
}

// A rank that leaves its job is done, and the others go on without it. One that fails does not
// leave: its process ends at once, and the others learn that it is lost.
void or_end_process(const std::function<void()>& run) {
  try {
    run();
  } catch (const std::exception& error) {
    std::fflush(stdout);
    fmt::print(stderr, "{}\n", error.what());
    std::_Exit(1);
  }
}

// One thread per device. The others may wait for one that fails.
void run_all(const Trainers& trainers) {
  std::vector<std::jthread> threads;
  for (const auto& trainer : trainers) {
    threads.emplace_back([&trainer] { or_end_process([&trainer] { trainer->run(); }); });
  }
}

// `set_hyper`: null where another process does it.
void run(const TrainingOptions& options, Trainers trainers, Exchange& exchange,
         const Trainer::SetHyper& set_hyper, size_t state_arrays) {
  std::optional<geeps::DeviceGroup> group;
  if (options.devices > 1) group.emplace(exchange, geeps::DeviceGroupOptions{options.devices});
  const Trainers of_group = std::move(trainers);  // ends before the group
  for (uint32_t i = 0; i < of_group.size(); ++i) {
    Exchange& member = group ? group->member(i) : exchange;
    of_group[i]->begin(member, i == 0 ? set_hyper : nullptr, state_arrays);
  }
  if (group) {
    run_all(of_group);
  } else {
    of_group[0]->run();
  }
}

// Every process multiplies with the rate itself.
void train_in_store(const TrainingOptions& options, const std::string& name,
                    const MakeModel& make) {
  if (options.standalone || options.optimizer != "sgd" || !options.hyper.empty()) {
    fail(ErrorCode::kInvalid,
         "--store: only sgd without --hyper, and not with --standalone: rows are added to, by "
         "processes that have a box");
  }
  WorkerOptions worker = options.worker;
  if (worker.rank < 0 && !worker.rank_error.empty()) {
    fail(ErrorCode::kInvalid, "--store: {}", worker.rank_error);
  }
  take_rank_if_alone(worker);
  if (worker.rank < 0) {
    fail(ErrorCode::kInvalid, "--store: each of several processes says which rank it is (--rank)");
  }
  worker.spec.on_loss = "fail";
  worker.spec.consistency = options.consistency;
  worker.spec.slack = options.slack;
  Trainers all = trainers(options, name, static_cast<uint32_t>(worker.rank), make);
  std::vector<std::string> settings = settings_of(name, options);
  settings.push_back(fmt::format("from iteration {}", all[0]->checkpoint().clock));
  settings.push_back(fmt::format("to iteration {}", options.clocks));
  agree(worker, settings);
  StoreExchange exchange(worker, all[0]->tables().specs(), options.lr, all[0]->initial());
  const auto set_rate = [&](const std::map<std::string, double>& values) {
    exchange.set_rate(values.at("lr"));
  };
  or_end_process([&] { run(options, std::move(all), exchange, set_rate, 0); });
}

}  // namespace

void train(const TrainingOptions& options, const std::string& name, const MakeModel& make) {
  check_files(options);
  if (options.store) return train_in_store(options, name, make);
  const std::unique_ptr<Model> any = make(share_of(options, 0, 0));
  const JobSpec spec = job_spec(options, any->tables());
  const size_t state_arrays = optimizer_states(spec).size();
  // Every rank says where it goes on, and rank 0's file has the state of the optimizer, which is
  // the job's. The server gives and takes it when it knows that the job has begun, as it does when
  // set_hyper() has returned.
  const auto begin = [&](Exchange& exchange, const Trainer::SetHyper& set_hyper,
                         const Checkpoint& checkpoint) {
    try {
      set_hyper({{"lr_rounds_before", static_cast<double>(checkpoint.clock)}});
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kMismatch) throw;
      fail(ErrorCode::kMismatch, "the ranks go on from different iterations: {}", error.what());
    }
    if (options.resume && state_arrays > 0 && exchange.rank() == 0) {
      OptimizerState(any->tables().specs(), state_arrays).set(exchange, checkpoint);
    }
  };
  if (options.standalone) {
    Trainers all = trainers(options, name, 0, make);
    geeps::StandaloneExchange exchange(spec, all[0]->initial());
    const auto set_hyper = [&](const std::map<std::string, double>& values) {
      exchange.set_hyper(values);
    };
    begin(exchange, set_hyper, all[0]->checkpoint());
    run(options, std::move(all), exchange, set_hyper, state_arrays);
    return;
  }
  WorkerOptions worker_options = options.worker;
  worker_options.spec = spec;
  Worker worker(worker_options);
  or_end_process([&] {
    Trainers all = trainers(options, name, worker.rank(), make);
    worker.broadcast(worker.rank() == 0 ? all[0]->initial() : std::vector<float>());
    geeps::WorkerExchange exchange(worker, all[0]->tables().specs());
    const auto set_hyper = [&](const std::map<std::string, double>& values) {
      worker.set_hyper(values);
    };
    begin(exchange, set_hyper, all[0]->checkpoint());
    worker.barrier();  // nobody completes a round before that
    const Trainer::SetHyper of_rank_0 = worker.rank() == 0 ? Trainer::SetHyper(set_hyper) : nullptr;
    run(options, std::move(all), exchange, of_rank_0, state_arrays);
  });
  worker.leave();
}

}  // namespace phub::examples
