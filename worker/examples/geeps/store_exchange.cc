#include "worker/examples/geeps/store_exchange.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "transport/error.h"
#include "worker/geeps/tables.h"

namespace phub::examples {

using geeps::TableSpec;
using iterstore::StoreThread;

namespace {

// Each piece of the parameters is a table of the store.
std::vector<TableSpec> parameters_of(std::span<const TableSpec> tables) {
  const std::vector<KeySpec> keys = geeps::keys_of(tables);
  const std::vector<geeps::RowsOfKey> rows = geeps::rows_of_keys(tables);
  std::vector<TableSpec> parameters;
  for (size_t key = 0; key < keys.size(); ++key) {
    parameters.push_back({.name = geeps::table_name(keys[key].name),
                          .row_floats = tables[rows[key].table].row_floats,
                          .keys = geeps::dense(rows[key].rows)});
  }
  return parameters;
}

// Rows of the store are counted from 0, as those of a table are in memory.
iterstore::StoreOptions store_options(const WorkerOptions& worker,
                                      std::span<const TableSpec> tables) {
  iterstore::StoreOptions options{.worker = worker, .tables = {}};
  options.numa = false;  // the application computes in threads of its own
  for (const TableSpec& table : tables) {
    options.tables.push_back(
        {.name = table.name, .rows = table.keys.size(), .columns = table.row_floats});
  }
  return options;
}

std::vector<size_t> elements_of(std::span<const TableSpec> tables) {
  std::vector<size_t> elements;
  for (const TableSpec& table : tables) elements.push_back(table.keys.size() * table.row_floats);
  return elements;
}

}  // namespace

StoreExchange::StoreExchange(const WorkerOptions& worker, std::span<const TableSpec> tables,
                             double rate, std::span<const float> initial)
    : worker_(worker),
      tables_(parameters_of(tables)),
      rate_(static_cast<float>(rate)),
      gradients_(elements_of(tables_)),
      parameters_(elements_of(tables_)),
      change_(std::ranges::max(elements_of(tables_))),
      store_(store_options(worker, tables_)),
      pushed_(tables_.size()),
      missing_(tables_.size()) {
  for (const TableSpec& table : tables_) rows_.push_back(geeps::dense(table.keys.size()));
  begin(initial);
  thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
}

StoreExchange::~StoreExchange() = default;

void StoreExchange::begin(std::span<const float> initial) {
  {
    StoreThread mine(store_, 0);
    mine.begin_virtual();
    exchange(mine, std::vector<Pushed>(tables_.size(), Pushed::kGradient));
    mine.finish();
    size_t at = 0;
    for (uint32_t key = 0; key < tables_.size() && rank() == 0; ++key) {
      mine.update_batch(key, std::span<const uint64_t>(rows_[key]),
                        initial.subspan(at, elements(key)));
      at += elements(key);
    }
    mine.clock();
  }
  for (uint32_t key = 0; key < tables_.size(); ++key) {  // of all, with what rank 0 has clocked
    const std::vector<std::byte> state = store_.table(key);
    std::memcpy(parameters_[key].data(), state.data(), state.size());
  }
}

void StoreExchange::push(size_t key, int32_t /*priority*/) { push(key, Pushed::kGradient); }
void StoreExchange::push_null(size_t key) { push(key, Pushed::kNull); }

void StoreExchange::push(size_t key, Pushed what) {
  done_.check();
  {
    const std::lock_guard lock(mutex_);
    if (pushed_.at(key) != Pushed::kNo) {
      fail(ErrorCode::kInvalid, "table '{}' is pushed twice in a clock", name(key));
    }
    pushed_[key] = what;
    --missing_;
  }
  changed_.notify_one();
}

void StoreExchange::run(const std::stop_token& stop) {
  try {
    StoreThread mine(store_, 0);
    std::unique_lock lock(mutex_);
    while (changed_.wait(lock, stop, [this] { return missing_ == 0; }), !stop.stop_requested()) {
      const std::vector<Pushed> pushed =
          std::exchange(pushed_, std::vector<Pushed>(tables_.size()));
      missing_ = tables_.size();
      lock.unlock();
      exchange(mine, pushed);
      lock.lock();
    }
  } catch (const std::exception& error) {
    done_.fail(error);
  }
}

// Keys are here again one by one, in the order in which the store's rows come.
void StoreExchange::exchange(StoreThread& mine, std::span<const Pushed> pushed) {
  const float rate = rate_;
  for (uint32_t key = 0; key < tables_.size(); ++key) {
    if (pushed[key] == Pushed::kNull) continue;
    const auto change = std::span(change_).first(elements(key));
    std::ranges::transform(gradients_[key], change.begin(), [rate](float g) { return -rate * g; });
    mine.update_batch<float>(key, rows_[key], change);
  }
  mine.clock();
  for (uint32_t key = 0; key < tables_.size(); ++key) {
    mine.read_batch(key, std::span<const uint64_t>(rows_[key]), parameters_[key]);
    if (!mine.is_virtual()) done_.add(key);
  }
}

std::optional<uint32_t> StoreExchange::slack() const { return geeps::slack_of(worker_.spec); }

}  // namespace phub::examples
