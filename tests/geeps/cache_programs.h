// Random tables and programs of calls, with calls left out, put in and held for longer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "worker/geeps/cache.h"
#include "worker/geeps/sequence.h"

namespace phub::geeps::testing {

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

class RandomPrograms {
 public:
  explicit RandomPrograms(uint64_t seed) : random_(seed) {
    make_tables();
    program_ = random_program();
  }

 protected:
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
      table.spec.piece_bytes =
          pick(3) == 0 ? 0 : sizeof(float) * table.spec.row_floats * (1 + pick(rows));
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

  std::mt19937_64 random_;
  std::vector<FlatTable> tables_;
  Program program_;
};

}  // namespace phub::geeps::testing
