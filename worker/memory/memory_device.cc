#include "worker/memory/memory_device.h"

#include <fmt/format.h>

#include "transport/error.h"
#include "worker/memory/gradient_coder.h"
#include "worker/session/send_order.h"

namespace phub {

void check_memory_device(const WorkerOptions& options) {
  if (options.memory_device == nullptr) return;
  const auto refuse = [&](std::string_view what, std::string_view instead) {
    fail(
        ErrorCode::kInvalid,
        "gradients and parameters are to lie in memory of {} (memory_device), and {}: {}, or leave "
        "memory_device out",
        options.memory_device->name(), what, instead);
  };
  if (options.transport != "auto") check_reaches(options.transport, *options.memory_device);
  if (has_coded_keys(options.spec)) {
    refuse("gradients in a coded format are encoded by the host", "use f32, bf16 or f16 for all");
  }
  if (options.spec.weights == Weights::kYes) {
    refuse("the host writes the weight of a push behind each of its gradients",
           "leave weights out");
  }
  for (const KeySpec& key : options.spec.keys) {
    if (!is_compact(key)) continue;
    refuse(fmt::format("the {} of key '{}' are put together by the host", key.format, key.name),
           "send its gradient as it is");
  }
  if (difference_format(options.spec) != nullptr) {
    refuse("results in a coded parameter_dtype are added by the host", "use f32, bf16 or f16");
  }
  if (options.carry_over > 0) {
    refuse("gradients that are carried over are added by the host", "set carry_over to 0");
  }
  if (parse_send_order(options.send_order) == SendOrder::kMagnitude) {
    refuse("the magnitudes of gradients are computed by the host", "use another send_order");
  }
}

void check_reaches(std::string_view transport, const MemoryDevice& device) {
  if (transport == "verbs" || transport == "ofi") return;
  fail(ErrorCode::kInvalid,
       "gradients and parameters are to lie in memory of {} (memory_device), and transport '{}' "
       "reads and writes memory of the host: use verbs or ofi, or leave memory_device out",
       device.name(), transport);
}

}  // namespace phub
