#include "tests/phub/core_script.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "phub/core/lock_step.h"
#include "tests/phub/core_script_rig.h"
#include "tests/phub/script.h"

namespace phub::testing {
namespace core_script {

using ::testing::Each;
using ::testing::UnorderedElementsAreArray;

using Commands = std::map<std::string, std::function<void()>>;

class Player {
 public:
  void command(const std::string& text) {
    SCOPED_TRACE(text);
    Words words(text);
    const std::string name = words.word();
    if (name == "job") return begin(JobWords(words.words()));
    ASSERT_TRUE(rig_) << "no job";
    if (arrives(name, words) || act(name, words) || boundary(name, words) || check(name, words) ||
        whole_state(name, words) || state(name, words) || above(name, words) ||
        through_switch(name, words)) {
      return;
    }
    ADD_FAILURE() << "no such command";
  }
  void end() {
    if (!rig_) return;
    EXPECT_THAT(rig_->take_reports(), ::testing::IsEmpty()) << "at the end";
  }

 private:
  void begin(const JobWords& words) {
    end();
    interest_ = words.interest;
    orders_.clear();
    last_.clear();
    activity_ = 0;
    rig_ = std::make_unique<ScriptRig>(words);
    if (!words.everybody) return;
    Boundary all{.round = 1};
    for (const uint32_t rank : words.options.expected)
      all.admitted.push_back(admission(rank, 1, 1));
    rig_->job->hold();
    rig_->job->commit(all);
    if (interest_.empty()) rig_->take_posts();
  }
  Boundary::Admitted admission(uint32_t rank, uint32_t incarnation, uint64_t round) {
    Boundary::Admitted admitted = rig_->admission(rank, incarnation, round);
    if (interest_.contains(rank)) admitted.interest = interest_.at(rank);
    return admitted;
  }

  bool arrives(const std::string& name, Words& w);
  void put(uint32_t rank, uint32_t chunk, const Item& item, bool null);
  void initial(uint32_t rank, const std::string& text);
  void raw(uint32_t rank, Words& w);
  bool act(const std::string& name, Words& w);
  bool boundary(const std::string& name, Words& w);
  void commit(uint64_t round, const std::vector<std::string>& changes);
  const KeyStateMemory& state_to_set(const std::string& text);
  bool check(const std::string& name, Words& w);
  bool whole_state(const std::string& name, Words& w);
  bool state(const std::string& name, Words& w);
  bool above(const std::string& name, Words& w);
  bool through_switch(const std::string& name, Words& w);
  void expect_beginnings(Words& w);

  std::unique_ptr<ScriptRig> rig_;
  std::map<uint32_t, std::vector<ChunkInterest>> interest_;
  std::deque<std::vector<BranchOrder>> orders_;  // the cores have some of them
  bool hyper_changed_ = false;
  std::optional<StateMemory> set_, got_;
  uint64_t activity_ = 0;                           // when it was looked at
  uint64_t lowest_ = 0;                             // that the last commit said
  std::map<uint32_t, std::vector<uint64_t>> last_;  // of the last commit, by the chunks' ids
};

// In a slot of a parent's job the number of ranks lies behind the gradient, or its weight.
void Player::put(uint32_t rank, uint32_t chunk, const Item& item, bool null) {
  ScriptRig& rig = *rig_;
  const uint32_t elements = rig.options_.elements;
  const size_t first = size_t{chunk} * rig.stride();
  if (!null) {
    rig.fill(rank, chunk, item.value.empty() ? CoreJobRig::digit(rank) : value_of(item.value));
  }
  const ImmKind kind = null ? ImmKind::kNull : ImmKind::kData;
  const bool has_weights = rig.options_.parameters.rules.weights;
  if (rig.options_.parameters.rack_ranks.empty() && !has_weights) {
    return rig.arrive(rank, {chunk, item.low(), kind});
  }
  const uint32_t trailer =
      has_weights ? std::bit_cast<uint32_t>(std::strtof(item.participants.c_str(), nullptr))
                  : participants_of(item.participants);
  std::byte* const behind = rig.slots[rank].data() + (first + elements) * sizeof(float);
  std::memcpy(behind, &trailer, sizeof trailer);
  rig.endpoint.inbox.push_back({.rank = rank,
                                .imm = encode({chunk, item.low(), kind}),
                                .bytes = null ? 4 : (elements + 1) * sizeof(float),
                                .offset = (null ? first + elements : first) * sizeof(float)});
}

void Player::initial(uint32_t rank, const std::string& text) {
  const auto [place, value] = split(text, '=');
  const auto [chunk, part] = split(place, '.');
  const auto index = static_cast<uint32_t>(std::stoul(chunk));
  if (!value.empty()) {  // in f32, whatever gradients are
    auto* const slot = reinterpret_cast<float*>(rig_->slots[rank].data()) + index * rig_->stride();
    std::fill_n(slot, kernels::slot_bytes(rig_->options_.dtype, rig_->options_.elements) / 4,
                value_of(value));
  }
  const uint32_t number = part.empty() ? 0 : static_cast<uint32_t>(std::stoul(part));
  rig_->arrive(rank, {index, number, ImmKind::kInitial});
}

void Player::raw(uint32_t rank, Words& w) {
  const ImmKind kind = kind_of(w.word());
  const Item item(w.word());
  Arrival arrival{.rank = rank, .imm = encode({item.chunks.at(0), item.low(), kind})};
  arrival.bytes = w.number(), arrival.offset = w.number();
  rig_->endpoint.inbox.push_back(arrival);
}

bool Player::arrives(const std::string& name, Words& w) {
  if (name == "initial" || name == "raw" || name == "break") {
    const uint32_t rank = w.rank();
    if (name == "initial") initial(rank, w.word());
    if (name == "raw") raw(rank, w);
    if (name == "break") rig_->endpoint.inbox.push_back({.rank = rank, .ok = false});
    return true;
  }
  if (name == "pushes") {
    const Item round("0@" + w.word());
    const std::string ranks = w.word();
    for (uint32_t chunk = 0; chunk < rig_->options_.chunks; ++chunk) {
      rig_->push_all(list_of(ranks.empty() ? "0-2" : ranks), chunk, round.round);
      rig_->run();
    }
    return true;
  }
  if (name != "push" && name != "null" && name != "again" && name != "control") return false;
  const std::vector<uint32_t> ranks = list_of(w.word());
  for (const std::string& word : w.words()) {
    const Item item(word);
    for (const uint32_t chunk : item.chunks) {
      for (const uint32_t rank : ranks) {
        if (name == "again" || name == "control") {
          const ImmKind kind = name == "again" ? ImmKind::kData : ImmKind::kControl;
          rig_->arrive(rank, {chunk, item.low(), kind});
        } else {
          put(rank, chunk, item, name == "null");
        }
      }
    }
  }
  return true;
}

bool Player::act(const std::string& name, Words& w) {
  ScriptRig& rig = *rig_;
  const Commands kActs = {
      {"run", [&] { rig.run(); }},
      {"forget-posts", [&] { rig.take_posts(); }},
      {"step",
       [&] {
         for (uint64_t n = std::max<uint64_t>(w.number(), 1); n > 0; --n) rig.job->step();
       }},
      {"room", [&] { rig.endpoint.room = w.number(); }},
      {"detach", [&] { rig.job->detach(w.rank()); }},
      {"reattach",
       [&] {
         const uint32_t rank = w.rank();
         rig.job->reattach(rank, w.incarnation());
       }},
      {"shelf",
       [&] {
         const auto numbers = w.numbers<size_t>();
         std::ranges::fill(rig.shelves.arrays.at(2 * numbers.at(0)),
                           static_cast<float>(numbers.at(1)));
       }},
      {"restore",
       [&] {
         std::ranges::fill(rig.parameters, value_of(w.word()));
         rig.copy_steps.at(0) = w.number();  // in place: the job has both
         std::ranges::copy(w.numbers<uint64_t>(), rig.copy_clocks.begin());
         rig.job->restore(rig.saved_clocks(), {});
       }},
      {"grace-over",
       [&] {
         const std::string word = w.word();
         const size_t at = word.find(':');
         const uint32_t fragment = at == word.npos ? 0 : list_of(word.substr(0, at)).at(0);
         uint64_t expected = 0;
         for (const uint32_t rank : list_of(word.substr(at == word.npos ? 0 : at + 1))) {
           expected |= uint64_t{1} << rank;
         }
         QuorumGate& gate = (*rig.quorum)[fragment];
         EXPECT_TRUE(gate.decide(gate.collecting(), {&expected, 1}, gate.quorum()));
       }},
      {"done",
       [&] {
         const auto chunks = list_of(w.word());
         rig.deferred->done.insert(rig.deferred->done.end(), chunks.begin(), chunks.end());
       }},
  };
  const auto found = kActs.find(name);
  if (found != kActs.end()) found->second();
  return found != kActs.end();
}

// CHANGE@ROUND:FROM>TO
BranchOrder order_in(const std::string& word) {
  const auto [kind, rest] = split(word, '@');
  const auto [round, places] = split(rest, ':');
  const auto [from, to] = split(places, '>');
  return {std::stoull(round), kind == "copy" ? BranchOrder::kCopy : BranchOrder::kSwap,
          static_cast<uint32_t>(std::stoul(from)), static_cast<uint32_t>(std::stoul(to))};
}

void Player::commit(uint64_t round, const std::vector<std::string>& changes) {
  ScriptRig& rig = *rig_;
  Boundary boundary{.round = round};
  if (std::exchange(hyper_changed_, false)) boundary.hyper = rig.view(rig.hyper);
  last_.clear();
  std::vector<BranchOrder> orders;
  for (const std::string& change : changes) {
    const auto [who, at] = split(change.substr(1), '@');
    const char kind = change.front();
    if (kind == '+') {
      const auto [rank, incarnation] = split(who, '.');
      boundary.admitted.push_back(admission(static_cast<uint32_t>(std::stoul(rank)),
                                            static_cast<uint32_t>(std::stoul(incarnation)),
                                            std::stoull(at)));
    } else if (kind == '-' || kind == '~') {
      const auto rank = static_cast<uint32_t>(std::stoul(who));
      last_[rank].assign(rig.options_.chunks, 99);
      boundary.lost.push_back({.rank = rank,
                               .expected_again = kind == '~' ? std::stoull(at) : kNever,
                               .last_rounds = last_[rank]});
    } else if (kind == 'x') {
      boundary.forgotten.push_back(static_cast<uint32_t>(std::stoul(who)));
    } else if (change.starts_with("copy@") || change.starts_with("swap@")) {
      orders.push_back(order_in(change));
    } else if (change.starts_with("snapshot")) {
      boundary.snapshot = true;
      boundary.snapshot_round = at.empty() ? 0 : std::stoull(at);
    } else if (change == "at-end") {
      boundary.snapshot_at_end = true;
    } else if (change == "get") {
      boundary.get_state = &got_.emplace(rig.options_.chunks, rig.options_.elements).memory;
    } else {
      ASSERT_TRUE(change.starts_with("set:")) << change;
      boundary.set_state = &state_to_set(change.substr(4));
      boundary.moves_state = true;
    }
  }
  if (!orders.empty()) boundary.orders = orders_.emplace_back(std::move(orders));
  lowest_ = rig.job->commit(boundary);
}

// CHUNKS=PARAMETER/STATE/STEPS
const KeyStateMemory& Player::state_to_set(const std::string& text) {
  const Item item(text);
  const auto [state, steps] = split(item.participants, '/');
  StateMemory& set = set_.emplace(rig_->options_.chunks, rig_->options_.elements);
  for (KeyStateMemory::Place& place : set.memory.places) place.first = KeyStateMemory::kNowhere;
  for (const uint32_t chunk : item.chunks) {
    set.fill(chunk, value_of(item.value), value_of(state), std::stoull(steps));
  }
  return set.memory;
}

bool Player::boundary(const std::string& name, Words& w) {
  if (name == "hold") {
    const CoreReport held = rig_->job->hold();
    const auto want = w.numbers<uint64_t>();
    const uint64_t said[] = {held.round, held.started, held.min_round};
    EXPECT_EQ(std::vector<uint64_t>(said, said + want.size()), want);
  } else if (name == "commit") {
    const uint64_t round = w.number();
    commit(round, w.words());
  } else if (name == "order") {
    const uint64_t round = rig_->job->hold().round;
    hyper_changed_ = true;
    commit(round, w.words());
  } else if (name == "lr" || name == "slack") {
    HyperVersion version = rig_->hyper.back();
    version.from_round = w.number();
    (name == "lr" ? version.values.lr : version.values.slack) = value_of(w.word());
    rig_->hyper.push_back(version);
    hyper_changed_ = true;
  } else if (name == "last") {
    std::vector<uint64_t> last = last_.at(w.rank());
    std::ranges::reverse(last);
    EXPECT_EQ(last, w.numbers<uint64_t>());
  } else if (name == "lowest") {
    EXPECT_EQ(lowest_, w.number());
  } else {
    return false;
  }
  return true;
}

// What is posted and told, and whether it sleeps.
bool Player::check(const std::string& name, Words& w) {
  ScriptRig& rig = *rig_;
  const auto posts = [&] {
    rig.run();
    return rig.take_posts();
  };
  const Commands kChecks = {
      {"sent", [&] { EXPECT_EQ(posts(), posts_in(w.words())); }},
      {"sent-mixed", [&] { EXPECT_THAT(posts(), UnorderedElementsAreArray(posts_in(w.words()))); }},
      {"reported",
       [&] { EXPECT_EQ(fmt::format("{}", fmt::join(rig.take_reports(), ", ")), w.rest()); }},
      {"posted", [&] { EXPECT_EQ(rig.take_posts(), posts_in(w.words())); }},
      {"sends", [&] { EXPECT_EQ(posts().size(), w.number()); }},
      {"flushed", [&] { EXPECT_EQ(rig.endpoint.flushed, w.number()); }},
      {"told",
       [&] {
         rig.run();
         EXPECT_EQ(fmt::format("{}", fmt::join(rig.take_reports(), ", ")), w.rest());
       }},
      {"attached",
       [&] {
         const auto ranks = w.numbers();
         EXPECT_EQ(rig.endpoint.attached, std::set<uint32_t>(ranks.begin(), ranks.end()));
       }},
      {"owes", [&] { EXPECT_TRUE(rig.job->owes()); }},
      {"owes-nothing", [&] { EXPECT_FALSE(rig.job->owes()); }},
      {"retries-in", [&] { EXPECT_EQ(rig.job->retry_ms(), w.number()); }},
      {"for-one", [&] { EXPECT_EQ(rig.job->waits_for_one(), w.word() == "yes"); }},
      {"activity",
       [&] {
         const uint64_t before = std::exchange(activity_, rig.job->activity());
         EXPECT_EQ(activity_ > before, w.word() == "grows");
       }},
      {"busy", [&] { EXPECT_FALSE(rig.job->arm()); }},
      {"sleeps",
       [&] {
         EXPECT_TRUE(rig.job->arm());
         const auto after = w.numbers();
         EXPECT_TRUE(after.empty() || rig.endpoint.wake_after == after);
       }},
      {"waits",
       [&] {
         rig.run();
         std::vector<uint64_t> want(rig.probe_now().waited_for.size());
         for (const uint32_t rank : w.numbers()) want.at(rank / 64) |= uint64_t{1} << rank % 64;
         EXPECT_EQ(rig.probe_now().waited_for, want);
       }},
      {"arrivals",
       [&] {
         std::vector<uint64_t> want = w.numbers<uint64_t>();
         want.resize(rig.options_.parameters.max_ranks);
         EXPECT_EQ(rig.probe_now().arrivals, want);
       }},
      {"parts",
       [&] {
         rig.run();
         EXPECT_EQ(rig.probe_now().parts, w.numbers<uint64_t>());
       }},
      {"completed", [&] { EXPECT_EQ(rig.probe_now().chunks_completed, w.number()); }},
      {"open", [&] { EXPECT_EQ(rig.probe_now().min_round, w.number()); }},
      {"lacks",
       [&] {
         const uint32_t rank = w.rank();
         EXPECT_EQ(rig.probe_now().lacks.at(rank).chunks, w.number());
       }},
  };
  const auto found = kChecks.find(name);
  if (found != kChecks.end()) found->second();
  return found != kChecks.end();
}

// CHUNKS=PARAMETER/STATE/STEPS: this is all that there is of them at a place, or in a copy.
bool Player::whole_state(const std::string& name, Words& w) {
  static const std::set<std::string> kNames = {"is", "got", "copied", "shelf-is", "shelf-copied"};
  if (!kNames.contains(name)) return false;
  ScriptRig& rig = *rig_;
  const bool of_shelf = name.starts_with("shelf-");
  const uint32_t shelf = of_shelf ? w.rank() : 0, place = of_shelf ? shelf + 1 : 0;
  const Item item(w.word());
  EXPECT_EQ(w.rest(), "") << "of one place";
  const auto [state_text, steps_text] = split(item.participants, '/');
  for (const uint32_t chunk : item.chunks) {
    const size_t first = size_t{chunk} * rig.stride();
    const uint32_t id = rig.options_.chunks - 1 - chunk;
    const float* parameters = rig.job->elements_of(place, Places::kParameters, chunk);
    const float* state = rig.job->elements_of(place, Places::kState0, chunk);
    uint64_t steps = of_shelf ? rig.shelves.steps.at(shelf).at(id) : 0;
    if (name == "got") {
      parameters = got_->parameters(chunk), state = got_->state(chunk);
      steps = got_->place(chunk).steps;
    } else if (name == "copied") {
      parameters = &rig.copy_parameters.at(first), state = &rig.copy_state.at(first);
      steps = rig.copy_steps.at(id);
    } else if (name == "shelf-copied") {
      const CoreJobRig::Shelves& copies = rig.copied_shelves;
      parameters = &copies.arrays.at(2 * shelf).at(first);
      state = &copies.arrays.at(2 * shelf + 1).at(first);
      steps = copies.steps.at(shelf).at(id);
    }
    const size_t count = rig.options_.elements;
    EXPECT_THAT(std::vector(parameters, parameters + count), Each(value_of(item.value)));
    EXPECT_THAT(std::vector(state, state + count), Each(value_of(state_text)));
    EXPECT_EQ(steps, std::stoull(steps_text)) << "chunk " << chunk;
  }
  return true;
}

// What results and branches are.
bool Player::state(const std::string& name, Words& w) {
  ScriptRig& rig = *rig_;
  const Commands kStates = {
      {"has",
       [&] {
         for (const std::string& word : w.words()) {
           const auto [place, value] = split(word, '=');
           const auto [left, right] = split(place, ':');
           const auto [chunks, elements] = split(right.empty() ? left : right, '.');
           for (const uint32_t chunk : list_of(chunks)) {
             const auto rank = static_cast<uint32_t>(std::stoul(left));
             for (const uint32_t element : list_of(elements.empty() ? "0" : elements)) {
               const float is =
                   right.empty() ? rig.result(chunk, element) : rig.result_of(rank, chunk);
               EXPECT_EQ(fmt::format("{}", is), fmt::format("{}", value_of(value))) << word;
             }
           }
         }
       }},
      {"at",
       [&] {
         const uint32_t place = w.rank();
         for (const std::string& word : w.words()) {
           const Item item(word);
           EXPECT_EQ(rig.at(place, Places::kParameters, item.chunks.at(0)), value_of(item.value));
         }
       }},
      {"steps",
       [&] {
         const uint64_t shelf = w.number();
         EXPECT_EQ(rig.shelves.steps.at(shelf).at(0), w.number());
       }},
      {"copied-clocks",
       [&] {
         rig.run();
         EXPECT_EQ(rig.copy_steps, std::vector<uint64_t>{w.number()});
         EXPECT_EQ(rig.copy_clocks, w.numbers<uint64_t>());
       }},
      {"is-pending",
       [&] {
         rig.run();
         const auto chunks = w.numbers();
         EXPECT_EQ(rig.deferred->pending, std::set<uint32_t>(chunks.begin(), chunks.end()));
       }},
  };
  const auto found = kStates.find(name);
  if (found != kStates.end()) found->second();
  return found != kStates.end();
}

bool Player::above(const std::string& name, Words& w) {
  ScriptRig& rig = *rig_;
  FakeUplink& uplink = rig.parent.uplink;
  const Commands kAbove = {
      {"answer",
       [&] {
         for (const std::string& word : w.words()) {
           const Item item(word);
           for (const uint32_t chunk : item.chunks) {
             rig.parent.answer(chunk, item.round, value_of(item.value));
             rig.run();
           }
         }
       }},
      {"senseless",
       [&] {
         Arrival arrival{.queue = w.rank()};
         const Item item(w.word());
         arrival.imm = encode({item.chunks.at(0), item.low(), kind_of(w.word())});
         const auto numbers = w.numbers<uint64_t>();
         if (!numbers.empty()) arrival.bytes = numbers.at(0);
         if (numbers.size() > 1) arrival.offset = numbers.at(1);
         uplink.inbox.push_back(arrival);
         EXPECT_THROW(rig.run(), Error);
       }},
      {"up-violates",
       [&] {
         uplink.inbox.push_back({.ok = false, .violation = true});
         EXPECT_THROW(rig.run(), Error);
       }},
      {"up-room", [&] { uplink.room = w.number(); }},
      {"up-full", [&] { uplink.full_queue = w.rank(); }},
      {"up-refused", [&] { uplink.refused_ns = w.number(); }},
      {"up-flushed", [&] { EXPECT_EQ(uplink.flushed, w.number()); }},
      {"up-breaks", [&] { uplink.inbox.push_back({.ok = false}); }},
      {"up-again",
       [&] {
         rig.job->detach(CoreReport::kNoRank);
         rig.job->reattach(CoreReport::kNoRank, 0);
       }},
      {"up",
       [&] {
         rig.run();
         EXPECT_EQ(fmt::format("{}", fmt::join(rig.parent.take_sent(), " ")), w.rest());
       }},
  };
  const auto found = kAbove.find(name);
  if (found != kAbove.end()) found->second();
  return found != kAbove.end();
}

// Before a rank is told of a generation, it has no result with which it could send its first round.
void Player::expect_beginnings(Words& w) {
  const auto index = w.rank();
  const uint64_t first_round = w.number();
  std::set<uint32_t> told, could_send;
  rig_->run();
  for (const auto& [rank, write] : std::exchange(rig_->endpoint.posted, {})) {
    const Imm imm = decode(write.imm);
    if (is_switch_beginning(imm)) {
      EXPECT_FALSE(could_send.contains(rank)) << "rank " << rank << " is told too late";
      EXPECT_TRUE(told.insert(rank).second) << "rank " << rank << " is told twice";
      const SwitchBeginning said = switch_beginning(imm, first_round);
      EXPECT_TRUE(said.index == index && said.round == first_round) << "rank " << rank;
    } else if (imm.round == low8(first_round - 1)) {
      could_send.insert(rank);
    }
  }
  const auto ranks = w.numbers();
  EXPECT_EQ(told, std::set<uint32_t>(ranks.begin(), ranks.end()));
}

bool Player::through_switch(const std::string& name, Words& w) {
  const auto answer_of = [](const std::string& word) -> std::optional<int> {
    if (word == "nothing") return std::nullopt;
    return word == "taken" ? kSwitchTaken : kSwitchEnded;
  };
  const Commands kSwitched = {
      {"sum",
       [&] {
         for (const std::string& word : w.words()) {
           const Item item(word);
           for (const uint32_t chunk : item.chunks) {
             rig_->behind->send_sum(chunk, static_cast<uint32_t>(item.round),
                                    std::stoi(item.value));
           }
         }
       }},
      {"waiting",
       [&] {
         const Item item(w.word());
         uint64_t there = 0;
         for (const uint32_t rank : list_of(w.word())) there |= uint64_t{1} << rank;
         rig_->behind->send_waiting(item.chunks.at(0), item.low(), there);
       }},
      {"generation",
       [&] {
         const uint32_t index = w.rank();
         rig_->behind->begin(index, w.rank());
       }},
      {"answered",
       [&] {
         rig_->run();
         EXPECT_EQ(rig_->behind->answer(), answer_of(w.word()));
       }},
      {"answered-last",
       [&] {
         rig_->run();
         std::optional<int> last;
         while (const auto next = rig_->behind->answer()) last = next;
         EXPECT_EQ(last, answer_of(w.word()));
       }},
      {"begins", [&] { expect_beginnings(w); }},
  };
  const auto found = kSwitched.find(name);
  if (found != kSwitched.end()) found->second();
  return found != kSwitched.end();
}

}  // namespace core_script

void play_core(std::string_view script, const std::vector<std::string>& words) {
  play_script<core_script::Player>(script, words);
}

}  // namespace phub::testing
