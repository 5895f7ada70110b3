#include "phub/control/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

namespace phub {
namespace {

struct Input {
  const ServerStatus& status;
  const HttpCounters& http;
  const ProcessUsage& process;
};

// The samples of one metric.
class Samples {
 public:
  using Label = std::pair<std::string_view, std::string_view>;

  Samples(std::string& out, std::string_view name) : out_(out), name_(name) {}

  void add(std::initializer_list<Label> labels, uint64_t value) {
    begin(labels);
    fmt::format_to(std::back_inserter(out_), " {}\n", value);
  }
  void add(std::initializer_list<Label> labels, double value) {
    begin(labels);
    if (std::isnan(value)) {
      out_ += " NaN\n";
    } else if (std::isinf(value)) {
      out_ += value > 0 ? " +Inf\n" : " -Inf\n";
    } else {
      fmt::format_to(std::back_inserter(out_), " {}\n", value);
    }
  }

 private:
  void begin(std::initializer_list<Label> labels) {
    out_ += name_;
    char separator = '{';
    for (const auto& [label, value] : labels) {
      out_ += separator;
      separator = ',';
      out_.append(label).append("=\"");
      escape(value);
      out_ += '"';
    }
    if (separator == ',') out_ += '}';
  }
  void escape(std::string_view value) {
    for (const char c : value) {
      if (c == '\n') {
        out_ += "\\n";
        continue;
      }
      if (c == '\\' || c == '"') out_ += '\\';
      out_ += c;
    }
  }

  std::string& out_;
  const std::string_view name_;
};

using WriteSamples = void (*)(const Input&, Samples&);

// object.*first.*second …, as what a sample takes.
template <auto kFirst, auto... kRest, class T>
auto value_of(const T& object) {
  if constexpr (sizeof...(kRest) > 0) {
    return value_of<kRest...>(object.*kFirst);
  } else if constexpr (std::is_same_v<std::remove_cvref_t<decltype(object.*kFirst)>, double>) {
    return object.*kFirst;
  } else {
    return uint64_t{object.*kFirst};
  }
}

template <auto... kPath>
void of_server(const Input& in, Samples& out) {
  out.add({}, value_of<kPath...>(in.status));
}

template <auto... kPath>
void of_http(const Input& in, Samples& out) {
  out.add({}, value_of<kPath...>(in.http));
}

template <auto... kPath>
void of_process(const Input& in, Samples& out) {
  out.add({}, value_of<kPath...>(in.process));
}

template <class F>
void each_core(const Input& in, F f) {
  for (const NodeStatus& node : in.status.nodes) {
    for (const CoreStatus& core : node.cores) {
      f(core, fmt::format("{}", core.core), fmt::format("{}", core.cpu),
        fmt::format("{}", node.node));
    }
  }
}
template <auto... kPath>
void of_core(const Input& in, Samples& out) {
  each_core(in, [&](const CoreStatus& core, std::string_view id, std::string_view cpu,
                    std::string_view node) {
    out.add({{"core", id}, {"cpu", cpu}, {"node", node}}, value_of<kPath...>(core));
  });
}
void core_passes(const Input& in, Samples& out) {
  each_core(in, [&](const CoreStatus& core, std::string_view id, std::string_view cpu,
                    std::string_view node) {
    out.add({{"core", id}, {"cpu", cpu}, {"node", node}, {"found", "work"}}, core.busy_passes);
    out.add({{"core", id}, {"cpu", cpu}, {"node", node}, {"found", "nothing"}}, core.idle_passes);
  });
}

template <auto... kPath>
void of_nic(const Input& in, Samples& out) {
  for (const NodeStatus& node : in.status.nodes) {
    const std::string number = fmt::format("{}", node.node);
    for (const NicStatus& nic : node.nics) {
      out.add({{"nic", nic.name}, {"transport", nic.transport}, {"node", number}},
              value_of<kPath...>(nic));
    }
  }
}

template <auto... kPath>
void of_job(const Input& in, Samples& out) {
  for (const JobStatus& job : in.status.jobs) {
    out.add({{"job", job.name}}, value_of<kPath...>(job));
  }
}
void job_info(const Input& in, Samples& out) {
  for (const JobStatus& job : in.status.jobs) {
    out.add({{"job", job.name}, {"transport", job.transport}, {"optimizer", job.optimizer}},
            uint64_t{1});
  }
}
void job_state(const Input& in, Samples& out) {
  for (const JobStatus& job : in.status.jobs) {
    for (const std::string_view state : {"assembling", "running", "paused", "failed"}) {
      out.add({{"job", job.name}, {"state", state}}, uint64_t{job.state == state});
    }
  }
}
void job_ranks(const Input& in, Samples& out) {
  for (const JobStatus& job : in.status.jobs) {
    for (const std::string_view state : {"absent", "joining", "live", "lost", "left"}) {
      auto count = static_cast<uint64_t>(
          std::count_if(job.ranks.begin(), job.ranks.end(),
                        [state](const RankStatus& rank) { return rank.state == state; }));
      if (state == "absent") {  // those are not listed
        count += job.max_ranks - std::min<uint64_t>(job.max_ranks, job.ranks.size());
      }
      out.add({{"job", job.name}, {"state", state}}, count);
    }
  }
}
template <auto kList>
void job_count(const Input& in, Samples& out) {
  for (const JobStatus& job : in.status.jobs) {
    out.add({{"job", job.name}}, uint64_t{(job.*kList).size()});
  }
}

template <auto... kPath>
void of_rank(const Input& in, Samples& out) {
  for (const JobStatus& job : in.status.jobs) {
    for (const RankStatus& rank : job.ranks) {
      const std::string number = fmt::format("{}", rank.rank);
      out.add({{"job", job.name}, {"rank", number}}, value_of<kPath...>(rank));
    }
  }
}
void lease_age(const Input& in, Samples& out) {
  for (const JobStatus& job : in.status.jobs) {
    for (const RankStatus& rank : job.ranks) {
      if (rank.state != "live") continue;
      out.add({{"job", job.name}, {"rank", fmt::format("{}", rank.rank)}}, rank.lease_age_s);
    }
  }
}

template <class F>
void each_job_core(const Input& in, F f) {
  for (const JobStatus& job : in.status.jobs) {
    for (const JobCoreStatus& core : job.cores) f(job, core, fmt::format("{}", core.core));
  }
}
template <auto... kPath>
void of_endpoint(const Input& in, Samples& out) {
  each_job_core(in, [&](const JobStatus& job, const JobCoreStatus& core, std::string_view id) {
    out.add({{"job", job.name}, {"core", id}, {"transport", job.transport}},
            value_of<kPath...>(core.counters));
  });
}
void endpoint_polls(const Input& in, Samples& out) {
  each_job_core(in, [&](const JobStatus& job, const JobCoreStatus& core, std::string_view id) {
    const auto add = [&](std::string_view found, uint64_t polls) {
      out.add({{"job", job.name}, {"core", id}, {"transport", job.transport}, {"found", found}},
              polls);
    };
    add("work", core.counters.polls);
    add("nothing", core.counters.empty_polls);
  });
}
template <auto... kPath>
void of_queue(const Input& in, Samples& out) {
  each_job_core(in, [&](const JobStatus& job, const JobCoreStatus& core, std::string_view id) {
    for (const QueueStatus& queue : core.queues) {
      const std::string number = fmt::format("{}", queue.queue);
      out.add({{"job", job.name},
               {"core", id},
               {"queue", number},
               {"nic", queue.nic},
               {"transport", job.transport}},
              value_of<kPath...>(queue));
    }
  });
}

template <auto kField>
void of_tls(const Input& in, Samples& out) {
  if (in.http.tls != nullptr) out.add({}, (in.http.tls->*kField).load());
}
void http_answers(const Input& in, Samples& out) {
  for (const auto& [of, count] : in.http.answers) {
    out.add({{"path", of.first}, {"code", fmt::format("{}", of.second)}}, count);
  }
}
void jobs(const Input& in, Samples& out) { out.add({}, uint64_t{in.status.jobs.size()}); }

void switch_ended(const Input& in, Samples& out) {
  for (const JobStatus& job : in.status.jobs) {
    out.add({{"job", job.name}, {"reason", job.switch_ended}},
            job.switch_ended.empty() ? uint64_t{0} : uint64_t{1});
  }
}

template <class F>
void each_loss(const Input& in, Samples& out, F value) {
  for (const JobStatus& job : in.status.jobs) {
    for (const RoundLoss& of : job.losses) {
      out.add({{"job", job.name}, {"loss", of.name}}, value(of));
    }
  }
}
void losses(const Input& in, Samples& out) {
  each_loss(in, out, [](const RoundLoss& of) { return of.nonfinite ? std::nan("") : of.loss; });
}
void loss_rounds(const Input& in, Samples& out) {
  each_loss(in, out, [](const RoundLoss& of) { return of.round; });
}

constexpr std::string_view kCounter = "counter";
constexpr std::string_view kGauge = "gauge";

constexpr auto kMetrics = std::to_array<std::pair<MetricInfo, WriteSamples>>({
    {{"phub_jobs", kGauge, "Jobs on the server."}, jobs},
    {{"phub_memory_bytes", kGauge, "Memory that the jobs hold."},
     of_server<&ServerStatus::memory_bytes>},
    {{"phub_memory_limit_bytes", kGauge, "Memory that jobs may hold (--memory-limit)."},
     of_server<&ServerStatus::memory_limit_bytes>},
    {{"phub_parent_budget_bytes_per_second", kGauge,
      "What each NIC sends to the parent at most (--parent-budget), with headers; 0: no limit."},
     of_server<&ServerStatus::parent_budget_bytes_per_s>},

    {{"phub_job_info", kGauge, "1; its labels are the job's transport and optimizer."}, job_info},
    {{"phub_job_state", kGauge, "1 for the job's state, 0 for the other states."}, job_state},
    {{"phub_job_rounds_total", kCounter, "Rounds that every chunk has completed."},
     of_job<&JobStatus::completed_round>},
    {{"phub_job_durable_round", kGauge, "Round of the newest checkpoint."},
     of_job<&JobStatus::durable_round>},
    {{"phub_job_void_snapshots_total", kCounter, "Snapshots that lacked a rank's part."},
     of_job<&JobStatus::void_snapshots>},
    {{"phub_job_failed_saves_total", kCounter, "Checkpoints that could not be written."},
     of_job<&JobStatus::failed_saves>},
    {{"phub_job_chunks_total", kCounter, "Chunks that were completed, in all rounds."},
     of_job<&JobStatus::flow, &Flow::chunks>},
    {{"phub_job_switch_chunks_total", kCounter, "Chunks that came through a switch that adds."},
     of_job<&JobStatus::switch_chunks>},
    {{"phub_job_switch_ended", kGauge,
      "1 if no more chunks come through the switch; its label is the reason."},
     switch_ended},
    {{"phub_job_ranks", kGauge, "Ranks in each state."}, job_ranks},
    {{"phub_job_missing_ranks", kGauge, "Ranks that are expected and not live."},
     job_count<&JobStatus::missing>},
    {{"phub_job_awaited_ranks", kGauge, "Ranks that others wait for."},
     job_count<&JobStatus::waiting_for>},
    {{"phub_job_keys", kGauge, "Keys of the model."}, of_job<&JobStatus::keys>},
    {{"phub_job_chunks_per_round", kGauge, "Chunks of the model."}, of_job<&JobStatus::chunks>},
    {{"phub_job_elements", kGauge, "Elements of the model."}, of_job<&JobStatus::elements>},
    {{"phub_job_memory_bytes", kGauge, "Memory that the job holds."},
     of_job<&JobStatus::memory_bytes>},
    {{"phub_job_window_bytes", kGauge, "Windows of gradients of all ranks."},
     of_job<&JobStatus::window_bytes>},
    {{"phub_job_window_grown_bytes", kGauge, "By how much these are larger than at first."},
     of_job<&JobStatus::window_grown_bytes>},
    {{"phub_job_window_growths_total", kCounter, "Times that the window of a rank and core grew."},
     of_job<&JobStatus::window_growths>},

    {{"phub_job_loss", kGauge, "The latest loss that ranks reported by this name."}, losses},
    {{"phub_job_loss_round", kGauge, "The round of that loss."}, loss_rounds},

    {{"phub_rank_lease_age_seconds", kGauge, "Time since the last heartbeat of a live rank."},
     lease_age},
    {{"phub_rank_incarnation", kGauge, "Incarnations that the rank has had."},
     of_rank<&RankStatus::incarnation>},
    {{"phub_rank_contributions_total", kCounter, "Chunks that arrived from the rank."},
     of_rank<&RankStatus::contributions>},
    {{"phub_rank_lag_chunks", kGauge, "Chunks that others have sent and the rank has not."},
     of_rank<&RankStatus::waited_chunks>},
    {{"phub_rank_awaited_seconds", kGauge,
      "While others wait for the rank: time since it last sent a chunk."},
     of_rank<&RankStatus::waited_s>},
    {{"phub_rank_late_rounds", kGauge, "Rounds in a row that went on without the rank."},
     of_rank<&RankStatus::late>},

    {{"phub_core_passes_total", kCounter, "Passes of the core's loop, by what they found."},
     core_passes},
    {{"phub_core_sleeps_total", kCounter, "Times that the core slept until something woke it."},
     of_core<&CoreStatus::sleeps>},
    {{"phub_core_asleep_seconds_total", kCounter,
      "Time asleep; otherwise the core works or spins."},
     of_core<&CoreStatus::asleep_s>},
    {{"phub_core_chunks_total", kCounter, "Chunks that the core completed, in all jobs so far."},
     of_core<&CoreStatus::flow, &Flow::chunks>},
    {{"phub_core_received_bytes_total", kCounter, "Gradients that the core received."},
     of_core<&CoreStatus::flow, &Flow::bytes_in>},
    {{"phub_core_sent_bytes_total", kCounter, "Results that the core wrote back."},
     of_core<&CoreStatus::flow, &Flow::bytes_out>},

    {{"phub_nic_chunks_total", kCounter, "Chunks completed of the NIC's queues, in all jobs."},
     of_nic<&NicStatus::flow, &Flow::chunks>},
    {{"phub_nic_received_bytes_total", kCounter, "Gradients received over the NIC."},
     of_nic<&NicStatus::flow, &Flow::bytes_in>},
    {{"phub_nic_sent_bytes_total", kCounter, "Results sent over the NIC."},
     of_nic<&NicStatus::flow, &Flow::bytes_out>},
    {{"phub_nic_budget_bytes_per_second", kGauge,
      "What the NIC sends to workers at most (--nic-budget), with headers; 0: no limit."},
     of_nic<&NicStatus::budget_bytes_per_s>},

    {{"phub_queue_chunks_total", kCounter, "Chunks completed of a job's queue."},
     of_queue<&QueueStatus::flow, &Flow::chunks>},
    {{"phub_queue_received_bytes_total", kCounter, "Gradients received over a job's queue."},
     of_queue<&QueueStatus::flow, &Flow::bytes_in>},
    {{"phub_queue_sent_bytes_total", kCounter, "Results sent over a job's queue."},
     of_queue<&QueueStatus::flow, &Flow::bytes_out>},

    {{"phub_endpoint_sends_total", kCounter, "Writes posted."},
     of_endpoint<&EndpointCounters::sends>},
    {{"phub_endpoint_receives_total", kCounter, "Arrivals."},
     of_endpoint<&EndpointCounters::receives>},
    {{"phub_endpoint_doorbells_total", kCounter, "Batches of requests handed over."},
     of_endpoint<&EndpointCounters::doorbells>},
    {{"phub_endpoint_polls_total", kCounter,
      "Polls of completion queues or sockets, by what they found."},
     endpoint_polls},
    {{"phub_endpoint_system_calls_total", kCounter, "System calls, without those of sleeping."},
     of_endpoint<&EndpointCounters::system_calls>},
    {{"phub_endpoint_wakeups_total", kCounter, "Wake-ups of sleeping workers."},
     of_endpoint<&EndpointCounters::wakeups>},

    {{"phub_http_requests_total", kCounter, "Requests answered; no path: refused before routing."},
     http_answers},
    {{"phub_http_request_bytes_total", kCounter, "Bodies of requests."},
     of_http<&HttpCounters::request_bytes>},
    {{"phub_http_response_bytes_total", kCounter, "Bodies of answers."},
     of_http<&HttpCounters::response_bytes>},
    {{"phub_http_connections", kGauge, "Connections that are open."},
     of_http<&HttpCounters::connections>},
    {{"phub_http_connections_accepted_total", kCounter, "Connections that were served."},
     of_http<&HttpCounters::accepted>},
    {{"phub_http_connections_refused_total", kCounter,
      "Connections refused because there were too many."},
     of_http<&HttpCounters::refused>},
    {{"phub_http_connections_evicted_total", kCounter,
      "Idle connections that were closed to make room."},
     of_http<&HttpCounters::evicted>},
    {{"phub_http_timeouts_total", kCounter, "Connections that were idle or slow for too long."},
     of_http<&HttpCounters::timed_out>},
    {{"phub_tls_handshakes", kGauge, "Handshakes that are under way."},
     of_tls<&TlsCounters::handshakes>},
    {{"phub_tls_handshakes_completed_total", kCounter, "Clients that were let in."},
     of_tls<&TlsCounters::completed>},
    {{"phub_tls_handshakes_failed_total", kCounter, "Clients that were refused."},
     of_tls<&TlsCounters::failed>},
    {{"phub_tls_certificate_expires_seconds", kGauge, "When it expires, since the epoch."},
     of_tls<&TlsCounters::expires_s>},

    {{"process_cpu_seconds_total", kCounter, "CPU time, user and system."},
     of_process<&ProcessUsage::cpu_s>},
    {{"process_start_time_seconds", kGauge, "Start time, in seconds since the epoch."},
     of_process<&ProcessUsage::start_s>},
    {{"process_resident_memory_bytes", kGauge, "Resident memory, with mapped files."},
     of_process<&ProcessUsage::resident_bytes>},
    {{"process_virtual_memory_bytes", kGauge, "Address space."},
     of_process<&ProcessUsage::virtual_bytes>},
    {{"process_threads", kGauge, "Threads."}, of_process<&ProcessUsage::threads>},
    {{"process_open_fds", kGauge, "File descriptors that are open."},
     of_process<&ProcessUsage::open_fds>},
    {{"process_max_fds", kGauge, "File descriptors that may be open (ulimit -n)."},
     of_process<&ProcessUsage::max_fds>},
});

}  // namespace

std::string metrics_text(const ServerStatus& status, const HttpCounters& http,
                         const ProcessUsage& process) {
  const Input input{status, http, process};
  std::string out;
  for (const auto& [metric, write] : kMetrics) {
    fmt::format_to(std::back_inserter(out), "# HELP {} {}\n# TYPE {} {}\n", metric.name,
                   metric.help, metric.name, metric.type);
    Samples samples(out, metric.name);
    write(input, samples);
  }
  return out;
}

std::span<const MetricInfo> metric_infos() {
  static const auto infos = [] {
    std::array<MetricInfo, kMetrics.size()> all;
    for (size_t i = 0; i < all.size(); ++i) all[i] = kMetrics[i].first;
    return all;
  }();
  return infos;
}

}  // namespace phub
