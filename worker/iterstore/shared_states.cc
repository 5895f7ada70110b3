// The whole state of a store's tables, and how ranks go back to the state before a clock.
#include <fmt/format.h>

#include <cstdio>
#include <cstring>
#include <exception>

#include "worker/iterstore/one_round.h"
#include "worker/iterstore/shared_rows.h"

namespace phub::iterstore {

// Of each key all ranks have pushed something then, so that its round is complete.
void SharedRows::retract() {
  if (!early_) return;
  for (size_t k = 0; k < keys_.size(); ++k) {
    Key& key = keys_[k];
    if (!key.exchanged || key.pushed_at == now_) continue;
    worker_->wait(k);
    const std::span<const std::byte> state = worker_->parameter_bytes(k);
    key.before.assign(state.begin(), state.end());
    worker_->push_null(k);
  }
  retracted_ = true;
}

// All results are here, and out of lock-step they have what all ranks have pushed.
void SharedRows::settle() {
  worker_->wait_all();
  if (options_.spec.consistency == "bsp") return;
  worker_->barrier();
  push_nothing();
  worker_->barrier();  // nobody's next clock comes before the last one has that
}

void SharedRows::push_nothing() {
  for (size_t k = 0; k < worker_->keys(); ++k) {
    const bool is_question = k > keys_.size();  // which this rank has pushed already
    if (!is_question && (k == keys_.size() || keys_[k].exchanged)) worker_->push_null(k);
  }
  ++pushed_;
  worker_->wait_all();
  for (Key& key : keys_) key.here = 0;  // it is read from now on
}

void SharedRows::end_question() {
  if (asks_ && saves()) push_nothing();
}

void SharedRows::abandon() noexcept {
  try {
    worker_->abandon();
  } catch (const std::exception& error) {
    fmt::print(stderr, "phub: job '{}': {}\n", options_.spec.name, error.what());
  }
}

States SharedRows::states(const std::string& name) {
  settle();
  const auto mine = static_cast<int32_t>(worker_->rank());
  States states;
  for (const Table& table : tables_) states.emplace_back(table.bytes());
  std::vector<std::span<std::byte>> narrow;
  for (size_t k = 0; k < keys_.size(); ++k) {
    const RowPlan::Key& key = plan_.keys()[k];
    const uint64_t bytes = keys_[k].row_bytes;
    const bool before = retracted_ && keys_[k].exchanged;
    const std::byte* const from =
        before ? keys_[k].before.data() : worker_->parameter_bytes(k).data();
    for (uint64_t i = 0; i < key.rows; ++i) {
      const uint64_t row = plan_.row_at(key.table, key.first + i);
      if (plan_.is_narrow(key.table) && plan_.owner(key.table, row) != mine) continue;
      std::memcpy(states[key.table].data() + row * bytes, from + i * bytes, bytes);
    }
  }
  for (uint32_t t = 0; t < tables_.size(); ++t) {
    if (plan_.is_narrow(t)) narrow.emplace_back(states[t]);
  }
  if (narrow.empty()) return states;
  unite(options_, name, narrow);
  for (uint32_t t = 0; t < tables_.size(); ++t) {
    if (!plan_.is_narrow(t)) continue;
    for (uint64_t row = 0; row < tables_[t].rows; ++row) {
      if (plan_.place(t, row)) continue;
      const uint64_t bytes = tables_[t].row_bytes();
      std::memcpy(states[t].data() + row * bytes, rest_[t].data() + row * bytes, bytes);
    }
  }
  return states;
}

}  // namespace phub::iterstore
