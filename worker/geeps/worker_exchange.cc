#include "worker/geeps/worker_exchange.h"

#include <iterator>

#include "worker/geeps/tables.h"

namespace phub::geeps {

WorkerExchange::WorkerExchange(Worker& worker, std::span<const TableSpec> tables)
    : worker_(worker), away_(worker.keys()) {
  const std::vector<KeySpec> expected = keys_of(tables);
  const std::vector<KeySpec>& keys = worker_.spec().keys;
  for (size_t k = 0; k < expected.size(); ++k) {
    const std::string table = table_name(expected[k].name);
    if (k == keys.size()) {
      fail(ErrorCode::kInvalid, "table '{}' is not in job '{}', which has {} keys", table,
           worker_.spec().name, keys.size());
    }
    if (keys[k].name != expected[k].name) {
      fail(ErrorCode::kInvalid,
           "table '{}' is key '{}', but key {} of job '{}' is '{}': a job's keys are those of "
           "keys_of() for the same tables",
           table, expected[k].name, k, worker_.spec().name, keys[k].name);
    }
    if (keys[k].elements != expected[k].elements) {
      fail(ErrorCode::kInvalid, "table '{}' has {} elements here and {} in job '{}'", table,
           expected[k].elements, keys[k].elements, worker_.spec().name);
    }
    names_.push_back(table);
  }
  if (keys.size() > expected.size()) {
    fail(ErrorCode::kInvalid, "key '{}' of job '{}' is no table", keys[expected.size()].name,
         worker_.spec().name);
  }
  check_formats(worker_.spec());
  worker_.wait_all();
}

template <typename Push>
void WorkerExchange::push_by(size_t key, Push push) {
  {
    const std::lock_guard lock(mutex_);
    failure_.check();
    if (away_.at(key)) {
      fail(ErrorCode::kInvalid, "table '{}' was pushed before its last push came back",
           names_[key]);
    }
    away_[key] = true;
  }
  Pushed pushed;
  try {
    pushed = push();
  } catch (const std::exception& error) {
    fail_with(error);
  }
  {
    const std::lock_guard lock(mutex_);
    pushed_.push_back(pushed);
  }
  wake_next();
}

void WorkerExchange::push(size_t key, int32_t priority) {
  push_by(key, [&] { return worker_.push(key, priority); });
}

void WorkerExchange::push_null(size_t key) {
  push_by(key, [&] { return worker_.push_null(key); });
}

std::optional<size_t> WorkerExchange::next() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopped_ || failure_ || !pushed_.empty(); });
    if (stopped_) return std::nullopt;
    failure_.check();
    awaited_ = pushed_;
    waiting_ = true;
    lock.unlock();
    std::optional<size_t> here;
    try {
      here = worker_.wait_any(awaited_);
    } catch (const std::exception& error) {
      fail_with(error);
    }
    lock.lock();
    waiting_ = false;
    if (!here) continue;
    const size_t key = awaited_[*here].key;
    pushed_.erase(std::next(pushed_.begin(), static_cast<std::ptrdiff_t>(*here)));
    away_[key] = false;
    return key;
  }
}

void WorkerExchange::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  wake_next();
}

std::optional<uint32_t> WorkerExchange::slack() const { return slack_of(worker_.spec()); }

// Throws the failure, which the other calls meet from now on.
void WorkerExchange::fail_with(const std::exception& error) {
  {
    const std::lock_guard lock(mutex_);
    failure_.keep(error);
  }
  wake_next();
  const std::lock_guard lock(mutex_);
  failure_.check();
}

// next() looks again at what was pushed.
void WorkerExchange::wake_next() {
  bool waiting = false;
  {
    const std::lock_guard lock(mutex_);
    waiting = waiting_;
  }
  changed_.notify_one();
  if (waiting) worker_.wake();
}

}  // namespace phub::geeps
