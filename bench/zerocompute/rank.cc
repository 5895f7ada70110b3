#include "bench/zerocompute/rank.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "bench/zerocompute/compact_gradients.h"
#include "bench/zerocompute/gradients.h"
#include "bench/zerocompute/shared.h"
#include "transport/control/token.h"

namespace phub {
namespace {

WorkerOptions options_of(const CaseSpec& spec, uint32_t rank) {
  WorkerOptions options = spec.worker;
  options.rank = static_cast<int32_t>(rank);
  options.token = token_from_environment();
  if (const char* trace = std::getenv("PHUB_WORKER_TRACE")) options.trace = trace;
  return options;
}

CheckerOptions with_keys(CheckerOptions options, const std::vector<KeySpec>& keys) {
  options.keys = keys;
  return options;
}

}  // namespace

Rank::Rank(const CaseSpec& spec, uint32_t rank, std::span<std::byte> reference)
    : spec_(spec),
      rank_(rank),
      width_(kernels::bytes_of(spec.dtype)),
      worker_(options_of(spec, rank)),
      keys_(worker_.spec().keys),
      checker_(with_keys(spec.checker, keys_), reference),
      chunks_(keys_, chunk_elements()),
      compact_(keys_.size()) {
  uint64_t elements = 0;
  for (const KeySpec& key : keys_) {
    key_first_.push_back(elements);
    elements += key.elements;
  }
  if (!spec.copy.empty()) own_results_.resize(elements * width_);
  if (spec.copy == "all") {
    own_gradients_.resize(elements * kernels::bytes_of(gradient_dtype()));
    for (size_t k = 0; k < keys_.size(); ++k) {
      worker_.register_memory(k, {.gradient = is_compact(keys_[k]) ? nullptr : gradient(k),
                                  .parameters = own_results_.data() + key_first_[k] * width_});
    }
  }
  worker_.wait_all();  // the parameters that the job begins with
}

kernels::DType Rank::gradient_dtype() const {
  return kernels::is_plain(spec_.format) ? spec_.format : kernels::DType::kF32;
}

std::byte* Rank::gradient(size_t key) {
  if (own_gradients_.empty()) return worker_.gradient_bytes(key).data();
  return own_gradients_.data() + key_first_[key] * kernels::bytes_of(gradient_dtype());
}

void Rank::fill(uint64_t round) {
  for (size_t k = 0; k < key_first_.size(); ++k) {
    if (is_compact(keys_[k])) {
      fill_compact(k, round);
      continue;
    }
    fill_gradients(rank_, round, spec_.checker.pattern_first + key_first_[k], keys_[k].elements,
                   gradient_dtype(), gradient(k));
  }
}

void Rank::fill_compact(size_t k, uint64_t round) {
  const KeySpec& key = keys_[k];
  const uint64_t rows = key.shape[0], columns = key.shape[1];
  const uint64_t first = spec_.checker.pattern_first + key_first_[k];
  Compact& compact = compact_[k];
  if (is_factors(key)) {
    const FactorsInPattern factors(key, first);
    compact.left.resize(key.rank_limit * rows);
    compact.right.resize(key.rank_limit * columns);
    for (uint32_t pair = 0; pair < key.rank_limit; ++pair) {
      factors.fill_left(rank_, round, pair, 0, std::span(compact.left).subspan(pair * rows, rows));
      factors.fill_right(rank_, round, pair,
                         std::span(compact.right).subspan(pair * columns, columns));
    }
    return;
  }
  compact.rows = rows_of_rank(rank_, round, static_cast<uint32_t>(k), key);
  compact.elements.resize(compact.rows.size() * columns);
  for (size_t i = 0; i < compact.rows.size(); ++i) {
    fill_gradients(rank_, round, first + static_cast<uint64_t>(compact.rows[i]) * columns, columns,
                   kernels::DType::kF32, compact.elements.data() + i * columns);
  }
}

void Rank::push(size_t k) {
  const Compact& compact = compact_[k];
  if (is_factors(keys_[k])) {
    worker_.push_factors(k, {compact.left.data(), compact.right.data(), keys_[k].rank_limit});
  } else if (is_rows(keys_[k])) {
    worker_.push_rows(k, {compact.rows, compact.elements});
  } else {
    worker_.push(k);
  }
}

int64_t Rank::exchange() {
  const size_t keys = key_first_.size();
  for (size_t k = 0; k < keys; ++k) push(k);
  const int64_t pushed_ns = monotonic_ns();
  if (spec_.copy != "results") {
    worker_.wait_all();
    return pushed_ns;
  }
  for (size_t k = 0; k < keys; ++k) {
    worker_.wait(k);
    worker_.pull(k, {own_results_.data() + key_first_[k] * width_, keys_[k].elements * width_});
  }
  return pushed_ns;
}

const std::byte* Rank::results(size_t key) const {
  if (own_results_.empty()) return worker_.parameter_bytes(key).data();
  return own_results_.data() + key_first_[key] * width_;
}

void Rank::check_part(uint64_t round, uint64_t part, uint64_t parts) {
  const auto first_of = [&](uint64_t piece) {  // whole chunks
    uint64_t chunk = chunks_.size() * piece / parts;
    while (checker_.takes_whole_keys() && chunk < chunks_.size() && chunks_[chunk].begin > 0) {
      ++chunk;
    }
    return chunk < chunks_.size() ? chunks_[chunk].first : chunks_.elements();
  };
  const uint64_t begin = first_of(part);
  const uint64_t end = first_of(part + 1);
  checker_.advance_chunks(round, begin, end - begin);
  for (size_t k = 0; k < key_first_.size(); ++k) {
    const uint64_t first = std::max(begin, key_first_[k]);
    const uint64_t last = std::min(end, key_first_[k] + keys_[k].elements);
    if (first >= last) continue;
    note(round, k, last - first,
         checker_.advance_and_check(round, first, last - first,
                                    results(k) + (first - key_first_[k]) * width_));
  }
}

void Rank::check_edges(uint64_t round) {
  for (size_t k = 0; k < key_first_.size(); ++k) {
    for_each_chunk_edge(key_first_[k], keys_[k].elements,
                        static_cast<uint32_t>(chunk_elements_of(keys_[k], chunk_elements())),
                        [&](uint64_t first, size_t n) {
                          const std::byte* at = results(k) + (first - key_first_[k]) * width_;
                          note(round, k, n, checker_.check(round, first, n, at));
                        });
  }
}

void Rank::note(uint64_t round, size_t key, uint64_t compared, const Mismatch& mismatch) {
  checked_ += compared;
  if (mismatch.count == 0) return;
  if (wrong_ == 0) {
    wrong_text_ = fmt::format("round {}, rank {}, key {} '{}', element {}: {} instead of {}", round,
                              rank_, key, keys_[key].name, mismatch.element - key_first_[key],
                              mismatch.found, mismatch.expected);
  }
  wrong_ += mismatch.count;
}

}  // namespace phub
