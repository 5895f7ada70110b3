// Key tables: of well-known models, generated from their layer shapes, and from a JSON file.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "transport/job_spec.h"

namespace phub {

struct KeyTable {
  std::string name;
  std::vector<KeySpec> keys;
};

uint64_t total_elements(const KeyTable& table);

std::vector<std::string_view> model_names();

// A model by name ("resnet50"), else Error(kInvalid) that lists the names.
KeyTable model(std::string_view name);

// {"name": …, "keys": [{"name": …, "elements": …}, …]}. Throws Error(kInvalid) with file, position
// or key, and what is wrong: malformed JSON, empty or duplicate names, elements that are not a
// positive integer or too large.
KeyTable parse_key_table(std::string_view json, std::string_view source);
KeyTable load_key_table(const std::string& path);

// "resnet50", or a path when the argument contains '/' or ends in ".json".
KeyTable model_or_file(const std::string& argument);

}  // namespace phub
