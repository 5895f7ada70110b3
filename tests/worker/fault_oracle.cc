#include "tests/worker/fault_oracle.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string_view>
#include <utility>

#include "kernels/kernels.h"
#include "tests/kernels/reference.h"
#include "tests/worker/participation.h"

namespace phub::testing {
namespace {

float random_value(uint64_t rank, uint64_t round, uint64_t key, uint64_t element) {
  uint64_t x = rank * 0x9e3779b97f4a7c15u + round * 0xbf58476d1ce4e5b9u +
               key * 0x94d049bb133111ebu + element * 0xd6e8feb86659fd93u + 1;
  x ^= x >> 31;
  x *= 0x7fb5d329728ea185u;
  x ^= x >> 27;
  return (static_cast<float>(x % 20001) - 10000.0f) / 3000.0f;
}

template <typename T>
void append(std::string& out, const T& value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Takes a value off the front; false: it is not there any more.
template <typename T>
bool take(std::string_view& from, T& value) {
  if (from.size() < sizeof(value)) return false;
  std::memcpy(&value, from.data(), sizeof(value));
  from.remove_prefix(sizeof(value));
  return true;
}

kernels::Hyper hyper_of(const JobSpec& spec, kernels::Optimizer optimizer) {
  kernels::Hyper hyper = kernels::default_hyper(optimizer);
  if (const auto lr = spec.hyper.find("lr"); lr != spec.hyper.end()) hyper.lr = lr->second;
  return hyper;
}

// Recomputes one chunk, round by round, and compares what was seen of it.
class Replay {
 public:
  Replay(const JobSpec& spec, const Participation& participation, uint32_t chunk)
      : spec_(spec),
        participation_(participation),
        chunk_(chunk),
        place_(chunks_of(spec)[chunk]),
        model_(*kernels::parse_optimizer(spec.optimizer),
               hyper_of(spec, *kernels::parse_optimizer(spec.optimizer)), initial()) {}

  // A round that nobody took part in (everybody who knew it is gone) changes nothing.
  void next_round() {
    ++round_;
    ranks_ = participation_.ranks(round_, chunk_);
    if (ranks_.empty()) return;
    std::vector<std::vector<float>> slots;
    for (const uint32_t rank : ranks_) {
      if (gives_null(rank, round_, place_.key)) continue;
      slots.emplace_back(place_.elements);
      fill_gradient(spec_, rank, round_, place_.key, slots.back(), place_.begin);
    }
    std::vector<const void*> pointers;
    for (const auto& slot : slots) pointers.push_back(slot.data());
    const double count = spec_.reduction == "mean" ? static_cast<double>(ranks_.size()) : 1.0;
    model_.steps = round_ - 1;
    model_.round(pointers, kernels::DType::kF32, static_cast<float>(1.0 / count));
  }

  std::string compare(const Sight& sight, const Seen& seen) const {
    const std::string who = fmt::format("rank {} (incarnation {}), round {}, chunk {}", sight.rank,
                                        sight.incarnation, seen.round, chunk_);
    if (spec_.optimizer == "none" && spec_.reduction == "sum" && !ranks_.empty()) {
      const std::string digits = check_digits(seen.firsts[chunk_]);
      if (!digits.empty()) return who + ": " + digits;
    }
    if (seen.hashes[chunk_] != hash_of(std::as_bytes(std::span(model_.params)))) {
      return who + ": other bytes than the reference's";
    }
    return "";
  }

 private:
  std::vector<float> initial() const {
    if (spec_.initial == "zeros") return std::vector<float>(place_.elements);
    const std::vector<float> all = initial_parameters(spec_);
    uint64_t begin = place_.begin;
    for (uint32_t key = 0; key < place_.key; ++key) begin += spec_.keys[key].elements;
    const auto at = all.begin() + static_cast<ptrdiff_t>(begin);
    return {at, at + place_.elements};
  }

  std::string check_digits(float first) const {
    auto rest = static_cast<uint64_t>(first);
    for (uint32_t rank = 0; rank < 12; ++rank, rest /= 4) {
      const bool counted =
          std::ranges::find(ranks_, rank) != ranks_.end() && !gives_null(rank, round_, place_.key);
      if (rest % 4 != counted) {
        return fmt::format("rank {} is in the sum {} times, and {} in the log", rank, rest % 4,
                           counted);
      }
    }
    return "";
  }

  const JobSpec& spec_;
  const Participation& participation_;
  const uint32_t chunk_;
  const ChunkPlace place_;
  reference::Model model_;
  uint64_t round_ = 0;
  std::vector<uint32_t> ranks_;
};

}  // namespace

std::vector<ChunkPlace> chunks_of(const JobSpec& spec) {
  std::vector<ChunkPlace> out;
  for (uint32_t key = 0; key < spec.keys.size(); ++key) {
    for (uint64_t at = 0; at < spec.keys[key].elements; at += spec.chunk_elements) {
      const uint64_t left = spec.keys[key].elements - at;
      out.push_back(
          {key, at, static_cast<uint32_t>(std::min<uint64_t>(left, spec.chunk_elements))});
    }
  }
  return out;
}

JobSpec fault_spec(const std::string& name, uint32_t world_size, const std::string& optimizer) {
  JobSpec spec;
  spec.name = name;
  spec.keys = {{.name = "a", .elements = 1},
               {.name = "b", .elements = 700, .priority = 2},
               {.name = "c", .elements = 512},
               {.name = "d", .elements = 2000}};
  spec.chunk_elements = 256;
  spec.world_size = world_size;
  spec.optimizer = optimizer;
  if (optimizer != "none") {
    spec.initial = "broadcast";
    spec.reduction = "mean";
    spec.hyper = {{"lr", 0.01}};
  }
  spec.lease_ms = 1000;
  spec.progress_limit_ms = 10000;
  spec.wait_limit_ms = 20000;
  spec.join_limit_ms = 20000;
  return spec;
}

bool gives_null(uint32_t rank, uint64_t round, size_t key) { return (rank + round + key) % 7 == 0; }

void fill_gradient(const JobSpec& spec, uint32_t rank, uint64_t round, size_t key,
                   std::span<float> out, uint64_t begin) {
  for (size_t i = 0; i < out.size(); ++i) {
    const uint64_t e = begin + i;
    out[i] = e % spec.chunk_elements == 0 ? static_cast<float>(uint64_t{1} << (2 * rank))
                                          : random_value(rank, round, key, e);
  }
}

std::vector<float> initial_parameters(const JobSpec& spec) {
  std::vector<float> out;
  for (size_t key = 0; key < spec.keys.size(); ++key) {
    for (size_t e = 0; e < spec.keys[key].elements; ++e) {
      out.push_back(random_value(99, 0, key, e));
    }
  }
  return out;
}

uint64_t hash_of(std::span<const std::byte> bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t at = 0; at + 4 <= bytes.size(); at += 4) {
    uint32_t word = 0;
    std::memcpy(&word, bytes.data() + at, sizeof(word));
    hash = (hash ^ word) * 0x100000001b3u;
    hash ^= hash >> 29;
  }
  return hash;
}

std::string encode_header(const Sight& sight) {
  std::string out;
  append(out, sight.rank);
  append(out, sight.incarnation);
  append(out, sight.first_round);
  return out;
}

std::string encode(const Seen& seen) {
  std::string out;
  append(out, seen.round);
  for (size_t c = 0; c < seen.hashes.size(); ++c) {
    append(out, seen.hashes[c]);
    append(out, seen.firsts[c]);
  }
  return out;
}

Sight read_sight(const std::string& path, size_t chunks) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  std::string_view rest = bytes;
  Sight sight;
  if (!take(rest, sight.rank) || !take(rest, sight.incarnation) || !take(rest, sight.first_round)) {
    return {};
  }
  for (;;) {
    Seen seen;
    bool whole = take(rest, seen.round);
    for (size_t c = 0; c < chunks && whole; ++c) {
      whole = take(rest, seen.hashes.emplace_back()) && take(rest, seen.firsts.emplace_back());
    }
    if (!whole) return sight;
    sight.rounds.push_back(std::move(seen));
  }
}

std::string check_sights(const JobSpec& spec, const std::vector<LogRecord>& log,
                         std::vector<Sight> sights) {
  const auto chunks = static_cast<uint32_t>(chunks_of(spec).size());
  const Participation participation(log, chunks);
  for (const LogRecord& record : log) {
    if (record.kind != LogRecord::Kind::kLost) continue;
    for (Sight& sight : sights) {
      const bool lost = sight.rank == record.rank && sight.incarnation == record.incarnation;
      if (lost && !sight.rounds.empty()) sight.rounds.pop_back();
    }
  }
  std::multimap<uint64_t, std::pair<const Sight*, const Seen*>> by_round;
  for (const Sight& sight : sights) {
    for (size_t i = 0; i < sight.rounds.size(); ++i) {
      if (sight.rounds[i].round != sight.first_round - 1 + i) {
        return fmt::format("rank {} (incarnation {}) saw round {} instead of {}", sight.rank,
                           sight.incarnation, sight.rounds[i].round, sight.first_round - 1 + i);
      }
      by_round.emplace(sight.rounds[i].round, std::pair(&sight, &sight.rounds[i]));
    }
  }
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    Replay replay(spec, participation, chunk);
    uint64_t round = 0;
    for (const auto& [seen_round, who] : by_round) {
      for (; round < seen_round; ++round) replay.next_round();
      std::string wrong = replay.compare(*who.first, *who.second);
      if (!wrong.empty()) return wrong;
    }
  }
  return "";
}

}  // namespace phub::testing
