// Collects the parameters of a network, layer by layer. Order and names are those of the library
// that has the model, so that a real training job has the same keys.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "transport/control/job_spec.h"

namespace phub {

class ModelBuilder {
 public:
  void add(std::string name, std::initializer_list<uint64_t> shape) {
    uint64_t elements = 1;
    for (const uint64_t n : shape) elements *= n;
    keys_.push_back({.name = std::move(name), .elements = elements, .shape = shape});
  }
  void conv(const std::string& name, uint64_t in, uint64_t out, uint64_t kernel, bool bias) {
    add(name + ".weight", {out, in, kernel, kernel});
    if (bias) add(name + ".bias", {out});
  }
  void linear(const std::string& name, uint64_t in, uint64_t out) {
    add(name + ".weight", {out, in});
    add(name + ".bias", {out});
  }
  // Batch and layer normalisation: a scale and a shift per channel.
  void norm(const std::string& name, uint64_t channels) {
    add(name + ".weight", {channels});
    add(name + ".bias", {channels});
  }
  // torchvision's BasicConv2d: a convolution without bias, then batch normalisation.
  void conv_norm(const std::string& name, uint64_t in, uint64_t out, uint64_t height,
                 uint64_t width) {
    add(name + ".conv.weight", {out, in, height, width});
    norm(name + ".bn", out);
  }
  void conv_norm(const std::string& name, uint64_t in, uint64_t out, uint64_t kernel) {
    conv_norm(name, in, out, kernel, kernel);
  }
  void embedding(const std::string& name, uint64_t rows, uint64_t width) {
    add(name + ".weight", {rows, width});
  }
  std::vector<KeySpec> take() { return std::move(keys_); }

 private:
  std::vector<KeySpec> keys_;
};

}  // namespace phub
