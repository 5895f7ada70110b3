#include "bench/time_to_loss_rank.h"

#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "worker/device/host_device.h"
#include "worker/examples/digits_model.h"
#include "worker/examples/geeps/devices.h"
#include "worker/examples/geeps/network.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/worker_exchange.h"

namespace phub::digits {
namespace {

using Clock = std::chrono::steady_clock;

class PlainRank : public Rank {
 public:
  PlainRank(const Training& training, const Dataset& data, const WorkerOptions& options)
      : worker_(options), training_(training), data_(data), network_(network(training)) {}

  Worker& worker() override { return worker_; }
  std::vector<float> initial() const override { return network_.initial(training_.seed); }

  uint64_t train(uint64_t round, std::chrono::nanoseconds time,
                 const std::function<void()>& computed) override {
    compute(round, time, computed);
    for (size_t key = 0; key < worker_.keys(); ++key) worker_.push(key);
    worker_.wait_all();
    return round;
  }

  std::vector<float> parameters() const override {
    std::vector<float> all;
    for (size_t key = 0; key < worker_.keys(); ++key) {
      const std::span<const float> of_key = values(key);
      all.insert(all.end(), of_key.begin(), of_key.end());
    }
    return all;
  }

 protected:
  virtual std::span<const float> values(size_t key) const { return worker_.parameters(key); }
  virtual std::span<float> gradient(size_t key) { return worker_.gradient(key); }

  // The gradients of a round, which take this long.
  void compute(uint64_t round, std::chrono::nanoseconds time,
               const std::function<void()>& computed) {
    const auto done = Clock::now() + time;
    const Samples batch = digits::batch(data_.train, training_.seed, worker_.rank(),
                                        training_.world, round, training_.batch);
    network_.start(batch.images);
    for (size_t l = 0; l < network_.layers(); ++l) {
      network_.forward(l, values(Network::weights_key(l)), values(Network::bias_key(l)));
    }
    network_.loss(batch.labels);
    for (size_t l = network_.layers(); l-- > 0;) {
      const size_t weights = Network::weights_key(l);
      network_.backward(l, values(weights), gradient(weights), gradient(Network::bias_key(l)));
    }
    std::this_thread::sleep_until(done);
    computed();
  }

  Worker worker_;

 private:
  const Training& training_;
  const Dataset& data_;
  Network network_;
};

// It computes with parameters and gradients of its own, while the worker has the round before.
class LateRank final : public PlainRank {
 public:
  LateRank(const Training& training, const Dataset& data, const WorkerOptions& options)
      : PlainRank(training, data, options) {
    for (const KeySpec& key : worker_.spec().keys) {
      parameters_.emplace_back(key.elements);
      gradients_.emplace_back(key.elements);
    }
  }

  void begin() override {
    for (size_t key = 0; key < worker_.keys(); ++key) pull(key);
  }

  uint64_t train(uint64_t round, std::chrono::nanoseconds time,
                 const std::function<void()>& computed) override {
    compute(round, time, computed);
    for (size_t key = 0; key < worker_.keys(); ++key) {
      pull(key);
      worker_.push_copy(key, std::as_bytes(std::span(gradients_[key])));
    }
    return round;
  }

  void end() override { worker_.wait_all(); }

 private:
  std::span<const float> values(size_t key) const override { return parameters_[key]; }
  std::span<float> gradient(size_t key) override { return gradients_[key]; }
  void pull(size_t key) { worker_.pull(key, std::as_writable_bytes(std::span(parameters_[key]))); }

  std::vector<std::vector<float>> parameters_, gradients_;  // by key
};

// Computes, and takes at least a stated time for it: each product of an iteration the same part.
class PacedMath final : public examples::Math {
 public:
  // Of a network of two layers: forward and backward, without the error of the images.
  static constexpr int kProducts = 5;
  // Before the last one the upper layer has been pushed.
  static constexpr int kProductsBeforePush = 4;

  void begin(std::chrono::nanoseconds time, const std::function<void()>& computed) {
    time_ = time / kProducts;
    computed_ = &computed;
    products_ = 0;
  }

  void multiply(const examples::Product& product, const float* a, const float* b,
                float* c) override {
    const auto done = Clock::now() + time_;
    math_->multiply(product, a, b, c);
    std::this_thread::sleep_until(done);
    if (++products_ == kProductsBeforePush) (*computed_)();
  }
  void run(size_t rows, size_t columns, const examples::Operation& operation) override {
    math_->run(rows, columns, operation);
  }
  void upload(const float* from, float* to, size_t count) override {
    math_->upload(from, to, count);
  }
  void download(const float* from, float* to, size_t count) override {
    math_->download(from, to, count);
  }

 private:
  const std::unique_ptr<examples::Math> math_ = examples::make_host_math();
  std::chrono::nanoseconds time_{0};
  const std::function<void()>* computed_ = nullptr;
  int products_ = 0;
};

class CachedRank final : public Rank {
 public:
  CachedRank(const Training& training, const Dataset& data, WorkerOptions options,
             const std::string& budget, bool late)
      : training_(training),
        layers_(network(training)),
        share_{.rank = static_cast<uint32_t>(options.rank),
               .world = training.world,
               .samples = training.batch,
               .seed = training.seed,
               .staleness = staleness_of(options.spec, late)},
        network_(layers(training), data, share_),
        device_(device(data, budget)),
        worker_(options_of(std::move(options))) {}

  Worker& worker() override { return worker_; }

  // A layer's weights and bias are the floats of a table: in the same order as the keys.
  std::vector<float> initial() const override {
    const std::vector<float> flat = layers_.initial(training_.seed);
    std::vector<float> all;
    size_t at = 0;
    for (uint32_t layer = 0; layer < layers_.layers(); ++layer) {
      const size_t begin = all.size(), floats = floats_of(layer);
      all.insert(all.end(), flat.begin() + static_cast<long>(at),
                 flat.begin() + static_cast<long>(at + floats));
      all.resize(begin + network_.tables().part_floats(layer));
      at += floats;
    }
    return all;
  }

  void begin() override {
    exchange_.emplace(worker_, network_.tables().specs());
    cache_.emplace(*device_, *exchange_, network_.tables().specs());
    cache_->begin_virtual();
    iterate(nullptr, 1);
    cache_->finish_sequence();
  }

  uint64_t train(uint64_t round, std::chrono::nanoseconds time,
                 const std::function<void()>& computed) override {
    math_.begin(time, computed);
    iterate(&math_, round);
    return samples() ? round : round - 1;
  }

  std::vector<float> parameters() const override { return parameters_; }
  void end() override {
    cache_->wait_all();
    cache_.reset();
    exchange_.reset();
  }

 private:
  static examples::Layers layers(const Training& training) {
    const auto hidden = static_cast<size_t>(training.hidden);
    examples::Layers layers;
    layers.push_back(examples::dense(kPixels, hidden, true));
    layers.push_back(examples::dense(hidden, kClasses, false));
    return layers;
  }

  static std::optional<uint32_t> staleness_of(const JobSpec& spec, bool late) {
    if (!late) return std::nullopt;
    return (spec.consistency == "ssp" ? spec.slack : 0) + 1;
  }

  // Its gradients are divided by the number of ranks.
  WorkerOptions options_of(WorkerOptions options) const {
    options.spec.keys = geeps::keys_of(network_.tables().specs());
    options.spec.reduction = "sum";
    return options;
  }

  std::unique_ptr<HostDevice> device(const Dataset& data, const std::string& budget) const {
    examples::TrainingOptions options;
    options.budget = budget;
    options.share = share_;
    return make_host_device(
        {.budget_bytes = examples::budget_bytes(options, [&](const examples::Share& share) {
           return std::make_unique<examples::Network>(layers(training_), data, share);
         })});
  }

  size_t floats_of(uint32_t layer) const {
    return layers_.keys()[Network::weights_key(layer)].elements +
           layers_.keys()[Network::bias_key(layer)].elements;
  }
  bool samples() const { return share_.rank == 0; }

  void iterate(examples::Math* math, uint64_t round) {
    network_.train(*cache_, math, round - 1);
    if (samples()) read_parameters();
  }

  void read_parameters() {
    parameters_.clear();
    for (uint32_t layer = 0; layer < layers_.layers(); ++layer) {
      const geeps::ReadBuffer rows = network_.tables().read(*cache_, layer);
      if (rows.data() == nullptr) continue;  // virtual
      parameters_.insert(parameters_.end(), rows.data(), rows.data() + floats_of(layer));
    }
  }

  const Training& training_;
  const Network layers_;
  const examples::Share share_;
  examples::Network network_;
  const std::unique_ptr<HostDevice> device_;
  Worker worker_;
  std::optional<geeps::WorkerExchange> exchange_;
  std::optional<geeps::Cache> cache_;
  PacedMath math_;
  std::vector<float> parameters_;  // of rank 0, after the latest iteration
};

}  // namespace

std::unique_ptr<Rank> make_plain_rank(const Training& training, const Dataset& data,
                                      const WorkerOptions& options, bool late) {
  if (late) return std::make_unique<LateRank>(training, data, options);
  return std::make_unique<PlainRank>(training, data, options);
}

std::unique_ptr<Rank> make_cached_rank(const Training& training, const Dataset& data,
                                       const WorkerOptions& options, const std::string& budget,
                                       bool late) {
  return std::make_unique<CachedRank>(training, data, options, budget, late);
}

}  // namespace phub::digits
