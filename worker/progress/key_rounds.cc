#include "worker/progress/key_rounds.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "transport/error.h"
#include "transport/text.h"

namespace phub {

uint64_t KeyRounds::of(size_t key) const {
  const Sleeper::Lock lock = sleeper_.lock();
  return session_.round(key);
}

uint64_t KeyRounds::complete() const {
  uint64_t complete = ~uint64_t{0};
  const Sleeper::Lock lock = sleeper_.lock();
  for (size_t k = 0; k < keys(); ++k) {
    if (session_.takes_part(k)) complete = std::min(complete, session_.round(k));
  }
  return complete;
}

uint64_t KeyRounds::this_or_next(uint64_t round) const {
  if (round > 0) return round;
  const Sleeper::Lock lock = sleeper_.lock();
  return session_.next_round();
}

std::optional<size_t> KeyRounds::key_before(uint64_t round) const {
  const Sleeper::Lock lock = sleeper_.lock();
  for (size_t k = 0; k < keys(); ++k) {
    if (session_.takes_part(k) && session_.round(k) < round) return k;
  }
  return std::nullopt;
}

void KeyRounds::check_between() const {
  const Sleeper::Lock lock = sleeper_.lock();
  std::optional<size_t> first;
  for (size_t k = 0; k < keys(); ++k) {
    if (!session_.takes_part(k)) continue;
    if (!first) first = k;
    const uint64_t round = session_.pushed_round(k), of_first = session_.pushed_round(*first);
    if (round == of_first) continue;
    fail(ErrorCode::kInvalid,
         "get_state: key '{}' is pushed up to round {}, and key '{}' up to round {}: a state is of "
         "the time between rounds, when this rank has pushed every key as often",
         reply_.spec.keys[*first].name, of_first, reply_.spec.keys[k].name, round);
  }
}

std::optional<RoundVerdict> KeyRounds::verdict() const {
  const Sleeper::Lock lock = sleeper_.lock();
  return session_.verdict();
}

void KeyRounds::say_never_pushed() noexcept try {
  const bool in_rounds =
      reply_.spec.consistency == "bsp" && !folds(reply_.spec) && reply_.spec.quorum == 0;
  if (!in_rounds || said_never_pushed_.exchange(true)) return;
  const uint64_t before = reply_.first_round - 1;
  uint64_t rounds = 0;
  std::vector<size_t> never;
  const Sleeper::Lock lock = sleeper_.lock();
  for (size_t k = 0; k < keys(); ++k) {
    if (!session_.takes_part(k)) continue;
    rounds = std::max(rounds, session_.round(k) - before);
    if (session_.ready(k) && session_.round(k) == before) never.push_back(k);
  }
  if (never.empty() || rounds < 2) return;
  const std::string text = fmt::format(
      "phub: rank {} of job '{}' took part in {} rounds, and never pushed key '{}'{}: nothing has "
      "changed there\n",
      reply_.rank, reply_.spec.name, rounds, printable(reply_.spec.keys[never.front()].name),
      never.size() > 1 ? fmt::format(" and {} others", never.size() - 1) : "");
  std::fputs(text.c_str(), stderr);
} catch (...) {  // NOLINT(bugprone-empty-catch): no memory for a line to people
}

}  // namespace phub
