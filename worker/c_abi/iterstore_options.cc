// The options and tables of a store in the C interface.
#include <fmt/format.h>

#include <array>
#include <charconv>
#include <limits>
#include <memory>
#include <string_view>

#include "transport/text.h"
#include "worker/c_abi/call.h"
#include "worker/c_abi/iterstore.h"
#include "worker/c_abi/options.h"

namespace phub::c_abi {
namespace {

using iterstore::StoreOptions;

struct Option {
  std::string_view name;
  uint32_t StoreOptions::*count = nullptr;
  bool StoreOptions::*flag = nullptr;
  double StoreOptions::*share = nullptr;
};

constexpr std::array<Option, 7> kOptions = {{
    {.name = "threads", .count = &StoreOptions::threads},
    {.name = "placement", .flag = &StoreOptions::placement},
    {.name = "numa", .flag = &StoreOptions::numa},
    {.name = "static_index", .flag = &StoreOptions::static_index},
    {.name = "batches", .count = &StoreOptions::batches},
    {.name = "push_early", .flag = &StoreOptions::push_early},
    {.name = "gather_again", .share = &StoreOptions::gather_again},
}};

const Option& option_named(std::string_view name) {
  std::array<std::string_view, kOptions.size()> names;
  for (size_t i = 0; i < kOptions.size(); ++i) {
    if (kOptions[i].name == name) return kOptions[i];
    names[i] = kOptions[i].name;
  }
  refuse_option(name, names);
}

double share_in(std::string_view option, std::string_view text) {
  double share = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), share);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw Refusal(PHUB_INVALID, fmt::format("option '{}' must be a number such as 0.1, got '{}'",
                                            option, printable(text)));
  }
  return share;
}

void set_number(StoreOptions& options, const Option& option, int64_t value) {
  if (option.share) {
    options.*option.share = static_cast<double>(value);
    return;
  }
  check_number(option.name, value, 0,
               option.flag ? 1 : int64_t{std::numeric_limits<uint32_t>::max()});
  if (option.count) options.*option.count = static_cast<uint32_t>(value);
  if (option.flag) options.*option.flag = value != 0;
}

// Calls `body(options)` with those of the handle, one thread at a time.
template <typename Body>
phub_code change(const char* function, const phub_store_options* handle, Body body) {
  return call(function, [&] {
    const auto object = object_of<StoreOptionsObject>(handle);
    const std::lock_guard lock(object->mutex);
    body(object->options);
  });
}

}  // namespace
}  // namespace phub::c_abi

using namespace phub;         // NOLINT: the functions below are C's
using namespace phub::c_abi;  // NOLINT

phub_code phub_store_options_create(phub_store_options** options) {
  return call(__func__, [&] {
    need(options, "options");
    *options =
        handle_of<phub_store_options>(std::make_shared<StoreOptionsObject>(), Type::kStoreOptions);
  });
}

phub_code phub_store_options_destroy(phub_store_options* options) {
  return call(__func__, [&] { Handles::instance().remove(options, Type::kStoreOptions); });
}

phub_code phub_store_options_set(phub_store_options* options, const char* name, const char* value) {
  return change(__func__, options, [&](StoreOptions& all) {
    need(name, "name");
    need(value, "value");
    const Option& option = option_named(name);
    if (option.share) {
      all.*option.share = share_in(option.name, value);
    } else {
      set_number(all, option, number_in(option.name, value));
    }
  });
}

phub_code phub_store_options_set_number(phub_store_options* options, const char* name,
                                        int64_t value) {
  return change(__func__, options, [&](StoreOptions& all) {
    need(name, "name");
    set_number(all, option_named(name), value);
  });
}

phub_code phub_store_options_add_table(phub_store_options* options, const char* name, uint64_t rows,
                                       uint32_t columns, const char* type, const char* operation,
                                       int fixed, uint64_t spare) {
  return change(__func__, options, [&](StoreOptions& all) {
    need(name, "name");
    need(type, "type");
    need(operation, "operation");
    all.tables.push_back({.name = name,
                          .rows = rows,
                          .columns = columns,
                          .type = type,
                          .operation = operation,
                          .fixed = fixed != 0,
                          .spare = spare});
  });
}
