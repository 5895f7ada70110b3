// Key tables of well-known models, generated from the shapes of their layers, or read from JSON.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "transport/control/job_spec.h"

namespace phub {

struct KeyTable {
  std::string name;
  std::vector<KeySpec> keys;
};

uint64_t total_elements(const KeyTable& table);

std::vector<std::string_view> model_names();

// The model of that name ("resnet50"). Throws Error(kInvalid), which lists the names.
KeyTable model(std::string_view name);

// {"name": …, "keys": [{"name": …, "elements": …, "shape": […]}, …]}; a shape may be left out.
// Throws Error(kInvalid), which names the file and the position or key: malformed JSON, empty or
// duplicate names, a number of elements that is not a positive integer or too large, a shape that
// has another.
KeyTable parse_key_table(std::string_view json, std::string_view source);
KeyTable load_key_table(const std::string& path);

// A name such as "resnet50", or a path if `argument` contains '/' or ends in ".json".
KeyTable model_or_file(const std::string& argument);

}  // namespace phub
