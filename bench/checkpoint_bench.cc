// A checkpoint of a model with Adam's two states, durable, against `dd bs=1M conv=fsync` of as many
// bytes to the same file system, in turn.
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <random>
#include <string>
#include <system_error>
#include <vector>

#include "bench/zerocompute/measures.h"
#include "phub/checkpoint/crc32c.h"
#include "phub/checkpoint/store.h"
#include "phub/plan/models.h"
#include "transport/error.h"
#include "worker/examples/program.h"

namespace phub {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double run_dd(const std::string& path, uint64_t mib) {
  std::filesystem::remove(path);
  sync();
  const auto begin = Clock::now();
  const pid_t child = fork();
  if (child == 0) {
    const std::string of = "of=" + path, count = fmt::format("count={}", mib);
    execlp("dd", "dd", "if=/dev/zero", of.c_str(), "bs=1M", count.c_str(), "conv=fsync",
           "status=none", nullptr);
    _exit(127);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
    fail(ErrorCode::kInternal, "dd to {} failed", path);
  }
  const double seconds = seconds_since(begin);
  std::filesystem::remove(path);
  return seconds;
}

// A model as the box holds it: the parameters, and two arrays of state.
struct Model {
  explicit Model(KeyTable keys) : table(std::move(keys)), elements(total_elements(table)) {
    uint64_t at = 0;
    for (const KeySpec& key : table.keys) {
      tensors.push_back({key.name, TensorType::kF32, {key.elements}});
      offsets.push_back(at);
      at += key.elements;
    }
    std::mt19937 random(1);
    for (auto& array : arrays) {
      array.resize(elements);
      for (float& value : array) value = static_cast<float>(random());
    }
  }
  uint64_t bytes() const { return arrays.size() * elements * sizeof(float); }

  KeyTable table;
  uint64_t elements;
  std::vector<TensorInfo> tensors;
  std::vector<uint64_t> offsets;
  std::vector<std::vector<float>> arrays{3};
};

double write_checkpoint(CheckpointStore& store, const Model& model, uint64_t round) {
  store.remove_job(model.table.name);
  sync();
  Manifest manifest;
  manifest.spec.name = model.table.name;
  manifest.spec.keys = model.table.keys;
  manifest.round = round;
  const auto begin = Clock::now();
  const auto writer = store.begin(model.table.name, {.epoch = 1, .round = round});
  const std::vector<std::string> files = {std::string(kParametersFile), state_file("exp_avg"),
                                          state_file("exp_avg_sq")};
  for (size_t i = 0; i < files.size(); ++i) {
    writer->add_tensors(files[i], model.tensors, [&](size_t tensor, uint64_t offset) {
      const std::span<const float> values(model.arrays[i].data() + model.offsets[tensor],
                                          model.table.keys[tensor].elements);
      return std::as_bytes(values).subspan(offset);
    });
  }
  if (const std::string problem = writer->commit(manifest); !problem.empty()) {
    fail(ErrorCode::kInternal, "{}", problem);
  }
  return seconds_since(begin);
}

void measure_checksum(const Model& model) {
  const auto bytes = std::as_bytes(std::span(model.arrays[0]));
  const std::span<const std::byte> cached = bytes.first(std::min<size_t>(bytes.size(), 256 << 10));
  uint32_t crc = 0;
  const auto begin = Clock::now();
  uint64_t done = 0;
  for (; done < 2000 * cached.size(); done += cached.size()) crc = crc32c(crc, cached);
  fmt::print("CRC-32C of what is in the cache: {:.1f} GB/s ({:08x})\n",
             static_cast<double>(done) / 1e9 / seconds_since(begin), crc);
}

void run(const std::string& directory, const std::string& name, uint32_t turns) {
  const Model model(model_or_file(name));
  const uint64_t mib = (model.bytes() + kMiB - 1) / kMiB;
  fmt::print("{}: {} elements, with two states {} MiB\n", model.table.name, model.elements, mib);
  measure_checksum(model);
  std::filesystem::create_directories(directory);
  CheckpointStore store(directory + "/checkpoints", 1);
  std::vector<double> dd, checkpoint;
  for (uint32_t turn = 0; turn < turns; ++turn) {
    const auto measure_dd = [&] { dd.push_back(run_dd(directory + "/dd", mib)); };
    if (turn % 2 == 0) measure_dd();
    checkpoint.push_back(write_checkpoint(store, model, turn + 1));
    if (turn % 2 == 1) measure_dd();
    fmt::print("turn {}: checkpoint {:.3f} s ({:.0f} MiB/s), dd {:.3f} s ({:.0f} MiB/s)\n",
               turn + 1, checkpoint.back(), static_cast<double>(mib) / checkpoint.back(), dd.back(),
               static_cast<double>(mib) / dd.back());
  }
  std::vector<Refusal> refused;
  const auto begin = Clock::now();
  if (store.newest_whole(model.table.name, refused) == nullptr) {
    fail(ErrorCode::kInternal, "the checkpoint is not whole: {}", refused.at(0).why);
  }
  const double verified = seconds_since(begin);
  const auto print = [](const char* what, double checkpoint_s, double dd_s) {
    fmt::print("{}: checkpoint {:.3f} s, dd {:.3f} s: {:.0f}% of its speed\n", what, checkpoint_s,
               dd_s, 100 * dd_s / checkpoint_s);
  };
  print("medians", median(checkpoint), median(dd));
  print("fastest", *std::min_element(checkpoint.begin(), checkpoint.end()),
        *std::min_element(dd.begin(), dd.end()));
  fmt::print("verified in {:.3f} s\n", verified);
  std::filesystem::remove_all(directory + "/checkpoints");
  std::error_code not_empty;
  std::filesystem::remove(directory, not_empty);
}

}  // namespace
}  // namespace phub

int main(int argc, char** argv) {
  CLI::App app("A durable checkpoint against dd conv=fsync.", "checkpoint_bench");
  std::string directory = "checkpoint_bench.tmp", model = "resnet50";
  uint32_t turns = 5;
  bool tiny = false;
  app.add_option("--directory", directory, "Where to write; on a disk, not in memory")
      ->capture_default_str();
  app.add_option("--model", model, "As for 'phub plan'")->capture_default_str();
  app.add_option("--turns", turns, "Of each")->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_flag("--tiny", tiny, "A smoke test");
  phub::examples::parse_or_exit(app, argc, argv);
  return phub::examples::status_of("checkpoint_bench", [&] {
    phub::run(directory, tiny ? "resnet18" : model, tiny ? 1 : turns);
  });
}
