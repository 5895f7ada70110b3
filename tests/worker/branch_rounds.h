// What the tests of branches push in a round, and what a worker has after it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "tests/oracle/reference.h"
#include "tests/oracle/replay.h"
#include "worker/worker.h"

namespace phub::testing {

using Model = std::vector<std::vector<std::byte>>;  // by key

// All keys of round `n`, which is of this branch, and waits. The same gradients for the same
// numbers and rank.
inline void push(Worker& worker, uint64_t n, uint32_t branch, uint32_t seed = 0) {
  for (size_t key = 0; key < worker.keys(); ++key) {
    std::minstd_rand random(
        static_cast<uint32_t>(1 + seed + 7919 * branch + 97 * n + 11 * worker.rank() + key));
    const auto value = [&random] { return static_cast<float>(random() % 2001) / 1000 - 1; };
    const KeySpec& of = worker.spec().keys[key];
    if (is_factors(of)) {
      std::vector<float> left(of.rank_limit * of.shape[0]), right(of.rank_limit * of.shape[1]);
      std::ranges::generate(left, value);
      std::ranges::generate(right, value);
      worker.push_factors(key, {left.data(), right.data(), of.rank_limit});
    } else if (is_rows(of)) {
      std::vector<int64_t> rows(of.rows_limit);
      std::vector<float> elements(rows.size() * of.shape[1]);
      for (int64_t& row : rows) row = static_cast<int64_t>(random() % of.shape[0]);
      std::ranges::generate(elements, value);
      worker.push_rows(key, {rows, elements});
    } else {
      const std::span<std::byte> out = worker.gradient_bytes(key);
      const kernels::DType type = memory_dtype(worker.spec(), static_cast<uint32_t>(key));
      for (size_t i = 0; i < out.size() / kernels::bytes_of(type); ++i) {
        reference::store(out.data(), type, i, value());
      }
      worker.push(key);
    }
  }
  worker.wait_all();
}

inline Model model_of(const Worker& worker) {
  Model model;
  for (size_t key = 0; key < worker.keys(); ++key) {
    const auto bytes = worker.parameter_bytes(key);
    model.emplace_back(bytes.begin(), bytes.end());
  }
  return model;
}

}  // namespace phub::testing
