// A matrix of weights [rows, columns] in group-wise quantised form, and its products with many tokens.
//
// Groups are kGroup consecutive rows of one column (FlexGen, section 5: along the output channel), or kGroup
// consecutive columns of one row (the last one of a row what is left). The matrix lies in panels of kGroup
// rows, the last one what is left: scales [columns in whole units], or [rows of the panel, groups of a row],
// minimums likewise, then each row's codes (group_codec.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/kernels.h"
#include "offload/group_codec.h"

namespace flashllm {

enum class GroupsAlong { outputs, inputs };  // rows, columns
// How a group's scale and minimum are chosen: from its smallest and largest weight (FlexGen), or from there
// on so that fewer squares are lost (group_refine.h).
enum class GroupScales { range, squares };

// Throw CoreError (usage) for names that are neither.
GroupsAlong parse_groups_along(const std::string& name);
GroupScales parse_group_scales(const std::string& name);

struct PackedWeights {
  const std::uint8_t* data = nullptr;
  std::size_t rows = 0;
  std::size_t columns = 0;
  int bits = 4;
  GroupsAlong along = GroupsAlong::outputs;

  std::size_t row_nbytes() const { return codes_nbytes(columns, bits); }
  // Scales of a panel of some rows; there are as many minimums.
  std::size_t panel_scales(std::size_t panel_rows) const {
    return along == GroupsAlong::outputs ? in_units(columns) : panel_rows * groups_of(columns);
  }
  std::size_t panel_nbytes(std::size_t panel_rows) const {
    return 2 * panel_scales(panel_rows) * sizeof(std::uint16_t) + panel_rows * row_nbytes();
  }
  std::size_t panel_nbytes() const { return panel_nbytes(kGroup); }  // of a whole one
  std::size_t nbytes() const {
    return rows / kGroup * panel_nbytes() + (rows % kGroup == 0 ? 0 : panel_nbytes(rows % kGroup));
  }

  // Rows [begin, begin + count) of columns [first, first + width), widened; `first` is a multiple of kUnit,
  // and each row of `to`, `stride` floats apart, has room for whole units.
  void widen(std::size_t begin, std::size_t count, std::size_t first, std::size_t width, float* to,
             std::size_t stride, const GroupKernels& kernels) const;
};

// weights [rows, columns] of the given dtype, consecutive rows. `packed` has the shape to pack to, `to` its
// nbytes(). Throws CoreError (usage) for weights that are not finite; `to` is then undefined.
void pack_weights(const std::byte* weights, Dtype dtype, const PackedWeights& packed, GroupScales scales,
                  std::uint8_t* to, ThreadPool& pool, SimdLevel level);

// out: [rows, columns]
void unpack_weights(const PackedWeights& packed, float* out, ThreadPool& pool, SimdLevel level);

// out[m][r] = sum_j weights[r][j] * x[m][j] (+ bias[r]) with the unpacked weights, fp32 at every level and
// with the order of sums of `linear_many` (kernels/matmul.h). x: [tokens, columns], out: [tokens, rows], both
// of the given dtype.
void packed_linear_many(const PackedWeights& packed, const float* bias, const std::byte* x,
                        std::size_t tokens, Dtype dtype, std::byte* out, ThreadPool& pool, SimdLevel level);

}  // namespace flashllm
