// What ranks save of their own, and get back: after a restore, each the part that it sent after
// exactly the checkpoint's round.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "tests/sim/rack_oracle.h"
#include "transport/error.h"
#include "worker/memory/gradient_coder.h"

namespace phub::sim {

void Oracle::joined(const Member& who, bool saves) {
  saves_[who] = saves;
  std::erase_if(sets_, [&who](const SetCall& call) { return call.who == who; });
}

std::string Oracle::part_of(const Contribution& by) const {
  std::string part = fmt::format("rank {}.{} after round {}:", by.rank, by.incarnation, by.round);
  part.append((job_.seed + 7 * by.round + by.rank) % 3000, static_cast<char>('a' + by.round % 26));
  return part;
}

void Oracle::restored(const Contribution& with, std::optional<std::string> part) {
  parts_.emplace_back(with, std::move(part));
}

namespace {

// Who had a rank in a round is the latest that was admitted by then: those before it were in a life
// that was taken back.
std::optional<Member> holder_of(uint32_t rank, uint64_t round, const Participation& participation) {
  std::optional<Member> holder;
  for (const Participation::Stay& stay : participation.stays()) {
    const bool took_part = stay.last.empty() || std::ranges::max(stay.last) >= round;
    if (stay.rank != rank || stay.first > round || stay.checkpoint < round || !took_part) continue;
    if (!holder || stay.incarnation > holder->incarnation) holder = stay;
  }
  return holder;
}

}  // namespace

// Who goes on from a checkpoint has the residuals of whoever had its rank.
std::optional<Member> Oracle::heritage(const Member& who,
                                       const Participation& participation) const {
  const auto went_on =
      std::ranges::find_if(parts_, [&who](const auto& part) { return part.first == who; });
  if (went_on == parts_.end()) return std::nullopt;
  const auto holder = holder_of(who.rank, went_on->first.round, participation);
  const bool saved = holder && (saves_.at(*holder) || saves_residuals(job_.spec));
  return saved ? holder : std::nullopt;
}

// The checkpoint of a round has a part of every rank that saves and took part in it, and of no
// other.
void Oracle::check_parts(const Participation& participation) const {
  for (const auto& [who, part] : parts_) {
    const std::optional<Member> from = holder_of(who.rank, who.round, participation);
    std::optional<std::string> expected;
    if (from && saves_.at(*from)) expected = part_of({*from, who.round});
    if (part == expected) continue;
    constexpr size_t kShown = 40;
    const auto shown = [](const std::optional<std::string>& text) {
      return text ? "'" + text->substr(0, kShown) + "'" : "nothing";
    };
    fail(ErrorCode::kInvalid, "{}: rank {} (incarnation {}) went on after round {} with {}, not {}",
         job_.spec.name, who.rank, who.incarnation, who.round, shown(part), shown(expected));
  }
}

}  // namespace phub::sim
