#include "bench/geeps_pictures.h"

#include <fmt/format.h>

#include <array>
#include <chrono>
#include <cmath>
#include <iostream>
#include <memory>
#include <optional>

#include "bench/geeps_run.h"
#include "bench/geeps_video.h"
#include "bench/geeps_workers.h"
#include "transport/error.h"
#include "worker/examples/processes.h"

namespace phub::geeps_bench {
namespace {

// Bytes that the cache of a run keeps for calls outside the sequence.
constexpr uint64_t kReserved = 256;

void add(Points& points, nlohmann::json point) {
  fmt::print("{}\n", point.dump());
  std::cout << std::flush;
  points.push_back(std::move(point));
}

// Nothing if it needs more memory.
std::optional<double> seconds_of(const Training& training, const Machine& machine, uint64_t budget,
                                 const Pictures& pictures, uint64_t& moved) {
  std::optional<TrainingRun> run;
  try {
    run.emplace(training, machine, budget);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kFull) throw;
    return std::nullopt;
  }
  moved = run->cache().placement().moved_bytes;
  TrainingRun* const runs[] = {&*run};
  return alternate(runs, pictures.iterations, pictures.turns)[0];
}

bool fits(const Training& training, uint64_t budget) {
  try {
    geeps::place(training.demand(), {.budget_bytes = budget, .max_lead = 1});
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kFull) throw;
    return false;
  }
  return true;
}

// The most images, up to `most`, with which `fits` is true; 0: not with one.
template <class Fits>
double most_images(double most, Fits fits) {
  if (fits(most)) return most;
  double least = 0, too_many = most;
  while (too_many - least > 1) {
    const double images = std::floor((least + too_many) / 2);
    (fits(images) ? least : too_many) = images;
  }
  return least;
}

}  // namespace

Points forms(const Pictures& pictures) {
  const OwnServer server(beside_this_program("phub"), pictures.transport, {});
  constexpr uint32_t kMachines = 4;  // this machine's processors work for so many
  const double slower_by = pictures.slower * kMachines;
  const Net net = part_of(adam_like(), pictures.parts * kMachines);
  Machine machine = geeps_machine();
  machine.link_bytes_per_second = pictures.machine.link_bytes_per_second;
  machine.cuda = pictures.machine.cuda;
  machine = slower(machine, slower_by);
  const double computing =
      std::chrono::duration<double>(Training(net, machine).compute_time()).count();
  Points points;
  for (uint32_t workers = 1; workers <= kMachines; workers *= 2) {
    std::vector<double> seconds[2];
    for (uint32_t turn = 0; turn < pictures.turns; ++turn) {
      for (const bool cached : {true, false}) {
        const Workers job{.server = server.address(),
                          .transport = pictures.transport,
                          .job = fmt::format("forms-{}-{}-{}", workers, turn, cached),
                          .workers = workers,
                          .iterations = pictures.iterations,
                          .cached = cached};
        seconds[cached ? 0 : 1].push_back(train(job, net, machine, {}).seconds);
      }
    }
    const double images = net.images * workers * slower_by;
    for (const bool cached : {true, false}) {
      const double iteration = median(seconds[cached ? 0 : 1]);
      add(points, {{"picture", "forms"},
                   {"form", cached ? "cache" : "host"},
                   {"workers", workers},
                   {"images_per_s", images / iteration},
                   {"never_waits", images / computing},
                   {"stalled", 1 - computing / iteration}});
    }
  }
  return points;
}

Points batches(const Pictures& pictures) {
  const Machine machine = slower(pictures.machine, pictures.slower);
  const Net whole = part_of(adam_like(), pictures.parts);
  const auto everything = static_cast<double>(Training(whole, machine).everything_bytes());
  Points points;
  for (const uint32_t in_a_clock : {1U, 2U, 4U}) {
    Net net = whole;
    net.images /= in_a_clock;
    const Training training(net, machine, {.batches = in_a_clock});
    for (const uint32_t percent : {10, 20, 35, 50, 65, 80, 100}) {
      const auto budget = static_cast<uint64_t>(everything * percent / 100);
      uint64_t moved = 0;
      const auto seconds = seconds_of(training, machine, budget, pictures, moved);
      if (!seconds) continue;
      add(points, {{"picture", "batches"},
                   {"images", net.images * pictures.parts},
                   {"budget_percent", percent},
                   {"budget_bytes", static_cast<double>(budget) * pictures.parts},
                   {"moved_bytes", static_cast<double>(moved) * pictures.parts},
                   {"images_per_s", whole.images * pictures.slower / *seconds}});
    }
  }
  return points;
}

Points sizes(const Pictures& pictures) {
  const Machine machine = slower(pictures.machine, pictures.slower);
  const double parts = pictures.parts * 8;
  const auto of_layers = [&](uint32_t layers) {
    return Training(part_of(very_large(layers), parts), machine);
  };
  const uint32_t most = pictures.tiny ? 16 : 56;
  const uint64_t budget = data_bytes(of_layers(most).tables()) / (pictures.tiny ? 6 : 20);
  Points points;
  for (uint32_t layers = most; layers >= 2; layers = layers * 2 / 3) {
    const Net net = part_of(very_large(layers), parts);
    const Training training = of_layers(layers);
    uint64_t moved = 0;
    const auto seconds = seconds_of(training, machine, budget, pictures, moved);
    if (!seconds) fail(ErrorCode::kFull, "{} layers do not fit in {} bytes", layers, budget);
    double connections = 0;
    for (const Layer& layer : net.layers) connections += layer.connections * net.images;
    const double computing = std::chrono::duration<double>(training.compute_time()).count();
    add(points, {{"picture", "sizes"},
                 {"layers", layers},
                 {"model_bytes", net.weights() * 4 * parts},
                 {"data_bytes", static_cast<double>(data_bytes(training.tables())) * parts},
                 {"budget_bytes", static_cast<double>(budget) * parts},
                 {"connections_per_s", connections * pictures.slower / *seconds},
                 {"busy", computing / *seconds}});
  }
  return points;
}

Points minibatches(const Pictures& pictures) {
  const Machine machine = slower(pictures.machine, pictures.slower);
  const Net whole = part_of(adam_like(), pictures.parts);
  const auto of = [&](uint32_t in_a_clock) {
    Net net = whole;
    net.images /= in_a_clock;
    return Training(net, machine, {.batches = in_a_clock});
  };
  const auto all_bytes = [](const Training& training) {
    return training.least_unmoved_bytes() + kReserved;
  };
  const uint64_t budget = all_bytes(of(4));
  const double images = whole.images * pictures.slower;  // of a clock, on the stated machine
  Points points;
  for (const uint32_t in_a_clock : {8U, 4U, 2U, 1U}) {
    const Training training = of(in_a_clock);
    const uint64_t all = all_bytes(training);
    TrainingRun on_budget(training, machine, budget);
    TrainingRun with_all(training, machine, all);
    TrainingRun* const runs[] = {&on_budget, &with_all};
    const std::vector<double> seconds = alternate(runs, pictures.iterations, pictures.turns);
    const double computing = std::chrono::duration<double>(training.compute_time()).count();
    const auto moved = static_cast<double>(on_budget.cache().placement().moved_bytes);
    add(points, {{"picture", "minibatches"},
                 {"images", whole.images / in_a_clock * pictures.parts},
                 {"budget_bytes", static_cast<double>(budget) * pictures.parts},
                 {"moved_bytes", moved * pictures.parts},
                 {"images_per_s", images / seconds[0]},
                 {"all_bytes", static_cast<double>(all) * pictures.parts},
                 {"all_images_per_s", images / seconds[1]},
                 {"never_waits", images / computing}});
  }
  return points;
}

Points partitions(const Pictures& pictures) {
  const Machine machine = slower(pictures.machine, pictures.slower);
  const Net net = part_of(adam_like(), pictures.parts);
  const Training training(net, machine);
  const uint64_t budget = training.everything_bytes() * 35 / 100;
  const double computing = std::chrono::duration<double>(training.compute_time()).count();
  const double images = net.images * pictures.slower;
  constexpr std::array<uint32_t, 4> kPartitions = {1, 2, 4, 8};
  std::vector<std::unique_ptr<TrainingRun>> owned;
  std::vector<TrainingRun*> runs;
  for (const uint32_t count : kPartitions) {
    owned.push_back(std::make_unique<TrainingRun>(training, machine, budget, count));
    runs.push_back(owned.back().get());
  }
  const std::vector<double> seconds = alternate(runs, pictures.iterations, pictures.turns);
  Points points;
  for (size_t i = 0; i < kPartitions.size(); ++i) {
    add(points, {{"picture", "partitions"},
                 {"partitions", kPartitions[i]},
                 {"images_per_s", images / seconds[i]},
                 {"never_waits", images / computing}});
  }
  return points;
}

Points frames(const Pictures& pictures) {
  // Parameters are copied for every frame, by this machine's processors: everything else is slower
  // by so much, too.
  constexpr double kCopies = 4;
  const double slower_by = pictures.slower * (pictures.tiny ? 1 : kCopies);
  const Machine machine = slower(pictures.machine, slower_by);
  const VideoShape shape = pictures.tiny ? VideoShape{4, 8, 2} : VideoShape{};
  constexpr size_t kMost = 192;  // the paper's longest
  const size_t most = pictures.tiny ? kMost / 12 : kMost;
  Points points;
  const auto measure = [&](const char* form, size_t frames, uint64_t budget) {
    VideoTraining training(shape, frames, machine);
    TrainingRun run(training.iteration(), machine, budget);
    TrainingRun* const runs[] = {&run};
    const double seconds = alternate(runs, pictures.iterations, pictures.turns)[0];
    add(points, {{"picture", "frames"},
                 {"form", form},
                 {"budget_bytes", budget},
                 {"frames", frames},
                 {"moved_bytes", run.cache().placement().moved_bytes},
                 {"s_per_iteration", seconds / slower_by},
                 {"ms_per_frame", 1e3 * seconds / slower_by / static_cast<double>(frames)},
                 {"busy", run.busy(seconds)}});
  };
  for (size_t kept = most / (pictures.tiny ? 4 : 16); kept <= most; kept *= 2) {
    const uint64_t budget = VideoTraining(shape, kept, machine).least_unmoved_bytes();
    measure("kept", kept, budget);
    if (kept == most) break;
    const double longest = most_images(static_cast<double>(most), [&](double frames) {
      return VideoTraining(shape, static_cast<size_t>(frames), machine).fits(budget);
    });
    measure("swapped", static_cast<size_t>(longest), budget);
  }
  return points;
}

Points largest(const Pictures& pictures) {
  const Net net = alexnet();
  const auto with = [&](double images) {
    Net other = net;
    other.images = images;
    return Training(part_of(other, pictures.parts), pictures.machine);
  };
  Points points;
  for (const double gigabytes : {1, 2, 3, 4, 5, 6}) {
    const auto budget = static_cast<uint64_t>(gigabytes * 1e9 / pictures.parts);
    const double most = 4096 * gigabytes;
    add(points, {{"picture", "largest"},
                 {"budget_bytes", gigabytes * 1e9},
                 {"kept", most_images(most,
                                      [&](double images) {
                                        return with(images).least_unmoved_bytes() <= budget;
                                      })},
                 {"swapped",
                  most_images(most, [&](double images) { return fits(with(images), budget); })}});
    if (pictures.tiny) break;
  }
  return points;
}

}  // namespace phub::geeps_bench
