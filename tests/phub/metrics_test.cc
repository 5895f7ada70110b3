// /metrics: the format as Prometheus reads it, every value, and the table in phub/README.md.
#include "phub/control/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/worker/box.h"
#include "transport/control/http_client.h"
#include "worker/worker.h"

namespace phub {
namespace metrics_test {

using ::testing::HasSubstr;

using Labels = std::map<std::string, std::string>;
struct Family {
  std::string type, help;
  std::map<Labels, double> samples;
};

// What stands between the quotes of a label, whose escapes kLabel has looked at.
std::string unquoted(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool escaped = text[i] == '\\';
    if (escaped) ++i;
    out += escaped && text[i] == 'n' ? '\n' : text[i];
  }
  return out;
}

// A strict reader of the text format 0.0.4: families one after another, HELP, TYPE, samples;
// nothing else.
std::map<std::string, Family> read(const std::string& text) {
  static const std::regex kHelp("# HELP ([a-z_][a-z0-9_]*) (.*)"), kType("# TYPE (.*) (.*)"),
      kSample(R"(([a-z_][a-z0-9_]*)(?:\{(.*)\})? ([^ ]+))"),
      kLabel(R"re(([a-z_][a-z0-9_]*)="((?:[^"\\]|\\["\\n])*)"(?:,|$))re");
  EXPECT_TRUE(text.ends_with('\n'));
  std::map<std::string, Family> all;
  std::string name;
  std::istringstream lines(text);
  std::smatch found;
  for (std::string line; std::getline(lines, line);) {
    SCOPED_TRACE(line);
    if (std::regex_match(line, found, kHelp)) {
      name = found[1];
      EXPECT_TRUE(all.emplace(name, Family{"", found[2], {}}).second) << "a family twice";
    } else if (std::regex_match(line, found, kType)) {
      EXPECT_EQ(found[1], name);
      EXPECT_EQ(std::exchange(all[name].type, found[2]), "");
    } else if (std::regex_match(line, found, kSample)) {
      EXPECT_EQ(found[1], name);
      EXPECT_NE(all[name].type, "");
      const std::string value = found[3];
      Labels labels;
      std::string rest = found[2];
      for (std::smatch label;
           std::regex_search(rest, label, kLabel, std::regex_constants::match_continuous);
           rest = std::string(label.suffix())) {
        EXPECT_TRUE(labels.emplace(label[1], unquoted(label[2])).second) << "a label twice";
      }
      EXPECT_EQ(rest, "");
      char* end = nullptr;
      const double number = std::strtod(value.c_str(), &end);
      EXPECT_EQ(*end, '\0');
      EXPECT_TRUE(all[name].samples.emplace(labels, number).second) << "a series twice";
    } else {
      ADD_FAILURE() << "no line of this format";
    }
  }
  return all;
}

const std::string kHostile = "a\"b\\c\nd} 1\n# TYPE x counter";

ServerStatus sample() {
  ServerStatus status;
  status.memory_bytes = 100;
  status.memory_limit_bytes = 1000;
  status.parent_budget_bytes_per_s = 2'000'000;
  const Flow flow = {.chunks = 7, .bytes_in = 70, .bytes_out = 700, .chunks_per_s = 1};
  JobStatus job;
  job.name = kHostile;
  job.state = "running";
  job.transport = "tcp";
  job.optimizer = "adam";
  job.completed_round = 417;
  job.window_bytes = 90;
  job.window_grown_bytes = 30;
  job.window_growths = 6;
  job.flow = flow;
  job.losses = {{.round = 416, .loss = 0.5, .name = "train"},
                {.round = 400, .nonfinite = true, .name = "val/top-5"}};
  job.ranks = {{.rank = 0, .incarnation = 2, .state = "live"},
               {.rank = 1, .incarnation = 1, .state = "lost"}};
  job.ranks[0].lease_age_s = 0.5;
  job.ranks[0].contributions = 11;
  job.ranks[1].waited_chunks = 3;
  job.ranks[1].waited_s = 1.25;
  job.ranks[1].late = 7;
  job.missing = {1};
  job.waiting_for = {1};
  job.cores = {{.core = 4,
                .counters = {1, 2, 3, 4, 5, 6, 7},
                .queues = {{.queue = 9, .nic = "mlx5_0", .flow = flow}}}};
  status.jobs = {job};
  status.nodes = {{.node = 1,
                   .cores = {{.core = 4,
                              .cpu = 12,
                              .busy_passes = 20,
                              .idle_passes = 30,
                              .sleeps = 40,
                              .asleep_s = 2.5,
                              .flow = flow}},
                   .nics = {{.name = "mlx5_0",
                             .transport = "verbs",
                             .budget_bytes_per_s = 31'250'000,
                             .flow = flow}}}};
  return status;
}

HttpCounters sample_http() {
  HttpCounters http;
  http.connections = 5;
  http.answers[{"/metrics", 200}] = 3;
  http.answers[{"", 431}] = 2;
  static const TlsCounters tls;
  http.tls = &tls;
  return http;
}

TEST(Metrics, EveryFamilyIsWellFormedAndNamedAsIsTheCustom) {
  const auto families = read(metrics_text(sample(), sample_http(), process_usage()));
  EXPECT_EQ(families.size(), metric_infos().size());
  for (const auto& [name, family] : families) {
    SCOPED_TRACE(name);
    EXPECT_TRUE(family.type == "counter" || family.type == "gauge") << family.type;
    EXPECT_EQ(name.ends_with("_total"), family.type == "counter");
    EXPECT_TRUE(name.starts_with("phub_") || name.starts_with("process_"));
    EXPECT_THAT(family.help, ::testing::EndsWith("."));
    EXPECT_FALSE(family.samples.empty());
  }
}

TEST(Metrics, HaveTheValuesOfTheStatus) {
  ProcessUsage process;
  process.cpu_s = 12.75;
  const auto families = read(metrics_text(sample(), sample_http(), process));
  const auto value = [&](const std::string& name, const Labels& labels) {
    const auto family = families.find(name);
    if (family == families.end()) return -1.0;
    const auto sample = family->second.samples.find(labels);
    return sample == family->second.samples.end() ? -2.0 : sample->second;
  };
  const Labels job = {{"job", kHostile}};
  const auto of_job = [&](const Labels& more) {
    Labels all = job;
    all.insert(more.begin(), more.end());
    return all;
  };
  const Labels core = {{"core", "4"}, {"cpu", "12"}, {"node", "1"}};
  const Labels nic = {{"nic", "mlx5_0"}, {"transport", "verbs"}, {"node", "1"}};
  const Labels queue =
      of_job({{"core", "4"}, {"queue", "9"}, {"nic", "mlx5_0"}, {"transport", "tcp"}});
  const Labels endpoint = of_job({{"core", "4"}, {"transport", "tcp"}});
  EXPECT_EQ(value("phub_jobs", {}), 1);
  EXPECT_EQ(value("phub_memory_bytes", {}), 100);
  EXPECT_EQ(value("phub_job_info", of_job({{"transport", "tcp"}, {"optimizer", "adam"}})), 1);
  EXPECT_EQ(value("phub_job_state", of_job({{"state", "running"}})), 1);
  EXPECT_EQ(value("phub_job_state", of_job({{"state", "paused"}})), 0);
  EXPECT_EQ(value("phub_job_rounds_total", job), 417);
  EXPECT_EQ(value("phub_job_chunks_total", job), 7);
  EXPECT_EQ(value("phub_job_ranks", of_job({{"state", "lost"}})), 1);
  EXPECT_EQ(value("phub_job_missing_ranks", job), 1);
  EXPECT_EQ(value("phub_job_window_bytes", job), 90);
  EXPECT_EQ(value("phub_job_window_grown_bytes", job), 30);
  EXPECT_EQ(value("phub_job_window_growths_total", job), 6);
  EXPECT_EQ(value("phub_job_loss", of_job({{"loss", "train"}})), 0.5);
  EXPECT_TRUE(std::isnan(value("phub_job_loss", of_job({{"loss", "val/top-5"}}))));
  EXPECT_EQ(value("phub_job_loss_round", of_job({{"loss", "val/top-5"}})), 400);
  EXPECT_EQ(value("phub_rank_lease_age_seconds", of_job({{"rank", "0"}})), 0.5);
  EXPECT_EQ(value("phub_rank_lease_age_seconds", of_job({{"rank", "1"}})), -2) << "it is lost";
  EXPECT_EQ(value("phub_rank_contributions_total", of_job({{"rank", "0"}})), 11);
  EXPECT_EQ(value("phub_rank_lag_chunks", of_job({{"rank", "1"}})), 3);
  EXPECT_EQ(value("phub_rank_awaited_seconds", of_job({{"rank", "1"}})), 1.25);
  EXPECT_EQ(value("phub_rank_late_rounds", of_job({{"rank", "1"}})), 7);
  EXPECT_EQ(value("phub_core_asleep_seconds_total", core), 2.5);
  EXPECT_EQ(value("phub_core_sleeps_total", core), 40);
  EXPECT_EQ(value("phub_core_sent_bytes_total", core), 700);
  EXPECT_EQ(value("phub_nic_received_bytes_total", nic), 70);
  EXPECT_EQ(value("phub_nic_budget_bytes_per_second", nic), 31'250'000);
  EXPECT_EQ(value("phub_parent_budget_bytes_per_second", {}), 2'000'000);
  EXPECT_EQ(value("phub_queue_chunks_total", queue), 7);
  EXPECT_EQ(value("phub_endpoint_sends_total", endpoint), 1);
  EXPECT_EQ(value("phub_endpoint_doorbells_total", endpoint), 3);
  EXPECT_EQ(value("phub_endpoint_wakeups_total", endpoint), 7);
  EXPECT_EQ(value("phub_http_requests_total", {{"path", ""}, {"code", "431"}}), 2);
  EXPECT_EQ(value("phub_http_connections", {}), 5);
  EXPECT_EQ(value("process_cpu_seconds_total", {}), 12.75);
}

TEST(Metrics, TheProcessIsThisOne) {
  const ProcessUsage usage = process_usage();
  EXPECT_GT(usage.resident_bytes, 1u << 20);
  EXPECT_GT(usage.virtual_bytes, usage.resident_bytes);
  EXPECT_GE(usage.threads, 1u);
  EXPECT_GE(usage.open_fds, 3u);
  EXPECT_GE(usage.max_fds, usage.open_fds);
  EXPECT_LE(usage.start_s, static_cast<double>(time(nullptr)) + 1);
  EXPECT_GT(usage.start_s, static_cast<double>(time(nullptr)) - 86400);
  EXPECT_EQ(process_usage("/nowhere").resident_bytes, 0u);
}

// `name` | type | labels | what
TEST(Metrics, TheReadmeHasEachOfThem) {
  std::ifstream file(PHUB_README);
  std::map<std::string, std::pair<std::string, std::set<std::string>>> documented;
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("| `phub_") && !line.starts_with("| `process_")) continue;
    std::istringstream cells(line);
    std::string empty, name, type, labels;
    std::getline(cells, empty, '|');
    std::getline(cells, name, '|');
    std::getline(cells, type, '|');
    std::getline(cells, labels, '|');
    name = name.substr(2, name.size() - 4);
    type = type.substr(1, type.size() - 2);
    std::set<std::string> set;
    std::istringstream list(labels);
    for (std::string label; list >> label;) {
      label.erase(std::remove(label.begin(), label.end(), ','), label.end());
      if (!label.empty()) set.insert(label);
    }
    documented[name] = {type, set};
  }
  const auto families = read(metrics_text(sample(), sample_http(), process_usage()));
  for (const auto& [name, family] : families) {
    SCOPED_TRACE(name);
    ASSERT_TRUE(documented.contains(name)) << "phub/README.md does not have it";
    std::set<std::string> labels;
    for (const auto& [label, value] : family.samples.begin()->first) labels.insert(label);
    EXPECT_EQ(documented[name].first, family.type);
    EXPECT_EQ(documented[name].second, labels);
  }
  for (const auto& [name, rest] : documented) {
    EXPECT_TRUE(families.contains(name)) << name << " is in phub/README.md only";
  }
}

double sum(const Family& family) {
  double all = 0;
  for (const auto& [labels, value] : family.samples) all += value;
  return all;
}

std::map<std::string, Family> scrape(const std::string& address) {
  HttpClient client(address);
  const HttpAnswer answer = client.request("GET", "/metrics", "", "", 5000);
  EXPECT_EQ(answer.status, 200u);
  return read(answer.body);
}

// What a real job leaves behind, to the byte.
TEST(Metrics, CountARealJobExactly) {
  constexpr uint32_t kRanks = 2;
  constexpr uint64_t kRounds = 5, kElements = 100'000, kChunks = 13;
  ::phub::testing::Box box;
  JobSpec spec;
  spec.name = "counted";
  spec.world_size = kRanks;
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  spec.keys = {{.name = "w", .elements = kElements}};
  ::phub::testing::each_rank(kRanks, [&](uint32_t rank) {
    WorkerOptions options = box.options(spec);
    options.rank = static_cast<int32_t>(rank);
    Worker worker(options);
    worker.wait(0);
    for (uint64_t round = 0; round < kRounds; ++round) worker.push_pull(0);
    worker.leave();
  });
  while (!box.status().jobs.empty()) usleep(1000);
  auto families = scrape(box.address());
  EXPECT_EQ(sum(families["phub_jobs"]), 0);
  EXPECT_EQ(sum(families["phub_core_chunks_total"]), kChunks * kRounds);
  EXPECT_EQ(sum(families["phub_nic_chunks_total"]), kChunks * kRounds);
  EXPECT_EQ(sum(families["phub_core_received_bytes_total"]), 4 * kElements * kRounds * kRanks);
  EXPECT_EQ(sum(families["phub_nic_received_bytes_total"]), 4 * kElements * kRounds * kRanks);
  // A rank that has just joined gets the parameters as they are.
  EXPECT_EQ(sum(families["phub_nic_sent_bytes_total"]), 4 * kElements * (kRounds + 1) * kRanks);
  EXPECT_EQ(families["phub_http_requests_total"]
                .samples[(Labels{{"path", "/v1/jobs/{job}/join"}, {"code", "200"}})],
            kRanks);
  EXPECT_EQ(sum(families["phub_core_passes_total"]) > 0, true);

  const auto later = scrape(box.address());
  for (const auto& [name, family] : families) {
    if (family.type != "counter") continue;
    for (const auto& [labels, value] : family.samples) {
      EXPECT_GE(later.at(name).samples.at(labels), value) << name << " goes back";
    }
  }
}

// A job that stands still has no speed.
TEST(Metrics, ARateIsOfNow) {
  ::phub::testing::Box box;
  JobSpec spec;
  spec.name = "rates";
  spec.keys = {{.name = "w", .elements = 100}};
  Worker worker(box.options(spec));
  worker.wait(0);
  const auto rate_is = [&](auto wanted) {
    for (int i = 0; i < 3000; ++i) {
      if (wanted(box.status().jobs.at(0).rounds_per_s)) return true;
      usleep(10'000);
    }
    return false;
  };
  EXPECT_TRUE(rate_is([&](double rate) {
    worker.push_pull(0);
    return rate > 0;
  }));
  EXPECT_TRUE(rate_is([](double rate) { return rate == 0; }));
}

// Which rank and which key a round waits for.
TEST(Metrics, StatusNamesTheRankAndTheKeyThatARoundWaitsFor) {
  ::phub::testing::Box box;
  JobSpec spec;
  spec.name = "waits";
  spec.world_size = 2;
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  spec.keys = {{.name = "first", .elements = 100}, {.name = "second", .elements = 30'000}};
  WorkerOptions options = box.options(spec);
  options.rank = 0;
  options.await_ranks = false;
  Worker zero(options);
  options.rank = 1;
  Worker one(options);
  for (size_t key : {0, 1}) zero.push(key), one.push(key);
  zero.wait_all();
  one.wait_all();
  one.push(0);
  zero.push(0);
  zero.push(1);
  zero.wait(0);
  one.wait(0);
  RankStatus waited;
  while (waited.waited_chunks < 4 || waited.waited_s == 0) {
    const ServerStatus status = box.status();
    for (const RankStatus& rank : status.jobs.at(0).ranks) {
      if (rank.waited_chunks > 0) waited = rank;
    }
  }
  EXPECT_EQ(waited.rank, 1u);
  EXPECT_EQ(waited.waited_key, "second");
  EXPECT_EQ(waited.waited_round, 2u);
  EXPECT_EQ(waited.waited_chunks, 4u);
  one.push(1);
  zero.wait(1);
  one.wait(1);
  while (box.status().jobs.at(0).ranks.at(1).waited_chunks > 0) usleep(1000);
}

}  // namespace metrics_test
}  // namespace phub
