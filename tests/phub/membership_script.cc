#include "tests/phub/membership_script.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>

#include "tests/phub/script.h"

namespace phub::testing {

using ::testing::EndsWith;

JobSpec membership_spec(uint32_t world_size, uint32_t max_ranks, std::string on_loss) {
  JobSpec spec;
  spec.name = "job";
  spec.keys = {{.name = "w", .elements = 100}};
  spec.world_size = world_size;
  spec.max_ranks = max_ranks == 0 ? world_size : max_ranks;
  spec.on_loss = std::move(on_loss);
  spec.lease_ms = 1000;
  spec.progress_limit_ms = 5000;
  spec.wait_limit_ms = 8000;
  spec.join_limit_ms = 3000;
  return spec;
}

Assembled::Assembled(const JobSpec& spec) : MembershipDriver(spec) {
  if (spec.initial == "broadcast") cores_at(0, 0, 0);
  for (uint32_t rank = 0; rank < spec.world_size; ++rank) join(static_cast<int32_t>(rank));
  settle();
  EXPECT_EQ((*this)->state(), "running");
  take_trace();
}

void lose(MembershipDriver& m, uint32_t rank) {
  m->changes().lose(rank, "the process ended");
  m.carry_out();
}

std::vector<std::string> log_of(MembershipDriver& m) {
  static constexpr const char* kNames[] = {"admitted", "lost",     "left",
                                           "hyper",    "excluded", "failed"};
  std::vector<std::string> out;
  for (const LogRecord& r : m.records()) {
    std::string text = fmt::format("{} {}.{} @{}", kNames[static_cast<int>(r.kind)], r.rank,
                                   r.incarnation, r.round);
    for (const ChunkRange& range : r.last_rounds) {
      text += fmt::format(" {}-{}:{}", range.first, range.last, range.round);
    }
    for (const auto& [name, value] : r.values) text += fmt::format(" {}={}", name, value);
    out.push_back(text);
  }
  return out;
}

namespace {

std::string joined(const std::vector<std::string>& entries) {
  return fmt::format("{}", fmt::join(entries, ", "));
}

JobSpec spec_in(Words& words) {
  JobSpec spec = membership_spec(words.rank());
  for (std::string word = words.word(); !word.empty(); word = words.word()) {
    if (word == "max") {
      spec.max_ranks = words.rank();
    } else if (word == "min") {
      spec.min_ranks = words.rank();
    } else if (word == "broadcast") {
      spec.initial = word;
    } else if (word == "ssp") {
      spec.consistency = word, spec.slack = 4;
    } else {
      spec.on_loss = word;
    }
  }
  return spec;
}

class Player {
 public:
  void command(const std::string& text) {
    SCOPED_TRACE(text);
    Words words(text);
    const std::string first = words.word();
    if (first.ends_with(':')) return answer_of(first.substr(0, first.size() - 1), words);
    if (const size_t named = text.find(" = "); named != text.npos) {
      Words request(text.substr(named + 3));
      tokens_[first] = ask(request.word(), request);
      return;
    }
    if (first == "job" || first == "assembled") end();
    if (first == "job") {
      assembled_.reset();
      const JobSpec spec = spec_in(words);
      m_.emplace(spec);
      if (spec.initial == "broadcast") m_->cores_at(0, 0, 0);
    } else if (first == "assembled") {
      assembled_.emplace(spec_in(words));
    } else if (!act(first, words) && !check(first, words)) {
      ask(first, words);
    }
  }
  void end() {
    if (!m_ && !assembled_) return;
    EXPECT_EQ(m().wrong(), "");
  }

 private:
  MembershipDriver& m() { return assembled_ ? static_cast<MembershipDriver&>(*assembled_) : *m_; }

  uint64_t ask(const std::string& what, Words& words) {
    if (what == "leave") return m().leave(words.rank());
    if (what == "barrier") return m().barrier(words.rank());
    if (what == "join") {
      const auto rank = words.number<int32_t>();
      return m().join(rank, words.word() == "replace");
    }
    if (what != "hyper") {
      ADD_FAILURE() << "no such command";
      return 0;
    }
    std::map<std::string, double> values;
    std::string word = words.word();
    for (size_t at; (at = word.find('=')) != word.npos; word = words.word()) {
      values[word.substr(0, at)] = std::stod(word.substr(at + 1));
    }
    const uint64_t round = words.number();  // behind "from"
    words.word();                           // "by"
    return m().hyper(values, round, words.rank());
  }

  void answer_of(const std::string& name, Words& words) {
    if (!tokens_.contains(name)) FAIL() << "nothing is called " << name;
    const std::string said = m().answered(tokens_[name]), want = words.rest();
    if (want == "-") {
      EXPECT_EQ(said, "");
    } else if (want != "ok" && !want.starts_with("ok ")) {
      expect_text(said, want);
    } else {
      ASSERT_EQ(said, "ok");
      const MembershipAction reply = m().reply(tokens_[name]);
      Words details(want.substr(2));
      for (std::string word = details.word(); !word.empty(); word = details.word()) {
        if (word == "sends" || word == "waits") {
          EXPECT_EQ(reply.send_initial, word == "sends");
        } else if (word.starts_with('@')) {
          EXPECT_EQ(fmt::format("@{}", reply.first_round), word);
        } else {
          EXPECT_EQ(fmt::format("{}.{}", reply.rank, reply.incarnation), word);
        }
      }
    }
  }

  void beat(const std::vector<uint32_t>& ranks) {
    for (const uint32_t rank : ranks) m()->leases().renew(rank, m().now);
  }
  bool act(const std::string& what, Words& w);
  bool check(const std::string& what, Words& w);

  std::optional<MembershipDriver> m_;
  std::optional<Assembled> assembled_;
  std::map<std::string, uint64_t> tokens_;
};

using Commands = std::map<std::string, std::function<void()>>;

bool Player::act(const std::string& what, Words& w) {
  MembershipDriver& m = this->m();
  const Commands kActs = {
      {"settle", [&] { m.settle(); }},
      {"tick", [&] { m.tick(w.number()); }},
      {"at", [&] { m.now += w.number(); }},
      {"beat", [&] { beat(w.numbers()); }},
      {"committed", [&] { m.committed_at(w.number()); }},
      {"remove", [&] { m->fail(ErrorCode::kNotFound, "the job was deleted"); }},
      {"give-up", [&] { m->barrier().leave(w.rank()); }},
      {"forget-trace", [&] { m.take_trace(); }},
      {"lose", [&] { lose(m, w.rank()); }},
      {"cores",
       [&] {
         const auto at = w.numbers<uint64_t>();
         m.cores_at(at.at(0), at.at(1), at.at(2));
       }},
      {"answer",
       [&] {
         for (uint64_t n = std::max<uint64_t>(w.number(), 1); n > 0; --n) EXPECT_TRUE(m.answer());
       }},
      {"last",
       [&] {
         m.last_round = [rounds = w.numbers<uint64_t>()](uint32_t, uint32_t chunk) {
           return rounds.at(std::min<size_t>(chunk, rounds.size() - 1));
         };
       }},
      {"probe",
       [&] {
         const uint64_t lowest = w.number();
         const auto arrivals = w.numbers<uint64_t>();
         w.word();  // waited
         m.probe(lowest, arrivals, w.numbers());
       }},
      {"beats",
       [&] {
         const uint64_t times = w.number(), ms = w.number();
         const auto ranks = w.numbers();
         for (uint64_t n = 0; n < times; ++n) beat(ranks), m.tick(ms);
       }},
      {"nonfinite",
       [&] {
         const std::string rank = w.word();
         const uint32_t who = rank == "-" ? CoreReport::kNoRank : Words(rank).rank();
         m->fail(ErrorCode::kNonFinite, non_finite_text(who, w.rest()));
       }},
      {"memory",
       [&] {
         const std::string how = w.word();
         m.admissions_work = how != "none", m.admissions_take_time = how == "slow";
       }},
  };
  const auto found = kActs.find(what);
  if (found == kActs.end()) return false;
  found->second();
  m.carry_out();
  return true;
}

bool Player::check(const std::string& what, Words& w) {
  MembershipDriver& m = this->m();
  const auto word = [&w] { return w.word(); };
  const auto rank = [&w] { return w.rank(); };
  const Commands kChecks = {
      {"state", [&] { EXPECT_EQ(m->state(), word()); }},
      {"missing", [&] { EXPECT_EQ(m->ranks().missing(), w.numbers()); }},
      {"waiting", [&] { EXPECT_EQ(m->leases().waiting_for(), w.numbers()); }},
      {"over", [&] { EXPECT_TRUE(m.over()); }},
      {"alive", [&] { EXPECT_FALSE(m.over()); }},
      {"trace", [&] { EXPECT_EQ(joined(m.take_trace()), w.rest()); }},
      {"last-traced", [&] { EXPECT_THAT(joined(m.take_trace()), EndsWith(w.rest())); }},
      {"log", [&] { EXPECT_EQ(joined(log_of(m)), w.rest()); }},
      {"reason", [&] { expect_text(m.records().back().reason, w.rest()); }},
      {"current",
       [&] {
         const uint32_t who = rank();
         EXPECT_TRUE(m->ranks().is_current(who, w.incarnation()));
       }},
      {"insecure",
       [&] {
         const uint32_t who = rank();
         EXPECT_FALSE(m->ranks().is_secure(who, w.incarnation()));
       }},
      {"never-came",
       [&] {
         const std::string why = m->statuses()[rank()].reason;
         EXPECT_EQ(why, w.rest());
       }},
      {"of",
       [&] {
         const std::string state = m.state_of(rank());
         EXPECT_EQ(state, word());
       }},
      {"out",
       [&] {
         const uint32_t who = rank(), incarnation = w.incarnation();
         EXPECT_FALSE(m->ranks().is_current(who, incarnation));
         expect_text(m->ranks().why_not_current(who, incarnation), w.rest());
       }},
  };
  const auto found = kChecks.find(what);
  if (found != kChecks.end()) found->second();
  return found != kChecks.end();
}

}  // namespace

void play(std::string_view script, const std::vector<std::string>& words) {
  play_script<Player>(script, words);
}

}  // namespace phub::testing
