#include "tests/worker/fault_oracle.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string_view>
#include <utility>

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

// A chunk's parameters before the first round.
std::vector<float> initial_of(const JobSpec& spec, const ChunkPlace& place) {
  if (spec.initial == "zeros") return std::vector<float>(place.elements);
  const std::vector<float> all = initial_parameters(spec);
  uint64_t begin = place.begin;
  for (uint32_t key = 0; key < place.key; ++key) begin += spec.keys[key].elements;
  const auto at = all.begin() + static_cast<ptrdiff_t>(begin);
  return {at, at + place.elements};
}

// What is wrong with what was seen of a chunk, or "".
std::string compare(const JobSpec& spec, const Replay& replay, uint32_t chunk, uint32_t key,
                    const Sight& sight, const Seen& seen) {
  const std::string who = fmt::format("rank {} (incarnation {}), round {}, chunk {}", sight.rank,
                                      sight.incarnation, seen.round, chunk);
  if (spec.optimizer == "none" && spec.reduction == "sum" && !replay.counted().empty()) {
    const auto counted = [&](uint32_t rank) {
      return std::ranges::find(replay.counted(), rank, &Member::rank) != replay.counted().end() &&
             !gives_null(rank, replay.round(), key);
    };
    const std::string digits = check_digits(seen.firsts[chunk], 0, 12, counted);
    if (!digits.empty()) return who + ": " + digits;
  }
  if (seen.hashes[chunk] != hash_of(replay.result())) {
    return who + ": other bytes than the reference's";
  }
  return "";
}

}  // namespace

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
  spec.lease_ms = 3000;
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

std::string notes_of_life(const std::string& notes, int life) {
  return life == 0 ? notes : fmt::format("{}.{}", notes, life);
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
  const HyperHistory hyper(spec, log);
  const std::vector<ChunkPlace> places = chunks_of(spec);
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    const ChunkPlace& place = places[chunk];
    const auto gradient = [&](const Member& from, uint64_t round, std::byte* out) {
      if (gives_null(from.rank, round, place.key)) return false;
      const std::span slot(reinterpret_cast<float*>(out), place.elements);
      fill_gradient(spec, from.rank, round, place.key, slot, place.begin);
      return true;
    };
    Replay replay(spec, participation, hyper, chunk, initial_of(spec, place), gradient);
    for (const auto& [seen_round, who] : by_round) {
      while (replay.round() < seen_round) replay.next_round();
      std::string wrong = compare(spec, replay, chunk, place.key, *who.first, *who.second);
      if (!wrong.empty()) return wrong;
    }
  }
  return "";
}

}  // namespace phub::testing
