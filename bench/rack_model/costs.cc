#include "bench/rack_model/costs.h"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>
#include <vector>

#include "phub/text_file.h"
#include "transport/error.h"
#include "transport/text.h"

namespace phub::rack_model {
namespace {

constexpr size_t kMostBytes = 1u << 16;
constexpr double kMostCores = 4096;

struct Field {
  std::string_view name;
  double Costs::*value;
  double least = 0;
};
constexpr Field kFields[] = {{"send_chunk_ns", &Costs::send_chunk_ns},
                             {"send_byte_ns", &Costs::send_byte_ns},
                             {"receive_chunk_ns", &Costs::receive_chunk_ns},
                             {"receive_byte_ns", &Costs::receive_byte_ns},
                             {"sum_chunk_ns", &Costs::sum_chunk_ns},
                             {"wakeup_us", &Costs::wakeup_us},
                             {"latency_us", &Costs::latency_us},
                             {"framing", &Costs::framing, 1},
                             {"window_bytes", &Costs::window_bytes}};
constexpr std::string_view kSharedCores = "shared_cores";

[[noreturn]] void refuse(std::string_view path, const toml::node& at, const std::string& what) {
  fail(ErrorCode::kInvalid, "{}:{}:{}: {}", path, at.source().begin.line, at.source().begin.column,
       what);
}

double number(std::string_view path, std::string_view name, const toml::node& node, double least,
              double most) {
  const std::optional<double> value = node.value<double>();
  if (!node.is_number() || !value || !(*value >= least && *value <= most)) {
    refuse(path, node, fmt::format("{} must be a number from {} to {}", name, least, most));
  }
  return *value;
}

}  // namespace

Costs parse_costs(std::string_view text, std::string_view path) {
  toml::table file;
  try {
    file = toml::parse(text);
  } catch (const toml::parse_error& error) {
    fail(ErrorCode::kInvalid, "{}:{}:{}: {}", path, error.source().begin.line,
         error.source().begin.column, error.description());
  }
  Costs costs;
  for (const auto& [key, node] : file) {
    const auto* field = std::ranges::find(kFields, key.str(), &Field::name);
    if (field != std::end(kFields)) {
      costs.*field->value = number(path, key.str(), node, field->least, 1e12);
    } else if (key.str() == kSharedCores && node.is_integer()) {
      costs.shared_cores = static_cast<uint32_t>(number(path, kSharedCores, node, 0, kMostCores));
    } else if (key.str() == kSharedCores) {
      refuse(path, node, "shared_cores must be an integer");
    } else {
      std::vector<std::string_view> names;
      for (const Field& known : kFields) names.push_back(known.name);
      refuse(path, node,
             fmt::format("there is no cost '{}', only {}, {}", printable(key.str()),
                         fmt::join(names, ", "), kSharedCores));
    }
  }
  return costs;
}

Costs load_costs(const std::string& path) { return parse_costs(read_file(path, kMostBytes), path); }

}  // namespace phub::rack_model
