// Random tables, sequences, budgets and options, with calls left out, put in and held for longer,
// against flat arrays.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <set>

#include "transport/error.h"
#include "worker/device/host_device.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/sequence.h"
#include "worker/geeps/standalone_exchange.h"

namespace phub::geeps {
namespace {

using std::chrono::microseconds;

constexpr float kRate = 1;               // what read_my_writes asks for
constexpr uint64_t kReserved = 1 << 20;  // more than what is put in or held for longer at once

struct Step {  // of an iteration
  enum Kind : uint8_t { kAcquire, kRelease, kClock };
  Kind kind = kAcquire;
  uint32_t use = 0;    // of kAcquire and kRelease
  uint32_t table = 0;  // of kClock
};
struct Use {
  Call call = Call::kRead;
  uint32_t table = 0;
  std::vector<uint64_t> keys;
  Fetch fetch = Fetch::kYes;
  Save save = Save::kYes;
  std::optional<uint32_t> staleness = {};
};
struct Program {
  std::vector<Use> uses;
  std::vector<Step> steps;
};

// What the cache should hold.
struct FlatTable {
  TableSpec spec;
  std::map<uint64_t, size_t> row_of;
  std::vector<float> rows, log;
  std::vector<std::vector<float>> before;  // by clock: the rows that it has ended
  std::vector<bool> known;                 // by row: of local data
};

class Rig {
 public:
  Rig(uint64_t seed, bool stream_mode) : random_(seed), stream_mode_(stream_mode) {
    make_tables();
    program_ = random_program();
  }

  void run() {
    device_ = make_host_device({.budget_bytes = 64 << 20,
                                .copy_bytes_per_second = pick(2) == 0 ? 0 : 1e9,
                                .copy_latency = microseconds(pick(3) * 10),
                                .poison_copies = true});
    std::vector<TableSpec> specs;
    JobSpec job;
    job.name = "stress";
    job.optimizer = "sgd";
    job.hyper["lr"] = kRate;
    job.initial = "zeros";
    for (const FlatTable& table : tables_) specs.push_back(table.spec);
    job.keys = keys_of(specs);
    std::vector<float> initial;
    for (FlatTable& table : tables_) {
      if (!table.spec.local) initial.insert(initial.end(), table.rows.begin(), table.rows.end());
    }
    if (stream_mode_) compute_ = device_->make_stream("compute");
    CacheOptions options{.budget_bytes = 32 << 20,
                         .reserved_bytes = kReserved,
                         .max_lead = static_cast<uint32_t>(1 + pick(4)),
                         .prefetch = pick(4) != 0,
                         .poison = pick(2) == 0,
                         .partitions = static_cast<uint32_t>(1 + pick(3)),
                         .compute = compute_.get(),
                         .timeout = std::chrono::seconds(2)};
    options.budget_bytes = budget_for(specs, job, options);
    StandaloneExchange exchange(job, initial);
    Cache cache(*device_, exchange, specs, options);
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
    check_end(exchange);
    cache_ = nullptr;
  }
  size_t stale() const { return stale_; }

 private:
  uint64_t pick(uint64_t below) {
    return std::uniform_int_distribution<uint64_t>(0, below - 1)(random_);
  }
  float number() { return std::uniform_real_distribution<float>(-1, 1)(random_); }

  void make_tables() {
    const size_t count = 2 + pick(4);
    for (size_t i = 0; i < count; ++i) {
      FlatTable table;
      table.spec.name = "t" + std::to_string(i);
      table.spec.row_floats = static_cast<uint32_t>(1 + pick(pick(4) == 0 ? 600 : 9));
      const size_t rows = 1 + pick(40);
      if (pick(2) == 0) {
        table.spec.keys = dense(rows);
      } else {
        std::set<uint64_t> keys;
        while (keys.size() < rows) keys.insert(random_());
        table.spec.keys.assign(keys.begin(), keys.end());
        std::shuffle(table.spec.keys.begin(), table.spec.keys.end(), random_);
      }
      table.spec.local = i > 0 && pick(2) == 0;
      if (!table.spec.local) {
        table.spec.max_staleness = pick(3) == 0 ? 1 + pick(2) : 0;  // else kept once
        table.spec.read_my_writes = pick(4) == 0;
      }
      for (size_t row = 0; row < rows; ++row) table.row_of[table.spec.keys[row]] = row;
      table.rows.resize(rows * table.spec.row_floats);
      table.log.resize(table.rows.size());
      table.known.assign(rows, true);
      if (!table.spec.local) {
        for (float& value : table.rows) value = number();
      }
      tables_.push_back(std::move(table));
    }
  }

  std::vector<uint64_t> random_list(const FlatTable& table) {
    std::vector<uint64_t> keys = table.spec.keys;
    if (pick(2) == 0) return keys;
    if (pick(2) == 0) std::shuffle(keys.begin(), keys.end(), random_);
    const size_t begin = pick(keys.size());
    return {keys.begin() + static_cast<std::ptrdiff_t>(begin),
            keys.begin() + static_cast<std::ptrdiff_t>(begin + 1 + pick(keys.size() - begin))};
  }

  Use random_use() {
    Use use;
    use.table = static_cast<uint32_t>(pick(tables_.size()));
    use.keys = random_list(tables_[use.table]);
    if (tables_[use.table].spec.local) {
      use.call = Call::kLocalAccess;
      use.fetch = pick(3) == 0 ? Fetch::kNo : Fetch::kYes;
      use.save = pick(3) == 0 ? Save::kNo : Save::kYes;
    } else {
      use.call = pick(2) == 0 ? Call::kRead : Call::kPreUpdate;
      const uint64_t staleness = pick(2 + tables_[use.table].spec.max_staleness);
      if (staleness > 0) use.staleness = staleness - 1;
    }
    return use;
  }

  Program random_program() {
    Program program;
    std::vector<uint32_t> held;
    const size_t length = 3 + pick(25);
    for (size_t i = 0; i < length; ++i) {
      if (!held.empty() && (held.size() > 3 || pick(3) == 0)) {
        const size_t which = pick(held.size());
        program.steps.push_back({Step::kRelease, held[which], 0});
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(which));
        continue;
      }
      const auto number = static_cast<uint32_t>(program.uses.size());
      program.uses.push_back(pick(3) == 0 && !program.uses.empty()
                                 ? program.uses[pick(program.uses.size())]
                                 : random_use());
      program.steps.push_back({Step::kAcquire, number, 0});
      held.push_back(number);
    }
    for (const uint32_t use : held) program.steps.push_back({Step::kRelease, use, 0});
    for (uint32_t table = 0; table < tables_.size(); ++table) {
      if (tables_[table].spec.local) continue;
      const auto at = program.steps.begin() +
                      static_cast<std::ptrdiff_t>(pick(2) == 0 ? program.steps.size()
                                                               : pick(program.steps.size() + 1));
      program.steps.insert(at, {Step::kClock, 0, table});
    }
    return program;
  }

  // The program with something left out, put in, or released or clocked later.
  Program deviating() {
    Program program = program_;
    for (uint64_t changes = 1 + pick(3); changes > 0; --changes) {
      const auto use = static_cast<uint32_t>(pick(program.uses.size()));
      const auto at = [&](Step::Kind kind) {
        return std::find_if(program.steps.begin(), program.steps.end(),
                            [&](const Step& s) { return s.kind == kind && s.use == use; });
      };
      const auto somewhere = [&](size_t from) {
        return program.steps.begin() +
               static_cast<std::ptrdiff_t>(from + pick(program.steps.size() + 1 - from));
      };
      switch (pick(4)) {
        case 0: {  // not clocked: until the next iteration's clock
          const auto clock = std::find_if(program.steps.begin(), program.steps.end(),
                                          [](const Step& s) { return s.kind == Step::kClock; });
          if (clock != program.steps.end()) program.steps.erase(clock);
          break;
        }
        case 1:  // left out
          if (at(Step::kAcquire) == program.steps.end()) break;
          program.steps.erase(at(Step::kAcquire));
          program.steps.erase(at(Step::kRelease));
          break;
        case 2: {  // put in
          const auto number = static_cast<uint32_t>(program.uses.size());
          program.uses.push_back(random_use());
          const auto begin = static_cast<size_t>(somewhere(0) - program.steps.begin());
          program.steps.insert(program.steps.begin() + static_cast<std::ptrdiff_t>(begin),
                               {Step::kAcquire, number, 0});
          program.steps.insert(somewhere(begin + 1), {Step::kRelease, number, 0});
          break;
        }
        default: {  // released later
          const auto release = at(Step::kRelease);
          if (release == program.steps.end()) break;
          const Step step = *release;
          const auto from = static_cast<size_t>(release - program.steps.begin());
          program.steps.erase(release);
          program.steps.insert(somewhere(from), step);
        }
      }
    }
    return program;
  }

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

  // In the order of the computation.
  void compute(std::function<void()> work) {
    if (compute_) {
      compute_->call(std::move(work));
    } else {
      work();
    }
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
    compute([expected = std::move(expected), row_floats, data = buffer.data,
             name = table.spec.name + (table.spec.local            ? ", local"
                                       : table.spec.read_my_writes ? ", own writes are read"
                                       : table.spec.max_staleness  ? ", kept twice"
                                                                   : "")] {
      for (size_t row = 0; row < expected.size(); ++row) {
        const float* const got = data + row * row_floats;
        const bool right = std::ranges::any_of(expected[row], [&](const std::vector<float>& one) {
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
      compute([values = std::move(values), data = buffer.data] {
        std::copy(values.begin(), values.end(), data);
      });
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
      table.rows[i] -= kRate * table.log[i];
      table.log[i] = 0;
    }
  }

  void clock_all() {
    for (uint32_t table = 0; table < tables_.size(); ++table) {
      if (!tables_[table].spec.local) clock(table);
    }
  }

  // What the sequence takes within a budget; nothing if it does not fit.
  std::optional<uint64_t> placed_bytes(const std::vector<TableSpec>& specs, const JobSpec& job,
                                       CacheOptions options, uint64_t budget) {
    const auto device = make_host_device({.budget_bytes = budget});
    StandaloneExchange exchange(job);
    options.compute = nullptr;
    options.budget_bytes = budget;
    Cache cache(*device, exchange, specs, options);
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
    const uint64_t all = placed_bytes(specs, job, options, 32 << 20).value();
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
      const auto parameters = exchange.parameters(key++);
      for (size_t i = 0; i < table.rows.size(); ++i) {
        ASSERT_EQ(std::bit_cast<uint32_t>(table.rows[i]), std::bit_cast<uint32_t>(parameters[i]))
            << table.spec.name << " float " << i;
      }
    }
  }

  std::mt19937_64 random_;
  bool stream_mode_;
  std::vector<FlatTable> tables_;
  Program program_;
  std::unique_ptr<HostDevice> device_;
  std::unique_ptr<Stream> compute_;
  Cache* cache_ = nullptr;
  bool virtually_ = false;
  bool schedule_again_ = true;
  size_t stale_ = 0;  // reads of rows of an older clock
};

void run_seeds(bool stream_mode) {
  const char* only = std::getenv("PHUB_SEED");
  const uint64_t first = only != nullptr ? std::strtoull(only, nullptr, 10) : 1;
  const char* many = std::getenv("PHUB_SEEDS");
  const uint64_t count = only != nullptr   ? 1
                         : many != nullptr ? std::strtoull(many, nullptr, 10)
                                           : 60;
  size_t stale = 0;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE("PHUB_SEED=" + std::to_string(seed));
    Rig rig(seed, stream_mode);
    rig.run();
    stale += rig.stale();
    if (::testing::Test::HasFailure()) {
      FAIL() << "failed first with PHUB_SEED=" << seed;
    }
  }
  std::printf("%zu reads of an older clock\n", stale);
}

TEST(CacheStress, InTheThreadOfTheApplication) { run_seeds(false); }
TEST(CacheStress, OnAComputeStream) { run_seeds(true); }

}  // namespace
}  // namespace phub::geeps
