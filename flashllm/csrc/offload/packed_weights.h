// A matrix of weights [rows, columns] in group-wise quantised form, and its products with many tokens.
//
// Groups are kGroup consecutive rows of one column (FlexGen, section 5: along the output channel). The matrix
// lies in panels of kGroup rows, the last one what is left: scales [columns in whole units], minimums
// likewise, then each row's codes (group_codec.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"
#include "offload/group_codec.h"

namespace flashllm {

struct PackedWeights {
  const std::uint8_t* data = nullptr;
  std::size_t rows = 0;
  std::size_t columns = 0;
  int bits = 4;

  std::size_t row_nbytes() const { return codes_nbytes(columns, bits); }
  std::size_t panel_nbytes() const {  // of a whole one
    return 2 * in_units(columns) * sizeof(std::uint16_t) + kGroup * row_nbytes();
  }
  std::size_t nbytes() const {
    return groups_of(rows) * 2 * in_units(columns) * sizeof(std::uint16_t) + rows * row_nbytes();
  }

  // Rows [begin, begin + count) of columns [first, first + width), widened; `first` is a multiple of kUnit,
  // and each row of `to`, `stride` floats apart, has room for whole units.
  void widen(std::size_t begin, std::size_t count, std::size_t first, std::size_t width, float* to,
             std::size_t stride, const GroupKernels& kernels) const;
};

// weights [rows, columns] of the given dtype, consecutive rows. `packed` has the shape to pack to, `to` its
// nbytes(). Throws CoreError (usage) for weights that are not finite; `to` is then undefined.
void pack_weights(const std::byte* weights, Dtype dtype, const PackedWeights& packed, std::uint8_t* to,
                  ThreadPool& pool, SimdLevel level);

// out: [rows, columns]
void unpack_weights(const PackedWeights& packed, float* out, ThreadPool& pool, SimdLevel level);

// out[m][r] = sum_j weights[r][j] * x[m][j] (+ bias[r]) with the unpacked weights, fp32 at every level and
// with the order of sums of `linear_many` (kernels/matmul.h). x: [tokens, columns], out: [tokens, rows], both
// of the given dtype.
void packed_linear_many(const PackedWeights& packed, const float* bias, const std::byte* x,
                        std::size_t tokens, Dtype dtype, std::byte* out, ThreadPool& pool, SimdLevel level);

}  // namespace flashllm
