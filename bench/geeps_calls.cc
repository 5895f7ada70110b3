#include "bench/geeps_calls.h"

#include <ctime>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/geeps_run.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/standalone_exchange.h"

namespace phub::geeps_bench {
namespace {

constexpr uint32_t kTables = 8;

void ok(phub_code code) {
  if (code != PHUB_OK) throw std::runtime_error(phub_last_error());
}

// `iterate()` makes so many calls; `settle()` waits for the device, and is not counted.
template <typename Iterate, typename Settle>
double per_call(uint32_t iterations, uint32_t calls, Iterate iterate, Settle settle) {
  double spent = 0;
  for (uint32_t i = 0; i < iterations; ++i) {
    const double begin = own_processor_us();
    iterate();
    spent += own_processor_us() - begin;
    settle();
  }
  return spent / (static_cast<double>(iterations) * calls);
}

double time_reads(uint32_t iterations, const CallDevices& devices, bool in_stream) {
  std::vector<geeps::TableSpec> tables;
  for (uint32_t t = 0; t < kTables; ++t) {
    tables.push_back({.name = std::to_string(t), .row_floats = 1, .keys = geeps::dense(1)});
  }
  const auto device = devices.make();
  const auto stream = in_stream ? device->make_stream("caller") : nullptr;
  geeps::StandaloneExchange exchange(job_of(tables));
  geeps::Cache cache(*device, exchange, tables, {.compute = stream.get()});
  const auto iterate = [&] {
    for (uint32_t t = 0; t < kTables; ++t) cache.post_read(cache.read(t, tables[t].keys).handle);
  };
  cache.begin_virtual();
  iterate();
  cache.finish_sequence();
  return per_call(iterations, 2 * kTables, iterate, [&] {
    if (stream) stream->synchronize();
  });
}

// The same in C, in a stream.
class InC {
 public:
  explicit InC(const CallDevices& devices) {
    ok(phub_options_create(&job_));
    ok(phub_options_set(job_, "job", "geeps"));
    ok(phub_options_set(job_, "optimizer", "sgd"));
    ok(phub_options_set(job_, "on_nonfinite", "pass"));
    ok(phub_geeps_options_create(&tables_));
    for (uint32_t t = 0; t < kTables; ++t) {
      ok(phub_geeps_options_add_table(tables_, std::to_string(t).c_str(), 1, nullptr, 1));
    }
    ok(phub_options_add_tables(job_, tables_));
    ok(devices.open(&device_));
    const phub_code made = phub_host_stream_create(device_, &stream_);
    if (made != PHUB_INVALID) ok(made);  // else it is a GPU: its default stream is null
    ok(phub_geeps_options_set_stream(tables_, stream_));
    ok(phub_geeps_create_standalone(device_, job_, tables_, nullptr, 0, &geeps_));
  }
  ~InC() {
    phub_geeps_destroy(geeps_);
    if (stream_ != nullptr) phub_host_stream_destroy(stream_);
    phub_device_close(device_);
    phub_geeps_options_destroy(tables_);
    phub_options_destroy(job_);
  }
  InC(const InC&) = delete;
  InC& operator=(const InC&) = delete;

  double time(uint32_t iterations, bool updates) {
    ok(phub_geeps_begin_virtual(geeps_));
    iterate(updates);
    ok(phub_geeps_finish(geeps_));
    return per_call(
        iterations, (updates ? 5 : 2) * kTables, [&] { iterate(updates); },
        [&] {
          ok(phub_geeps_wait_all(geeps_));
          if (stream_ != nullptr) ok(phub_host_stream_wait(stream_));
        });
  }

 private:
  void iterate(bool updates) {
    phub_buffer buffer = {};
    buffer.size = sizeof buffer;
    for (uint32_t t = 0; t < kTables; ++t) {
      ok(phub_geeps_read(geeps_, t, nullptr, 0, PHUB_STALENESS_OF_JOB, &buffer));
      ok(phub_geeps_post_read(geeps_, buffer.handle));
      if (!updates) continue;
      ok(phub_geeps_pre_update(geeps_, t, nullptr, 0, &buffer));
      ok(phub_geeps_update(geeps_, buffer.handle));
      ok(phub_geeps_table_clock(geeps_, t));
    }
  }

  phub_options* job_ = nullptr;
  phub_geeps_options* tables_ = nullptr;
  phub_device* device_ = nullptr;
  phub_host_stream* stream_ = nullptr;
  phub_geeps* geeps_ = nullptr;
};

}  // namespace

double own_processor_us() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
}

CallTimes time_calls(uint32_t iterations, const CallDevices& devices) {
  InC in_c(devices);
  return {.in_thread = time_reads(iterations, devices, false),
          .in_stream = time_reads(iterations, devices, true),
          .in_stream_c = in_c.time(iterations, false),
          .round_stream_c = in_c.time(iterations, true)};
}

}  // namespace phub::geeps_bench
