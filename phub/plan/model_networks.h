// The networks behind models.h: the keys of each, in the order and under the names of its library.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "transport/control/job_spec.h"

namespace phub {

// torchvision's, for 1,000 classes.
std::vector<KeySpec> alexnet();
std::vector<KeySpec> vgg(const std::array<uint32_t, 5>& convolutions_per_stage);
std::vector<KeySpec> googlenet();
std::vector<KeySpec> inception_v3();

// Residual networks: blocks of two 3×3 convolutions, or bottlenecks, whose 3×3 convolution has
// `groups` groups of `width_per_group` channels in the first stage, and twice as many in the next.
std::vector<KeySpec> resnet_basic(const std::array<uint32_t, 4>& blocks_per_stage);
std::vector<KeySpec> resnet_bottleneck(const std::array<uint32_t, 4>& blocks_per_stage,
                                       uint64_t groups = 1, uint64_t width_per_group = 64);

// Hugging Face's: an encoder with its pooler, and a decoder whose head is its word embedding.
std::vector<KeySpec> bert(uint32_t layers, uint64_t width);
std::vector<KeySpec> gpt2(uint32_t layers, uint64_t width);

}  // namespace phub
