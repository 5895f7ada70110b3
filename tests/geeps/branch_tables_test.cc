// Local tables by branch, through a cache: what each branch reads is what an array of its own has,
// whatever the budget, and however branches come and go.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/geeps/plain_job.h"
#include "tests/seeds.h"
#include "tests/worker/expect_error.h"
#include "transport/error.h"
#include "worker/device/cuda_device.h"
#include "worker/device/host_device.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/standalone_exchange.h"

namespace phub::geeps {
namespace branch_tables_test {

using phub::testing::error_of;
using phub::testing::expect_error;
using phub::testing::fresh_seeds;
using phub::testing::scaled;

constexpr uint64_t kReserved = 16 << 10;
constexpr uint32_t kW = 0, kState = 1, kOwn = 2, kMoments = 3;  // kOwn is the same in all branches

std::vector<TableSpec> tables() {
  return {
      {"w", 4, dense(6)},
      {.name = "state", .row_floats = 3, .keys = dense(40), .local = true, .by_branch = true},
      {.name = "own", .row_floats = 5, .keys = dense(12), .local = true},
      {.name = "moments", .row_floats = 64, .keys = dense(10), .local = true, .by_branch = true}};
}

// What is decided about the branches of a job.
struct Decided {
  BranchReply all = {.branches = {{.branch = 0}}, .runs = {{.round = 1, .branch = 0}}};
  uint64_t begun = 0;  // rounds of earlier exchanges
  RankState saved = {};
  bool restores = false;
};

// Its parameters are those of one worker, which no branch has of its own here.
class BranchedExchange final : public Exchange {
 public:
  BranchedExchange(const JobSpec& job, std::span<const float> initial, Decided& decided)
      : alone_(job, initial), decided_(decided) {}

  size_t keys() const override { return alone_.keys(); }
  const std::string& name(size_t key) const override { return alone_.name(key); }
  size_t elements(size_t key) const override { return alone_.elements(key); }
  std::span<float> gradient(size_t key) override { return alone_.gradient(key); }
  std::span<const float> parameters(size_t key) const override { return alone_.parameters(key); }
  void push(size_t key, int32_t priority) override { alone_.push(key, priority); }
  void push_null(size_t key) override { alone_.push_null(key); }
  std::optional<size_t> next() override { return alone_.next(); }
  void stop() override { alone_.stop(); }
  std::optional<uint32_t> slack() const override { return alone_.slack(); }
  uint32_t rank() const override { return 0; }
  uint32_t world_size() const override { return 1; }

  std::optional<Branches> branches(uint64_t pushes) override {
    ++asked;
    if (std::exchange(is_silent, false)) throw Error(ErrorCode::kUnavailable, "no answer");
    return Branches{.round = decided_.begun + pushes + 1, .all = decided_.all};
  }
  uint64_t saved_after(size_t /*key*/) const override { return save_after; }
  void save(RankState state) override {
    decided_.saved = std::move(state);
    save_after = kNever;
  }
  std::optional<std::span<const std::byte>> restored(const std::string& name) const override {
    const auto found = decided_.saved.find(name);
    if (!decided_.restores || found == decided_.saved.end()) return std::nullopt;
    return found->second;
  }

  uint64_t save_after = kNever;
  uint64_t asked = 0;
  bool is_silent = false;  // once

 private:
  StandaloneExchange alone_;
  Decided& decided_;
};

struct Use {
  uint32_t table;
  std::vector<uint64_t> keys;
  bool fetches, saves;
};

class Training {
 public:
  Training(uint64_t seed, bool on_cuda) : on_cuda_(on_cuda), random_(seed), specs_(tables()) {
    for (const uint32_t table : {kState, kOwn, kMoments}) {
      const TableSpec& spec = specs_[table];
      arrays_[table][0].resize(spec.keys.size() * spec.row_floats);
    }
    const size_t uses = 3 + pick(6);
    for (size_t i = 0; i < uses; ++i) uses_.push_back(random_use());
    options_ = {.reserved_bytes = kReserved,
                .max_lead = 1 + pick(4),
                .prefetch = pick(4) > 0,
                .poison = pick(2) == 0,
                .partitions = 1 + pick(3),
                .timeout = std::chrono::seconds(60)};
    on_stream_ = pick(2) == 0;
    slow_ = pick(4) == 0;
    trains_first_ = pick(2) == 0;
    records_ = pick(8) > 0;
    options_.budget_bytes = kReserved + 1024;
    while (!opens()) options_.budget_bytes += options_.budget_bytes / 8;
    options_.budget_bytes += (options_.budget_bytes - kReserved) * pick(4) / 2;
  }

  void run() {
    ASSERT_TRUE(opens());
    for (int i = 0; i < 40; ++i) {
      iteration(true);
      ASSERT_FALSE(::testing::Test::HasFailure()) << "iteration " << i;
      if (pick(12) == 0) go_on_from_what_is_saved();
    }
    for (int i = 0; i < 7; ++i) iteration(false);  // until all has happened
    while (decided_.all.branches.size() > 1) {     // all of them once more
      run_from_next(decided_.all.branches.back().branch);
      iteration(false);
      check_all();
      const uint32_t last = decided_.all.branches.back().branch;
      run_from_next(0);
      iteration(false);
      check_all();
      discard(last);
    }
    iteration(false);
    cache_->wait_all();
    EXPECT_EQ(cache_->stats().branch_bytes, 0u);
  }

 private:
  uint32_t pick(uint32_t below) { return static_cast<uint32_t>(random_() % below); }

  Use random_use() {
    const uint32_t table = pick(3) == 0 ? kOwn : pick(2) == 0 ? kState : kMoments;
    std::vector<uint64_t> keys = specs_[table].keys;
    if (pick(3) > 0) {
      std::shuffle(keys.begin(), keys.end(), random_);
      keys.resize(1 + pick(static_cast<uint32_t>(keys.size())));
      if (pick(2) == 0) std::ranges::sort(keys);
    }
    return {table, keys, pick(5) > 0, pick(4) > 0};
  }

  bool opens() {
    cache_.reset();
    exchange_.reset();
    staged_.clear();
    stream_.reset();
    hand_.reset();
    device_ = make_device();
    if (on_stream_) stream_ = device_->make_stream("compute");
    if (on_cuda_ && !on_stream_) hand_ = device_->make_stream("hand");
    options_.compute = stream_.get();
    exchange_ = std::make_unique<BranchedExchange>(testing::plain_job(specs_), w_, decided_);
    cache_ = std::make_unique<Cache>(*device_, *exchange_, specs_, options_);
    cache_round_ = 0;
    if (!records_) return true;
    cache_->begin_virtual();
    if (trains_first_) train_w(true);
    for (const Use& use : uses_) access(use, true);
    if (!trains_first_) train_w(true);
    try {
      cache_->finish_sequence();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kFull) << error.what();
      return false;
    }
    return true;
  }

  std::unique_ptr<Device> make_device() const {
    if (on_cuda_) return make_cuda_device({.ordinal = 0, .budget_bytes = options_.budget_bytes});
    return make_host_device({.budget_bytes = options_.budget_bytes,
                             .copy_latency = std::chrono::microseconds(slow_ ? 100 : 0),
                             .poison_copies = true});
  }

  std::vector<float>& array_of(uint32_t table) {
    return arrays_.at(table).at(table == kOwn ? 0 : running_);
  }

  void access(const Use& use, bool virtually = false) {
    const Buffer buffer =
        cache_->local_access(use.table, use.keys, use.fetches ? Fetch::kYes : Fetch::kNo);
    if (!virtually) {
      std::vector<float>& array = array_of(use.table);
      const uint32_t floats = specs_[use.table].row_floats;
      std::vector<float> expected, written;
      for (const uint64_t key : use.keys) {
        for (uint32_t i = 0; i < floats; ++i) {
          expected.push_back(array[key * floats + i]);
          written.push_back(static_cast<float>(random_() % 1'000'000));
          if (use.saves) array[key * floats + i] = written.back();
        }
      }
      if (!use.fetches) expected.clear();
      if (!use.saves) written.clear();
      compute(buffer.data, expected, written, specs_[use.table].name);
    }
    cache_->post_local_access(buffer.handle, use.saves ? Save::kYes : Save::kNo);
  }
  // Begins with what is expected, and ends with what is written.
  void compute(float* data, const std::vector<float>& expected, const std::vector<float>& written,
               const std::string& name) {
    const auto body = [expected, written, name](float* rows) {
      if (!std::equal(expected.begin(), expected.end(), rows)) {
        ADD_FAILURE() << "other rows of " << name;
      }
      std::ranges::copy(written, rows);
    };
    if (!on_cuda_) return stream_ ? stream_->call([=] { body(data); }) : body(data);
    Stream& stream = stream_ ? *stream_ : *hand_;
    const size_t floats = std::max(expected.size(), written.size());
    const HostMemory& here = staged_.emplace_back(*device_, (floats + 1) * sizeof(float), "staged");
    float* rows = here.floats().data();
    if (!expected.empty()) stream.copy_to_host(rows, data, expected.size() * sizeof(float));
    stream.call([=] { body(rows); });
    if (!written.empty()) stream.copy_to_device(data, rows, written.size() * sizeof(float));
    if (!stream_) stream.synchronize();
  }

  // One is subtracted from every parameter.
  void train_w(bool virtually = false) {
    const Buffer read = cache_->read(kW, specs_[kW].keys);
    if (!virtually) compute(read.data, w_, {}, "w");
    cache_->post_read(read.handle);
    const Buffer update = cache_->pre_update(kW, specs_[kW].keys);
    if (!virtually) {
      compute(update.data, {}, std::vector<float>(w_.size(), 1), "w");
      for (float& w : w_) w -= 1;
    }
    cache_->update(update.handle);
    cache_->table_clock(kW);
  }

  void iteration(bool decides) {
    const uint32_t omitted = pick(6) == 0 ? pick(static_cast<uint32_t>(uses_.size())) : ~0U;
    if (trains_first_) train_w();
    for (uint32_t i = 0; i < uses_.size(); ++i) {
      if (i != omitted) access(uses_[i]);
      if (pick(20) == 0) access(random_use());
    }
    if (!trains_first_) train_w();
    if (decides) decide();
    ++round_;
    ++cache_round_;
    if (pick(8) == 0) {
      exchange_->is_silent = true;
      expect_error(ErrorCode::kUnavailable, "no answer", [&] { cache_->save_point(); });
    }
    cache_->save_point();
    if (pick(8) == 0) cache_->save_point();  // once more has no effect
    if (stream_ && !staged_.empty()) stream_->synchronize();
    staged_.clear();
    apply();
  }

  // Something may hold from the next round on; what holds later comes at its time.
  void decide() {
    std::vector<BranchStatus>& branches = decided_.all.branches;
    if (pick(3) == 0 && branches.size() < 5) {
      const uint32_t parent = any_branch();
      const uint64_t round = std::max(round_ + 1 + pick(3), status_of(parent).round);
      decided_.all.forks.push_back({.round = round, .branch = next_, .parent = parent});
      branches.push_back({.branch = next_++, .parent = parent, .round = round});
    }
    const bool is_last = decided_.all.runs.back().round <= round_ + 1;
    if (pick(2) == 0 && is_last) {
      const uint32_t to = any_branch();
      if (status_of(to).round <= round_ + 1) run_from_next(to);
      uint64_t later = round_ + 1;
      while (pick(2) == 0 && later < round_ + 5) {
        const uint32_t then = any_branch();
        later += 1 + pick(2);
        if (status_of(then).round <= later) {
          decided_.all.runs.push_back({.round = later, .branch = then});
        }
      }
    }
    // What is gone at the end of all that was decided may have turns and children until then.
    if (pick(4) == 0) {
      const uint32_t branch = any_branch();
      if (branch != 0 && decided_.all.runs.back().branch != branch) discard(branch);
    }
  }
  const BranchStatus& status_of(uint32_t branch) {
    return *std::ranges::find(decided_.all.branches, branch, &BranchStatus::branch);
  }
  uint32_t any_branch() {
    return decided_.all.branches[pick(static_cast<uint32_t>(decided_.all.branches.size()))].branch;
  }
  void run_from_next(uint32_t branch) {
    std::vector<BranchRun>& runs = decided_.all.runs;
    if (runs.back().round == round_ + 1) runs.pop_back();
    runs.push_back({.round = round_ + 1, .branch = branch});
  }
  void discard(uint32_t branch) {
    std::erase_if(decided_.all.branches,
                  [&](const BranchStatus& each) { return each.branch == branch; });
    gone_.push_back(branch);
  }

  // The arrays as they are at the beginning of the round.
  void apply() {
    std::vector<BranchFork>& forks = decided_.all.forks;
    for (const BranchFork& fork : forks) {
      for (const uint32_t table : {kState, kMoments}) {
        if (fork.round == round_) arrays_[table][fork.branch] = arrays_[table].at(fork.parent);
      }
    }
    std::erase_if(forks, [&](const BranchFork& fork) { return fork.round < round_; });
    std::vector<BranchRun>& runs = decided_.all.runs;
    while (runs.size() > 1 && runs[1].round <= round_) runs.erase(runs.begin());
    running_ = runs.front().branch;
    std::erase_if(gone_, [&](uint32_t branch) {
      if (std::ranges::find(runs, branch, &BranchRun::branch) != runs.end()) return false;
      const auto is_of_it = [&](const BranchFork& fork) {
        return fork.round > round_ && (fork.parent == branch || fork.branch == branch);
      };
      if (std::ranges::any_of(forks, is_of_it)) return false;
      for (const uint32_t table : {kState, kMoments}) arrays_[table].erase(branch);
      return true;
    });
  }

  void check_all() {
    for (const uint32_t table : {kState, kOwn, kMoments}) {
      access({table, specs_[table].keys, true, false});
    }
    if (stream_) stream_->synchronize();
  }

  // As a restored rank does.
  void go_on_from_what_is_saved() {
    exchange_->save_after = cache_round_ + 1;
    iteration(true);
    EXPECT_EQ(exchange_->save_after, Exchange::kNever);
    decided_.begun = round_ - 1;
    decided_.restores = true;
    if (pick(2) == 0) options_.partitions = 1 + pick(3);
    if (!opens()) {
      options_.budget_bytes *= 4;
      ASSERT_TRUE(opens());
    }
  }

  const bool on_cuda_;
  std::mt19937_64 random_;
  const std::vector<TableSpec> specs_;
  std::vector<float> w_ = std::vector<float>(24);
  std::map<uint32_t, std::map<uint32_t, std::vector<float>>> arrays_;  // by table and branch
  std::vector<Use> uses_;
  CacheOptions options_;
  bool on_stream_ = false, slow_ = false, trains_first_ = false, records_ = true;
  Decided decided_;
  std::vector<uint32_t> gone_;
  uint64_t round_ = 1, cache_round_ = 0;  // in progress; done by this cache
  uint32_t running_ = 0, next_ = 1;
  std::unique_ptr<Device> device_;
  std::deque<HostMemory> staged_;          // CUDA: what the computation reads and writes
  std::unique_ptr<Stream> stream_, hand_;  // of the computation; CUDA: else of this thread
  std::unique_ptr<BranchedExchange> exchange_;
  std::unique_ptr<Cache> cache_;
};

void run_seeds(bool on_cuda) {
  const auto seeds = fresh_seeds(scaled(100));
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(seed);
    Training(seed, on_cuda).run();
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(BranchTables, EachBranchReadsWhatItWrote) { run_seeds(false); }
TEST(BranchTables, EachBranchReadsWhatItWroteOnCuda) {
  if (const auto found = cuda_devices(); found.devices.empty()) GTEST_SKIP() << found.none_because;
  run_seeds(true);
}

}  // namespace branch_tables_test
}  // namespace phub::geeps
