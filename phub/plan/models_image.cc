// Convolutional networks, as torchvision has them.
#include <fmt/format.h>

#include <string>

#include "phub/plan/model_builder.h"
#include "phub/plan/model_networks.h"

namespace phub {
namespace {

constexpr uint64_t kClasses = 1000;
constexpr uint64_t kStemWidth = 64;

// What all residual networks begin and end with; `add_block(name, in, stage, first)` adds a block
// and returns its width.
template <typename AddBlock>
std::vector<KeySpec> residual(const std::array<uint32_t, 4>& blocks_per_stage,
                              const AddBlock& add_block) {
  ModelBuilder net;
  net.conv("conv1", 3, kStemWidth, 7, false);
  net.norm("bn1", kStemWidth);
  uint64_t in = kStemWidth;
  for (size_t stage = 0; stage < blocks_per_stage.size(); stage++) {
    for (uint32_t block = 0; block < blocks_per_stage[stage]; block++) {
      in = add_block(net, fmt::format("layer{}.{}.", stage + 1, block), in, stage, block == 0);
    }
  }
  net.linear("fc", in, kClasses);
  return net.take();
}

void downsample(ModelBuilder& net, const std::string& name, uint64_t in, uint64_t out) {
  net.conv(name + "downsample.0", in, out, 1, false);
  net.norm(name + "downsample.1", out);
}

// The widths of a module of GoogLeNet: its four branches, with the reductions before them.
struct Inception {
  const char* name;
  uint64_t in, ones, before_threes, threes, before_fives, fives, pooled;
};

// Modules of Inception v3 (figures 5 to 7 of the paper). A kernel of 1×7 and then one of 7×1 see
// as much as one of 7×7.
void inception_a(ModelBuilder& net, const std::string& name, uint64_t in, uint64_t pooled) {
  net.conv_norm(name + "branch1x1", in, 64, 1);
  net.conv_norm(name + "branch5x5_1", in, 48, 1);
  net.conv_norm(name + "branch5x5_2", 48, 64, 5);
  net.conv_norm(name + "branch3x3dbl_1", in, 64, 1);
  net.conv_norm(name + "branch3x3dbl_2", 64, 96, 3);
  net.conv_norm(name + "branch3x3dbl_3", 96, 96, 3);
  net.conv_norm(name + "branch_pool", in, pooled, 1);
}

void inception_b(ModelBuilder& net, const std::string& name, uint64_t in) {
  net.conv_norm(name + "branch3x3", in, 384, 3);
  net.conv_norm(name + "branch3x3dbl_1", in, 64, 1);
  net.conv_norm(name + "branch3x3dbl_2", 64, 96, 3);
  net.conv_norm(name + "branch3x3dbl_3", 96, 96, 3);
}

void inception_c(ModelBuilder& net, const std::string& name, uint64_t in, uint64_t inner) {
  net.conv_norm(name + "branch1x1", in, 192, 1);
  net.conv_norm(name + "branch7x7_1", in, inner, 1);
  net.conv_norm(name + "branch7x7_2", inner, inner, 1, 7);
  net.conv_norm(name + "branch7x7_3", inner, 192, 7, 1);
  net.conv_norm(name + "branch7x7dbl_1", in, inner, 1);
  net.conv_norm(name + "branch7x7dbl_2", inner, inner, 7, 1);
  net.conv_norm(name + "branch7x7dbl_3", inner, inner, 1, 7);
  net.conv_norm(name + "branch7x7dbl_4", inner, inner, 7, 1);
  net.conv_norm(name + "branch7x7dbl_5", inner, 192, 1, 7);
  net.conv_norm(name + "branch_pool", in, 192, 1);
}

void inception_d(ModelBuilder& net, const std::string& name, uint64_t in) {
  net.conv_norm(name + "branch3x3_1", in, 192, 1);
  net.conv_norm(name + "branch3x3_2", 192, 320, 3);
  net.conv_norm(name + "branch7x7x3_1", in, 192, 1);
  net.conv_norm(name + "branch7x7x3_2", 192, 192, 1, 7);
  net.conv_norm(name + "branch7x7x3_3", 192, 192, 7, 1);
  net.conv_norm(name + "branch7x7x3_4", 192, 192, 3);
}

void inception_e(ModelBuilder& net, const std::string& name, uint64_t in) {
  net.conv_norm(name + "branch1x1", in, 320, 1);
  net.conv_norm(name + "branch3x3_1", in, 384, 1);
  net.conv_norm(name + "branch3x3_2a", 384, 384, 1, 3);
  net.conv_norm(name + "branch3x3_2b", 384, 384, 3, 1);
  net.conv_norm(name + "branch3x3dbl_1", in, 448, 1);
  net.conv_norm(name + "branch3x3dbl_2", 448, 384, 3);
  net.conv_norm(name + "branch3x3dbl_3a", 384, 384, 1, 3);
  net.conv_norm(name + "branch3x3dbl_3b", 384, 384, 3, 1);
  net.conv_norm(name + "branch_pool", in, 192, 1);
}

}  // namespace

// Krizhevsky, 2014 ("One weird trick"), the variant that torchvision has.
std::vector<KeySpec> alexnet() {
  ModelBuilder net;
  net.conv("features.0", 3, 64, 11, true);
  net.conv("features.3", 64, 192, 5, true);
  net.conv("features.6", 192, 384, 3, true);
  net.conv("features.8", 384, 256, 3, true);
  net.conv("features.10", 256, 256, 3, true);
  net.linear("classifier.1", 256 * 6 * 6, 4096);
  net.linear("classifier.4", 4096, 4096);
  net.linear("classifier.6", 4096, kClasses);
  return net.take();
}

// Simonyan and Zisserman, 2014, without batch normalisation. A stage is that many 3×3 convolutions
// and a pooling layer; every convolution is followed by a ReLU, and all of them count in the names.
std::vector<KeySpec> vgg(const std::array<uint32_t, 5>& convolutions_per_stage) {
  constexpr uint64_t kWidth[] = {64, 128, 256, 512, 512};
  ModelBuilder net;
  uint64_t in = 3;
  uint32_t layer = 0;
  for (size_t stage = 0; stage < convolutions_per_stage.size(); stage++) {
    for (uint32_t i = 0; i < convolutions_per_stage[stage]; i++) {
      net.conv(fmt::format("features.{}", layer), in, kWidth[stage], 3, true);
      in = kWidth[stage];
      layer += 2;
    }
    layer += 1;
  }
  net.linear("classifier.0", in * 7 * 7, 4096);
  net.linear("classifier.3", 4096, 4096);
  net.linear("classifier.6", 4096, kClasses);
  return net.take();
}

// Szegedy et al., 2014 ("Going Deeper with Convolutions"), with batch normalisation, without the
// auxiliary classifiers, and with 3×3 kernels in the branch of the 5×5: torchvision's.
std::vector<KeySpec> googlenet() {
  constexpr Inception kModules[] = {
      {"inception3a", 192, 64, 96, 128, 16, 32, 32},
      {"inception3b", 256, 128, 128, 192, 32, 96, 64},
      {"inception4a", 480, 192, 96, 208, 16, 48, 64},
      {"inception4b", 512, 160, 112, 224, 24, 64, 64},
      {"inception4c", 512, 128, 128, 256, 24, 64, 64},
      {"inception4d", 512, 112, 144, 288, 32, 64, 64},
      {"inception4e", 528, 256, 160, 320, 32, 128, 128},
      {"inception5a", 832, 256, 160, 320, 32, 128, 128},
      {"inception5b", 832, 384, 192, 384, 48, 128, 128},
  };
  ModelBuilder net;
  net.conv_norm("conv1", 3, 64, 7);
  net.conv_norm("conv2", 64, 64, 1);
  net.conv_norm("conv3", 64, 192, 3);
  for (const Inception& m : kModules) {
    const std::string name = m.name;
    net.conv_norm(name + ".branch1", m.in, m.ones, 1);
    net.conv_norm(name + ".branch2.0", m.in, m.before_threes, 1);
    net.conv_norm(name + ".branch2.1", m.before_threes, m.threes, 3);
    net.conv_norm(name + ".branch3.0", m.in, m.before_fives, 1);
    net.conv_norm(name + ".branch3.1", m.before_fives, m.fives, 3);
    net.conv_norm(name + ".branch4.1", m.in, m.pooled, 1);
  }
  net.linear("fc", 1024, kClasses);
  return net.take();
}

// Szegedy et al., 2015 ("Rethinking the Inception Architecture"), with the auxiliary classifier.
std::vector<KeySpec> inception_v3() {
  ModelBuilder net;
  net.conv_norm("Conv2d_1a_3x3", 3, 32, 3);
  net.conv_norm("Conv2d_2a_3x3", 32, 32, 3);
  net.conv_norm("Conv2d_2b_3x3", 32, 64, 3);
  net.conv_norm("Conv2d_3b_1x1", 64, 80, 1);
  net.conv_norm("Conv2d_4a_3x3", 80, 192, 3);
  inception_a(net, "Mixed_5b.", 192, 32);
  inception_a(net, "Mixed_5c.", 256, 64);
  inception_a(net, "Mixed_5d.", 288, 64);
  inception_b(net, "Mixed_6a.", 288);
  inception_c(net, "Mixed_6b.", 768, 128);
  inception_c(net, "Mixed_6c.", 768, 160);
  inception_c(net, "Mixed_6d.", 768, 160);
  inception_c(net, "Mixed_6e.", 768, 192);
  net.conv_norm("AuxLogits.conv0", 768, 128, 1);
  net.conv_norm("AuxLogits.conv1", 128, 768, 5);
  net.linear("AuxLogits.fc", 768, kClasses);
  inception_d(net, "Mixed_7a.", 768);
  inception_e(net, "Mixed_7b.", 1280);
  inception_e(net, "Mixed_7c.", 2048);
  net.linear("fc", 2048, kClasses);
  return net.take();
}

// He et al., 2015 ("Deep Residual Learning").
std::vector<KeySpec> resnet_basic(const std::array<uint32_t, 4>& blocks_per_stage) {
  return residual(blocks_per_stage, [](ModelBuilder& net, const std::string& name, uint64_t in,
                                       size_t stage, bool first) {
    const uint64_t out = kStemWidth << stage;
    net.conv(name + "conv1", in, out, 3, false);
    net.norm(name + "bn1", out);
    net.conv(name + "conv2", out, out, 3, false);
    net.norm(name + "bn2", out);
    if (first && stage > 0) downsample(net, name, in, out);
    return out;
  });
}

// The same, and with groups Xie et al., 2016 ("Aggregated Residual Transformations").
std::vector<KeySpec> resnet_bottleneck(const std::array<uint32_t, 4>& blocks_per_stage,
                                       uint64_t groups, uint64_t width_per_group) {
  constexpr uint64_t kExpansion = 4;
  return residual(blocks_per_stage, [=](ModelBuilder& net, const std::string& name, uint64_t in,
                                        size_t stage, bool first) {
    const uint64_t out = (kStemWidth << stage) * kExpansion;
    const uint64_t width = (width_per_group << stage) * groups;
    net.conv(name + "conv1", in, width, 1, false);
    net.norm(name + "bn1", width);
    net.conv(name + "conv2", width / groups, width, 3, false);
    net.norm(name + "bn2", width);
    net.conv(name + "conv3", width, out, 1, false);
    net.norm(name + "bn3", out);
    if (first) downsample(net, name, in, out);
    return out;
  });
}

}  // namespace phub
