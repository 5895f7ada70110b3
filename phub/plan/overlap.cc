#include "phub/plan/overlap.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <utility>

#include "phub/plan/layers.h"
#include "phub/text_file.h"
#include "transport/control/json_codec.h"
#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

constexpr double kForwardShare = 1.0 / 3;
constexpr size_t kMaxFileBytes = 64u << 20;
constexpr double kMostMs = 1e9;
constexpr size_t kMostLayers = 4096;  // the search looks at them again and again

struct LayerRow {
  std::string name;
  double forward_ms = 0, backward_ms = 0;
};
struct LayerRows {
  std::vector<LayerRow> layers;
};

template <class A>
void fields(A& a, const LayerRow*) {
  a.required("name", &LayerRow::name, {1, kMaxNameBytes});
  a.required("forward_ms", &LayerRow::forward_ms);
  a.required("backward_ms", &LayerRow::backward_ms);
}
template <class A>
void fields(A& a, const LayerRows*) {
  a.required("layers", &LayerRows::layers, {1, kMostLayers});
}

// The layer that the key is of: that with its name, or with the longest of what is before a '.' in
// it. Null: none.
LayerComputing* layer_of(const std::map<std::string_view, LayerComputing*>& by_name,
                         std::string_view key) {
  for (;;) {
    if (const auto found = by_name.find(key); found != by_name.end()) return found->second;
    const size_t dot = key.rfind('.');
    if (dot == key.npos) return nullptr;
    key = key.substr(0, dot);
  }
}

std::vector<LayerComputing> shared_out(const JobSpec& spec, double ms) {
  const layers::Net net = layers::net(spec.name);
  PHUB_CHECK(net.table.keys.size() == spec.keys.size());
  const double all = net.connections();
  std::vector<LayerComputing> out;
  for (const layers::Layer& layer : net.layers) {
    LayerComputing& to = out.emplace_back();
    to.name = layer.name;
    for (const size_t key : layer.keys) to.keys.push_back(static_cast<uint32_t>(key));
    const double seconds = ms / 1e3 * layer.connections / all;
    to.forward_s = seconds * kForwardShare;
    to.backward_s = seconds - to.forward_s;
  }
  return out;
}

}  // namespace

std::vector<LayerComputing> computing_of(const JobSpec& spec, const std::string& argument) {
  if (argument.find('/') != argument.npos || argument.ends_with(".json")) {
    return parse_computing(spec, read_file(argument, kMaxFileBytes), argument);
  }
  double ms = 0;
  const char* const end = argument.data() + argument.size();
  const auto parsed = std::from_chars(argument.data(), end, ms);
  if (parsed.ec != std::errc() || parsed.ptr != end || !(ms > 0 && ms <= kMostMs)) {
    fail(ErrorCode::kInvalid,
         "--compute: '{}' is neither the milliseconds of an iteration nor a file of layers, "
         "FILE.json",
         argument);
  }
  const auto names = layers::net_names();
  if (std::ranges::find(names, spec.name) == names.end()) {
    fail(ErrorCode::kInvalid,
         "--compute: how {} ms are shared out is known of the layers of {} alone, not of '{}': "
         "give their times in a file, FILE.json",
         argument, fmt::join(names, ", "), spec.name);
  }
  return shared_out(spec, ms);
}

std::vector<LayerComputing> parse_computing(const JobSpec& spec, std::string_view json,
                                            std::string_view source) {
  const LayerRows rows = json::decode<LayerRows>(json, source);
  std::vector<LayerComputing> layers;
  std::vector<std::string_view> names;
  for (const LayerRow& row : rows.layers) {
    for (const double ms : {row.forward_ms, row.backward_ms}) {
      if (ms >= 0 && ms <= kMostMs) continue;
      fail(ErrorCode::kInvalid, "{}: layer '{}': {} ms are not between 0 and {}", source,
           printable(row.name), ms, kMostMs);
    }
    names.push_back(row.name);
    layers.push_back({.name = row.name,
                      .keys = {},
                      .forward_s = row.forward_ms / 1e3,
                      .backward_s = row.backward_ms / 1e3});
  }
  std::map<std::string_view, LayerComputing*> by_name;
  for (LayerComputing& layer : layers) by_name.emplace(layer.name, &layer);
  std::ranges::sort(names);
  if (const auto twice = std::ranges::adjacent_find(names); twice != names.end()) {
    fail(ErrorCode::kInvalid, "{}: layer '{}' is there twice", source, printable(*twice));
  }
  for (uint32_t k = 0; k < spec.keys.size(); ++k) {
    LayerComputing* const layer = layer_of(by_name, spec.keys[k].name);
    if (layer == nullptr) {
      fail(ErrorCode::kInvalid,
           "{}: key '{}' is of no layer: none has its name, or what it begins with before a '.'",
           source, printable(spec.keys[k].name));
    }
    layer->keys.push_back(k);
  }
  if (computing_seconds(layers) == 0) {
    fail(ErrorCode::kInvalid, "{}: all layers compute for 0 ms", source);
  }
  return layers;
}

}  // namespace phub
