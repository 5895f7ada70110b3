#include "tests/sim/rack_oracle.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "tests/sim/values.h"
#include "transport/error.h"

namespace phub::sim {
namespace {

// Exact in any sum of a run.
float whole_value_of(uint64_t hash) { return static_cast<float>(hash & 15) - 8; }
// And this: what formats cannot hold of it they send later. No format's residual of it is above 1.
float quarters_of(uint64_t hash) { return static_cast<float>(hash & 31) / 4 - 4; }

constexpr uint32_t kDigitsPerElement = 12;

// By BadGradient::Kind.
constexpr float kBadValues[] = {std::numeric_limits<float>::quiet_NaN(),
                                -std::numeric_limits<float>::infinity(), 3.3e38f};

std::string name_of_chunk(const JobPlan& job, const Plan& plan, uint32_t chunk) {
  const ChunkLayout& c = plan.chunks[chunk];
  return fmt::format("{} chunk {} (key {} from {})", job.spec.name, chunk, c.key, c.key_element);
}

// NaN is NaN, whatever its bits.
bool is_same(const RoundVerdict& a, const RoundVerdict& b) {
  const bool norm = a.norm == b.norm || (std::isnan(a.norm) && std::isnan(b.norm));
  return norm && a.round == b.round && a.skipped == b.skipped;
}

}  // namespace

Oracle::Oracle(const JobPlan& job, const Plan& plan)
    : job_(job),
      plan_(plan),
      places_(chunks_of(job.spec)),
      parameter_dtype_(*kernels::parse_dtype(parameter_memory_format(job.spec))),
      seen_(plan.chunks.size()),
      seen_out_of_step_(plan.chunks.size()),
      seen_states_(plan.chunks.size()) {
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

// At least 1, so that what is too large for a sum stays so.
float Oracle::weight_of(const Contribution& from, uint32_t key) const {
  if (job_.spec.weights == Weights::kNo) return 1;
  const uint64_t hash =
      mix(mix(mix(job_.seed, 79), from.rank * 1000ull + from.incarnation), from.round * 1000 + key);
  return hash % 4 == 0 ? 1.0f : 1 + static_cast<float>(hash >> 40) * 0x1p-20f;
}

// Which have a digit of each rank, as far as there are elements.
uint32_t Oracle::digit_elements(const ChunkLayout& chunk) const {
  const uint32_t all = (job_.spec.max_ranks + kDigitsPerElement - 1) / kDigitsPerElement;
  return std::min(std::max(2u, all), chunk.elements);
}

uint64_t Oracle::rounds() const {
  std::map<uint32_t, uint64_t> last;
  for (uint32_t c = 0; c < seen_.size(); ++c) {
    if (seen_[c].empty()) continue;
    uint64_t& of = last[job_.spec.keys[plan_.chunks[c].key].fragment];
    of = std::max(of, seen_[c].rbegin()->first);
  }
  uint64_t all = 0;
  for (const auto& [fragment, round] : last) all += round;
  return all;
}

bool Oracle::has_bad(const Contribution& from, uint32_t key) const {
  return std::ranges::any_of(job_.bad, [&](const BadGradient& bad) {
    return bad.key == key && bad.round == from.round &&
           (bad.rank == from.rank || bad.kind == BadGradient::kOverflow);
  });
}

bool Oracle::touches(uint32_t rank, uint32_t chunk,
                     std::vector<ElementRange> KeyInterest::*of) const {
  if (job_.interest.empty()) return true;
  const ChunkLayout& c = plan_.chunks[chunk];
  for (const KeyInterest& interest : job_.interest.at(rank)) {
    if (interest.key != job_.spec.keys[c.key].name) continue;
    return std::ranges::any_of(interest.*of, [&c](const ElementRange& range) {
      return range.begin < c.key_element + c.elements && c.key_element < range.end;
    });
  }
  return true;
}

// Of a job that is not in lock-step: what it adds up to does not depend on the order.
float Oracle::exact_value(uint32_t key, uint64_t hash) const {
  return is_coded(job_.spec, key) ? quarters_of(hash) : whole_value_of(hash);
}

// Whole numbers are codes of int8 and int4 as they are: the scale is 1.
void Oracle::fix_scale(const ChunkLayout& chunk, std::byte* gradient) const {
  const std::string& format = gradient_format(job_.spec, job_.spec.keys[chunk.key]);
  const float largest = format == "int8" ? 127.0f : format == "int4" ? 7.0f : 0.0f;
  if (largest == 0) return;
  reference::store(gradient, kernels::DType::kF32, chunk.elements - 1, largest);
}

// Chunk by chunk: here the right vectors of a key's chunks need not be the same.
void Oracle::fill_factors(const Contribution& from, uint32_t chunk, std::byte* out) const {
  const reference::Factors& factors = places_[chunk].factors;
  const uint64_t stream =
      mix(mix(mix(job_.seed, from.rank), from.incarnation), mix(from.round, chunk));
  for (size_t i = 0; i + 1 < factors.floats(); ++i) {
    reference::store(out, kernels::DType::kF32, i, value_of(mix(stream, i)));
  }
  auto count = static_cast<uint32_t>(stream % (factors.pairs + 1));
  for (const BadGradient& bad : job_.bad) {
    if (bad.key != places_[chunk].key || bad.round != from.round) continue;
    if (bad.rank != from.rank && bad.kind != BadGradient::kOverflow) continue;
    count = std::max(count, 1u);
    std::fill_n(factors.right(out, 0), factors.columns, 1.0f);
    factors.left(out, 0)[factors.rows / 2] = kBadValues[bad.kind];
  }
  factors.set_count(out, count);
}

// In any order, and some of them twice, as the box may get them.
void Oracle::fill_rows(const Contribution& from, uint32_t chunk, std::byte* out) const {
  const reference::Rows& rows = places_[chunk].rows;
  const uint64_t stream =
      mix(mix(mix(job_.seed, from.rank), from.incarnation), mix(from.round, chunk));
  const bool is_bad = std::ranges::any_of(job_.bad, [&](const BadGradient& bad) {
    return bad.key == places_[chunk].key && bad.round == from.round;
  });
  if (rows.pairs > 0 && !is_bad && mix(stream, 1) % 2 == 0) {
    const auto pairs = static_cast<uint32_t>(1 + stream % rows.pairs);
    std::vector<float> all(pairs * (rows.rows + rows.columns));
    for (size_t i = 0; i < all.size(); ++i) all[i] = value_of(mix(stream, i));
    return rows.set_pairs(out, {rows.rows, rows.columns, pairs}, all.data(), pairs);
  }
  auto count = static_cast<uint32_t>(stream % (std::min(rows.rows, rows.limit) + 1));
  if (mix(mix(job_.seed, from.round), chunk) % 3 == 0) count = 0;  // nobody has any
  for (uint32_t i = 0; i < std::min(rows.rows, rows.limit); ++i) {
    rows.set_row(out, i, static_cast<uint32_t>(mix(stream, 7 * i + 1) % rows.rows));
    for (size_t j = 0; j < rows.columns; ++j) {
      reference::store(rows.elements(out, i), kernels::DType::kF32, j,
                       value_of(mix(stream, i * rows.columns + j)));
    }
  }
  for (const BadGradient& bad : job_.bad) {
    if (bad.key != places_[chunk].key || bad.round != from.round) continue;
    if (bad.rank != from.rank && bad.kind != BadGradient::kOverflow) continue;
    // The same row of every rank, as sums are to overflow.
    count = 1;
    rows.set_row(out, 0, static_cast<uint32_t>(rows.rows / 2));
    rows.elements(out, 0)[rows.columns / 2] = kBadValues[bad.kind];
  }
  rows.set_count(out, count);
}

void Oracle::fill_chunk(const Contribution& from, uint32_t chunk, std::byte* out) const {
  if (places_[chunk].factors.pairs > 0) return fill_factors(from, chunk, out);
  if (places_[chunk].rows.columns > 0) return fill_rows(from, chunk, out);
  const ChunkLayout& c = plan_.chunks[chunk];
  const kernels::DType dtype = memory_dtype(job_.spec, c.key);
  const uint64_t stream =
      mix(mix(mix(job_.seed, from.rank), from.incarnation), mix(from.round, chunk));
  for (uint32_t i = 0; i < c.elements; ++i) {
    const uint64_t hash = mix(stream, i);
    reference::store(out, dtype, i, job_.lock_step() ? value_of(hash) : exact_value(c.key, hash));
  }
  if (!job_.lock_step()) {
    fix_scale(c, out);
    for (uint32_t rank = 0; rank < job_.spec.max_ranks; ++rank) {
      reference::store(out, dtype, rank, rank == from.rank ? 1.0f : 0.0f);
    }
  }
  if (job_.digits) {
    const uint32_t element = from.rank / kDigitsPerElement;
    for (uint32_t i = 0; i < digit_elements(c); ++i) {
      const float one = std::ldexp(1.0f, static_cast<int>(2 * (from.rank % kDigitsPerElement)));
      reference::store(out, dtype, i, i == element ? one : 0.0f);
    }
  }
  for (const BadGradient& bad : job_.bad) {
    if (bad.key != c.key || bad.round != from.round) continue;
    if (bad.rank != from.rank && bad.kind != BadGradient::kOverflow) continue;
    reference::store(out, dtype, c.elements / 2, kBadValues[bad.kind]);
  }
}

void Oracle::fill_key(const Contribution& from, uint32_t key, std::span<std::byte> out) const {
  const size_t element = kernels::bytes_of(memory_dtype(job_.spec, key));
  for (uint32_t c = first_chunk_[key]; c < first_chunk_[key + 1]; ++c) {
    const ChunkLayout& chunk = plan_.chunks[c];
    const uint64_t slot = chunk.gradient_offset - plan_.chunks[first_chunk_[key]].gradient_offset;
    fill_chunk(from, c,
               out.data() + (places_[c].is_compact() ? slot : chunk.key_element * element));
  }
}

std::string Oracle::saw(const Contribution& by, uint32_t key, std::span<const std::byte> result,
                        bool pushed) {
  const size_t element = kernels::bytes_of(parameter_dtype_);
  for (uint32_t c = first_chunk_[key]; c < first_chunk_[key + 1]; ++c) {
    const ChunkLayout& chunk = plan_.chunks[c];
    auto bytes = result.subspan(chunk.key_element * element, chunk.elements * element);
    const bool reads = touches(by.rank, c, &KeyInterest::reads);
    if (pushed && (reads || touches(by.rank, c, &KeyInterest::writes))) {
      witnessed_.insert({by, c, by.round});
    }
    if (!reads) continue;
    if (!pushed && by.round > 0 && by.round == restored_ && job_.spec.optimizer == "none" &&
        job_.lock_step()) {
      if (std::ranges::all_of(bytes, [](std::byte byte) { return byte == std::byte{0}; })) continue;
      return fmt::format("{} round {}: rank {} sees a sum, which no checkpoint has",
                         name_of_chunk(job_, plan_, c), by.round, by.rank);
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

std::string Oracle::was_told(const Contribution& by, const std::optional<RoundVerdict>& verdict,
                             bool pushed) {
  if (!GatedReplay::is_gated(job_.spec)) {
    return verdict ? job_.spec.name + ": a verdict in a job without gated rounds" : "";
  }
  if (!verdict && !pushed) return "";
  if (verdict && verdict->round == by.round) {
    const auto [at, is_new] = told_.try_emplace(by.round, *verdict);
    if (is_new || is_same(at->second, *verdict)) return "";
  }
  return fmt::format("{} round {}: rank {} (incarnation {}) is told {}", job_.spec.name, by.round,
                     by.rank, by.incarnation,
                     verdict ? fmt::format("of round {} norm {}{}", verdict->round, verdict->norm,
                                           verdict->skipped ? ", skipped" : "")
                             : "nothing");
}

void Oracle::undo_from(uint64_t round) {
  restored_ = round - 1;
  std::erase_if(restored_rounds_, [this](uint64_t before) { return before > restored_; });
  if (restored_ > 0) restored_rounds_.push_back(restored_);
  // Also those of a life that had gone on from the same checkpoint.
  std::erase_if(parts_, [round](const auto& part) { return part.first.round + 1 >= round; });
  for (auto& seen : seen_) seen.erase(seen.lower_bound(round), seen.end());
  told_.erase(told_.lower_bound(round), told_.end());
  std::erase_if(witnessed_,
                [round](const Witness& witness) { return std::get<2>(witness) >= round; });
  // A get of the round before may have seen what was set for this one.
  for (auto& seen : seen_states_) {
    std::erase_if(seen, [round](const SeenState& state) { return state.round + 1 >= round; });
  }
  // A later life may go on from a checkpoint that this one could not read, and that has them.
  for (SetCall& call : sets_) call.is_void |= call.round && *call.round >= round;
  // With what the round begins is known when that before it is complete; later decisions are void,
  // but for those that the checkpoint has.
  std::erase_if(told_to_run_, [round](const auto& told) { return told.first > round; });
  std::erase_if(decided_, [round](const auto& decided) { return decided.second.round > round; });
  // They may have seen updates of others that are void, and that their makers do again.
  for (auto& seen : seen_out_of_step_) seen.clear();
}

std::string Oracle::check(const std::vector<LogRecord>& log) {
  try {
    const Participation participation(log, static_cast<uint32_t>(plan_.chunks.size()),
                                      fragments_by_chunk(job_.spec, plan_.chunks));
    check_witnesses(participation);
    check_parts(participation);
    const HyperHistory hyper(job_.spec, log);
    check_branches(hyper);
    if (GatedReplay::is_gated(job_.spec)) {
      std::vector<Replay> chunks;
      for (uint32_t c = 0; c < plan_.chunks.size(); ++c) {
        chunks.push_back(replay_of(c, participation, hyper));
      }
      check_gated_rounds({job_.spec, hyper, std::move(chunks)});
      return "";
    }
    const std::vector<SetCall> sets = sets_in(log);
    MostSteps most_steps;
    for (uint32_t c = 0; c < plan_.chunks.size(); ++c) {
      if (!job_.lock_step()) {
        check_clocks(c, participation, hyper, log);
      } else if (!seen_[c].empty() || !seen_states_[c].empty()) {
        check_rounds(replay_of(c, participation, hyper), c, sets, most_steps);
      }
    }
    check_steps(most_steps);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void Oracle::heard_of_branches(uint64_t complete, const BranchChange& change,
                               const BranchReply& reply) {
  const auto after = std::ranges::upper_bound(reply.runs, complete + 1, {}, &BranchRun::round);
  if (after != reply.runs.begin())
    told_to_run_.emplace_back(complete + 1, std::prev(after)->branch);
  if (change.action != BranchAction::kList) decided_.emplace_back(change, reply);
}

void Oracle::check_branches(const HyperHistory& history) {
  for (const auto& [round, branch] : told_to_run_) {
    if (history.branch_in(round) == branch) continue;
    fail(ErrorCode::kInvalid, "{}: branch {} was said to run in round {}, the log has {}",
         job_.spec.name, branch, round, history.branch_in(round));
  }
  for (const auto& [change, reply] : decided_) {
    const auto is_fork = [&change = change, &reply = reply](const LogRecord& record) {
      return record.kind == LogRecord::Kind::kForked && record.branch == reply.branch &&
             record.parent == change.branch && record.round == reply.round &&
             record.values == change.values;
    };
    const bool is_there = std::ranges::any_of(history.branches(), is_fork);
    if (change.action == BranchAction::kFork && !is_there) {
      fail(ErrorCode::kInvalid, "{}: the log lacks the fork of branch {} in round {}",
           job_.spec.name, reply.branch, reply.round);
    }
    const bool kills = change.action == BranchAction::kKill;
    if (kills || change.action == BranchAction::kRevive) {
      check_killed(change.branch, kills, reply.round, history);
    }
    if (reply.round < change.round) {
      fail(ErrorCode::kInvalid, "{}: a change of branches for round {} holds from round {} on",
           job_.spec.name, change.round, reply.round);
    }
  }
  for (const uint64_t round : restored_rounds_) {
    const std::span<const LogRecord> all = history.branches();
    restored_with_branches_ += !all.empty() && all.front().round <= round + 1;
  }
  uint64_t last = 0;
  for (const auto& seen : seen_) {
    if (!seen.empty()) last = std::max(last, seen.rbegin()->first);
  }
  for (const LogRecord& record : history.branches()) {
    if (record.round > last + 1) continue;
    forks_ += record.kind == LogRecord::Kind::kForked;
    switches_ += record.kind == LogRecord::Kind::kScheduled;
  }
  revived_runs_ += history.revived_runs(last);
}

// Who was told that a branch is killed, or that it is back, finds that in the log.
void Oracle::check_killed(uint32_t branch, bool kills, uint64_t round,
                          const HyperHistory& history) const {
  const auto kind = kills ? LogRecord::Kind::kKilled : LogRecord::Kind::kRevived;
  const bool is_logged = std::ranges::any_of(history.kills(), [&](const LogRecord& record) {
    return record.kind == kind && record.branch == branch && record.round == round;
  });
  if (is_logged) return;
  fail(ErrorCode::kInvalid, "{}: branch {} was said to be {} before round {}, which the log lacks",
       job_.spec.name, branch, kills ? "killed" : "revived", round);
}

// Who got the result of a round that it had pushed to took part in it.
void Oracle::check_witnesses(const Participation& participation) const {
  for (const Witness& witness : witnessed_) {
    const auto& [who, chunk, round] = witness;
    const bool counted =
        !participation.is_late(round, chunk, who.rank) &&
        std::ranges::any_of(participation.stays(), [&who = who, &chunk = chunk, &round = round](
                                                       const Participation::Stay& stay) {
          return stay == who && (stay.covers(round, chunk) || stay.repeats(round, chunk));
        });
    if (counted) continue;
    fail(ErrorCode::kInvalid,
         "{} round {}: rank {} (incarnation {}) got the result, the log says it took no part",
         name_of_chunk(job_, plan_, chunk), round, who.rank, who.incarnation);
  }
}

Replay Oracle::replay_of(uint32_t chunk, const Participation& participation,
                         const HyperHistory& hyper) const {
  const ChunkLayout& c = plan_.chunks[chunk];
  const auto begin = initial_[c.key].begin() + static_cast<ptrdiff_t>(c.key_element);
  return {job_.spec,
          participation,
          hyper,
          chunk,
          {begin, begin + c.elements},
          [this, chunk, key = c.key](const Member& from, uint64_t round, std::byte* out) {
            const Contribution contribution{from, round};
            if (is_null(contribution, key)) return false;
            if (!touches(from.rank, chunk, &KeyInterest::writes)) return false;
            fill_chunk(contribution, chunk, out);
            // A chunk without rows is not sent. Factors are, also without pairs.
            return places_[chunk].rows.columns == 0 || !places_[chunk].is_empty(out);
          },
          [this, &participation](const Member& who) { return heritage(who, participation); },
          [this, key = c.key](const Member& from, uint64_t round) {
            return weight_of({from, round}, key);
          }};
}

void Oracle::check_rounds(Replay replay, uint32_t chunk, const std::vector<SetCall>& sets,
                          MostSteps& most_steps) const {
  std::set<uint64_t> rounds;
  for (const auto& [round, seen] : seen_[chunk]) rounds.insert(round);
  for (const SeenState& seen : seen_states_[chunk]) rounds.insert(seen.round);
  for (const uint64_t round : rounds) {
    while (replay.round() < round) {
      set_before_next(replay, chunk, sets);
      try {
        replay.next_round();
      } catch (const Error& error) {
        fail(ErrorCode::kInvalid, "{} {}", name_of_chunk(job_, plan_, chunk), error.what());
      }
    }
    check_round(chunk, replay);
    check_states(chunk, replay, sets, most_steps);
  }
}

// All chunks go on together.
void Oracle::check_gated_rounds(GatedReplay replay) const {
  uint64_t last = 0;
  for (const auto& seen : seen_) {
    if (!seen.empty()) last = std::max(last, seen.rbegin()->first);
  }
  for (uint64_t round = 0;; replay.next_round(), ++round) {
    for (uint32_t chunk = 0; chunk < seen_.size(); ++chunk) {
      check_round(chunk, replay.chunk(chunk));
    }
    const auto told = told_.find(round);
    const RoundVerdict& is = replay.verdict();
    if (told != told_.end() && !is_same(told->second, is)) {
      fail(ErrorCode::kInvalid, "{} round {}: norm {}{} was told, the reference has {}{}",
           job_.spec.name, round, told->second.norm, told->second.skipped ? ", skipped" : "",
           is.norm, is.skipped ? ", skipped" : "");
    }
    if (round == last) return;
  }
}

// In words: who took part in the latest round, and for which round it was sent.
std::string Oracle::members_of(const Replay& replay) {
  std::string text;
  for (const Member& who : replay.counted()) {
    text += fmt::format("{}{}.{} for round {}", text.empty() ? ", the sum of " : ", ", who.rank,
                        who.incarnation, replay.sent_for(who.rank));
  }
  return text;
}

void Oracle::check_round(uint32_t chunk, const Replay& replay) const {
  const auto at = seen_[chunk].find(replay.round());
  if (at == seen_[chunk].end()) return;
  const auto& [round, seen] = *at;
  const std::vector<std::byte> result = replay.result();
  if (seen != result) {
    const auto element =
        static_cast<size_t>(std::ranges::mismatch(seen, result).in1 - seen.begin()) /
        kernels::bytes_of(parameter_dtype_);
    fail(ErrorCode::kInvalid, "{} round {}: element {} is {}, the reference has {}{}",
         name_of_chunk(job_, plan_, chunk), round, element,
         reference::load(seen.data(), parameter_dtype_, element),
         reference::load(result.data(), parameter_dtype_, element), members_of(replay));
  }
  if (job_.digits && round > 0) check_digits_of(chunk, replay, seen);
}

// Read from the result alone: who was counted, and how often.
void Oracle::check_digits_of(uint32_t chunk, const Replay& replay,
                             std::span<const std::byte> seen) const {
  const ChunkLayout& c = plan_.chunks[chunk];
  if (replay.counted().empty() || has_bad({{~0u, 0}, replay.round()}, c.key)) return;
  const auto counted = [&](uint32_t rank) {
    const auto who = std::ranges::find(replay.counted(), rank, &Member::rank);
    return who != replay.counted().end() && !is_null({*who, replay.sent_for(rank)}, c.key) &&
           touches(rank, chunk, &KeyInterest::writes);
  };
  for (uint32_t i = 0; i < digit_elements(c); ++i) {
    const uint32_t first = i * kDigitsPerElement;
    if (first >= job_.spec.max_ranks) break;
    float value = 0;
    std::memcpy(&value, seen.data() + i * sizeof(float), sizeof(float));
    if (!std::isfinite(value)) return;  // a bad gradient of this round, passed through
    const std::string wrong = check_digits(
        value, first, std::min(kDigitsPerElement, job_.spec.max_ranks - first), counted);
    if (wrong.empty()) continue;
    fail(ErrorCode::kInvalid, "{} round {}: {}", name_of_chunk(job_, plan_, chunk), replay.round(),
         wrong);
  }
}

}  // namespace phub::sim
