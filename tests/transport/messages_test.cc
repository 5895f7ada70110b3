#include "transport/control/messages.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <boost/pfr.hpp>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <sstream>

#include "transport/control/message_fields.h"
#include "transport/control/messages_json.h"
#include "transport/control/shard_fields.h"
#include "transport/format_schedule.h"

namespace phub {
namespace messages_test {

using ::testing::HasSubstr;

std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalid) << error.what();
    return error.what();
  }
  return "no error";
}

// What the table of fields says of one member of a struct.
template <class T>
struct FieldOf {
  const T& object;
  const void* member;
  bool is_there = false, is_required = false;
  json::Bounds bounds = {};

  template <class M>
  bool optional(std::string_view, M T::*m, json::Bounds its = json::default_bounds<M>()) {
    if (&(object.*m) != member) return false;
    is_there = true, bounds = its;
    return true;
  }
  template <class M>
  void required(std::string_view name, M T::*m, json::Bounds its = json::default_bounds<M>()) {
    if (optional(name, m, its)) is_required = true;
  }
};

// Not on the wire: who asks is found in the request's path and head.
template <class T>
bool is_of_this_side(const T&, const void*) {
  return false;
}
bool is_of_this_side(const Credential& c, const void* m) {
  return m == &c.job || m == &c.ticket || m == &c.is_admin;
}
bool is_of_this_side(const JoinRequest& r, const void* m) { return m == &r.caller || m == &r.held; }

// Fills what a struct has (not only what its table of fields has) within the table's bounds.
class Random {
 public:
  explicit Random(uint64_t seed) : bits_(seed) {}
  uint64_t below(uint64_t n) { return bits_() % n; }
  bool coin() { return below(2) == 0; }
  template <class T>
  T make() {
    T object{};
    fill(object, {});
    return object;
  }

  template <class T>
  void fill(T& object, const json::Bounds& bounds) {
    if constexpr (!std::same_as<T, json::PlainOf<T>>) {
      object = make<json::PlainOf<T>>();
    } else if constexpr (std::same_as<T, bool>) {
      object = coin();
    } else if constexpr (std::same_as<T, double>) {
      object = real();
    } else if constexpr (std::same_as<T, ErrorCode>) {
      object = ErrorCode::kFenced;
    } else if constexpr (json::Word<T>) {
      object = static_cast<T>(below(std::size(kWords<T>)));
    } else if constexpr (json::Integer<T>) {
      object = static_cast<T>(bits_() >> below(64));
      if (std::unsigned_integral<T>)
        object = static_cast<T>(within(bounds, static_cast<uint64_t>(object)));
    } else if constexpr (std::same_as<T, std::string>) {
      object = text(bounds.min);
    } else if constexpr (json::IsMap<T>::value) {
      for (uint64_t n = bounds.min + below(3), i = 0; i < n; ++i)
        object[fmt::format("h{}", i)] = real();
    } else if constexpr (json::IsList<T>::value) {
      using M = typename T::value_type;
      object.resize(std::min(bounds.min + below(3), bounds.max));
      for (M& entry : object) fill(entry, json::default_bounds<M>());
    } else {
      boost::pfr::for_each_field(object, [&](auto& member) {
        if constexpr (json::Struct<T>) fill_member(object, member);
      });
    }
  }
  double real() {
    const double options[] = {0.0, 1.0, 0.1, -1e-300, 1.7e308, 5e-324, 1.0 / 3, 123456789.0};
    if (coin()) return options[below(8)];
    return std::ldexp(static_cast<double>(bits_()), static_cast<int>(below(200)) - 100);
  }

 private:
  template <class T, class M>
  void fill_member(T& object, M& member) {
    if (is_of_this_side(object, &member)) return;
    FieldOf<T> field{object, &member};
    fields(field, static_cast<const T*>(nullptr));
    if constexpr (!std::same_as<M, Caller> && !std::same_as<M, std::shared_ptr<void>>) {
      if (field.is_required || below(4) > 0) fill(member, field.bounds);
    }
  }
  static uint64_t within(const json::Bounds& bounds, uint64_t n) {
    const uint64_t values = bounds.max - bounds.min + 1;  // 0: all
    return values == 0 ? n : bounds.min + n % values;
  }
  std::string text(size_t least) {
    static const std::vector<std::string> pieces = {"a", "Z9", "\"",   "\\", "/", "\n",
                                                    "é", "\t", "\x01", "漢", "😀", " "};
    std::string out;
    for (size_t n = least + below(6); n > 0; --n) out += pieces[below(pieces.size())];
    return out;
  }

  std::mt19937_64 bits_;
};

// Whether all members are equal, of whatever is in them too.
template <class T>
bool same(const T& a, const T& b) {
  if constexpr (json::IsList<T>::value) {
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
      if (!same<typename T::value_type>(a[i], b[i])) return false;
    }
    return a.size() == b.size();
  } else if constexpr (json::Struct<T> && !std::same_as<T, std::shared_ptr<void>> &&
                       !json::IsMap<T>::value && std::same_as<T, json::PlainOf<T>>) {
    bool all = true;
    boost::pfr::for_each_field(a, [&](const auto& member, auto index) {
      const auto& other = boost::pfr::get<index>(b);
      all = all && (is_of_this_side(a, &member) || same(member, other));
    });
    return all;
  } else {
    return a == b;
  }
}

class RoundTrip : public ::testing::Test {
 protected:
  // Random messages need not pass validate().
  template <class Message>
  void check() {
    for (int i = 0; i < 30; ++i) {
      const auto message = random_.make<Message>();
      const std::string text = to_json(message);
      const auto back = json::decode<Message>(text, "it");
      EXPECT_EQ(to_json(back), text);
      ASSERT_TRUE(same(message, back))
          << "seed " << seed_ << ": a member is not what it was: " << text;
    }
  }
  uint64_t seed_ = std::random_device{}();
  Random random_{seed_};
};

TEST_F(RoundTrip, EveryMessage) {
#define PHUB_MESSAGE(Message, what) check<Message>();
#include "transport/control/messages.def"
#undef PHUB_MESSAGE
}

// What is in the path and in the head is not in the text.
TEST(Codec, RequestsOfARankSayWhoItIs) {
  const Credential who{.job = "stays", .rank = 7, .incarnation = 9, .ticket = "secret", .epoch = 5};
  const auto expect = [](const Credential& back) {
    EXPECT_EQ(std::tuple(back.rank, back.incarnation, back.epoch), std::tuple(7u, 9u, 5u));
    EXPECT_EQ(back.job + back.ticket, "");
  };
  expect(from_json<Credential>(to_json(who)));
  EXPECT_THAT(to_json(who), ::testing::Not(HasSubstr("secret")));
}

TEST(Codec, AnyNumberOfKeysComesThrough) {
  JoinRequest request;
  request.spec.name = "big";
  for (size_t i = 0; i < 100000; ++i) request.spec.keys.push_back({fmt::format("k{}", i), i + 1});
  EXPECT_EQ(from_json<JoinRequest>(to_json(request)).spec, request.spec);
}

// Whatever brings a spec refuses one that cannot be.
TEST(Codec, SpecsAreValidated) {
  JoinRequest request;
  request.spec.name = "j";
  request.spec.keys = {{"w", 1}};
  JoinReply reply{.offer = {.ticket = "t"}, .spec = request.spec};
  EXPECT_EQ(from_json<JoinRequest>(to_json(request)).spec, request.spec);
  EXPECT_EQ(from_json<JoinReply>(to_json(reply)).spec, request.spec);
  EXPECT_EQ(from_json<JobSpec>(to_json(request.spec)), request.spec);
  reply.spec.chunk_elements = request.spec.chunk_elements = 33;
  EXPECT_NE(message_of([&] { from_json<JoinRequest>(to_json(request)); }), "no error");
  EXPECT_NE(message_of([&] { from_json<JoinReply>(to_json(reply)); }), "no error");
  EXPECT_NE(message_of([&] { from_json<JobSpec>(to_json(request.spec)); }), "no error");
}

// --- bad input -----------------------------------------------------------------------------------

// JSON is easier to read here with other quotes.
std::string quoted(std::string text) {
  std::ranges::replace(text, '\'', '"');
  return text;
}
std::string keys(const std::string& list) {
  return quoted("{'version':1,'spec':{'name':'j','keys':[" + list + "]}}");
}
std::string key(const std::string& fields) {
  return keys("{'name':'w','elements':" + fields + "}");
}
std::string spec(const std::string& fields) {
  return quoted("{'version':1,'spec':{'name':'j','keys':[{'name':'w','elements':10}]," + fields +
                "}}");
}
std::string join(const std::string& fields) {
  return quoted("{'version':1,'spec':{'name':'j','keys':[{'name':'w','elements':1}]}," + fields +
                "}");
}

struct Case {
  std::string text, says;  // "": it is good
};
void expect_all(const std::vector<Case>& cases) {
  for (const auto& [text, says] : cases) {
    EXPECT_THAT(message_of([&text = text] { from_json<JoinRequest>(text); }),
                HasSubstr(says.empty() ? "no error" : says))
        << text.substr(0, 200);
  }
}

TEST(BadInput, JoinRequestsAreRefusedWithThePathOfWhatIsWrong) {
  const std::string deep(100000, '[');
  expect_all({
      {"", "malformed JSON"},
      {"nonsense", "malformed JSON: parse error at line 1, column 2"},
      {"{\n\"version\":1,\n oops", "line 3"},
      {"[]", "join request: must be an object, got a list"},
      {"7", "join request: must be an object, got 7"},
      {deep, "must be an object, got a list"},
      {"{}", "field \"version\" is missing"},
      {R"({"version":2})", "version: must be 1, got 2"},
      {R"({"version":1})", "field \"spec\" is missing"},
      {R"({"version":1,"spec":[]})", "spec: must be an object, got a list"},
      {R"({"version":1,"spec":{"name":"j"}})", "spec: field \"keys\" is missing"},
      {R"({"version":1,"spec":{"name":"j","keys":{}}})",
       "spec.keys: must be a list, got an object"},
      {R"({"version":1,"spec":{"name":7}})",
       "spec.name: must be a string of 1 to 255 bytes, got 7"},
      {join("'rank':-1"), ""},
      {join("'rank':-2"), "rank: must be a rank, or -1"},
      {join("'rank':1023"), ""},
      {join("'rank':1024"), "rank: must be a rank, or -1"},
      {join("'replace':1"), "replace: must be true or false, got 1"},
      {join("'ticket':'x'"), "unknown field \"ticket\""},
      {join("'rank':0") + "x", "malformed JSON"},
      {keys(""), "spec.keys: must have at least 1 entries"},
      {keys(deep), "spec.keys[0]: must be an object, got a list"},
      {keys("null"), "spec.keys[0]: must be an object, got null"},
      {keys("{}"), "spec.keys[0]: field \"name\" is missing"},
      {keys("{'name':'w'}"), "spec.keys[0]: field \"elements\" is missing"},
      {keys("{'name':'','elements':1}"), "keys[0].name: must be a string of 1 to 255"},
      {keys("{'name':'" + std::string(256, 'n') + "','elements':1}"), "(256 bytes)"},
      {keys("{'name':'a\\u0000b','elements':1}"), "must not hold control characters"},
      {keys("{'name':'\xff','elements':1}"), "malformed JSON"},
      {keys("{'name':'a','elements':1},{'name':'a','elements':1}"),
       "keys[1].name: 'a' is there twice"},
      {keys("{'name':'a','elements':1},{'name':'b','elements':-1}"),
       "spec.keys[1].elements: must be a positive integer, got -1"},
      {keys("{'name':'a','elements':1099511627776},{'name':'b','elements':1}"),
       "keys[1].elements: 1 brings the job over 1099511627776 elements"},
      {key("0"), "spec.keys[0].elements: must be a positive integer, got 0"},
      {key("1.5"), "must be a positive integer, got 1.5"},
      {key("'1'"), "must be a positive integer, got \"1\""},
      {key("18446744073709551616"), "must be a positive integer"},
      {key("1e999"), "malformed JSON"},
      {key("1099511627777"), "keys[0].elements: 1099511627777"},
      {key("true"), "got true"},
      {key("[1]"), "got a list"},
      {key("1,'elements':2"), "field \"elements\" is given twice"},
      {key("1,'shapes':[1]"), "spec.keys[0]: unknown field \"shapes\""},
      {key("1,'shape':1"), "shape: must be a list, got 1"},
      {key("1,'shape':[1,1,1,1,1,1,1,1,1]"), "more than 8 entries"},
      {key("1,'shape':[-1]"), "shape[0]: must be"},
      {key("6,'shape':[2,4]"),
       "keys[0].shape: the product of [2, 4] must be the number of elements, which is 6"},
      {key("1,'shape':[1,0]"), "the product of [1, 0]"},
      {key("1,'shape':[4294967296,4294967296]"), "the product of [4294967296, 4294967296]"},
      {key("1,'group':255"), ""},
      {key("1,'group':256"), "keys[0].group: must be"},
      {key("1,'fragment':255"), "key 'w' is of fragment 255, and no key of fragment 0"},
      {key("1,'fragment':256"), "keys[0].fragment: must be"},
      {key("1,'priority':2147483648"),
       "spec.keys[0].priority: must be an integer of 32 bits, got 2147483648"},
      {key("1,'lr_scale':'x'"), "spec.keys[0].lr_scale: must be a number, got \"x\""},
  });
}

TEST(BadInput, SpecsAreRefusedByTheNameOfTheField) {
  expect_all({
      {spec("'optimiser':'adam'"), "spec: unknown field \"optimiser\""},
      {spec("'optimizer':''"), "optimizer: must be a name"},
      {spec("'reduction':'max'"), "reduction: must be one of sum, mean, got \"max\""},
      {spec("'work':'some'"), "work: must be one of all, sum, none"},
      {spec("'initial':'ones'"), "initial: must be one of"},
      {spec("'on_loss':'panic'"), "on_loss: must be one of shrink, wait, fail, stop"},
      {spec("'on_nonfinite':''"), "on_nonfinite: must be one of"},
      {spec("'unused':'none'"), "unused: must be one of zero, skip, got \"none\""},
      {spec("'rounding':'stochastic'"), ""},
      {spec("'rounding':''"), "rounding: must be one of nearest, stochastic, got \"\""},
      {spec("'rounding':'Nearest'"),
       "rounding: must be one of nearest, stochastic, got \"Nearest\""},
      {spec("'groups':'1,1'"), "groups: '1,1' has more than 1 ranks"},
      {spec("'world_size':2,'max_ranks':5,'groups':'1,1'"),
       "groups: '1,1' has 2 ranks, and max_ranks is 5"},
      {spec("'world_size':2,'groups':'1;1'"), "groups: expected ',' or the end"},
      {spec("'groups':[1]"), "spec.groups: must be a string"},
      {spec("'groups':'" + std::string(6145, '1') + "'"), "(6145 bytes)"},
      {spec("'world_size':0"), "world_size: must be an integer from 1 to 1024, got 0"},
      {spec("'world_size':1024"), ""},
      {spec("'world_size':1025"), "got 1025"},
      {spec("'min_ranks':2"), "min_ranks: must be from 0 to 1, got 2"},
      {spec("'world_size':4,'max_ranks':3"), "max_ranks: must be from 4 to 1024"},
      {spec("'chunk_elements':100"), "chunk_elements: must be a multiple of 32"},
      {spec("'chunk_elements':16777216"), ""},
      {spec("'chunk_elements':33554432"), "chunk_elements: must be from 32 to"},
      {spec("'lease_ms':9"), "lease_ms: must be from 10 to 3600000"},
      {spec("'lease_ms':10"), ""},
      {spec("'lease_ms':3600001"), "lease_ms: must be from 10 to 3600000"},
      {spec("'lease_ms':4294967296"), "lease_ms: must be a non-negative integer"},
      {spec("'progress_limit_ms':0"), "progress_limit_ms: must be from 1 to 604800000"},
      {spec("'wait_limit_ms':604800001"), "wait_limit_ms: must be from 1 to 604800000"},
      {spec("'join_limit_ms':0"), "join_limit_ms: must be from 1 to 604800000"},
      {spec("'slack':1"), "slack 1: it is for consistency ssp, and job 'j' has consistency 'bsp'"},
      {spec("'consistency':'ssp','slack':1"), ""},
      {spec("'hyper':{'lr':null}"), "spec.hyper.lr: must be a number, got null"},
      {spec("'hyper':{'lr':1,'lr':2}"), "field \"lr\" is given twice"},
      {spec("'hyper':{'':1}"), "hyper: '' is not the name"},
      {spec("'hyper':{'lr@0':1}"), ""},
      {spec("'hyper':{'lr@1':1}"), "hyper.lr@1: the keys are of groups 0 to 0"},
      {spec("'hyper':{'lr@':1}"), "hyper: 'lr@' is not the name"},
      {spec("'hyper':{'lr@00':1}"), "hyper: 'lr@00' is not the name"},
      {spec("'hyper':{'lr@0@0':1}"), "hyper: 'lr@0@0' is not the name"},
      {spec("'hyper':{'lr@-1':1}"), "hyper: 'lr@-1' is not the name"},
      {spec("'hyper':{'lr@4294967296':1}"), "hyper: 'lr@4294967296' is not"},
      {spec("'hyper':{'@0':1}"), "hyper: '@0' is not the name"},
      {spec("'hyper':[]"), "spec.hyper: must be an object, got a list"},
      {spec("'schedule':[{'round':0,'values':{}}]"),
       "spec.schedule[0].round: must be a positive integer, got 0"},
      {spec("'schedule':[{'round':5,'values':{'lr':1}},{'round':5,'values':{'lr':1}}]"),
       "schedule[1].round: must be ascending from 1, got 5 after 5"},
  });
}

TEST(BadInput, FormatsOfGradients) {
  std::vector<Case> cases;
  for (const char* format : {"f32",       "bf16",         "f16",           "fp8-e4m3",
                             "fp8-e5m2",  "int32",        "int8",          "int4",
                             "topk",      "topk-10",      "topk-100",      "topk-1000",
                             "topk-int4", "topk-10-int4", "topk-100-int4", "topk-1000-int4",
                             "topk-int2", "topk-10-int2", "topk-100-int2", "topk-1000-int2"}) {
    const std::string_view word = format;
    const bool of_results = word != "int32" && !word.starts_with("topk");
    cases.push_back({spec(fmt::format("'gradient_dtype':'{}'", format)), ""});
    cases.push_back({key(fmt::format("9,'format':'{}'", format)), ""});
    cases.push_back({spec(fmt::format("'optimizer':'sgd','parameter_dtype':'{}'", format)),
                     of_results ? "" : "fp8-e5m2, int8, int4, got"});
  }
  constexpr const char* kAll =
      "must be one of f32, bf16, f16, fp8-e4m3, fp8-e5m2, int32, int8, int4, topk, topk-10, "
      "topk-100, topk-1000, topk-int4, topk-10-int4, topk-100-int4, topk-1000-int4, "
      "topk-int2, topk-10-int2, topk-100-int2, topk-1000-int2, got '{}'";
  for (const char* format : {"fp8", "INT8", "int8 ", "f64", "top-k"}) {
    const std::string says = fmt::format(fmt::runtime(kAll), format);
    cases.push_back(
        {spec(fmt::format("'gradient_dtype':'{}'", format)), "gradient_dtype: " + says});
    cases.push_back({key(fmt::format("9,'format':'{}'", format)), "keys[0].format: " + says});
  }
  std::string longest;
  for (int phase = 0; phase < 7; ++phase) longest += "topk-1000-int4*1099511627776,";
  for (const std::string& format : {std::string("f32*9,topk"), longest + "topk-1000-int4"}) {
    cases.push_back({spec(fmt::format("'gradient_dtype':'{}'", format)), ""});
    cases.push_back({key(fmt::format("9,'format':'{}'", format)), ""});
  }
  const auto of_ranks = [](int ranks) {
    return spec(fmt::format("'gradient_dtype':'int32','max_ranks':{}", ranks));
  };
  const auto of_chunks = [](const char* which, int elements) {
    return quoted(
        fmt::format("{{'version':1,'spec':{{'name':'j','chunk_elements':{},'keys':[{{'name':'w','"
                    "elements':9{}}}]}}}}",
                    elements, which));
  };
  cases.insert(
      cases.end(),
      {
          {spec("'gradient_dtype':''"), "gradient_dtype: must be one of"},
          {spec("'parameter_dtype':''"), "parameter_dtype: must be one of"},
          {spec("'parameter_dtype':'INT8'"),
           "parameter_dtype: must be one of f32, bf16, f16, fp8-e4m3, fp8-e5m2, int8, int4, got "
           "'INT8'"},
          {of_ranks(512), ""},
          {of_ranks(513),
           "max_ranks: the integers of format int32 are added in 32 bits, which hold the sum of "
           "512 ranks, and the job has 513"},
          // An index has 16 bits.
          {of_chunks(",'format':'topk'", 65'536), ""},
          {of_chunks(",'format':'topk'", 65'568),
           "keys[0].format: topk is for chunks of at most 65536 elements, and these have 65568"},
          {of_chunks(",'format':'int4'", 65'568), ""},
          {spec("'chunk_elements':65568,'gradient_dtype':'topk'"),
           "gradient_dtype: topk is for chunks"},
          {spec("'chunk_elements':65568,'gradient_dtype':'topk-100-int4'"),
           "gradient_dtype: topk-100-int4 is for chunks of at most 65536 elements"},
          {spec("'chunk_elements':65568,'gradient_dtype':'topk-int2'"),
           "gradient_dtype: topk-int2 is for chunks of at most 65536 elements"},
      });
  expect_all(cases);
}

TEST(BadInput, RangesThatRanksExchange) {
  std::vector<Case> cases;
  const auto add = [&](const std::string& ranges, const std::string& says) {
    const std::string key =
        "{'name':'a','elements':100},{'name':'b','elements':10,'exchanged_by':[" + ranges + "]}";
    cases.push_back({quoted("{'version':1,'spec':{'name':'j','max_ranks':3,'keys':[" + key + "]}}"),
                     says.empty() ? "" : "keys[1].exchanged_by: " + says});
  };
  const auto range = [](int end, int ranks) {
    return fmt::format("{{'end':{},'ranks':[{}]}}", end, ranks);
  };
  add(range(4, 1) + "," + range(10, 7), "");
  add(range(4, 1) + "," + range(4, 1) + "," + range(10, 1), "a range from 4 up to, and without, 4");
  add(range(4, 1) + "," + range(11, 1), "a range from 4 up to, and without, 11");
  add(range(4, 3) + "," + range(10, 8), "rank 3 up to element 10; the job's ranks are 0 to 2");
  add(range(4, 3) + "," + range(10, 0), "no rank up to element 10; the job's ranks are 0 to 2");
  add(range(4, 1) + "," + range(9, 1), "the last range ends at element 9, and the key at 10");
  expect_all(cases);
  JobSpec spec{.name = "job", .keys = {{.name = "w", .elements = 10}}};
  const auto refuses = [&spec](std::vector<ExchangedRange> ranges, const std::string& says) {
    spec.keys[0].exchanged_by = std::move(ranges);
    EXPECT_THAT(message_of([&] { validate(spec); }), HasSubstr("keys[0].exchanged_by: " + says));
  };
  refuses({{0, {1}}, {10, {1}}}, "a range from 0 up to, and without, 0");
  refuses({{10, {}}}, "no rank up to element 10; the job's ranks are 0 to 0");
  refuses({{10, {1, 0}}}, "2 words of ranks up to element 10, more than 1 ranks have");
  refuses({{10, {1, 1}}}, "rank 64 up to element 10; the job's ranks are 0 to 0");
  refuses(std::vector<ExchangedRange>(65537), "65537 ranges");
}

// What no JSON brings as far as this, but a program's own spec.
TEST(BadInput, SpecsOfPrograms) {
  const struct {
    const char* says;
    void (*change)(JobSpec& s);
  } kCases[] = {
      {"no error", [](JobSpec&) {}},
      {"keys: a job needs at least one key", [](auto& s) { s.keys.clear(); }},
      {"keys[1].elements: must be a positive", [](auto& s) { s.keys[1].elements = 0; }},
      {"keys[1].elements", [](auto& s) { s.keys[1].elements = uint64_t{1} << 41; }},
      {"keys[0].name: must not be empty", [](auto& s) { s.keys[0].name = ""; }},
      {"no error", [](auto& s) { s.keys[0].name = std::string(255, 'x'); }},
      {"keys[0].name: must have at most 255",
       [](auto& s) { s.keys[0].name = std::string(256, 'x'); }},
      {"keys[0].shape: at most 8 dimensions", [](auto& s) { s.keys[0].shape.assign(9, 1); }},
      {"keys[0].group: must be from 0 to 255", [](auto& s) { s.keys[0].group = 256; }},
      {"keys[0].fragment: must be from 0 to 255", [](auto& s) { s.keys[0].fragment = 256; }},
      {"is of fragment 2, and no key of fragment 1", [](auto& s) { s.keys[1].fragment = 2; }},
      {"no error", [](auto& s) { s.keys[0].fragment = 1; }},
      {"keys[1].lr_scale: must be finite", [](auto& s) { s.keys[1].lr_scale = std::nan(""); }},
      {"world_size: must be from 1 to 1024", [](auto& s) { s.world_size = 0; }},
      {"world_size: must be from 1 to 1024", [](auto& s) { s.world_size = 1025; }},
      {"chunk_elements: must be from 32", [](auto& s) { s.chunk_elements = 0; }},
      {"optimizer: must be a name", [](auto& s) { s.optimizer = std::string(65, 'x'); }},
      {"lease_ms: must be from 10", [](auto& s) { s.lease_ms = 0; }},
      {"branches: must be from 0 to 255", [](auto& s) { s.branches = 256; }},
  };
  for (const auto& [says, change] : kCases) {
    JobSpec spec{.name = "job", .keys = {{"w", 10}, {"b", 1}}};
    change(spec);
    EXPECT_THAT(message_of([&] { validate(spec); }), HasSubstr(says));
  }
}

uint32_t& limit_of(KeySpec& key) { return is_rows(key) ? key.rows_limit : key.rank_limit; }

// Of which only some rows are sent, or factors.
TEST(BadInput, CompactKeys) {
  using Change = void (*)(JobSpec & s, KeySpec & key);
  const auto refused = [](const std::string& format, const std::string& says, Change change) {
    JobSpec spec{.name = "job", .keys = {{.name = "m", .elements = 3300, .shape = {100, 33}}}};
    KeySpec& key = spec.keys[0];
    format == "rows" ? set_rows_limit(key, 4, false) : set_rank_limit(key, 4);
    EXPECT_EQ(message_of([&] { validate(spec); }), "no error");
    change(spec, key);
    EXPECT_THAT(message_of([&] { validate(spec); }), HasSubstr(says));
  };
  for (const std::string format : {"rows", "factors"}) {
    const std::string limit = format == "rows" ? "keys[0].rows_limit: " : "keys[0].rank_limit: ";
    refused(format, limit + "must be from 1 to 1048575 for format " + format + ", got 0",
            [](auto&, auto& key) { limit_of(key) = 0; });
    refused(format, limit + "must be from 1 to 1048575, got 1048576",
            [](auto&, auto& key) { limit_of(key) = 1 << 20; });
    refused(format, limit + "needs format '" + format + "', got 'int8'",
            [](auto&, auto& key) { key.format = "int8"; });
    refused(format, limit + "needs the shape of a matrix, [rows, columns], got []",
            [](auto&, auto& key) { key.shape.clear(); });
    refused(format, limit + "needs the shape of a matrix, [rows, columns], got [10, 10, 33]",
            [](auto&, auto& key) {
              key.shape = {10, 10, 33};
            });
    refused(format, "keys[0].shape[1]: must be from 1 to 1048575, got 1048576",
            [](auto&, auto& key) { key.elements = key.shape[1] = 1 << 20, key.shape[0] = 1; });
    refused(format, "keys[0].tile_rows: must be a multiple of 32 and at most 100, got 33",
            [](auto&, auto& key) { key.tile_rows = 33; });
    refused(format, "keys[0].tile_rows: must be a multiple of 32 and at most 100, got 128",
            [](auto&, auto& key) { key.tile_rows = 128; });
    refused(format, "gradient_dtype: must be",
            [](auto& s, auto& key) { s.gradient_dtype = key.format; });
  }
  refused("rows", "keys[0].rows_limit: must be from 1 to 1048575 for lazy, got 0",
          [](auto&, auto& key) { key = {.name = "m", .elements = 4, .lazy = true}; });
  refused("rows", "keys[0].rank_limit: is 2, and so rows_limit must be 0, or 100, all rows; got 4",
          [](auto&, auto& key) { key.rank_limit = 2, key.format = "factors"; });
  refused("rows", "keys[0].rows_limit: needs format 'rows', got 'factors'", [](auto&, auto& key) {
    key.rank_limit = 2, key.rows_limit = 100, key.format = "factors";
  });
  refused("rows", "keys[0].rank_limit: must be from 1 to 1048575, got 1048576",
          [](auto&, auto& key) { key.rank_limit = 1 << 20, key.rows_limit = 100; });
  refused("rows", "keys[0].rank_limit: is 2, and so lazy must be false",
          [](auto&, auto& key) { set_rank_limit(key, 2), set_rows_limit(key, 100, true); });
  refused("rows", "their elements for 32 rows of 1048575 columns are more than a chunk may have",
          [](auto&, auto& key) {
            key.shape[1] = (1 << 20) - 1;
            key.elements = 100 * key.shape[1];
          });
  refused(
      "rows", "keys[0].rank_limit: 1000000 pairs of vectors for 32 rows of 33 columns are more",
      [](auto&, auto& key) { set_rows_limit(key, 100, false), set_rank_limit(key, 1'000'000); });
  refused("factors",
          "keys[0].rank_limit: 1000 pairs of vectors for 32 rows of 524289 columns are more than "
          "a chunk may have, which is 16777216 elements",
          [](auto&, auto& key) {
            key.shape[1] = (1 << 19) + 1;
            key.elements = 100 * key.shape[1];
            key.rank_limit = 1000;
          });
}

TEST(BadInput, SchedulesOfFormats) {
  const auto said = [](const std::string& format, uint32_t chunk_elements = 8192) {
    JobSpec spec{.name = "job", .chunk_elements = chunk_elements};
    spec.keys = {{.name = "k", .elements = 64, .format = format}, {.name = "l", .elements = 64}};
    const std::string of_key = message_of([&] { validate(spec); });
    spec.keys[0].format = "";
    spec.gradient_dtype = format;
    const std::string of_job = message_of([&] { validate(spec); });
    if (of_job == "no error") {
      EXPECT_EQ(of_key, of_job);
    } else {
      EXPECT_EQ(of_key.substr(of_key.find(": ")), of_job.substr(of_job.find(": ")));
      EXPECT_TRUE(of_key.starts_with("keys[0].format: ")) << of_key;
      EXPECT_TRUE(of_job.starts_with("gradient_dtype: ")) << of_job;
    }
    return of_job;
  };
  for (const char* good : {"f32*100,int8*900,topk", "int8*1,f32", "f32*1,f32*1099511627776,f32",
                           "int8*1,int4*1,topk*1,topk-10*1,fp8-e4m3*1,fp8-e5m2*1,f32*1,int8"}) {
    EXPECT_EQ(said(good), "no error") << good;
  }
  std::istringstream all(
      ",;*;f32*1;int8*5;f32,int8;f32*1,int8*1;f32*1,;,f32;f32*,int8;f32*0,int8;"
      "f32*01,int8;f32*-1,int8;f32*+1,int8;f32*1.5,int8;f32*1 ,int8;f32*1, int8;"
      "f32*1*1,int8;f32*1,,int8;f32*1099511627777,int8;f32*18446744073709551616,int8;"
      "f31*1,int8;f32*1,int9;bf16*1,int8;f32*1,f16;int32*1,f32;f32*1,factors;"
      "rows*1,f32;scheduled*1,f32;*1,f32;"
      "f32*1,f32*1,f32*1,f32*1,f32*1,f32*1,f32*1,f32*1,f32");
  for (std::string bad; std::getline(all, bad, ';');) {
    EXPECT_THAT(said(bad), HasSubstr("a schedule such as 'f32*100,int8*900,topk'")) << bad;
    EXPECT_THAT(said(bad), ::testing::EndsWith("got '" + bad + "'"));
  }
  EXPECT_EQ(said("f32*1,topk-10", 65'536), "no error");
  EXPECT_THAT(said("topk-10*1,f32", 65'568),
              HasSubstr("is for chunks of at most 65536 elements, and these have 65568"));
  JobSpec spec{.name = "job", .parameter_dtype = "f32*1,int8"};
  spec.keys = {{.name = "k", .elements = 64}};
  EXPECT_THAT(message_of([&] { validate(spec); }),
              HasSubstr("parameter_dtype: must be one of f32"));
}

TEST(BadInput, SchedulesOfFormatsAreFew) {
  JobSpec spec{.name = "job"};
  for (int i = 0; i < 100; ++i) {
    spec.keys.push_back({.name = fmt::format("k{}", i),
                         .elements = 1,
                         .format = i % 9 < 7 ? fmt::format("f32*{},int8", i % 9 + 1) : "topk"});
  }
  EXPECT_EQ(message_of([&] { validate(spec); }), "no error");
  spec.keys[99].format = "f32*8,int8";
  EXPECT_THAT(message_of([&] { validate(spec); }),
              HasSubstr("keys[99].format: a job has at most 7 different schedules"));
}

// A slot has room for any of its formats, whichever is the largest for the chunk's elements.
TEST(FormatSchedule, ItsSlotHoldsAGradientOfEachRound) {
  const auto schedule = FormatSchedule::parse("format", "topk-10-int4*2,int4*300,int8*1,topk");
  for (const uint64_t elements : {1, 5, 8, 31, 32, 96, 8192}) {
    uint64_t most = 0;
    for (const uint64_t round : {1, 2, 3, 302, 303, 304, 1 << 30}) {
      const SlotFormat& format = schedule.at(round);
      EXPECT_EQ(format.name, round <= 2     ? "topk-10-int4"
                             : round <= 302 ? "int4"
                             : round == 303 ? "int8"
                                            : "topk");
      most = std::max(most, format.bytes(elements));
    }
    EXPECT_EQ(schedule.slot().bytes(elements), most) << elements;
  }
  EXPECT_EQ(schedule.at(0).name, "topk-10-int4");
  EXPECT_FALSE(schedule.slot().is_plain());
}

TEST(BadInput, ValuesThatAreFolded) {
  const struct {
    const char* says;
    void (*change)(JobSpec& s);
  } kCases[] = {
      {"no error", [](JobSpec&) {}},
      {"keys[0].operation", [](auto& s) { s.keys[0].operation = "xor"; }},
      {"keys[0].operation", [](auto& s) { s.keys[0].operation = ""; }},
      {"keys[0].value_type", [](auto& s) { s.keys[0].value_type = "f16"; }},
      {"of whole numbers", [](auto& s) { s.keys[0].operation = "or"; }},
      {"63 are an odd number", [](auto& s) { s.keys[0].elements = 63; }},
      {"1 are an odd number",
       [](auto& s) {
         s.keys[0].shape = {64, 1};
       }},
      {"is for optimizer 'fold'", [](auto& s) { s.optimizer = "sgd"; }},
  };
  for (const auto& [says, change] : kCases) {
    JobSpec spec{.name = "job", .optimizer = "fold"};
    spec.keys = {{.name = "k", .elements = 64, .operation = "add", .value_type = "f64"}};
    change(spec);
    EXPECT_THAT(message_of([&] { validate(spec); }), HasSubstr(says));
  }
}

TEST(BadInput, AScheduleForManyGroupsIsBounded) {
  JobSpec spec;
  spec.name = "job";
  spec.keys = {{.name = "w", .elements = 1, .group = kMaxHyperGroups - 1}};
  for (uint64_t round = 1; round <= 1024; ++round) {
    spec.schedule.push_back({round, {{"lr@255", 1}}});
  }
  validate(spec);
  spec.schedule.push_back({1025, {{"lr", 1}}});
  EXPECT_THAT(message_of([&] { validate(spec); }),
              HasSubstr("schedule: number of entries: must be from 0 to 1024, got 1025"));
}

TEST(JobSpec, FormatsAreSetByPatterns) {
  JobSpec spec;
  for (const char* name : {"layer1.weight", "layer1.bias", "layer2.weight", "layer10.weight"}) {
    spec.keys.push_back({.name = name, .elements = 1});
  }
  const auto formats = [&spec] {
    std::vector<std::string> all;
    for (const KeySpec& key : spec.keys) all.push_back(gradient_format(spec, key));
    return all;
  };
  using ::testing::ElementsAre;
  EXPECT_EQ(set_format(spec, "*.weight", "int8"), 3u);
  EXPECT_THAT(formats(), ElementsAre("int8", "f32", "int8", "int8"));
  EXPECT_EQ(set_format(spec, "layer?.*", "topk"), 3u);  // the last one counts
  EXPECT_THAT(formats(), ElementsAre("topk", "topk", "topk", "int8"));
  EXPECT_EQ(set_format(spec, "layer2.weight", ""), 1u);  // again the job's
  spec.gradient_dtype = "bf16";
  EXPECT_THAT(formats(), ElementsAre("topk", "topk", "bf16", "int8"));
  EXPECT_EQ(set_format(spec, "layer", "int4"), 0u);
  EXPECT_EQ(set_format(spec, "[ab]*", "int4"), 0u);
  EXPECT_THAT(formats(), ElementsAre("topk", "topk", "bf16", "int8"));
  EXPECT_EQ(gradient_memory_format(spec, spec.keys[0]), "f32");
  EXPECT_EQ(gradient_memory_format(spec, spec.keys[2]), "bf16");
}

TEST(BadInput, JobNamesAreWhatAPathCanHold) {
  for (const char* name : {"", ".", "..", "a/b", "a b", "a%20b", "ä", "a\n"}) {
    JobSpec spec;
    spec.name = name;
    spec.keys = {{"w", 1}};
    EXPECT_THAT(message_of([&] { validate(spec); }), HasSubstr("name: must be 1 to 255 letters"));
  }
}

TEST(BadInput, OtherMessages) {
  const auto many = [](int n, auto entry) {
    std::string list;
    for (int i = 0; i < n; ++i) list += (i == 0 ? "" : ",") + entry(i);
    return list;
  };
  const std::string who = "{'rank':0,'incarnation':1,";
  const std::string values = many(4097, [](int i) { return fmt::format("'h{}':1", i); });
  const std::string turns = many(257, [](int) { return std::string("{'branch':0}"); });
  const struct {
    std::function<void(std::string_view)> parse;
    std::string text;
    const char* says;
  } kCases[] = {
      {from_json<Credential>, "{'rank':0}", "field \"incarnation\" is missing"},
      {from_json<Credential>, "{'rank':1024,'incarnation':1}",
       "rank: must be an integer from 0 to 1023, got 1024"},
      {from_json<HyperRequest>, who + "'values':{}}", "values: must have at least 1 entries"},
      {from_json<HyperRequest>, who + "'values':{" + values + "}}", "more than 4096 entries"},
      {from_json<Offer>, "{'transport':'shm','address':'/x','ticket':''}",
       "ticket: must be a string of 1 to 255 bytes"},
      {from_json<LogPage>, "{'records':[{'kind':'vanished','rank':0,'incarnation':1}]}",
       "records[0].kind: must be one of admitted, lost, left, hyper, excluded, failed, set, "
       "forked, scheduled, "
       "discarded, killed, revived, late, got \"vanished\""},
      {from_json<BranchRequest>, who + "'action':'graft'}",
       "action: must be one of list, fork, schedule, discard, kill, revive, got \"graft\""},
      {from_json<BranchRequest>, who + "'action':'schedule','turns':[" + turns + "]}",
       "more than 256 entries"},
      {from_json<Pulse>, "{}", "\"completed_round\" is missing"},
      {from_json<ServerStatus>, "[]", "answer to status: must be an object"},
  };
  for (const auto& [parse, text, says] : kCases) {
    EXPECT_THAT(message_of([&, &parse = parse, &text = text] { parse(quoted(text)); }),
                HasSubstr(says))
        << text.substr(0, 200);
  }
}

TEST(BadInput, NothingLongIsRepeatedInAMessage) {
  const std::string name(1 << 20, 'n');
  EXPECT_LT(message_of([&] { from_json<Credential>("{\"" + name + "\":1}"); }).size(), 200u);
  EXPECT_LT(message_of([&] { from_json<Credential>("{\"rank\":\"" + name + "\"}"); }).size(), 200u);
  EXPECT_LT(message_of([&] { from_json<Credential>(name); }).size(), 400u);
}

TEST(Encoding, RefusesWhatJsonCannotHold) {
  JobSpec spec;
  spec.name = "j";
  spec.keys = {{"\xff", 1}};
  EXPECT_THAT(message_of([&] { to_json(spec); }), HasSubstr("is not UTF-8"));
  spec.keys = {{"w", 1}};
  spec.hyper["lr"] = std::numeric_limits<double>::infinity();
  EXPECT_THAT(message_of([&] { to_json(spec); }), HasSubstr("not a finite number"));
  EXPECT_THAT(message_of([&] { validate(spec); }), HasSubstr("hyper.lr: must be finite"));
}

TEST(Encoding, DefaultsAreLeftOut) {
  JobSpec spec;
  spec.name = "j";
  spec.keys = {{"w", 3}};
  EXPECT_EQ(to_json(spec), R"({"name":"j","keys":[{"name":"w","elements":3}]})");
}

TEST(Errors, TravelWithCodeAndMessage) {
  const Error error = parse_error(error_json(ErrorCode::kFenced, "rank 3 \"was\"\nreplaced \xff"));
  EXPECT_EQ(error.code(), ErrorCode::kFenced);
  EXPECT_THAT(error.what(), HasSubstr("rank 3 \"was\"\nreplaced"));
  EXPECT_EQ(
      error_json(ErrorCode::kTaken, "rank 2"),
      R"({"type":"about:blank","title":"Conflict","status":409,"detail":"rank 2","code":"taken"})");
  EXPECT_THAT(error_json(415, ErrorCode::kInvalid, "no"),
              HasSubstr(R"("title":"Unsupported Media Type","status":415,)"));
  EXPECT_EQ(parse_error(R"({"type":"about:blank","title":"t","status":409,"detail":"m",)"
                        R"("code":"of_a_later_version"})")
                .code(),
            ErrorCode::kInternal);
}

// --- difference ----------------------------------------------------------------------------------

TEST(Difference, NamesTheFirstOne) {
  JobSpec job;
  job.name = "j";
  job.keys = {{"conv", 64}, {"fc.weight", 12}};
  const struct {
    const char* says;
    void (*change)(JobSpec& s);
  } kCases[] = {
      {"", [](JobSpec&) {}},
      {"key 1 'fc.weight' has 10 elements here and 12 in the job",
       [](auto& s) { s.keys[1].elements = 10; }},
      {"there are 3 keys here and 2 in the job",
       [](auto& s) {
         s.keys.push_back({"x", 1});
       }},
      {"key 1 is 'fc' here and 'fc.weight' in the job", [](auto& s) { s.keys[1].name = "fc"; }},
      {"key 0 'conv': lr_scale is 2 here and 1 in the job",
       [](auto& s) { s.keys[0].lr_scale = 2; }},
      {"key 0 'conv': group is 2 here and 0 in the job", [](auto& s) { s.keys[0].group = 2; }},
      {"key 0 'conv': fragment is 1 here and 0 in the job",
       [](auto& s) { s.keys[0].fragment = 1; }},
      {"key 1 'fc.weight': shape is [3,4] here and [] in the job",
       [](auto& s) {
         s.keys[1].shape.assign({3, 4});
       }},
      {"there are 1 keys here and 2 in the job", [](auto& s) { s.keys.pop_back(); }},
      {"world_size is 2 here and 1 in the job", [](auto& s) { s.world_size = 2; }},
      {"", [](auto& s) { s.max_ranks = 1; }},  // as world_size says
      {"max_ranks is 9 here and 1 in the job", [](auto& s) { s.max_ranks = 9; }},
      {"optimizer is 'adam' here and 'none' in the job", [](auto& s) { s.optimizer = "adam"; }},
      {"hyper is {\"lr\":0.5} here and {} in the job", [](auto& s) { s.hyper["lr"] = 0.5; }},
      {"", [](auto& s) { s.keys[0].tile_rows = 0; }},
  };
  for (const auto& [says, change] : kCases) {
    JobSpec here = job;
    change(here);
    EXPECT_EQ(difference(here, job), says);
  }
}

// Whatever differs is found: each field alone.
TEST(Difference, MissesNoField) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(fmt::format("seed {}", seed));
  Random random(seed);
  for (int i = 0; i < 20; ++i) {
    auto job = random.make<JobSpec>();
    if (job.max_ranks == 0) job.max_ranks = job.world_size;
    for (KeySpec& key : job.keys) key.tile_rows = 32;
    EXPECT_EQ(difference(job, job), "");
    const auto change_each = [&](auto member_of) {
      JobSpec here = job;
      boost::pfr::for_each_field(member_of(here), [&](auto& member, size_t index) {
        const auto before = member;
        while (member == before) random.fill(member, {.min = 1, .max = 99});
        EXPECT_NE(difference(here, job), "") << "field " << index << " of " << to_json(job);
        member = before;
      });
    };
    change_each([](JobSpec& spec) -> JobSpec& { return spec; });
    change_each([](JobSpec& spec) -> KeySpec& { return spec.keys.back(); });
  }
}

}  // namespace messages_test
}  // namespace phub
