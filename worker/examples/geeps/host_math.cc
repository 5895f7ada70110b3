#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "worker/examples/geeps/device_math.h"

namespace phub::examples {
namespace {

// A tile of the result is computed at once, in registers. Every element is one sum over the depth
// from 0 on, wherever it is in a tile.
constexpr size_t kTileRows = 4;
constexpr size_t kTileColumns = 8;
using Columns = float __attribute__((vector_size(kTileColumns * sizeof(float))));

// A factor as panels of `width` of its vectors along the depth, padded with zeros.
template <size_t kWidth>
void pack(const float* from, size_t vectors, size_t depth, size_t vector_stride,
          size_t depth_stride, std::vector<float>& panels) {
  panels.resize((vectors + kWidth - 1) / kWidth * kWidth * depth);
  float* to = panels.data();
  for (size_t panel = 0; panel < vectors; panel += kWidth) {
    const size_t width = std::min(kWidth, vectors - panel);
    const float* source = from + panel * vector_stride;
    for (size_t k = 0; k < depth; ++k, to += kWidth) {
      for (size_t v = 0; v < width; ++v) to[v] = source[k * depth_stride + v * vector_stride];
      for (size_t v = width; v < kWidth; ++v) to[v] = 0;
    }
  }
}

std::array<Columns, kTileRows> multiply_tile(const float* a, const float* b, size_t depth) {
  std::array<Columns, kTileRows> sums{};
  for (size_t k = 0; k < depth; ++k, a += kTileRows, b += kTileColumns) {
    Columns columns;
    std::copy_n(b, kTileColumns, reinterpret_cast<float*>(&columns));
    for (size_t r = 0; r < kTileRows; ++r) sums[r] += a[r] * columns;
  }
  return sums;
}

class HostMath : public Math {
 public:
  void multiply(const Product& p, const float* a, const float* b, float* c) override {
    pack<kTileRows>(a, p.rows, p.depth, p.transpose_a ? 1 : p.depth, p.transpose_a ? p.rows : 1,
                    a_panels_);
    pack<kTileColumns>(b, p.columns, p.depth, p.transpose_b ? p.depth : 1,
                       p.transpose_b ? 1 : p.columns, b_panels_);
    for (size_t column = 0; column < p.columns; column += kTileColumns) {
      const size_t width = std::min(kTileColumns, p.columns - column);
      for (size_t row = 0; row < p.rows; row += kTileRows) {
        const auto tile = multiply_tile(a_panels_.data() + row * p.depth,
                                        b_panels_.data() + column * p.depth, p.depth);
        for (size_t r = 0; r < std::min(kTileRows, p.rows - row); ++r) {
          float* to = c + (row + r) * p.columns + column;
          for (size_t i = 0; i < width; ++i) to[i] = p.add ? to[i] + tile[r][i] : tile[r][i];
        }
      }
    }
  }

  void run(size_t rows, size_t columns, const Operation& operation) override {
    std::visit(
        [&](const auto& apply) {
          for (size_t row = 0; row < rows; ++row) {
            for (size_t column = 0; column < columns; ++column) apply(row, column);
          }
        },
        operation);
  }

  void upload(const float* from, float* to, size_t count) override { std::copy_n(from, count, to); }
  void download(const float* from, float* to, size_t count) override {
    std::copy_n(from, count, to);
  }

 private:
  std::vector<float> a_panels_, b_panels_;
};

}  // namespace

std::unique_ptr<Math> make_host_math() { return std::make_unique<HostMath>(); }

}  // namespace phub::examples
