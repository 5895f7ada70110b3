// A training process to be killed, stopped, replaced: trains as it is told, and notes every result.
//
// Ends with "left" (status 0), or "CODE: message" of the error that ended it (status 3).
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "tests/worker/fault_oracle.h"
#include "transport/control/messages_json.h"
#include "transport/control/token.h"
#include "worker/worker.h"

namespace phub {
namespace {

std::atomic<bool> stop_asked{false};

struct Settings {
  std::string server, job, notes, transport;
  int32_t rank = -1;
  bool replace = false;
  bool patient = false;      // asks again while the rank is taken
  bool rejoin = false;       // when it has lost its server
  bool idle = false;         // only heartbeats
  bool poll = false;         // looks whether results are there, and never waits
  bool fork = false;         // has a child that lives on
  uint64_t rounds = 0;       // 0: until SIGTERM
  uint64_t die_in = 0;       // round: kill -9 of itself once some of its keys are pushed
  uint64_t hang_in = 0;      // round: pushes some keys, and then nothing but heartbeats
  uint64_t leave_after = 0;  // rounds
};

void note(FILE* file, const std::string& bytes) {
  if (std::fwrite(bytes.data(), 1, bytes.size(), file) != bytes.size() || std::fflush(file) != 0) {
    throw std::runtime_error("cannot write the notes");
  }
}

void note_results(FILE* file, const Worker& worker, uint64_t round) {
  testing::Seen seen{.round = round};
  for (const ChunkPlace& chunk : chunks_of(worker.spec())) {
    const auto bytes = worker.parameters(chunk.key).subspan(chunk.begin, chunk.elements);
    seen.hashes.push_back(testing::hash_of(std::as_bytes(bytes)));
    seen.firsts.push_back(bytes.front());
  }
  note(file, testing::encode(seen));
}

[[noreturn]] void hang() {
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

// Last layer first, as backward passes do.
void push_all(Worker& worker, const Settings& settings, uint64_t round) {
  for (size_t key = worker.keys(); key-- > 0;) {
    if (key == 1 && round == settings.die_in) std::raise(SIGKILL);
    if (key == 1 && round == settings.hang_in) hang();
    if (testing::gives_null(worker.rank(), round, key)) {
      worker.push_null(key);
      continue;
    }
    testing::fill_gradient(worker.spec(), worker.rank(), round, key, worker.gradient(key));
    worker.push(key, static_cast<int32_t>(worker.keys() - key));
  }
}

std::unique_ptr<Worker> join(const Settings& settings) {
  WorkerOptions options;
  if (const char* transport = std::getenv("PHUB_TRANSPORT")) options.transport = transport;
  options.server = settings.server;
  options.token = token_from_environment();
  options.spec = from_json<JobSpec>(settings.job);
  options.rank = settings.rank;
  options.connect_timeout_ms = 30'000;
  options.replace = settings.replace;
  if (!settings.transport.empty()) options.transport = settings.transport;
  for (;;) {
    try {
      return std::make_unique<Worker>(options);
    } catch (const Error& error) {
      if (!settings.patient || error.code() != ErrorCode::kTaken) throw;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

// From a join to its end, or that of its server.
void train(Worker& worker, const Settings& settings, FILE* notes) {
  note(notes, testing::encode_header({.rank = worker.rank(),
                                      .incarnation = worker.incarnation(),
                                      .first_round = worker.first_round()}));
  if (settings.fork) {  // as a data loader is: it knows nothing of phub, and lives on
    const pid_t child = fork();
    if (child == 0) {
      for (;;) pause();
    }
    fmt::print("child {}\n", child);
    std::fflush(stdout);
  }
  while (settings.idle && !stop_asked) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  if (!settings.idle) {
    worker.broadcast(worker.spec().initial == "broadcast"
                         ? testing::initial_parameters(worker.spec())
                         : std::vector<float>{});
    uint64_t round = worker.first_round() - 1;
    note_results(notes, worker, round);
    while (!stop_asked && (settings.rounds == 0 || round < settings.rounds)) {
      push_all(worker, settings, ++round);
      for (size_t key = 0; key < worker.keys(); ++key) {
        while (settings.poll && !worker.test(key)) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        worker.wait(key);
      }
      note_results(notes, worker, round);
      // The server's writer yields to everybody else: without a pause it would wait for long.
      if (worker.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (settings.leave_after > 0 && round + 1 - worker.first_round() == settings.leave_after) {
        break;
      }
    }
  }
  worker.leave();
  fmt::print("reconnected {} times\nleft\n", worker.stats().reconnections);
}

void train(const Settings& settings) {
  std::unique_ptr<Worker> worker = join(settings);
  for (int life = 0;; ++life) {
    fmt::print("joined rank {} incarnation {} round {}\n", worker->rank(), worker->incarnation(),
               worker->first_round());
    std::fflush(stdout);
    const std::string path = testing::notes_of_life(settings.notes, life);
    const std::unique_ptr<FILE, int (*)(FILE*)> notes(std::fopen(path.c_str(), "wb"), std::fclose);
    if (!notes) throw std::runtime_error("cannot open " + path);
    try {
      return train(*worker, settings, notes.get());
    } catch (const Error& error) {
      if (!settings.rejoin || error.code() != ErrorCode::kRewound) throw;
    }
    worker = worker->rejoin();
  }
}

}  // namespace
}  // namespace phub

int main(int argc, char** argv) {
  phub::Settings settings;
  CLI::App app("a worker to be disturbed");
  app.add_option("--server", settings.server)->required();
  app.add_option("--job", settings.job, "as JSON")->required();
  app.add_option("--notes", settings.notes)->required();
  app.add_option("--rank", settings.rank);
  app.add_option("--transport", settings.transport);
  app.add_flag("--replace", settings.replace);
  app.add_flag("--patient", settings.patient);
  app.add_flag("--rejoin", settings.rejoin);
  app.add_flag("--idle", settings.idle);
  app.add_flag("--poll", settings.poll);
  app.add_flag("--fork", settings.fork);
  app.add_option("--rounds", settings.rounds);
  app.add_option("--die-in", settings.die_in);
  app.add_option("--hang-in", settings.hang_in);
  app.add_option("--leave-after", settings.leave_after);
  CLI11_PARSE(app, argc, argv);
  std::signal(SIGTERM, [](int) { phub::stop_asked = true; });
  try {
    phub::train(settings);
  } catch (const phub::Error& error) {
    fmt::print("{}: {}\n", phub::name_of(error.code()), error.what());
    return 3;
  } catch (const std::exception& error) {
    fmt::print("{}\n", error.what());
    return 4;
  }
  return 0;
}
