// The job of a core's script (core_script.h), as its first line says it, and how the words of the
// others are read.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "phub/core/gated.h"
#include "phub/core/quorum.h"
#include "tests/phub/core_job_parts.h"
#include "tests/phub/core_job_rig.h"

namespace phub::testing::core_script {

// "0,2-4"
inline std::vector<uint32_t> list_of(const std::string& text) {
  std::vector<uint32_t> out;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) {
    const size_t dash = part.find('-');
    const auto first = static_cast<uint32_t>(std::stoul(part));
    const auto last =
        dash == part.npos ? first : static_cast<uint32_t>(std::stoul(part.substr(dash + 1)));
    for (uint32_t n = first; n <= last; ++n) out.push_back(n);
  }
  return out;
}

// "A/B": A times a B-th, as a mean computes it.
inline float value_of(const std::string& text) {
  const size_t slash = text.find('/');
  const float value = std::strtof(text.c_str(), nullptr);
  if (slash == text.npos) return value;
  return value * static_cast<float>(1 / std::stod(text.substr(slash + 1)));
}

// "LEFT" and, behind the mark, "RIGHT"; without it all is left.
inline std::pair<std::string, std::string> split(const std::string& text, char mark) {
  const size_t at = text.find(mark);
  if (at == text.npos) return {text, ""};
  return {text.substr(0, at), text.substr(at + 1)};
}

// [RANKS:]CHUNKS[@ROUND][=VALUE[/PARTICIPANTS]]
struct Item {
  explicit Item(const std::string& text) {
    const auto [place, more] = split(text, '=');
    value = more;
    std::tie(value, participants) = split(value, '/');
    auto [chunk_text, round_text] = split(place, '@');
    if (more.empty()) std::tie(round_text, participants) = split(round_text, '/');
    chunks = list_of(chunk_text);
    round = round_text.empty() ? 0 : std::stoull(round_text);
  }
  std::vector<uint32_t> chunks;
  uint64_t round = 0;
  std::string value, participants;

  uint32_t low() const { return low8(round); }
};

// "0-2:1,3@1" stands for the posts of all these ranks, chunk by chunk.
inline std::vector<std::string> posts_in(const std::vector<std::string>& words) {
  std::vector<std::string> out;
  for (const std::string& word : words) {
    const auto [ranks, rest] = split(word, ':');
    const size_t end = rest.find_first_not_of("0123456789,-");
    for (const uint32_t chunk : list_of(rest.substr(0, end))) {
      for (const uint32_t rank : list_of(ranks)) {
        out.push_back(fmt::format("{}:{}{}", rank, chunk, rest.substr(end)));
      }
    }
  }
  return out;
}

inline uint32_t participants_of(const std::string& text) {
  return text == "none-left" ? kNoneLeft : static_cast<uint32_t>(std::stoul(text));
}

inline ImmKind kind_of(const std::string& word) {
  static const std::map<std::string, ImmKind> kKinds = {{"data", ImmKind::kData},
                                                        {"null", ImmKind::kNull},
                                                        {"initial", ImmKind::kInitial},
                                                        {"control", ImmKind::kControl}};
  return kKinds.at(word);
}

inline std::vector<ChunkInterest> interest_of(const std::string& text) {
  std::vector<ChunkInterest> out;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) {
    out.push_back({.writes = part.find('w') != part.npos, .reads = part.find('r') != part.npos});
  }
  std::ranges::reverse(out);  // by the chunks' ids
  return out;
}

// What a script says of its job.
struct JobWords {
  explicit JobWords(const std::vector<std::string>& words) {
    options.admit = false;
    for (const std::string& word : words) {
      const auto [name, value] = split(word, '=');
      if (!set_number(name, value) && !set_word(name, value)) ADD_FAILURE() << "no option " << word;
    }
  }
  bool set_number(const std::string& name, const std::string& value);
  bool set_word(const std::string& name, const std::string& value);

  CoreJobRig::Options options;
  enum { kPlain, kDeferred, kRack, kSwitch } way = kPlain;
  bool everybody = true;
  double momentum = 0.9;
  std::vector<uint32_t> fragments;  // by chunk; 0 if it has none
  std::map<uint32_t, std::vector<ChunkInterest>> interest;
};

inline bool JobWords::set_number(const std::string& name, const std::string& value) {
  JobParameters& p = options.parameters;
  const auto list = [&value](auto& out) {
    std::istringstream in(value);
    for (std::string part; std::getline(in, part, ',');) out.push_back(std::stoi(part));
  };
  const auto number = [&value] { return static_cast<uint32_t>(std::stoul(value)); };
  const std::map<std::string, std::function<void()>> kNumbers = {
      {"max", [&] { p.max_ranks = number(); }},
      {"ranks", [&] { options.expected = list_of(value); }},
      {"chunks", [&] { options.chunks = number(); }},
      {"quorum", [&] { p.rules.quorum = number(); }},
      {"fragments", [&] { list(fragments); }},
      {"late-decay", [&] { p.rules.late_decay = std::stof(value); }},
      {"elements", [&] { options.elements = number(); }},
      {"slack", [&] { p.rules.consistency = Consistency::kSsp, p.slack = number(); }},
      {"formats", [&] { p.schedules = {FormatSchedule::parse("formats", value)}; }},
      {"first", [&] { p.first_round = number(); }},
      {"shelves", [&] { options.shelves = number(); }},
      {"groups", [&] { p.tree = RankTree(value, p.max_ranks); }},
      {"priorities", [&] { list(options.priorities); }},
      {"parent", [&] { list(p.rack_ranks), options.stride = 96; }},
      {"interest",
       [&] {
         std::istringstream in(value);
         uint32_t rank = 0;
         for (std::string of; std::getline(in, of, '/');) interest[rank++] = interest_of(of);
       }},
  };
  const auto found = kNumbers.find(name);
  if (found == kNumbers.end()) return false;
  found->second();
  return true;
}

inline bool JobWords::set_word(const std::string& name, const std::string& value) {
  JobParameters& p = options.parameters;
  const std::map<std::string, std::function<void()>> kWords = {
      {"nobody", [&] { everybody = false; }},
      {"f16", [&] { options.dtype = kernels::DType::kF16; }},
      {"bf16", [&] { options.dtype = kernels::DType::kBF16; }},
      {"mean", [&] { p.rules.reduction = Reduction::kMean; }},
      {"sgd", [&] { p.rules.optimizer = kernels::Optimizer::kSgd; }},
      {"momentum", [&] { p.rules.optimizer = kernels::Optimizer::kMomentum; }},
      {"half-momentum", [&] { p.rules.optimizer = kernels::Optimizer::kMomentum, momentum = 0.5; }},
      {"async", [&] { p.rules.consistency = Consistency::kAsync; }},
      {"unused=skip", [&] { p.rules.unused = Unused::kSkip; }},
      {"nan=stop", [&] { p.rules.on_nonfinite = OnNonFinite::kStop; }},
      {"nan=exclude", [&] { p.rules.on_nonfinite = OnNonFinite::kExclude; }},
      {"nan=skip", [&] { p.rules.on_nonfinite = OnNonFinite::kSkip; }},
      {"gated", [&] { p.rules.gated = true; }},
      {"weights", [&] { p.rules.weights = true, options.stride = 96; }},
      {"nan=pass", [&] { p.rules.on_nonfinite = OnNonFinite::kPass; }},
      {"workers-own", [&] { p.slots_belong_to_worker = true; }},
      {"initial", [&] { p.rules.initial = Initial::kBroadcast; }},
      {"snapshots", [&] { options.snapshots = true; }},
      {"pending", [&] { way = kDeferred; }},
      {"switch", [&] { way = kSwitch; }},
      {"rack",
       [&] {
         way = kRack;
         options.stride = 96;
         p.has_parent = true;
         p.first_round = std::max<uint64_t>(p.first_round, 1);
       }},
  };
  const auto found = kWords.find(value.empty() ? name : name + "=" + value);
  if (found == kWords.end()) return false;
  found->second();
  return true;
}

// Memory for the state of some chunks, in an order of its own.
struct StateMemory {
  StateMemory(uint32_t chunks, uint32_t elements) : chunks_(chunks), floats(2 * chunks * elements) {
    memory.floats = floats.data();
    for (uint32_t id = 0; id < chunks; ++id) {
      memory.places.push_back({.first = 2 * uint64_t{elements} * id, .stride = elements});
    }
  }
  KeyStateMemory::Place& place(uint32_t chunk) { return memory.places.at(chunks_ - 1 - chunk); }
  const float* parameters(uint32_t chunk) { return &floats.at(first(chunk)); }
  const float* state(uint32_t chunk) { return parameters(chunk) + place(chunk).stride; }
  void fill(uint32_t chunk, float parameter, float state, uint64_t steps) {
    KeyStateMemory::Place& at = place(chunk);
    at.first = first(chunk), at.steps = steps;
    std::fill_n(&floats.at(at.first), at.stride, parameter);
    std::fill_n(&floats.at(at.first + at.stride), at.stride, state);
  }

 private:
  uint64_t first(uint32_t chunk) { return 2 * place(chunk).stride * (chunks_ - 1 - chunk); }
  const uint32_t chunks_;

 public:
  std::vector<float> floats;
  KeyStateMemory memory;
};

struct Ways {
  Deferred* deferred = nullptr;
  CoreParent parent;
  std::optional<RoundGate> gate;
  std::optional<QuorumGates> quorum;
  std::optional<FakeSwitch> behind;
};
class ScriptRig : public Ways, public CoreJobRig {
 public:
  explicit ScriptRig(JobWords words) : CoreJobRig(with_way(words, *this)) {
    hyper.front().values.momentum = words.momentum;
  }

  Probe probe_now() {
    Probe probe;
    const uint32_t ranks = options_.parameters.max_ranks;
    probe.arrivals.resize(ranks), probe.parts.resize(ranks), probe.lacks.resize(ranks);
    probe.waited_for.resize((ranks + 63) / 64);
    job->probe(probe);
    return probe;
  }

 private:
  static Options with_way(const JobWords& words, ScriptRig& rig) {
    Options options = words.options;
    if (words.way == JobWords::kDeferred) {
      options.make_lock_step = [&rig](const Stages& stages) {
        auto way = std::make_unique<Deferred>(stages);
        rig.deferred = way.get();
        return way;
      };
    } else if (words.way == JobWords::kRack) {
      options.make_lock_step = [&rig](const Stages& stages) {
        return rig.parent.way_below(stages, rig.results.data());
      };
    } else if (words.way == JobWords::kSwitch) {
      return rig.behind.emplace().before(options);
    } else if (const uint32_t quorum = options.parameters.rules.quorum; quorum > 0) {
      std::vector<uint32_t> fragments = words.fragments;
      fragments.resize(options.chunks);
      const std::vector<uint32_t> cores(std::ranges::max(fragments) + 1, 1);
      rig.quorum.emplace(1, cores, options.parameters.max_ranks, quorum,
                         std::max<uint64_t>(options.parameters.first_round, 1));
      options.make_lock_step = [&rig, fragments](const Stages& stages) {
        return std::make_unique<Quorum>(stages, *rig.quorum, 0, fragments);
      };
    } else if (options.parameters.rules.gated) {
      rig.gate.emplace(1, options.chunks,
                       options.parameters.rules.on_nonfinite == OnNonFinite::kSkip);
      options.make_lock_step = [&rig](const Stages& stages) {
        return std::make_unique<Gated>(stages, *rig.gate, 0);
      };
    }
    return options;
  }
};

}  // namespace phub::testing::core_script
