// Networks as a chain of layers, each with its keys and the arithmetic of a sample: the key tables
// of phub/plan/models.h, and the sizes of the layers' outputs.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "phub/plan/models.h"

namespace phub::layers {

struct Layer {
  std::string name;
  std::vector<size_t> keys;      // indices into the table, in its order
  std::optional<size_t> matrix;  // the key of them that has two dimensions: a fully connected layer
  double connections = 0;        // multiplications of a sample, forward
};

struct Net {
  KeyTable table;
  std::vector<Layer> layers;  // the first one sees the image

  double connections() const;
};

// The networks of net_names() on images of 224 x 224, Inception v3 on 299 x 299. Modules with
// branches are chains of these. A convolution has the keys of its normalisation. Throws
// Error(kInvalid): another name, with a list of those that it knows.
Net net(std::string_view name);
std::vector<std::string_view> net_names();

}  // namespace phub::layers
