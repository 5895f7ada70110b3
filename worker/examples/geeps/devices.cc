#include "worker/examples/geeps/devices.h"

#include <CLI/CLI.hpp>
#include <charconv>

#include "transport/error.h"
#include "worker/device/cuda_device.h"
#include "worker/device/host_device.h"
#include "worker/geeps/standalone_exchange.h"

namespace phub::examples {
namespace {

// "cuda" or "cuda:N".
int cuda_ordinal(std::string_view device) {
  std::string_view number = device;
  if (number == "cuda") number = "cuda:0";
  int ordinal = 0;
  const bool is_cuda = number.starts_with("cuda:");
  if (is_cuda) number.remove_prefix(5);
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), ordinal);
  if (!is_cuda || error != std::errc() || end != number.data() + number.size()) {
    fail(ErrorCode::kInvalid, "--device {}: not host, cuda or cuda:N", device);
  }
  return ordinal;
}

// "64M".
uint64_t bytes_of(std::string text) {
  const std::string given = text;
  std::string error = given.starts_with('-') ? "it is below 0" : "";
  try {
    if (error.empty()) error = CLI::AsSizeValue(false)(text);  // replaces 64M by its number
  } catch (const CLI::ValidationError& e) {
    error = e.what();
  }
  uint64_t bytes = 0;
  const auto [end, wrong] = std::from_chars(text.data(), text.data() + text.size(), bytes);
  if (error.empty() && wrong != std::errc()) error = "it is too large";
  if (!error.empty()) fail(ErrorCode::kInvalid, "device memory of '{}': {}", given, error);
  return bytes;
}

// Parameters, their updates, and buffers for twice all that.
uint64_t more_than_enough(const Model& model) {
  uint64_t floats = 0;
  for (const auto& table : model.tables().specs()) floats += table.keys.size() * table.row_floats;
  return (floats * sizeof(float) * 8) + (16 << 20);
}

uint64_t least_budget(Model& model, uint64_t enough, const std::string& gather) {
  constexpr uint64_t kPrecision = 1024;
  uint64_t too_little = 0;
  while (enough - too_little > kPrecision) {
    const uint64_t half = too_little + (enough - too_little) / 2;
    try {
      plan(model, {.budget_bytes = half, .max_lead = 1}, gather);
      enough = half;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kFull) throw;
      too_little = half;
    }
  }
  return enough;
}

}  // namespace

geeps::Placement plan(Model& model, const geeps::CacheOptions& options, const std::string& gather) {
  const std::span<const geeps::TableSpec> tables = model.tables().specs();
  const auto device = make_host_device({.budget_bytes = options.budget_bytes});
  JobSpec spec{.name = "plan", .keys = geeps::keys_of(tables)};
  spec.on_nonfinite = "pass";  // nobody has computed what rows are changed by
  geeps::StandaloneExchange exchange(spec);
  geeps::Cache cache(*device, exchange, model.tables().specs(), options);
  if (gather == "virtual") cache.begin_virtual();
  if (gather == "first") cache.begin_gathering();
  model.train(cache, nullptr, 0);
  if (gather == "none") {
    cache.wait_all();
    return {};
  }
  cache.finish_sequence();
  return cache.placement();
}

ComputeDevice make_device(const TrainingOptions& options, uint32_t number, uint64_t budget_bytes) {
  if (options.device == "host") {
    return {
        .device = make_host_device({.name = "host" + std::to_string(number),
                                    .budget_bytes = budget_bytes,
                                    .copy_bytes_per_second = options.bandwidth,
                                    .copy_latency = std::chrono::microseconds(options.latency_us),
                                    .poison_copies = options.poison}),
        .compute = nullptr,
        .math = make_host_math()};
  }
  ComputeDevice cuda;
  const int ordinal = cuda_ordinal(options.device) + static_cast<int>(number);
  cuda.device = make_cuda_device({.ordinal = ordinal, .budget_bytes = budget_bytes});
  cuda.compute = cuda.device->make_stream("compute");
  cuda.math = make_cuda_math(*cuda.compute, ordinal);
  return cuda;
}

uint64_t budget_bytes(const TrainingOptions& options, const MakeModel& make) {
  const std::string& text = options.budget;
  if (text != "least" && !text.ends_with('%')) {
    return bytes_of(text);
  }
  const auto model = make(options.share);
  const uint64_t enough = more_than_enough(*model);
  if (text == "least") return least_budget(*model, enough, options.gather);
  unsigned percent = 0;
  const char* end = text.data() + text.size() - 1;
  if (const auto [at, error] = std::from_chars(text.data(), end, percent);
      error != std::errc() || at != end) {
    fail(ErrorCode::kInvalid, "device memory of '{}': not a whole number of percent", text);
  }
  const geeps::Placement all = plan(*model, {.budget_bytes = enough, .max_lead = 1}, "virtual");
  return all.total_bytes() * percent / 100;
}

}  // namespace phub::examples
