#include "worker/examples/numbers.h"

#include <fmt/format.h>

#include <cmath>
#include <functional>
#include <string>

namespace phub::examples {
namespace {

CLI::Validator check(const std::string& what, const std::function<bool(double)>& is_right) {
  return {[=](const std::string& text) {
            double value = 0;
            const bool right =
                CLI::detail::lexical_cast(text, value) && std::isfinite(value) && is_right(value);
            return right ? std::string() : fmt::format("'{}' is not {}", text, what);
          },
          "", ""};
}

}  // namespace

CLI::Validator between(double least, double most) {
  return check(fmt::format("a number from {} to {}", least, most),
               [=](double value) { return value >= least && value <= most; });
}

CLI::Validator positive() {
  return check("a finite number above 0", [](double value) { return value > 0; });
}

CLI::Validator not_negative() {
  return check("a finite number of at least 0", [](double value) { return value >= 0; });
}

}  // namespace phub::examples
