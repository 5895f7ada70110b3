// A matrix from its sufficient factors: the gradient of a fully connected layer is the sum, over
// the samples of a batch, of the outer product of two vectors (Xing et al., Distributed Machine
// Learning via Sufficient Factor Broadcasting, 2015; Zhang et al., Poseidon, 2015, section 4.3.1).
#pragma once

#include <cstddef>

namespace phub::kernels {

// Adds the outer products of `samples` pairs of vectors to a matrix of rows × columns, which lies
// row after row. `left` has the samples' vectors of `rows` elements one after another, `right`
// those of `columns`. Element (i, j) becomes, sample by sample in this order,
//
//   out[i][j] = std::fma(left[sample][i], right[sample][j], out[i][j])
//
// The same bits on every instruction set: where there is no FMA it is emulated, which is slow.
// Every NaN that is written is 0x7FC00000. REQUIRES: out overlaps neither left nor right.
void add_products(const float* left, const float* right, size_t samples, size_t rows,
                  size_t columns, float* out);

// Whether this CPU has FMA instructions that add_products() uses.
bool has_fma();

}  // namespace phub::kernels
