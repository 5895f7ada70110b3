#include "transport/control/messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "transport/control/messages_json.h"

namespace phub {
namespace {

using testing::HasSubstr;

std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalid) << error.what();
    return error.what();
  }
  return "no error";
}

// Random messages within the bounds, with every field away from its default now and then.
class Random {
 public:
  explicit Random(uint64_t seed) : bits_(seed) {}
  uint64_t below(uint64_t n) { return bits_() % n; }
  bool coin() { return below(2) == 0; }
  uint64_t u64() { return bits_() >> below(64); }
  uint32_t u32() { return static_cast<uint32_t>(u64()); }
  double real() {
    const double options[] = {0.0, 1.0, 0.1, -1e-300, 1.7e308, 5e-324, 1.0 / 3, 123456789.0};
    if (coin()) return options[below(8)];
    return std::ldexp(static_cast<double>(bits_()), static_cast<int>(below(200)) - 100);
  }
  std::string text(size_t least = 0) {
    static const std::vector<std::string> pieces = {"a", "Z9", "\"",   "\\", "/", "\n",
                                                    "é", "\t", "\x01", "漢", "😀", " "};
    std::string out;
    for (size_t n = least + below(6); n > 0; --n) out += pieces[below(pieces.size())];
    return out;
  }
  std::string word() { return coin() ? "adam" : "x.y-z_1"; }
  template <class T>
  std::vector<T> list(const std::function<T()>& make) {
    std::vector<T> out(below(5));
    for (T& entry : out) entry = make();
    return out;
  }
  HyperValues values(size_t least = 0) {
    HyperValues out;
    for (size_t n = least + below(3), i = 0; i < n; ++i) out[fmt::format("h{}", i)] = real();
    return out;
  }

  JobSpec spec() {
    JobSpec spec;
    spec.name = fmt::format("job-{}.x_Y", below(1000));
    for (size_t n = 1 + below(6), i = 0; i < n; ++i) {
      KeySpec key{fmt::format("{} \"é\"/w", i), 1 + below(1u << 20)};
      if (coin()) key.priority = static_cast<int32_t>(u32());
      if (coin()) key.lr_scale = real();
      if (coin()) key.decay_scale = real();
      if (coin() && key.elements % 2 == 0) key.shape = {key.elements / 2, 1, 2};
      if (coin()) key.group = static_cast<uint32_t>(below(kMaxHyperGroups));
      if (coin()) key.exchanged_by = {{.end = key.elements, .ranks = 1}};
      spec.keys.push_back(key);
    }
    spec.world_size = 1 + static_cast<uint32_t>(below(16));
    if (coin()) spec.max_ranks = spec.world_size + static_cast<uint32_t>(below(16));
    if (coin()) spec.chunk_elements = 32 * (1 + static_cast<uint32_t>(below(1000)));
    if (coin()) spec.optimizer = word();
    spec.hyper = values();
    for (uint64_t n = below(3), round = 0; n > 0; --n) {
      spec.schedule.push_back({round += 1 + below(1u << 30), values(1)});
    }
    if (coin()) spec.gradient_dtype = coin() ? "bf16" : "f16";
    for (KeySpec& key : spec.keys) key.format = coin() ? "" : coin() ? "int4" : "topk";
    if (coin()) spec.parameter_dtype = coin() ? "bf16" : coin() ? "f16" : "fp8-e4m3";
    if (coin()) spec.reduction = "mean";
    if (coin()) {
      const uint32_t ranks = std::max(spec.max_ranks, spec.world_size);
      const uint64_t first = 1 + below(ranks);
      spec.groups =
          first == ranks ? fmt::format("({})", ranks) : fmt::format("{},{}", first, ranks - first);
    }
    if (coin()) spec.work = coin() ? "sum" : "none";
    if (coin()) spec.initial = "broadcast";
    if (coin()) spec.on_loss = coin() ? "wait" : "fail";
    if (coin()) spec.on_nonfinite = coin() ? "exclude" : "pass";
    if (coin()) spec.unused = "skip";
    if (coin()) spec.rounding = "stochastic";
    if (coin()) spec.lease_ms = 10 + static_cast<uint32_t>(below(100000));
    if (coin()) spec.progress_limit_ms = 1 + static_cast<uint32_t>(below(100000));
    if (coin()) spec.wait_limit_ms = 1 + static_cast<uint32_t>(below(100000));
    if (coin()) spec.join_limit_ms = 1 + static_cast<uint32_t>(below(100000));
    return spec;
  }
  Offer offer() {
    return {word(), text(), fmt::format("{:032x}", u64()), list<QueueOffer>([&] {
              const auto addresses = [&] { return list<std::string>([&] { return word(); }); };
              return QueueOffer{
                  word(), coin() ? u64() : 0, coin() ? u32() : 0, coin() ? word() : "",
                  "",     addresses(),        addresses()};
            }),
            coin()};
  }

 private:
  std::mt19937_64 bits_;
};

class RoundTrip : public testing::Test {
 protected:
  // Encoding what was decoded gives the same text, and the text holds every field: a message with
  // another value in any field has another text (the decoder is compared field by field below).
  template <class Message>
  void check(const Message& message, Message (*parse)(std::string_view)) {
    const std::string text = to_json(message);
    EXPECT_EQ(to_json(parse(text)), text);
  }
  uint64_t seed_ = std::random_device{}();
  Random random_{seed_};
};

TEST_F(RoundTrip, JoinRequest) {
  for (int i = 0; i < 500; ++i) {
    SCOPED_TRACE(fmt::format("seed {} message {}", seed_, i));
    JoinRequest request;
    request.spec = random_.spec();
    request.rank = static_cast<int32_t>(random_.below(kMaxRanks + 1)) - 1;
    request.replace = random_.coin();
    request.transport = random_.word();
    const JoinRequest back = parse_join_request(to_json(request));
    EXPECT_EQ(back.spec, request.spec);
    EXPECT_EQ(back.rank, request.rank);
    EXPECT_EQ(back.replace, request.replace);
    EXPECT_EQ(back.transport, request.transport);
    EXPECT_EQ(parse_job_spec(to_json(request.spec)), request.spec);
  }
}

TEST_F(RoundTrip, JoinReply) {
  for (int i = 0; i < 200; ++i) {
    SCOPED_TRACE(fmt::format("seed {} message {}", seed_, i));
    JoinReply reply;
    reply.rank = static_cast<uint32_t>(random_.below(kMaxRanks));
    reply.incarnation = random_.u32();
    reply.first_round = random_.u64();
    reply.send_initial = random_.coin();
    reply.offer = random_.offer();
    reply.layout.key_offset = random_.list<uint64_t>([&] { return random_.u64(); });
    reply.layout.queue_chunks = random_.list<std::vector<uint32_t>>(
        [&] { return random_.list<uint32_t>([&] { return random_.u32(); }); });
    reply.layout.total_elements = random_.u64();
    reply.layout.queue_offset = random_.list<uint64_t>([&] { return random_.u64(); });
    reply.spec = random_.spec();
    reply.save_every = random_.u64();
    reply.parts = random_.list<RankPart>([&] {
      return RankPart{static_cast<uint32_t>(random_.below(kMaxRanks)),
                      1 + random_.below(kMaxStateBytes)};
    });
    if (random_.coin()) {
      reply.through_switch = {
          .generation = 1 + random_.u64() / 2,
          .workers = 1 + static_cast<uint32_t>(random_.below(64)),
          .port = static_cast<uint32_t>(random_.below(65536)),
          .streams = {{.address = "10.0.0.1:7718",
                       .first_slot = static_cast<uint32_t>(random_.below(32768)),
                       .slots = 1 + static_cast<uint32_t>(random_.below(32768)),
                       .queues = {random_.u32(), random_.u32()}}}};
    }
    const JoinReply back = parse_join_reply(to_json(reply));
    EXPECT_EQ(back.through_switch, reply.through_switch);
    EXPECT_EQ(back.rank, reply.rank);
    EXPECT_EQ(back.incarnation, reply.incarnation);
    EXPECT_EQ(back.first_round, reply.first_round);
    EXPECT_EQ(back.send_initial, reply.send_initial);
    EXPECT_EQ(back.offer.transport, reply.offer.transport);
    EXPECT_EQ(back.offer.address, reply.offer.address);
    EXPECT_EQ(back.offer.ticket, reply.offer.ticket);
    EXPECT_EQ(back.offer.queues, reply.offer.queues);
    EXPECT_EQ(back.layout, reply.layout);
    EXPECT_EQ(back.spec, reply.spec);
    EXPECT_EQ(back.save_every, reply.save_every);
    EXPECT_EQ(back.parts, reply.parts);
    check(reply.offer, parse_offer);
  }
}

TEST_F(RoundTrip, CredentialAndHyper) {
  for (int i = 0; i < 200; ++i) {
    SCOPED_TRACE(fmt::format("seed {} message {}", seed_, i));
    Credential who;
    who.job = "stays";
    who.ticket = "secret";
    who.rank = static_cast<uint32_t>(random_.below(kMaxRanks));
    who.incarnation = random_.u32();
    EXPECT_THAT(to_json(who), testing::Not(HasSubstr("secret")));
    const Credential back = parse_credential(to_json(who));
    EXPECT_EQ(back.rank, who.rank);
    EXPECT_EQ(back.incarnation, who.incarnation);
    const HyperChange change{.round = random_.u64(), .values = random_.values(1)};
    const auto [whose, changed] = parse_hyper(hyper_json(who, change));
    EXPECT_EQ(whose.rank, who.rank);
    EXPECT_EQ(whose.incarnation, who.incarnation);
    EXPECT_EQ(changed, change);
    const HyperReply got{random_.u64()};
    EXPECT_EQ(parse_hyper_reply(to_json(got)).round, got.round);

    const BranchChange branching{.action = static_cast<BranchAction>(random_.below(6)),
                                 .round = random_.u64(),
                                 .branch = random_.u32(),
                                 .values = random_.values(0),
                                 .turns = random_.list<BranchTurn>([&] {
                                   return BranchTurn{random_.u32(), random_.u64()};
                                 })};
    const auto [decider, decided] = parse_branch_request(branch_json(who, branching));
    EXPECT_EQ(decider.rank, who.rank);
    EXPECT_EQ(decider.incarnation, who.incarnation);
    EXPECT_EQ(decided, branching);
    const BranchReply there{.round = random_.u64(),
                            .branch = random_.u32(),
                            .branches = random_.list<BranchStatus>([&] {
                              return BranchStatus{random_.u32(), random_.u32(),  random_.u64(),
                                                  random_.u64(), random_.coin(), random_.u64(),
                                                  random_.coin()};
                            }),
                            .runs = random_.list<BranchRun>([&] {
                              return BranchRun{random_.u64(), random_.u32()};
                            })};
    EXPECT_EQ(parse_branch_reply(to_json(there)), there);

    const LossRequest report{.rank = who.rank,
                             .incarnation = random_.u32(),
                             .epoch = random_.u64(),
                             .round = random_.u64(),
                             .loss = random_.coin() ? 1 / 3.0 : -0.25,
                             .nonfinite = random_.coin()};
    EXPECT_EQ(parse_loss_request(to_json(report)), report);
    const LossPage losses{
        .epoch = random_.u64(), .latest = random_.u64(), .losses = random_.list<RoundLoss>([&] {
          return RoundLoss{random_.u64(), random_.u32(), random_.u32(), 1 / 7.0, random_.coin()};
        })};
    EXPECT_EQ(parse_loss_page(to_json(losses)), losses);
  }
}

TEST_F(RoundTrip, PulseAndLog) {
  for (int i = 0; i < 200; ++i) {
    SCOPED_TRACE(fmt::format("seed {} message {}", seed_, i));
    Pulse pulse;
    pulse.completed_round = random_.u64();
    pulse.durable_round = random_.u64();
    pulse.missing = random_.list<uint32_t>([&] { return random_.u32(); });
    pulse.assembling = random_.coin();
    const Pulse back = parse_pulse(to_json(pulse));
    EXPECT_EQ(back.completed_round, pulse.completed_round);
    EXPECT_EQ(back.durable_round, pulse.durable_round);
    EXPECT_EQ(back.missing, pulse.missing);
    EXPECT_EQ(back.assembling, pulse.assembling);

    LogPage page{.first = random_.u64(), .more = random_.coin()};
    page.records = random_.list<LogRecord>([&] {
      LogRecord record;
      record.kind = static_cast<LogRecord::Kind>(random_.below(10));
      record.round = random_.u64();
      record.rank = static_cast<uint32_t>(random_.below(kMaxRanks));
      record.incarnation = random_.u32();
      record.reason = random_.text();
      record.last_rounds = random_.list<ChunkRange>([&] {
        return ChunkRange{random_.u32(), random_.u32(), random_.u64()};
      });
      record.last_round = random_.u64();
      record.branch = random_.u32();
      record.parent = random_.u32();
      record.chunks = random_.list<ChunkSpan>([&] {
        return ChunkSpan{random_.u32(), random_.u32()};
      });
      record.values = random_.values();
      return record;
    });
    EXPECT_EQ(parse_log_page(to_json(page)), page);
  }
}

TEST_F(RoundTrip, Status) {
  for (int i = 0; i < 200; ++i) {
    SCOPED_TRACE(fmt::format("seed {} message {}", seed_, i));
    ServerStatus status;
    status.topology = random_.text();
    status.transports = random_.list<std::string>([&] { return random_.word(); });
    status.nics = random_.list<std::string>([&] { return random_.text(); });
    status.cores = random_.u32();
    status.memory_bytes = random_.u64();
    status.memory_limit_bytes = random_.u64();
    status.uptime_s = random_.real();
    status.parent = random_.text();
    status.parent_budget_bytes_per_s = random_.u64();
    const auto flow = [&] {
      return Flow{random_.u64(),  random_.u64(),  random_.u64(),
                  random_.real(), random_.real(), random_.real()};
    };
    status.nodes = random_.list<NodeStatus>([&] {
      NodeStatus node{.node = random_.u32(), .memory_bytes = random_.u64()};
      node.cores = random_.list<CoreStatus>([&] {
        return CoreStatus{random_.u32(), random_.u32(),  random_.u64(),  random_.u64(),
                          random_.u64(), random_.real(), random_.real(), flow()};
      });
      node.nics = random_.list<NicStatus>([&] {
        return NicStatus{random_.text(), random_.word(), random_.u64(), flow()};
      });
      return node;
    });
    status.jobs = random_.list<JobStatus>([&] {
      JobStatus job;
      job.name = "j" + random_.text();
      job.state = random_.word();
      job.error = random_.text();
      job.optimizer = random_.word();
      job.keys = random_.u64();
      job.chunks = random_.u64();
      job.elements = random_.u64();
      job.memory_bytes = random_.u64();
      job.completed_round = random_.u64();
      job.durable_round = random_.u64();
      job.next_saved_round = random_.u64();
      job.void_snapshots = random_.u64();
      job.failed_saves = random_.u64();
      job.rounds_per_s = random_.real();
      job.chunks_completed = random_.u64();
      job.switch_ended = random_.text();
      job.transport = random_.word();
      job.counters = {random_.u64(), random_.u64(), random_.u64(), random_.u64(),
                      random_.u64(), random_.u64(), random_.u64()};
      job.ranks = random_.list<RankStatus>([&] {
        return RankStatus{static_cast<uint32_t>(random_.below(kMaxRanks)),
                          random_.u32(),
                          random_.word(),
                          random_.u64(),
                          random_.text(),
                          random_.u64(),
                          random_.real(),
                          random_.real(),
                          random_.u64(),
                          random_.u64(),
                          random_.text()};
      });
      job.flow = flow();
      job.cores = random_.list<JobCoreStatus>([&] {
        JobCoreStatus core{.core = random_.u32()};
        core.queues = random_.list<QueueStatus>([&] {
          return QueueStatus{random_.u32(), random_.text(), flow()};
        });
        return core;
      });
      job.missing = random_.list<uint32_t>([&] { return random_.u32(); });
      job.waiting_for = random_.list<uint32_t>([&] { return random_.u32(); });
      return job;
    });
    check(status, parse_status);
    EXPECT_EQ(parse_status(to_json(status)).jobs.size(), status.jobs.size());
  }
}

TEST(Codec, AnyNumberOfKeysComesThrough) {
  JoinRequest request;
  request.spec.name = "big";
  for (size_t i = 0; i < 100000; ++i) request.spec.keys.push_back({fmt::format("k{}", i), i + 1});
  EXPECT_EQ(parse_join_request(to_json(request)).spec, request.spec);
}

// --- bad input -----------------------------------------------------------------------------------

std::string join_with(std::string_view key, std::string_view rest = "",
                      std::string_view more = "") {
  return fmt::format(R"({{"version":1,"spec":{{"name":"j","keys":[{}]{}}}{}}})", key, rest, more);
}

TEST(BadInput, JoinRequestsAreRefusedWithThePathOfWhatIsWrong) {
  const std::string key = R"({"name":"w","elements":1})";
  const std::string deep(100000, '[');
  const std::vector<std::pair<std::string, std::string>> cases = {
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
      {join_with(""), "spec.keys: must have at least 1 entries"},
      {join_with(deep), "spec.keys[0]: must be an object, got a list"},
      {join_with("null"), "spec.keys[0]: must be an object, got null"},
      {join_with("{}"), "spec.keys[0]: field \"name\" is missing"},
      {join_with(R"({"name":"w"})"), "spec.keys[0]: field \"elements\" is missing"},
      {join_with(key + R"(,{"name":"w2","elements":-1})"),
       "spec.keys[1].elements: must be a positive integer, got -1"},
      {join_with(R"({"name":"w","elements":0})"),
       "spec.keys[0].elements: must be a positive integer, got 0"},
      {join_with(R"({"name":"w","elements":1.5})"), "must be a positive integer, got 1.5"},
      {join_with(R"({"name":"w","elements":"1"})"), "must be a positive integer, got \"1\""},
      {join_with(R"({"name":"w","elements":18446744073709551616})"), "must be a positive integer"},
      {join_with(R"({"name":"w","elements":1e999})"), "malformed JSON"},
      {join_with(R"({"name":"w","elements":1099511627777})"), "keys[0].elements: 1099511627777"},
      {join_with(R"({"name":"a","elements":1099511627776},{"name":"b","elements":1})"),
       "keys[1].elements: 1 brings the job over 1099511627776 elements"},
      {join_with(R"({"name":"w","elements":true})"), "got true"},
      {join_with(R"({"name":"w","elements":[1]})"), "got a list"},
      {join_with(R"({"name":"w","elements":1,"elements":2})"), "field \"elements\" is given twice"},
      {join_with(R"({"name":"w","elements":1,"shapes":[1]})"),
       "spec.keys[0]: unknown field \"shapes\""},
      {join_with(R"({"name":"w","elements":1,"shape":1})"), "shape: must be a list, got 1"},
      {join_with(R"({"name":"w","elements":1,"shape":[1,1,1,1,1,1,1,1,1]})"),
       "more than 8 entries"},
      {join_with(R"({"name":"w","elements":1,"shape":[-1]})"), "shape[0]: must be"},
      {join_with(R"({"name":"w","elements":6,"shape":[2,4]})"),
       "keys[0].shape: the product of [2, 4] must be the number of elements, which is 6"},
      {join_with(R"({"name":"w","elements":1,"shape":[1,0]})"), "the product of [1, 0]"},
      {join_with(R"({"name":"w","elements":1,"shape":[4294967296,4294967296]})"),
       "the product of [4294967296, 4294967296]"},
      {join_with(R"({"name":"w","elements":1,"group":256})"), "keys[0].group: must be"},
      {join_with(R"({"name":"w","elements":1,"priority":2147483648})"),
       "spec.keys[0].priority: must be an integer of 32 bits, got 2147483648"},
      {join_with(R"({"name":"w","elements":1,"lr_scale":"x"})"),
       "spec.keys[0].lr_scale: must be a number, got \"x\""},
      {join_with(R"({"name":"","elements":1})"), "keys[0].name: must be a string of 1 to 255"},
      {join_with(R"({"name":")" + std::string(256, 'n') + R"(","elements":1})"), "(256 bytes)"},
      {join_with(R"({"name":"a\u0000b","elements":1})"), "must not hold control characters"},
      {join_with("{\"name\":\"\xff\",\"elements\":1}"), "malformed JSON"},
      {join_with(key + "," + key), "keys[1].name: 'w' is there twice"},
      {join_with(key, R"(,"optimiser":"adam")"), "spec: unknown field \"optimiser\""},
      {join_with(key, R"(,"optimizer":"")"), "optimizer: must be a name"},
      {join_with(key, R"(,"gradient_dtype":"f64")"),
       "gradient_dtype: must be one of f32, bf16, f16, fp8-e4m3, fp8-e5m2, int32, int8, int4, "
       "topk, "
       "got 'f64'"},
      {join_with(key, R"(,"parameter_dtype":"")"), "parameter_dtype: must be one of"},
      {join_with(key, R"(,"reduction":"max")"), "reduction: must be one of sum, mean, got 'max'"},
      {join_with(key, R"(,"work":"some")"), "work: must be one of all, sum, none"},
      {join_with(key, R"(,"initial":"ones")"), "initial: must be one of"},
      {join_with(key, R"(,"on_loss":"panic")"), "on_loss: must be one of shrink, wait, fail"},
      {join_with(key, R"(,"on_nonfinite":"")"), "on_nonfinite: must be one of"},
      {join_with(key, R"(,"unused":"none")"), "unused: must be one of zero, skip, got 'none'"},
      {join_with(key, R"(,"groups":"1,1")"), "groups: '1,1' has more than 1 ranks"},
      {join_with(key, R"(,"world_size":2,"max_ranks":5,"groups":"1,1")"),
       "groups: '1,1' has 2 ranks, and max_ranks is 5"},
      {join_with(key, R"(,"world_size":2,"groups":"1;1")"), "groups: expected ',' or the end"},
      {join_with(key, R"(,"groups":[1])"), "spec.groups: must be a string"},
      {join_with(key, R"(,"groups":")" + std::string(6145, '1') + R"(")"), "(6145 bytes)"},
      {join_with(key, R"(,"world_size":0)"),
       "world_size: must be an integer from 1 to 1024, got 0"},
      {join_with(key, R"(,"world_size":1025)"), "got 1025"},
      {join_with(key, R"(,"world_size":4,"max_ranks":3)"), "max_ranks: must be from 4 to 1024"},
      {join_with(key, R"(,"chunk_elements":100)"), "chunk_elements: must be a multiple of 32"},
      {join_with(key, R"(,"chunk_elements":33554432)"), "chunk_elements: must be from 32 to"},
      {join_with(key, R"(,"lease_ms":0)"), "lease_ms: must be from 10 to 3600000"},
      {join_with(key, R"(,"lease_ms":4294967296)"), "lease_ms: must be a non-negative integer"},
      {join_with(key, R"(,"hyper":{"lr":null})"), "spec.hyper.lr: must be a number, got null"},
      {join_with(key, R"(,"hyper":{"lr":1,"lr":2})"), "field \"lr\" is given twice"},
      {join_with(key, R"(,"hyper":{"":1})"), "hyper: '' is not the name"},
      {join_with(key, R"(,"hyper":{"lr@1":1})"), "hyper.lr@1: the keys are of groups 0 to 0"},
      {join_with(key, R"(,"hyper":{"lr@":1})"), "hyper: 'lr@' is not the name"},
      {join_with(key, R"(,"hyper":{"lr@00":1})"), "hyper: 'lr@00' is not the name"},
      {join_with(key, R"(,"hyper":{"lr@0@0":1})"), "hyper: 'lr@0@0' is not the name"},
      {join_with(key, R"(,"hyper":{"lr@-1":1})"), "hyper: 'lr@-1' is not the name"},
      {join_with(key, R"(,"hyper":{"lr@4294967296":1})"), "hyper: 'lr@4294967296' is not"},
      {join_with(key, R"(,"hyper":{"@0":1})"), "hyper: '@0' is not the name"},
      {join_with(key, R"(,"hyper":[])"), "spec.hyper: must be an object, got a list"},
      {join_with(key, R"(,"schedule":[{"round":0,"values":{}}])"),
       "spec.schedule[0].round: must be a positive integer, got 0"},
      {join_with(key,
                 R"(,"schedule":[{"round":5,"values":{"lr":1}},{"round":5,"values":{"lr":1}}])"),
       "schedule[1].round: must be ascending from 1, got 5 after 5"},
      {join_with(key, "", R"(,"rank":-2)"), "rank: must be a rank, or -1"},
      {join_with(key, "", R"(,"rank":1024)"), "rank: must be a rank, or -1"},
      {join_with(key, "", R"(,"replace":1)"), "replace: must be true or false, got 1"},
      {join_with(key, "", R"(,"ticket":"x")"), "unknown field \"ticket\""},
      {join_with(key) + "x", "malformed JSON"},
  };
  for (const auto& [text, expected] : cases) {
    EXPECT_THAT(message_of([&text = text] { parse_join_request(text); }), HasSubstr(expected))
        << text.substr(0, 200);
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

TEST(BadInput, FormatsOfGradients) {
  JobSpec good;
  good.name = "job";
  good.keys = {{.name = "a", .elements = 100'000}, {.name = "b", .elements = 1}};
  const auto message = [&good](const std::function<void(JobSpec&)>& change) {
    JobSpec spec = good;
    change(spec);
    return message_of([&spec] { validate(spec); });
  };
  for (const char* format :
       {"f32", "bf16", "f16", "fp8-e4m3", "fp8-e5m2", "int8", "int4", "topk"}) {
    EXPECT_EQ(message([&](JobSpec& spec) { spec.gradient_dtype = format; }), "no error");
    EXPECT_EQ(message([&](JobSpec& spec) { spec.parameter_dtype = format; }), "no error");
    EXPECT_EQ(message([&](JobSpec& spec) { spec.keys[1].format = format; }), "no error");
  }
  // Results in int32 would take the bytes of f32.
  EXPECT_EQ(message([](JobSpec& spec) { spec.gradient_dtype = "int32"; }), "no error");
  EXPECT_EQ(message([](JobSpec& spec) { spec.keys[1].format = "int32"; }), "no error");
  EXPECT_THAT(message([](JobSpec& spec) { spec.parameter_dtype = "int32"; }),
              HasSubstr("int8, int4, topk, got 'int32'"));
  EXPECT_EQ(message([](JobSpec& spec) {
              spec.keys[1].format = "int32";
              spec.max_ranks = 512;
            }),
            "no error");
  EXPECT_EQ(message([](JobSpec& spec) {
              spec.keys[1].format = "int32";
              spec.max_ranks = 513;
            }),
            "max_ranks: the integers of format int32 are added in 32 bits, which hold the sum of "
            "512 ranks, and the job has 513");
  for (const char* format : {"fp8", "INT8", "int8 ", "f64", "top-k"}) {
    EXPECT_THAT(message([&](JobSpec& spec) { spec.gradient_dtype = format; }),
                HasSubstr(fmt::format("gradient_dtype: must be one of f32, bf16, f16, fp8-e4m3, "
                                      "fp8-e5m2, int32, int8, int4, topk, got '{}'",
                                      format)));
    EXPECT_THAT(message([&](JobSpec& spec) { spec.keys[1].format = format; }),
                HasSubstr("keys[1].format: must be one of f32, bf16"));
  }
  EXPECT_THAT(message([](JobSpec& spec) { spec.gradient_dtype = ""; }),
              HasSubstr("gradient_dtype: must be one of"));
  EXPECT_THAT(message([](JobSpec& spec) { spec.parameter_dtype = "INT8"; }),
              HasSubstr("parameter_dtype: must be one of f32, bf16, f16, fp8-e4m3, fp8-e5m2, int8, "
                        "int4, topk, got 'INT8'"));
  EXPECT_EQ(message([](JobSpec& spec) { spec.rounding = "stochastic"; }), "no error");
  for (const char* word : {"", "random", "Nearest"}) {
    EXPECT_THAT(
        message([&](JobSpec& spec) { spec.rounding = word; }),
        HasSubstr(fmt::format("rounding: must be one of nearest, stochastic, got '{}'", word)));
  }
}

// An index has 16 bits.
TEST(BadInput, TopKOfChunksThatAreTooLong) {
  JobSpec spec;
  spec.name = "job";
  spec.keys = {{.name = "a", .elements = 100'000}, {.name = "b", .elements = 1}};
  spec.keys[1].format = "topk";
  spec.chunk_elements = 65'536;
  validate(spec);
  spec.chunk_elements += 32;
  EXPECT_THAT(
      message_of([&] { validate(spec); }),
      HasSubstr("keys[1].format: topk is for chunks of at most 65536 elements, and these have "
                "65568"));
  spec.keys[1].format = "int4";
  validate(spec);
  spec.gradient_dtype = "topk";
  EXPECT_THAT(message_of([&] { validate(spec); }), HasSubstr("gradient_dtype: topk is for chunks"));
}

TEST(BadInput, RangesThatRanksExchange) {
  JobSpec spec;
  spec.name = "job";
  spec.world_size = 2;
  spec.max_ranks = 3;
  spec.keys = {{.name = "a", .elements = 100}, {.name = "b", .elements = 10}};
  const auto refuses = [&spec](const std::string& words, std::vector<ExchangedRange> ranges) {
    spec.keys[1].exchanged_by = std::move(ranges);
    EXPECT_THAT(message_of([&] { validate(spec); }), HasSubstr("keys[1].exchanged_by: " + words));
  };
  refuses("a range from 4 up to, and without, 4", {{4, 1}, {4, 1}, {10, 1}});
  refuses("a range from 4 up to, and without, 11", {{4, 1}, {11, 1}});
  refuses("a range from 0 up to, and without, 0", {{0, 1}, {10, 1}});
  refuses("0 ranks up to element 4; a job of 3 has 1 to 3", {{4, 0}, {10, 1}});
  refuses("4 ranks up to element 10", {{4, 3}, {10, 4}});
  refuses("the last range ends at element 9, and the key at 10", {{4, 1}, {9, 1}});
  refuses("65537 ranges", std::vector<ExchangedRange>(65537));
  spec.keys[1].exchanged_by = {{4, 1}, {10, 3}};
  validate(spec);
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
  using testing::ElementsAre;
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
  EXPECT_THAT(message_of([] { parse_credential(R"({"rank":0})"); }),
              HasSubstr("field \"incarnation\" is missing"));
  EXPECT_THAT(message_of([] { parse_credential(R"({"rank":1024,"incarnation":1})"); }),
              HasSubstr("rank: must be an integer from 0 to 1023, got 1024"));
  EXPECT_THAT(message_of([] { parse_hyper(R"({"rank":0,"incarnation":1,"values":{}})"); }),
              HasSubstr("values: must have at least 1 entries"));
  std::string many;
  for (int i = 0; i < 4097; ++i) many += fmt::format("{}\"h{}\":1", i == 0 ? "" : ",", i);
  EXPECT_THAT(
      message_of([&] { parse_hyper(R"({"rank":0,"incarnation":1,"values":{)" + many + "}}"); }),
      HasSubstr("more than 4096 entries"));
  EXPECT_THAT(message_of([] { parse_offer(R"({"transport":"shm","address":"/x","ticket":""})"); }),
              HasSubstr("ticket: must be a string of 1 to 255 bytes"));
  EXPECT_THAT(message_of([] {
                parse_log_page(R"({"records":[{"kind":"vanished","rank":0,"incarnation":1}]})");
              }),
              HasSubstr("records[0].kind: must be one of admitted, lost, left, hyper, "
                        "excluded, failed, set, forked, scheduled, discarded, killed, revived, "
                        "got \"vanished\""));
  EXPECT_THAT(
      message_of([] { parse_branch_request(R"({"rank":0,"incarnation":1,"action":"graft"})"); }),
      HasSubstr(
          "action: must be one of list, fork, schedule, discard, kill, revive, got \"graft\""));
  std::string turns;
  for (int i = 0; i < 257; ++i) turns += fmt::format("{}{{\"branch\":0}}", i == 0 ? "" : ",");
  EXPECT_THAT(message_of([&] {
                parse_branch_request(R"({"rank":0,"incarnation":1,"action":"schedule","turns":[)" +
                                     turns + "]}");
              }),
              HasSubstr("more than 256 entries"));
  EXPECT_THAT(message_of([] { parse_pulse("{}"); }), HasSubstr("\"completed_round\" is missing"));
  EXPECT_THAT(message_of([] { parse_status("[]"); }),
              HasSubstr("answer to status: must be an object"));
}

TEST(BadInput, NothingLongIsRepeatedInAMessage) {
  const std::string name(1 << 20, 'n');
  EXPECT_LT(message_of([&] { parse_credential("{\"" + name + "\":1}"); }).size(), 200u);
  EXPECT_LT(message_of([&] { parse_credential("{\"rank\":\"" + name + "\"}"); }).size(), 200u);
  EXPECT_LT(message_of([&] { parse_credential(name); }).size(), 400u);
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
  const auto with = [&](const std::function<void(JobSpec&)>& change) {
    JobSpec here = job;
    change(here);
    return difference(here, job);
  };
  EXPECT_EQ(difference(job, job), "");
  EXPECT_EQ(with([](JobSpec& s) { s.keys[1].elements = 10; }),
            "key 1 'fc.weight' has 10 elements here and 12 in the job");
  EXPECT_EQ(with([](JobSpec& s) { s.keys[1].name = "fc"; }),
            "key 1 is 'fc' here and 'fc.weight' in the job");
  EXPECT_EQ(with([](JobSpec& s) { s.keys[0].lr_scale = 2; }),
            "key 0 'conv': lr_scale is 2 here and 1 in the job");
  EXPECT_EQ(with([](JobSpec& s) { s.keys[0].group = 2; }),
            "key 0 'conv': group is 2 here and 0 in the job");
  EXPECT_EQ(with([](JobSpec& s) {
              s.keys[1].shape = {3, 4};
            }),
            "key 1 'fc.weight': shape is [3,4] here and [] in the job");
  EXPECT_EQ(with([](JobSpec& s) { s.keys.pop_back(); }), "there are 1 keys here and 2 in the job");
  EXPECT_EQ(with([](JobSpec& s) { s.world_size = 2; }), "world_size is 2 here and 1 in the job");
  EXPECT_EQ(with([](JobSpec& s) { s.max_ranks = 1; }), "");  // as world_size says
  EXPECT_EQ(with([](JobSpec& s) { s.max_ranks = 9; }), "max_ranks is 9 here and 1 in the job");
  EXPECT_EQ(with([](JobSpec& s) { s.optimizer = "adam"; }),
            "optimizer is 'adam' here and 'none' in the job");
  EXPECT_EQ(with([](JobSpec& s) { s.hyper["lr"] = 0.5; }),
            "hyper is {\"lr\":0.5} here and {} in the job");
}

// Whatever differs is found: every field that travels is compared.
TEST(Difference, MissesNoField) {
  const uint64_t seed = std::random_device{}();
  Random random(seed);
  for (int i = 0; i < 500; ++i) {
    SCOPED_TRACE(fmt::format("seed {} pair {}", seed, i));
    JobSpec a = random.spec();
    JobSpec b = random.spec();
    if (a.max_ranks == 0) a.max_ranks = a.world_size;
    if (b.max_ranks == 0) b.max_ranks = b.world_size;
    EXPECT_EQ(difference(a, b).empty(), a == b);
    EXPECT_EQ(difference(a, a), "");
  }
}

}  // namespace
}  // namespace phub
