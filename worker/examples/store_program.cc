#include "worker/examples/store_program.h"

#include <fmt/format.h>

#include <cstdlib>
#include <exception>
#include <filesystem>
#include <thread>
#include <vector>

#include "transport/error.h"
#include "worker/examples/agreement.h"

namespace phub::examples {

void add_store_options(CLI::App& app, StoreProgram& program) {
  WorkerOptions& worker = program.store.worker;
  worker.spec.on_loss = "fail";  // without a rank's part of the data the outcome is another
  worker.spec.lease_ms = 10'000;
  app.add_option("--server", worker.server,
                 "HOST:PORT of phub serve; a process that is alone starts one, unless one is named")
      ->capture_default_str();
  app.add_option("--job", worker.spec.name, "Name of the store")->capture_default_str();
  app.add_option("--world", worker.spec.world_size, "Number of processes")->capture_default_str();
  app.add_option("--rank", worker.rank, "This process's rank; one that is alone needs none")
      ->capture_default_str();
  app.add_option("--threads", program.store.threads, "Threads of each process")
      ->check(CLI::Range(1u, 1024u))
      ->capture_default_str();
  app.add_option("--iterations", program.iterations)
      ->check(CLI::Range(1u, 1'000'000u))
      ->capture_default_str();
  app.add_option("--gather", program.gather, "How the store learns what is accessed")
      ->check(CLI::IsMember({"virtual", "real", "never"}))
      ->capture_default_str();
  app.add_option("--consistency", worker.spec.consistency, "bsp, ssp or async")
      ->check(CLI::IsMember({"bsp", "ssp", "async"}))
      ->capture_default_str();
  app.add_option("--slack", worker.spec.slack,
                 "ssp: clocks that a process may be ahead of the slowest")
      ->capture_default_str();
  app.final_callback([&app, &program] {
    take_rank_if_alone(program.store.worker);
    const bool is_given = app.get_option("--server")->count() > 0;
    program.names_server = is_given || std::getenv("PHUB_SERVER") != nullptr;
  });
}

std::unique_ptr<OwnServer> own_box(StoreProgram& program) {
  WorkerOptions& worker = program.store.worker;
  const bool is_alone = worker.spec.world_size == 1 && worker.rank_error.empty();
  if (!is_alone || program.names_server) return nullptr;
  const std::string phub = beside_this_program("phub");
  if (!std::filesystem::exists(phub)) {
    fail(ErrorCode::kUnavailable,
         "there is no {} to start a box with: start one with `phub serve`, and name it with "
         "--server HOST:PORT",
         phub);
  }
  auto box = std::make_unique<OwnServer>(phub, "shm", std::vector<std::string>{"--pin", "false"});
  worker.server = box->address();
  return box;
}

void agree(const StoreProgram& program, const std::string& name,
           std::vector<std::string> settings) {
  settings.insert(
      settings.begin(),
      {fmt::format("program {}", name), fmt::format("iterations {}", program.iterations),
       fmt::format("threads {}", program.store.threads), fmt::format("gather {}", program.gather)});
  agree(program.store.worker, settings);
}

uint32_t parts_of(const StoreProgram& program) {
  return program.store.worker.spec.world_size * program.store.threads;
}

void run_threads(iterstore::Store& store, const StoreProgram& program,
                 const std::function<void(iterstore::StoreThread&, uint32_t part)>& run) {
  const uint32_t first = static_cast<uint32_t>(program.store.worker.rank) * program.store.threads;
  std::vector<std::exception_ptr> errors(program.store.threads);
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < program.store.threads; ++t) {
    threads.emplace_back([&, t] {
      try {
        iterstore::StoreThread mine(store, t);
        run(mine, first + t);
      } catch (...) {
        errors[t] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

void run_iterations(iterstore::StoreThread& mine, const StoreProgram& program,
                    const std::function<void(uint32_t iteration)>& iterate) {
  if (program.gather == "virtual") {
    mine.begin_virtual();
    iterate(0);
    mine.finish();
  }
  if (program.gather == "real") mine.begin_gathering();
  for (uint32_t i = 0; i < program.iterations; ++i) {
    iterate(i);
    if (program.gather == "real" && i == 0) mine.finish();
  }
}

}  // namespace phub::examples
