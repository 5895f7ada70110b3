// Runs random programs of calls on a cache, and checks every row that it reads against flat arrays.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>

#include "tests/geeps/cache_programs.h"
#include "tests/geeps/plain_job.h"
#include "tests/seeds.h"
#include "transport/error.h"
#include "worker/geeps/driver.h"

namespace phub::geeps::testing {

constexpr uint64_t kReserved = 1 << 20;  // more than what is put in or held for longer at once
constexpr uint64_t kEnough = 32 << 20;   // of device memory, for every program

// What a program runs on.
class Stage {
 public:
  virtual ~Stage() = default;
  // `measures`: only to find out what a program needs.
  virtual std::unique_ptr<Device> make_device(uint64_t budget, bool measures) = 0;
  virtual std::unique_ptr<Exchange> make_exchange(const JobSpec& job,
                                                  std::span<const float> initial) = 0;
  virtual Cache::MakeDriver make_driver() = 0;
  virtual void between_calls() {}
};

class CacheRig : private RandomPrograms {
 public:
  CacheRig(uint64_t seed, Stage& stage, bool stream_mode)
      : RandomPrograms(seed), stage_(stage), stream_mode_(stream_mode) {}

  void run() {
    std::vector<TableSpec> specs;
    for (const FlatTable& table : tables_) specs.push_back(table.spec);
    const JobSpec job = plain_job(specs);
    std::vector<float> initial;
    for (FlatTable& table : tables_) {
      if (!table.spec.local) initial.insert(initial.end(), table.rows.begin(), table.rows.end());
    }
    CacheOptions options{.budget_bytes = kEnough,
                         .reserved_bytes = kReserved,
                         .max_lead = static_cast<uint32_t>(1 + pick(4)),
                         .peak_first = pick(4) == 0,
                         .prefetch = pick(4) != 0,
                         .poison = pick(2) == 0,
                         .partitions = static_cast<uint32_t>(1 + pick(pick(2) == 0 ? 3 : 7)),
                         .timeout = std::chrono::seconds(30)};
    options.budget_bytes = budget_for(specs, job, options);
    device_ = stage_.make_device(options.budget_bytes, false);
    if (stream_mode_) compute_ = device_->make_stream("compute");
    options.compute = compute_.get();
    const auto exchange = stage_.make_exchange(job, initial);
    Cache cache(*device_, *exchange, specs, options, stage_.make_driver());
    cache_ = &cache;
    const uint64_t gathering = pick(3);
    if (gathering == 0) {
      cache.begin_virtual();
      virtually_ = true;
      iteration(program_);
      virtually_ = false;
      cache.finish_sequence();
    } else if (gathering == 1) {
      cache.begin_gathering();
      iteration(program_);
      cache.finish_sequence();
    }
    const size_t iterations = 6 + pick(6);
    for (size_t i = 0; i < iterations && !::testing::Test::HasFailure(); ++i) {
      iteration(pick(3) == 0 ? deviating() : program_);
      if (pick(12) == 0 && schedule_again_) {
        const Program before = program_;
        if (pick(2) == 0) program_ = random_program();
        cache.begin_gathering();
        iteration(program_);
        clock_all();
        try {
          cache.finish_sequence();
        } catch (const Error& e) {  // another program may take more
          EXPECT_EQ(e.code(), ErrorCode::kFull) << e.what();
          program_ = before;
        }
      }
    }
    clock_all();
    cache.wait_all();
    if (compute_) compute_->synchronize();
    check_end(*exchange);
    cache_ = nullptr;
    staged_.clear();
  }
  size_t stale() const { return stale_; }

 private:
  struct Holding {
    uint32_t use = 0;
    Buffer buffer;
  };

  bool in_use(const Use& use, const Program& program, const std::vector<Holding>& held) const {
    if (use.call != Call::kLocalAccess) return false;
    for (const Holding& other : held) {
      const Use& theirs = program.uses[other.use];
      if (theirs.table != use.table) continue;
      for (const uint64_t key : theirs.keys) {
        if (std::find(use.keys.begin(), use.keys.end(), key) != use.keys.end()) return true;
      }
    }
    return false;
  }

  void iteration(const Program& program) {
    std::vector<Holding> held;
    std::set<uint32_t> left_out;
    for (const Step& step : program.steps) {
      if (::testing::Test::HasFailure()) break;
      if (!virtually_) stage_.between_calls();
      if (step.kind == Step::kClock) {
        clock(step.table);
        continue;
      }
      const Use& use = program.uses[step.use];
      if (step.kind == Step::kAcquire) {
        if (in_use(use, program, held)) {
          left_out.insert(step.use);
          EXPECT_THROW((void)cache_->local_access(use.table, use.keys), Error);
          continue;
        }
        held.push_back({step.use, acquire(use)});
        continue;
      }
      if (left_out.contains(step.use)) continue;
      const auto found = std::find_if(held.begin(), held.end(),
                                      [&](const Holding& h) { return h.use == step.use; });
      ASSERT_NE(found, held.end());
      release(use, found->buffer);
      held.erase(found);
    }
    for (const Holding& holding : held) release(program.uses[holding.use], holding.buffer);
  }

  // Both in the order of the computation, which need not be able to use the device's memory itself.
  void look_at(const float* data, size_t floats, std::function<void(const float* values)> look) {
    if (!compute_) {
      std::vector<float> values(floats);
      device_->read(values.data(), data, floats * sizeof(float));
      return look(values.data());
    }
    const HostMemory& staged = staged_.emplace_back(*device_, floats * sizeof(float), "staged");
    compute_->copy_to_host(staged.data(), data, staged.bytes());
    compute_->call([look = std::move(look), values = staged.floats().data()] { look(values); });
  }
  void put_into(float* data, const std::vector<float>& values) {
    const size_t bytes = values.size() * sizeof(float);
    if (!compute_) return device_->write(data, values.data(), bytes);
    const HostMemory& staged = staged_.emplace_back(*device_, bytes, "staged");
    std::ranges::copy(values, staged.floats().begin());
    compute_->copy_to_device(data, staged.data(), bytes);
  }

  Buffer acquire(const Use& use) {
    FlatTable& table = tables_[use.table];
    const size_t row_floats = table.spec.row_floats;
    Buffer buffer;
    switch (use.call) {
      case Call::kRead:
        buffer = cache_->read(use.table, use.keys, use.staleness);
        break;
      case Call::kPreUpdate:
        buffer = cache_->pre_update(use.table, use.keys);
        break;
      default:
        buffer = cache_->local_access(use.table, use.keys, use.fetch);
    }
    EXPECT_EQ(buffer.floats(), use.keys.size() * row_floats);
    if (virtually_) {
      EXPECT_EQ(buffer.data, nullptr);
      return buffer;
    }
    const bool reads =
        use.call == Call::kRead || (use.call == Call::kLocalAccess && use.fetch == Fetch::kYes);
    if (!reads) return buffer;
    const size_t clocks = table.before.size();
    const size_t age = buffer.age.value_or(clocks);
    EXPECT_LE(age, clocks);
    EXPECT_GE(age + (table.spec.read_my_writes ? 0 : use.staleness.value_or(0)), clocks);
    stale_ += age < clocks ? 1 : 0;
    // By row: as it was at the clock of its age, or later.
    std::vector<std::vector<std::vector<float>>> expected;
    for (const uint64_t key : use.keys) {
      const size_t row = table.row_of.at(key);
      std::vector<std::vector<float>>& of_row = expected.emplace_back();
      for (size_t clock = age; clock <= clocks && table.known[row]; ++clock) {
        const std::vector<float>& rows = clock < clocks ? table.before[clock] : table.rows;
        of_row.emplace_back();
        for (size_t at = row * row_floats; at < (row + 1) * row_floats; ++at) {
          of_row.back().push_back(rows[at] - (table.spec.read_my_writes ? table.log[at] : 0.0F));
        }
      }
    }
    const std::string name =
        table.spec.name + (table.spec.local            ? ", local"
                           : table.spec.read_my_writes ? ", own writes are read"
                           : table.spec.max_staleness  ? ", kept twice"
                                                       : "");
    look_at(buffer.data, buffer.floats(),
            [expected = std::move(expected), row_floats, name](const float* values) {
              for (size_t row = 0; row < expected.size(); ++row) {
                const float* const got = values + row * row_floats;
                const bool right =
                    std::ranges::any_of(expected[row], [&](const std::vector<float>& one) {
                      return std::memcmp(one.data(), got, row_floats * sizeof(float)) == 0;
                    });
                if (right || expected[row].empty()) continue;
                ADD_FAILURE() << name << " row " << row << " begins with " << got[0] << ", not "
                              << expected[row][0][0] << ", nor with any of " << expected[row].size()
                              << " clocks";
                return;
              }
            });
    return buffer;
  }

  void release(const Use& use, const Buffer& buffer) {
    FlatTable& table = tables_[use.table];
    const size_t row_floats = table.spec.row_floats;
    const bool writes = !virtually_ && use.call != Call::kRead &&
                        (use.call == Call::kPreUpdate || use.save == Save::kYes);
    if (writes) {
      std::vector<float> values(buffer.floats());
      for (float& value : values) value = number();
      for (size_t i = 0; i < use.keys.size(); ++i) {
        const size_t row = table.row_of.at(use.keys[i]);
        for (size_t f = 0; f < row_floats; ++f) {
          const float value = values[i * row_floats + f];
          if (use.call == Call::kPreUpdate) {
            table.log[row * row_floats + f] += value;
          } else {
            table.rows[row * row_floats + f] = value;
          }
        }
        if (use.call == Call::kLocalAccess) table.known[row] = true;
      }
      put_into(buffer.data, values);
    }
    switch (use.call) {
      case Call::kRead:
        cache_->post_read(buffer.handle);
        break;
      case Call::kPreUpdate:
        cache_->update(buffer.handle);
        break;
      default:
        cache_->post_local_access(buffer.handle, use.save);
    }
    EXPECT_THROW(cache_->post_read(buffer.handle), Error);
  }

  void clock(uint32_t number) {
    FlatTable& table = tables_[number];
    try {
      cache_->table_clock(number);
    } catch (const Error& e) {
      const std::string why = e.what();
      EXPECT_TRUE(why.find("twice") != std::string::npos ||
                  why.find("second time") != std::string::npos)
          << why;
      return;
    }
    if (virtually_) return;
    table.before.push_back(table.rows);
    for (size_t i = 0; i < table.rows.size(); ++i) {
      table.rows[i] -= table.log[i];
      table.log[i] = 0;
    }
  }

  void clock_all() {
    for (uint32_t table = 0; table < tables_.size(); ++table) {
      if (!tables_[table].spec.local) clock(table);
    }
  }

  static size_t elements_of(const JobSpec& job) {
    size_t elements = 0;
    for (const KeySpec& key : job.keys) elements += key.elements;
    return elements;
  }

  // What the sequence takes within a budget; nothing if it does not fit.
  std::optional<uint64_t> placed_bytes(const std::vector<TableSpec>& specs, const JobSpec& job,
                                       CacheOptions options, uint64_t budget) {
    const auto device = stage_.make_device(budget, true);
    const auto exchange = stage_.make_exchange(job, std::vector<float>(elements_of(job)));
    options.compute = nullptr;
    options.budget_bytes = budget;
    Cache cache(*device, *exchange, specs, options, stage_.make_driver());
    cache_ = &cache;
    cache.begin_virtual();
    virtually_ = true;
    iteration(program_);
    virtually_ = false;
    cache_ = nullptr;
    try {
      cache.finish_sequence();
      return cache.placement().total_bytes();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kFull) << e.what();
      return {};
    }
  }

  // Between what is needed at least and what everything needs.
  uint64_t budget_for(const std::vector<TableSpec>& specs, const JobSpec& job,
                      const CacheOptions& options) {
    const uint64_t all = placed_bytes(specs, job, options, kEnough).value();
    uint64_t least = kReserved, enough = all;
    while (enough - least > 256) {
      const uint64_t middle = (least + enough) / 2 / 256 * 256;
      (placed_bytes(specs, job, options, middle) ? enough : least) = middle;
    }
    return enough + (all - enough) * pick(5) / 4;
  }

  void check_end(Exchange& exchange) {
    size_t key = 0;
    for (const FlatTable& table : tables_) {
      if (table.spec.local) continue;
      std::vector<float> parameters;
      while (parameters.size() < table.rows.size()) {
        const auto piece = exchange.parameters(key++);
        parameters.insert(parameters.end(), piece.begin(), piece.end());
      }
      for (size_t i = 0; i < table.rows.size(); ++i) {
        ASSERT_EQ(std::bit_cast<uint32_t>(table.rows[i]), std::bit_cast<uint32_t>(parameters[i]))
            << table.spec.name << " float " << i;
      }
    }
  }

  Stage& stage_;
  bool stream_mode_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> compute_;
  std::deque<HostMemory> staged_;  // what the computation reads and writes
  Cache* cache_ = nullptr;
  bool virtually_ = false;
  bool schedule_again_ = true;
  size_t stale_ = 0;  // reads of rows of an older clock
};

// Runs a program for each of `count` fresh seeds. `make_stage` makes what it runs on from the seed.
template <class MakeStage>
void run_seeds(uint64_t count, bool stream_mode, MakeStage make_stage) {
  const phub::testing::Seeds seeds = phub::testing::fresh_seeds(count);
  size_t stale = 0;
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE("PHUB_SEED=" + std::to_string(seed));
    auto stage = make_stage(seed);
    CacheRig rig(seed, stage, stream_mode);
    rig.run();
    stale += rig.stale();
    if (::testing::Test::HasFailure()) FAIL() << "failed first with PHUB_SEED=" << seed;
  }
  std::printf("%zu reads of an older clock\n", stale);
}

}  // namespace phub::geeps::testing
