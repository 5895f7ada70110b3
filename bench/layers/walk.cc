#include "bench/layers/walk.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <optional>
#include <span>
#include <thread>

#include "transport/error.h"

namespace phub::layers {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kForwardShare = 1.0 / 3;  // backward computes two gradients, forward one output

void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// Higher goes first, at the worker and at the server.
int32_t priority_of(const Net& net, const WalkOptions& options, size_t layer) {
  return options.first_layers_first ? static_cast<int32_t>(net.layers.size() - layer) : 0;
}

bool is_in(size_t layer, const std::vector<size_t>& layers) {
  return std::ranges::find(layers, layer) != layers.end();
}

std::vector<FactorMatrix> matrices_of(const Net& net, const WalkOptions& options) {
  std::vector<FactorMatrix> matrices;
  for (const size_t layer : options.as_factors) {
    const KeySpec& key = net.table.keys[net.layers.at(layer).matrix.value()];
    matrices.push_back({.name = key.name,
                        .rows = key.shape[0],
                        .columns = key.shape[1],
                        .samples = options.samples});
  }
  return matrices;
}

// What is exchanged of the layers. A rank's gradient is rank + 1 in all elements, that of its
// factors too, times the samples: so results tell what is in them. In lock-step both ends of a key
// are times scale_of(round), and only they are compared.
class BoxExchange : public Exchange {
 public:
  BoxExchange(const Net& net, const WalkOptions& options, Worker& worker)
      : options_(options), worker_(worker), layers_(net.layers.size()) {
    if (!options.as_factors.empty()) factors_.emplace(worker, matrices_of(net, options));
    const auto own = static_cast<float>(worker.rank() + 1);
    for (size_t l = 0; l < layers_.size(); ++l) {
      for (const size_t key : net.layers[l].keys) {
        if (is_in(l, options.as_factors) && key == net.layers[l].matrix) continue;
        const size_t at = layers_[l].keys.emplace_back(worker.key(net.table.keys[key].name));
        std::ranges::fill(worker.gradient(at), own);
      }
    }
    for (size_t m = 0; m < options.as_factors.size(); ++m) {
      const size_t l = options.as_factors[m];
      layers_[l].matrix = m;
      layers_[l].priority = priority_of(net, options, l);
      std::ranges::fill(factors_->left(m), 1.0F);
      std::ranges::fill(factors_->right(m), own);
      if (is_timed()) {
        layers_[l].product_s =
            product_flop(net, l, worker.world_size(), options.samples) / options.product_flops;
      } else {
        layers_[l].gradient.resize(net.table.keys[*net.layers[l].matrix].elements);
      }
    }
  }

  void push(size_t l) override {
    Layer& layer = layers_[l];
    ++layer.rounds;
    for (const size_t key : layer.keys) {
      if (is_in_lock_step()) {
        const std::span<float> gradient = worker_.gradient(key);
        gradient.front() = gradient.back() =
            static_cast<float>(worker_.rank() + 1) * scale_of(layer.rounds);
      }
      worker_.push(key);
    }
    if (!layer.matrix) return;
    // Products that take a time are of no samples: their factors travel all the same.
    factors_->push(*layer.matrix, is_timed() ? 0 : options_.samples, layer.priority);
    if (!is_timed()) layer.product = std::async(std::launch::async, [&] { multiply(layer); });
  }

  // Until the parameters of a layer are here. Returns how long its products take on top.
  double wait(size_t l) override {
    Layer& layer = layers_[l];
    if (layer.waited == layer.rounds) return 0;
    layer.waited = layer.rounds;
    for (const size_t key : layer.keys) {
      worker_.wait(key);
      check(worker_.parameters(key), layer.rounds);
    }
    if (!layer.matrix) return 0;
    if (is_timed()) {
      factors_->wait(*layer.matrix, nullptr);
      return layer.product_s;
    }
    layer.product.get();
    const float all = sum_of_ranks() * static_cast<float>(options_.samples);
    wrong_ += layer.gradient.front() == all && layer.gradient.back() == all ? 0 : 1;
    return 0;
  }

  // Whether the results of its whole keys came since it was pushed, before anyone waited.
  bool is_back(size_t l) override {
    Layer& layer = layers_[l];
    return layer.waited < layer.rounds &&
           std::ranges::all_of(layer.keys, [&](size_t key) { return worker_.test(key); });
  }

  uint64_t wrong() const override { return wrong_; }

 private:
  struct Layer {
    std::vector<size_t> keys;      // of the worker, exchanged whole
    std::optional<size_t> matrix;  // of the factors
    int32_t priority = 0;          // of these
    double product_s = 0;
    std::vector<float> gradient;  // of the matrix, if it is made
    std::future<void> product;
    uint64_t rounds = 0, waited = 0;
  };

  bool is_in_lock_step() const { return worker_.spec().consistency != "ssp"; }
  bool is_timed() const { return options_.product_flops > 0; }

  void multiply(Layer& layer) {
    std::ranges::fill(layer.gradient, 0.0F);
    factors_->wait(*layer.matrix, layer.gradient.data());
  }

  float sum_of_ranks() const {
    const auto ranks = static_cast<float>(worker_.world_size());
    return ranks * (ranks + 1) / 2;
  }

  // In lock-step results are the round's sums. Out of it they are all updates so far: those of this
  // rank, and of each other one as many, give or take the slack and the update under way.
  void check(std::span<const float> results, uint64_t round) {
    const float own = static_cast<float>(worker_.rank() + 1), others = sum_of_ranks() - own;
    float least = sum_of_ranks() * scale_of(round), most = least;
    if (!is_in_lock_step()) {
      const uint64_t slack = worker_.spec().slack;
      const uint64_t behind = round - std::min(round, slack), ahead = round + slack + 1;
      least = own * static_cast<float>(round) + others * static_cast<float>(behind);
      most = own * static_cast<float>(round) + others * static_cast<float>(ahead);
    }
    const auto fits = [&](float result) { return least <= result && result <= most; };
    wrong_ += fits(results.front()) && fits(results.back()) ? 0 : 1;
  }

  const WalkOptions& options_;
  Worker& worker_;
  std::optional<Factors> factors_;
  std::vector<Layer> layers_;
  uint64_t wrong_ = 0;
};

class Walk {
 public:
  Walk(const Net& net, const WalkOptions& options, Exchange* exchange)
      : net_(net), options_(options), exchange_(exchange), ended_(net.layers.size()) {}

  WalkResult run() {
    Clock::time_point begin = Clock::now();
    for (uint64_t i = 0; i < options_.warmup + options_.iterations; ++i) {
      if (i == options_.warmup) {
        begin = Clock::now();
        result_ = {};
      }
      iterate();
    }
    const std::chrono::duration<double> all = Clock::now() - begin;
    result_.iteration_s = all.count() / static_cast<double>(options_.iterations);
    result_.layers = options_.iterations * (net_.layers.size() - 1);
    if (exchange_ == nullptr) return result_;
    wait_for_all();
    result_.wrong = exchange_->wrong();
    return result_;
  }

 private:
  void iterate() {
    for (size_t l = 0; l < net_.layers.size(); ++l) {
      if (exchange_ != nullptr) sleep(exchange_->wait(l));
      sleep(time_of(l, kForwardShare));
    }
    std::vector<Clock::time_point> pushed(net_.layers.size(), Clock::time_point::max());
    for (size_t l = net_.layers.size(); l-- > 0;) {
      sleep(time_of(l, 1 - kForwardShare));
      ended_[l] = Clock::now();
      if (exchange_ != nullptr && options_.overlap) pushed[l] = push(l);
    }
    if (exchange_ == nullptr) return;
    note(pushed);
    if (options_.overlap) return;
    for (size_t l = net_.layers.size(); l-- > 0;) push(l);
    wait_for_all();
  }

  Clock::time_point push(size_t l) {
    const Clock::time_point at = Clock::now();
    exchange_->push(l);
    return at;
  }

  void wait_for_all() {
    for (size_t l = 0; l < net_.layers.size(); ++l) sleep(exchange_->wait(l));
  }

  void note(const std::vector<Clock::time_point>& pushed) {
    for (size_t l = 1; l < net_.layers.size(); ++l) {
      result_.pushed_early += pushed[l] < ended_[l - 1] ? 1 : 0;
      result_.back_early += exchange_->is_back(l) ? 1 : 0;
    }
  }

  double time_of(size_t l, double share) const {
    return options_.compute_s * share * net_.layers[l].connections / net_.connections();
  }

  const Net& net_;
  const WalkOptions& options_;
  Exchange* exchange_;
  std::vector<Clock::time_point> ended_;  // the backward of each layer, last
  WalkResult result_;
};

}  // namespace

JobSpec job_of(const Net& net, const WalkOptions& options, JobSpec spec) {
  spec.optimizer = "none";
  spec.reduction = "sum";
  for (size_t l = 0; l < net.layers.size(); ++l) {
    for (const size_t key : net.layers[l].keys) {
      if (is_in(l, options.as_factors) && key == net.layers[l].matrix) continue;
      spec.keys.push_back(net.table.keys[key]);
      spec.keys.back().priority = priority_of(net, options, l);
    }
  }
  if (!options.as_factors.empty()) add_factor_keys(spec, matrices_of(net, options));
  return spec;
}

WalkResult walk(const Net& net, const WalkOptions& options, Worker& worker) {
  BoxExchange exchange(net, options, worker);
  return walk(net, options, exchange);
}

WalkResult walk(const Net& net, const WalkOptions& options, Exchange& exchange) {
  return Walk(net, options, &exchange).run();
}

WalkResult walk_alone(const Net& net, const WalkOptions& options) {
  return Walk(net, options, nullptr).run();
}

double product_flop(const Net& net, size_t layer, uint32_t ranks, uint32_t samples) {
  const KeySpec& key = net.table.keys[net.layers.at(layer).matrix.value()];
  return 2.0 * ranks * samples * static_cast<double>(key.elements);
}

}  // namespace phub::layers
