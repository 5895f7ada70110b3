// The object behind phub_options, and functions for options that are set by name.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>

#include "worker/c_abi/handles.h"
#include "worker/worker.h"

namespace phub::c_abi {

struct OptionsObject : Object {
  static constexpr Type kType = Type::kOptions;
  std::mutex mutex;  // guards the members below
  WorkerOptions options;
  std::shared_ptr<Object> memory_device;  // that of the options; null: there is none
};

// Throw Refusal(PHUB_INVALID).
[[noreturn]] void refuse_option(std::string_view name, std::span<const std::string_view> options);
int64_t number_in(std::string_view option, std::string_view text);
void check_number(std::string_view option, int64_t value, int64_t min, int64_t max);

}  // namespace phub::c_abi
