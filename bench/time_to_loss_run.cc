#include "bench/time_to_loss_run.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "bench/time_to_loss_rank.h"
#include "transport/error.h"
#include "worker/examples/digits_model.h"

namespace phub::digits {
namespace {

using Clock = std::chrono::steady_clock;

// Rank 0's parameters after one of its rounds.
struct Sample {
  double seconds = 0;
  double rounds = 0;  // gradients of all ranks, over their number
  std::vector<float> parameters;
};

class Run {
 public:
  Run(const TimeToLoss& options, const Dataset& data, const Mode& mode, WorkerOptions worker)
      : options_(options),
        training_(options.training),
        data_(data),
        mode_(mode),
        worker_(std::move(worker)),
        pushed_(options.training.world) {
    worker_.spec.consistency = mode.consistency;
    worker_.spec.slack = mode.job_slack();
    worker_.send_order = mode.order;
    worker_.carry_over = mode.carry_over;
  }

  Result measure() {
    std::vector<std::future<void>> ranks;
    for (uint32_t rank = 0; rank < training_.world; ++rank) {
      ranks.push_back(std::async(std::launch::async, [this, rank] { train(rank); }));
    }
    for (auto& rank : ranks) rank.get();
    const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    return evaluate({.rounds_per_second = static_cast<double>(training_.rounds) / seconds,
                     .largest_lead = static_cast<double>(largest_lead_.load()),
                     .carried = carried_});
  }

 private:
  static constexpr uint64_t kLeft = ~uint64_t{0};

  void train(uint32_t number) {
    WorkerOptions options = worker_;
    options.rank = static_cast<int32_t>(number);
    const std::unique_ptr<Rank> rank =
        options_.cache.empty()
            ? make_plain_rank(training_, data_, options, mode_.late)
            : make_cached_rank(training_, data_, options, options_.cache, mode_.late);
    Worker& worker = rank->worker();
    worker.broadcast(number == 0 ? rank->initial() : std::vector<float>());
    rank->begin();
    worker.barrier();
    std::call_once(started_, [this] { start_ = Clock::now(); });
    const uint64_t gradients = training_.rounds * training_.world;
    const auto goes_on = [&](uint64_t round) {  // in lock-step all ranks make the same rounds
      return mode_.consistency == "bsp" ? round <= training_.rounds
                                        : taken_.fetch_add(1) < gradients;
    };
    for (uint64_t round = 1; goes_on(round); ++round) {
      const auto computed = [&] {
        pushed_[number] = round;
        ++gradients_;
      };
      note_lead(rank->train(round, computation_of(number, round), computed));
      if (number == 0) take_sample(*rank);
    }
    pushed_[number] = kLeft;
    rank->end();
    if (number == 0) {
      const WorkerStats stats = worker.stats();
      carried_ = static_cast<double>(stats.chunks_carried_over) /
                 static_cast<double>(std::max<uint64_t>(stats.chunks_pushed, 1));
    }
    worker.leave();
  }

  // A straggler is the last rank in every round, or each rank in one of `world` of its rounds.
  std::chrono::nanoseconds computation_of(uint32_t rank, uint64_t round) const {
    Random random((training_.seed * training_.world + rank) << 32 | round);
    const bool straggles =
        options_.random ? random.next() % training_.world == 0 : rank + 1 == training_.world;
    const double ms = options_.compute_ms + (straggles ? options_.delay_ms : 0);
    return std::chrono::nanoseconds(static_cast<int64_t>(ms * 1e6));
  }

  // How many rounds a rank that begins the next one is ahead of the slowest.
  void note_lead(uint64_t round) {
    uint64_t slowest = round;
    for (const auto& pushed : pushed_) slowest = std::min<uint64_t>(slowest, pushed);
    const uint64_t lead = round - slowest;
    uint64_t most = largest_lead_;
    while (most < lead && !largest_lead_.compare_exchange_weak(most, lead)) {
    }
    if (lead > mode_.largest_lead()) {
      fail(ErrorCode::kInternal, "{}: a rank is {} rounds ahead", mode_.name(), lead);
    }
  }

  void take_sample(const Rank& rank) {
    samples_.push_back({.seconds = std::chrono::duration<double>(Clock::now() - start_).count(),
                        .rounds = static_cast<double>(gradients_) / training_.world,
                        .parameters = rank.parameters()});
  }

  // Computed after the run, so that it costs no time of the run.
  Result evaluate(Result result) const {
    Network network = digits::network(training_);
    for (const Sample& sample : samples_) {
      const Reached now{sample.seconds, sample.rounds};
      const bool last = &sample == &samples_.back();
      if (last || result.loss.seconds == kNotReached) {
        forward(network, data_.train, sample);
        result.last_loss = network.loss(data_.train.labels);
        if (result.loss.seconds == kNotReached && result.last_loss <= options_.loss) {
          result.loss = now;
        }
      }
      forward(network, data_.test, sample);
      const auto correct = static_cast<double>(network.correct(data_.test.labels));
      const double percent = 100 * correct / static_cast<double>(data_.test.size());
      result.accuracies.push_back({sample.seconds, sample.rounds, percent});
      if (result.accuracy.seconds == kNotReached && percent >= options_.accuracy) {
        result.accuracy = now;
      }
    }
    return result;
  }

  static void forward(Network& network, const Samples& on, const Sample& sample) {
    const std::vector<size_t> offsets = key_offsets(network.keys());
    const auto values = [&](size_t key) {
      return std::span(sample.parameters).subspan(offsets[key], offsets[key + 1] - offsets[key]);
    };
    network.start(on.images);
    for (size_t l = 0; l < network.layers(); ++l) {
      network.forward(l, values(Network::weights_key(l)), values(Network::bias_key(l)));
    }
  }

  const TimeToLoss& options_;
  const Training& training_;
  const Dataset& data_;
  const Mode mode_;
  WorkerOptions worker_;
  std::once_flag started_;
  Clock::time_point start_;
  std::atomic<uint64_t> taken_ = 0;            // gradients that somebody computes or has computed
  std::vector<std::atomic<uint64_t>> pushed_;  // per rank
  std::atomic<uint64_t> gradients_ = 0;        // of all ranks
  std::atomic<uint64_t> largest_lead_ = 0;
  std::vector<Sample> samples_;  // rank 0's
  double carried_ = 0;           // the same
};

}  // namespace

Result train(const TimeToLoss& options, const Dataset& data, const Mode& mode,
             const WorkerOptions& worker) {
  return Run(options, data, mode, worker).measure();
}

}  // namespace phub::digits
