// Names of number formats, and the choice of the instruction set.
#include "hwy/targets.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace phub::kernels {
namespace {

struct Target {
  int64_t bit;
  std::string_view name;
};

// Asked once, before anything can have been forced. A lower bit is a better target.
const std::vector<Target>& available() {
  static const std::vector<Target> found = [] {
    std::vector<Target> list;
    for (const int64_t bit : hwy::SupportedAndGeneratedTargets()) {
      list.push_back({bit, hwy::TargetName(bit)});
    }
    return list;
  }();
  return found;
}

}  // namespace

std::optional<DType> parse_format(std::string_view name) {
  for (size_t i = 0; i < kFormats.size(); ++i) {
    if (kFormats[i].name == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

std::optional<DType> parse_dtype(std::string_view name) {
  const std::optional<DType> format = parse_format(name);
  return format && is_plain(*format) ? format : std::nullopt;
}

std::span<const std::string_view> targets() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> list;
    for (const Target& target : available()) list.push_back(target.name);
    return list;
  }();
  return names;
}

void force_target(std::string_view name) {
  const auto& known = available();
  int64_t bits = 0;  // No restriction.
  for (const Target& target : known) {
    if (target.name == name) bits = target.bit;
  }
  if (bits == 0 && !name.empty()) {
    std::string message = "this machine cannot run instruction set \"";
    message.append(name).append("\"; it has:");
    for (const Target& target : known) message.append(" ").append(target.name);
    throw std::invalid_argument(message);
  }
  hwy::SetSupportedTargetsForTest(bits);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace phub::kernels
