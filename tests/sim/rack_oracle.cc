#include "tests/sim/rack_oracle.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "tests/kernels/reference.h"

namespace phub::sim {
namespace {

uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t z = a * 0x9e3779b97f4a7c15ull + b + 0x632be59bd9b4e019ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// Spread over some binary orders of magnitude, so that another order of additions gives other bits.
float value_of(uint64_t hash) {
  const auto fraction = static_cast<float>(hash >> 40) * 0x1p-24f;
  const int exponent = static_cast<int>(hash & 15) - 9;
  return std::ldexp((hash & 16) ? 1 + fraction : -1 - fraction, exponent);
}

// Exact in any sum of a run.
float whole_value_of(uint64_t hash) { return static_cast<float>(hash & 15) - 8; }

constexpr uint32_t kDigitsPerElement = 12;

std::string name_of_chunk(const JobPlan& job, const Plan& plan, uint32_t chunk) {
  const ChunkLayout& c = plan.chunks[chunk];
  return fmt::format("{} chunk {} (key {} from {})", job.spec.name, chunk, c.key, c.key_element);
}

}  // namespace

Oracle::Oracle(const JobPlan& job, const Plan& plan)
    : job_(job),
      plan_(plan),
      optimizer_(*kernels::parse_optimizer(job.spec.optimizer)),
      gradient_dtype_(*kernels::parse_dtype(job.spec.gradient_dtype)),
      parameter_dtype_(*kernels::parse_dtype(job.spec.parameter_dtype)),
      seen_(plan.chunks.size()),
      seen_out_of_step_(plan.chunks.size()) {
  for (uint32_t c = 0; c < plan.chunks.size(); ++c) {
    if (plan.chunks[c].key_element == 0) first_chunk_.push_back(c);
  }
  first_chunk_.push_back(static_cast<uint32_t>(plan.chunks.size()));
  for (uint32_t k = 0; k < job.spec.keys.size(); ++k) {
    std::vector<float> values(job.spec.keys[k].elements, 0.0f);
    if (job.spec.initial == "broadcast") {
      for (uint64_t i = 0; i < values.size(); ++i) {
        if (!job.lock_step() && i % job.spec.chunk_elements < job.spec.max_ranks) continue;
        const uint64_t hash = mix(mix(job.seed, 0x1717 + k), i);
        values[i] = job.lock_step() ? value_of(hash) : whole_value_of(hash);
      }
    }
    initial_.push_back(std::move(values));
  }
}

bool Oracle::is_null(const Contribution& from, uint32_t key) const {
  if (from.round > job_.rounds) return true;  // only looks at what is there
  if (job_.null_chance <= 0) return false;
  const uint64_t hash =
      mix(mix(mix(job_.seed, 77), from.rank * 1000ull + from.incarnation), from.round * 1000 + key);
  return static_cast<double>(hash >> 11) * 0x1p-53 < job_.null_chance;
}

bool Oracle::has_bad(const Contribution& from, uint32_t key) const {
  return std::ranges::any_of(job_.bad, [&](const BadGradient& bad) {
    return bad.key == key && bad.round == from.round &&
           (bad.rank == from.rank || bad.kind == BadGradient::kOverflow);
  });
}

void Oracle::fill_chunk(const Contribution& from, uint32_t chunk, std::byte* out) const {
  const ChunkLayout& c = plan_.chunks[chunk];
  const uint64_t stream =
      mix(mix(mix(job_.seed, from.rank), from.incarnation), mix(from.round, chunk));
  for (uint32_t i = 0; i < c.elements; ++i) {
    const uint64_t hash = mix(stream, i);
    reference::store(out, gradient_dtype_, i,
                     job_.lock_step() ? value_of(hash) : whole_value_of(hash));
  }
  if (!job_.lock_step()) {
    for (uint32_t rank = 0; rank < job_.spec.max_ranks; ++rank) {
      reference::store(out, gradient_dtype_, rank, rank == from.rank ? 1.0f : 0.0f);
    }
  }
  if (job_.digits) {
    const uint32_t element = from.rank / kDigitsPerElement;
    for (uint32_t i = 0; i < std::min(2u, c.elements); ++i) {
      const float one = std::ldexp(1.0f, static_cast<int>(2 * (from.rank % kDigitsPerElement)));
      reference::store(out, gradient_dtype_, i, i == element ? one : 0.0f);
    }
  }
  for (const BadGradient& bad : job_.bad) {
    if (bad.key != c.key || bad.round != from.round) continue;
    if (bad.rank != from.rank && bad.kind != BadGradient::kOverflow) continue;
    constexpr float kValues[] = {std::numeric_limits<float>::quiet_NaN(),
                                 -std::numeric_limits<float>::infinity(), 3.3e38f};
    reference::store(out, gradient_dtype_, c.elements / 2, kValues[bad.kind]);
  }
}

void Oracle::fill_key(const Contribution& from, uint32_t key, std::span<std::byte> out) const {
  const size_t element = kernels::bytes_of(gradient_dtype_);
  for (uint32_t c = first_chunk_[key]; c < first_chunk_[key + 1]; ++c) {
    fill_chunk(from, c, out.data() + plan_.chunks[c].key_element * element);
  }
}

std::string Oracle::saw(const Contribution& by, uint32_t key, std::span<const std::byte> result,
                        bool pushed) {
  const size_t element = kernels::bytes_of(parameter_dtype_);
  for (uint32_t c = first_chunk_[key]; c < first_chunk_[key + 1]; ++c) {
    const ChunkLayout& chunk = plan_.chunks[c];
    auto bytes = result.subspan(chunk.key_element * element, chunk.elements * element);
    if (pushed) {
      witnessed_.insert({by.rank * (1ull << 32) + by.incarnation, {c, by.round}});
    }
    if (!job_.lock_step()) {
      seen_out_of_step_[c].push_back({by, {bytes.begin(), bytes.end()}});
      ++observations_;
      continue;
    }
    auto [at, is_new] = seen_[c].try_emplace(by.round, bytes.begin(), bytes.end());
    ++observations_;
    if (!is_new && !std::ranges::equal(at->second, bytes)) {
      return fmt::format("{} round {}: rank {} (incarnation {}) sees other bytes than those before",
                         name_of_chunk(job_, plan_, c), by.round, by.rank, by.incarnation);
    }
  }
  return "";
}

std::string Oracle::read_log(const std::vector<LogRecord>& log) {
  auto open = [&](uint32_t rank) -> Stint* {
    for (Stint& stint : stints_) {
      if (stint.rank == rank && stint.last.empty()) return &stint;
    }
    return nullptr;
  };
  for (const LogRecord& record : log) {
    switch (record.kind) {
      case LogRecord::Kind::kAdmitted: {
        if (open(record.rank)) return fmt::format("log: rank {} admitted twice", record.rank);
        stints_.push_back({record.rank, record.incarnation, record.round, {}});
        break;
      }
      case LogRecord::Kind::kLost:
      case LogRecord::Kind::kLeft: {
        std::vector<uint64_t> last(plan_.chunks.size(), 0);
        uint32_t next = 0;
        for (const ChunkRange& range : record.last_rounds) {
          if (range.first != next || range.last < range.first || range.last >= last.size()) {
            return fmt::format("log: rank {}: the ranges of chunks have a gap at {}", record.rank,
                               next);
          }
          for (uint32_t c = range.first; c <= range.last; ++c) last[c] = range.round;
          next = range.last + 1;
        }
        if (next != last.size()) return fmt::format("log: rank {}: chunks missing", record.rank);
        if (Stint* stint = open(record.rank)) {
          if (stint->incarnation != record.incarnation) {
            return fmt::format("log: rank {}: another incarnation was lost", record.rank);
          }
          stint->last = std::move(last);
        } else if (std::ranges::any_of(last, [](uint64_t round) { return round > 0; })) {
          return fmt::format("log: rank {} took part without being admitted", record.rank);
        }
        break;
      }
      case LogRecord::Kind::kHyper:
        changes_.push_back({record.round, record.values});
        break;
      case LogRecord::Kind::kExcluded:
        for (uint64_t round = record.round; round <= record.last_round; ++round) {
          for (const ChunkSpan& span : record.chunks) {
            for (uint32_t c = span.first; c <= span.last; ++c) {
              excluded_.insert({{c, round}, record.rank});
            }
          }
        }
        break;
      case LogRecord::Kind::kFailed:
        break;
    }
  }
  for (size_t i = 0; i < stints_.size(); ++i) {
    for (size_t j = i + 1; j < stints_.size(); ++j) {
      if (stints_[i].rank != stints_[j].rank) continue;
      const uint64_t last = *std::ranges::max_element(stints_[i].last);
      if (last >= stints_[j].first) {
        return fmt::format(
            "log: incarnation {} of rank {} begins in round {}, its predecessor ended "
            "in {}",
            stints_[j].incarnation, stints_[j].rank, stints_[j].first, last);
      }
    }
  }
  return "";
}

std::string Oracle::check(const std::vector<LogRecord>& log) {
  if (std::string wrong = read_log(log); !wrong.empty()) return wrong;
  for (const auto& [who, where] : witnessed_) {
    const auto rank = static_cast<uint32_t>(who >> 32), incarnation = static_cast<uint32_t>(who);
    const bool counted = std::ranges::any_of(stints_, [&](const Stint& stint) {
      return stint.rank == rank && stint.incarnation == incarnation &&
             stint.covers(where.first, where.second);
    });
    if (!counted) {
      return fmt::format(
          "{} round {}: rank {} (incarnation {}) got the result, the log says it took "
          "no part",
          name_of_chunk(job_, plan_, where.first), where.second, rank, incarnation);
    }
  }
  for (uint32_t c = 0; c < plan_.chunks.size(); ++c) {
    std::string wrong = job_.lock_step() ? replay(c) : check_clocks(c);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

kernels::Hyper Oracle::hyper_of(uint32_t key, uint64_t round) const {
  kernels::Hyper hyper = kernels::default_hyper(optimizer_);
  auto apply = [&](const std::map<std::string, double>& values) {
    for (const auto& [name, value] : values) {
      if (name == "lr") hyper.lr = value;
      if (name == "weight_decay") hyper.weight_decay = value;
      if (name == "momentum") hyper.momentum = value;
      if (name == "grad_scale") hyper.grad_scale = value;
      if (name == "rmsprop_momentum") hyper.rmsprop_momentum = value;
    }
  };
  apply(job_.spec.hyper);
  // By ascending round; the schedule's before the calls' of the same round, these in their order.
  std::vector<HyperChange> all = job_.spec.schedule;
  all.insert(all.end(), changes_.begin(), changes_.end());
  std::ranges::stable_sort(all, {}, &HyperChange::round);
  for (const HyperChange& change : all) {
    if (change.round <= round) apply(change.values);
  }
  hyper.lr *= job_.spec.keys[key].lr_scale;
  hyper.weight_decay *= job_.spec.keys[key].decay_scale;
  return hyper;
}

std::string Oracle::replay(uint32_t chunk) {
  if (seen_[chunk].empty()) return "";
  const ChunkLayout& c = plan_.chunks[chunk];
  Model model;
  const auto begin = initial_[c.key].begin() + static_cast<ptrdiff_t>(c.key_element);
  model.parameters.assign(begin, begin + c.elements);
  model.state0.assign(c.elements, 0);
  model.state1.assign(c.elements, 0);
  std::vector<std::byte> result(c.elements * kernels::bytes_of(parameter_dtype_));
  for (uint64_t round = 0; round <= seen_[chunk].rbegin()->first; ++round) {
    if (round > 0) {
      if (std::string wrong = compute_round(chunk, round, model); !wrong.empty()) return wrong;
    }
    auto at = seen_[chunk].find(round);
    if (at == seen_[chunk].end()) continue;
    reference::convert(model.parameters.data(), kernels::DType::kF32, result.data(),
                       parameter_dtype_, c.elements);
    if (at->second == result) continue;
    const auto element =
        static_cast<size_t>(std::ranges::mismatch(at->second, result).in1 - at->second.begin()) /
        kernels::bytes_of(parameter_dtype_);
    return fmt::format("{} round {}: element {} is {}, the reference has {}",
                       name_of_chunk(job_, plan_, chunk), round, element,
                       reference::load(at->second.data(), parameter_dtype_, element),
                       reference::load(result.data(), parameter_dtype_, element));
  }
  return "";
}

std::string Oracle::compute_round(uint32_t chunk, uint64_t round, Model& model) {
  const ChunkLayout& c = plan_.chunks[chunk];
  const size_t bytes = c.elements * kernels::bytes_of(gradient_dtype_);
  std::vector<Contribution> counted;
  for (const Stint& stint : stints_) {
    if (stint.covers(chunk, round)) counted.push_back({stint.rank, stint.incarnation, round});
  }
  std::ranges::sort(counted, {}, &Contribution::rank);
  if (counted.empty()) return "";  // everybody was lost or begins later: the round is skipped

  std::vector<std::vector<std::byte>> gradients;
  std::vector<float> sum(c.elements);
  const kernels::Hyper hyper = hyper_of(c.key, round);
  auto add = [&] {
    gradients.clear();
    std::vector<const void*> slots;
    for (const Contribution& from : counted) {
      if (is_null(from, c.key)) continue;
      fill_chunk(from, chunk, gradients.emplace_back(bytes).data());
    }
    for (const auto& gradient : gradients) slots.push_back(gradient.data());
    const double divisor =
        job_.spec.reduction == "mean" ? static_cast<double>(counted.size()) : 1.0;
    const auto factor = static_cast<float>(1.0 / (hyper.grad_scale * divisor));
    return reference::sum(slots, gradient_dtype_, factor, sum.data(), c.elements);
  };
  const bool finite = add();
  std::set<uint32_t> excluded;
  if (!finite && job_.spec.on_nonfinite == "exclude") {
    std::erase_if(counted, [&](const Contribution& from) {
      std::vector<std::byte> gradient(bytes);
      fill_chunk(from, chunk, gradient.data());
      const void* slot = gradient.data();
      std::vector<float> alone(c.elements);
      const bool bad = !is_null(from, c.key) &&
                       !reference::sum({&slot, 1}, gradient_dtype_, 1, alone.data(), c.elements);
      if (bad) excluded.insert(from.rank);
      return bad;
    });
    if (!add()) return fmt::format("round {} cannot be complete: its sum overflows", round);
  } else if (!finite && job_.spec.on_nonfinite == "stop") {
    return fmt::format("{} round {} cannot be complete: a gradient is not finite",
                       name_of_chunk(job_, plan_, chunk), round);
  }
  for (uint32_t rank = 0; rank < job_.spec.max_ranks; ++rank) {
    if (excluded.contains(rank) != excluded_.contains({{chunk, round}, rank})) {
      return fmt::format("{} round {}: rank {} is {}excluded in the log",
                         name_of_chunk(job_, plan_, chunk), round, rank,
                         excluded.contains(rank) ? "not " : "");
    }
  }
  reference::step(optimizer_, hyper, round, sum.data(), model.parameters.data(),
                  model.state0.data(), model.state1.data(), c.elements);
  return job_.digits ? check_digits(chunk, round, counted) : "";
}

// Independent of the reference's arithmetic: reads from the result who was counted, and how often.
std::string Oracle::check_digits(uint32_t chunk, uint64_t round,
                                 const std::vector<Contribution>& counted) const {
  auto at = seen_[chunk].find(round);
  const ChunkLayout& c = plan_.chunks[chunk];
  if (at == seen_[chunk].end() || has_bad({~0u, 0, round}, c.key)) return "";
  const uint32_t ranks =
      std::min(job_.spec.max_ranks, std::min(2u, c.elements) * kDigitsPerElement);
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    float value = 0;
    std::memcpy(&value, at->second.data() + rank / kDigitsPerElement * sizeof(float),
                sizeof(float));
    if (!std::isfinite(value)) return "";  // a bad gradient of this round, passed through
    const uint64_t digit = (static_cast<uint64_t>(value) >> (2 * (rank % kDigitsPerElement))) & 3;
    auto who = std::ranges::find(counted, rank, &Contribution::rank);
    const uint64_t expected = who != counted.end() && !is_null(*who, c.key) ? 1 : 0;
    if (digit != expected) {
      return fmt::format("{} round {}: rank {} was counted {} times instead of {}",
                         name_of_chunk(job_, plan_, chunk), round, rank, digit, expected);
    }
  }
  return "";
}

}  // namespace phub::sim
