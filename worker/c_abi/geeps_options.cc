// The options and tables of a cache in the C interface.
#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string_view>
#include <utility>

#include "worker/c_abi/call.h"
#include "worker/c_abi/geeps.h"
#include "worker/c_abi/options.h"

namespace phub::c_abi {
namespace {

using geeps::CacheOptions;
using geeps::TableSpec;

constexpr int64_t kMaxBytes = std::numeric_limits<int64_t>::max();
constexpr int64_t kMaxPartitions = 256;  // three threads each
constexpr uint64_t kMaxRows = uint64_t{1} << 28;
constexpr std::string_view kTimeout = "timeout_ms";
constexpr std::string_view kTrace = "trace";

struct Option {
  std::string_view name;
  uint64_t CacheOptions::*bytes = nullptr;
  uint32_t CacheOptions::*count = nullptr;
  bool CacheOptions::*flag = nullptr;
  int64_t max = std::numeric_limits<uint32_t>::max();
};

constexpr std::array<Option, 12> kOptions = {{
    {.name = "budget_bytes", .bytes = &CacheOptions::budget_bytes, .max = kMaxBytes},
    {.name = "reserved_bytes", .bytes = &CacheOptions::reserved_bytes, .max = kMaxBytes},
    {.name = "max_lead", .count = &CacheOptions::max_lead},
    {.name = "peak_first", .flag = &CacheOptions::peak_first, .max = 1},
    {.name = "prefetch", .flag = &CacheOptions::prefetch, .max = 1},
    {.name = "strict", .flag = &CacheOptions::strict, .max = 1},
    {.name = "infer_clocks", .flag = &CacheOptions::infer_clocks, .max = 1},
    {.name = "poison", .flag = &CacheOptions::poison, .max = 1},
    {.name = "measure_stalls", .flag = &CacheOptions::measure_stalls, .max = 1},
    {.name = "partitions", .count = &CacheOptions::partitions, .max = kMaxPartitions},
    {.name = kTimeout},
    {.name = kTrace},
}};

const Option& option_named(std::string_view name) {
  std::array<std::string_view, kOptions.size()> names;
  for (size_t i = 0; i < kOptions.size(); ++i) {
    if (kOptions[i].name == name) return kOptions[i];
    names[i] = kOptions[i].name;
  }
  refuse_option(name, names);
}

geeps::TableSpec& local_of(GeepsOptionsObject& all, uint32_t table) {
  if (table < all.tables.size() && all.tables[table].local) return all.tables[table];
  throw Refusal(PHUB_INVALID,
                fmt::format("table {} is no table of local data: {} tables were added", table,
                            all.tables.size()));
}

geeps::TableSpec& parameters_of(GeepsOptionsObject& all, uint32_t table) {
  if (table < all.tables.size() && !all.tables[table].local) return all.tables[table];
  throw Refusal(PHUB_INVALID,
                fmt::format("table {} is no table of parameters: {} tables were added", table,
                            all.tables.size()));
}

geeps::TableSpec& table_at(GeepsOptionsObject& all, uint32_t table) {
  if (table < all.tables.size()) return all.tables[table];
  throw Refusal(PHUB_INVALID, fmt::format("there is no table {}: {} tables were added", table,
                                          all.tables.size()));
}

void set_number(CacheOptions& options, const Option& option, int64_t value) {
  if (option.name == kTrace) {
    throw Refusal(PHUB_INVALID, fmt::format("option '{}' is a text", option.name));
  }
  check_number(option.name, value, 0, option.max);
  if (option.bytes) options.*option.bytes = static_cast<uint64_t>(value);
  if (option.count) options.*option.count = static_cast<uint32_t>(value);
  if (option.flag) options.*option.flag = value != 0;
  if (option.name == kTimeout) options.timeout = std::chrono::milliseconds(value);
}

// Calls `body(object)` with the handle's object, one thread at a time.
template <typename Body>
phub_code change(const char* function, const phub_geeps_options* handle, Body body) {
  return call(function, [&] {
    const auto object = object_of<GeepsOptionsObject>(handle);
    const std::lock_guard lock(object->mutex);
    body(*object);
  });
}

TableSpec table_of(const char* name, uint32_t row_floats, const uint64_t* keys, uint64_t rows,
                   bool local) {
  need(name, "name");
  if (row_floats == 0 || rows == 0 || rows > kMaxRows) {
    throw Refusal(PHUB_INVALID,
                  fmt::format("table '{}' of {} rows of {} floats: from 1 to {} rows, and at least "
                              "1 float, are needed",
                              name, rows, row_floats, kMaxRows));
  }
  TableSpec table{.name = name, .row_floats = row_floats, .keys = {}, .local = local};
  table.keys = keys == nullptr ? geeps::dense(rows) : std::vector<uint64_t>(keys, keys + rows);
  return table;
}

// `members`: devices of each process, whose factors go together.
phub_code add_tables(const char* function, phub_options* options, const phub_geeps_options* tables,
                     uint32_t members) {
  return call(function, [&] {
    if (members == 0) throw Refusal(PHUB_INVALID, "a group of 0 devices");
    const auto job = object_of<OptionsObject>(options);
    const auto cache = object_of<GeepsOptionsObject>(tables);
    const std::scoped_lock lock(job->mutex, cache->mutex);
    std::vector<KeySpec>& keys = job->options.spec.keys;
    std::vector<KeySpec> more = geeps::keys_of(cache->tables, members);
    if (keys.size() + more.size() > kMaxKeys) {
      throw Refusal(PHUB_FULL, fmt::format("a job has at most {} keys", kMaxKeys));
    }
    keys.insert(keys.end(), std::make_move_iterator(more.begin()),
                std::make_move_iterator(more.end()));
  });
}

}  // namespace
}  // namespace phub::c_abi

using namespace phub;         // NOLINT: the functions below are C's
using namespace phub::c_abi;  // NOLINT

phub_code phub_geeps_options_create(phub_geeps_options** options) {
  return call(__func__, [&] {
    need(options, "options");
    *options =
        handle_of<phub_geeps_options>(std::make_shared<GeepsOptionsObject>(), Type::kGeepsOptions);
  });
}

phub_code phub_geeps_options_destroy(phub_geeps_options* options) {
  return call(__func__, [&] { Handles::instance().remove(options, Type::kGeepsOptions); });
}

phub_code phub_geeps_options_set(phub_geeps_options* options, const char* name, const char* value) {
  return change(__func__, options, [&](GeepsOptionsObject& all) {
    need(name, "name");
    need(value, "value");
    const Option& option = option_named(name);
    if (option.name == kTrace) {
      all.options.trace = value;
    } else {
      set_number(all.options, option, number_in(option.name, value));
    }
  });
}

phub_code phub_geeps_options_set_number(phub_geeps_options* options, const char* name,
                                        int64_t value) {
  return change(__func__, options, [&](GeepsOptionsObject& all) {
    need(name, "name");
    set_number(all.options, option_named(name), value);
  });
}

phub_code phub_geeps_options_add_table(phub_geeps_options* options, const char* name,
                                       uint32_t row_floats, const uint64_t* keys, uint64_t rows) {
  return change(__func__, options, [&](GeepsOptionsObject& all) {
    all.tables.push_back(table_of(name, row_floats, keys, rows, false));
  });
}

phub_code phub_geeps_options_add_local(phub_geeps_options* options, const char* name,
                                       uint32_t row_floats, const uint64_t* keys, uint64_t rows) {
  return change(__func__, options, [&](GeepsOptionsObject& all) {
    all.tables.push_back(table_of(name, row_floats, keys, rows, true));
  });
}

phub_code phub_geeps_options_tune_table(phub_geeps_options* options, uint32_t table,
                                        int read_my_writes, uint32_t max_staleness) {
  return change(__func__, options, [&](GeepsOptionsObject& all) {
    geeps::TableSpec& of = parameters_of(all, table);
    of.read_my_writes = read_my_writes != 0;
    of.max_staleness = max_staleness;
  });
}

phub_code phub_geeps_options_set_samples(phub_geeps_options* options, uint32_t table,
                                         uint32_t samples) {
  return change(__func__, options,
                [&](GeepsOptionsObject& all) { parameters_of(all, table).samples = samples; });
}

phub_code phub_geeps_options_set_piece_bytes(phub_geeps_options* options, uint32_t table,
                                             uint64_t bytes) {
  return change(__func__, options,
                [&](GeepsOptionsObject& all) { table_at(all, table).piece_bytes = bytes; });
}

phub_code phub_geeps_options_set_scratch(phub_geeps_options* options, uint32_t table) {
  return change(__func__, options,
                [&](GeepsOptionsObject& all) { local_of(all, table).scratch = true; });
}

phub_code phub_geeps_options_set_by_branch(phub_geeps_options* options, uint32_t table) {
  return change(__func__, options,
                [&](GeepsOptionsObject& all) { local_of(all, table).by_branch = true; });
}

phub_code phub_geeps_options_set_stream(phub_geeps_options* options, void* stream) {
  return change(__func__, options, [&](GeepsOptionsObject& all) { all.stream = stream; });
}

phub_code phub_options_add_tables(phub_options* options, const phub_geeps_options* tables) {
  return add_tables(__func__, options, tables, 1);
}

phub_code phub_options_add_group_tables(phub_options* options, const phub_geeps_options* tables,
                                        uint32_t members) {
  return add_tables(__func__, options, tables, members);
}
