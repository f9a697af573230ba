// Group-wise quantisation of keys and values (FlexGen, section 5): 4 or 8 bits a value, asymmetric
// min-max over groups of kGroup values that share a scale and a minimum in fp16. Every result has the same
// bits at every SIMD level, those of this arithmetic in fp32, each step rounded apart:
//
//   scale   = fp16(min((largest - smallest) / (2^bits - 1), 65504))
//   minimum = fp16(clamp(smallest, -65504, 65504) + 0)
//   code    = round half to even(clamp((x - minimum) / scale, 0, 2^bits - 1)); 0 where the scale is 0
//   value   = code * scale + minimum
//
// Codes lie in units of kUnit, 2 * bits bytes each, little-endian: code i of a unit is the bits from bits * i
// on. Rows are as long as whole units; what pads the last one repeats the row's last value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace flashllm {

constexpr std::size_t kGroup = 64;
constexpr std::size_t kUnit = 16;
static_assert(kGroup % kUnit == 0, "groups must be whole units");

constexpr std::size_t in_units(std::size_t columns) { return (columns + kUnit - 1) / kUnit * kUnit; }
constexpr std::size_t groups_of(std::size_t columns) { return (columns + kGroup - 1) / kGroup; }
// Bytes of a row's codes.
constexpr std::size_t codes_nbytes(std::size_t columns, int bits) {
  return in_units(columns) / kUnit * 2 * static_cast<std::size_t>(bits);
}

// Some rows' groups and codes. Rows of codes are `code_stride` bytes apart.
struct GroupedRows {
  std::uint16_t* scales;
  std::uint16_t* minimums;
  std::uint8_t* codes;
  std::size_t code_stride;
};
struct ConstGroupedRows {
  const std::uint16_t* scales;
  const std::uint16_t* minimums;
  const std::uint8_t* codes;
  std::size_t code_stride;
};

// The loops of one level and width in bits. `columns` is a multiple of kUnit; rows of values are `stride`
// floats apart. Values must be finite.
struct GroupKernels {
  // A group is one column of all rows (at most kGroup): scales and minimums [columns].
  void (*pack_columns)(const float* values, std::size_t stride, std::size_t rows, std::size_t columns,
                       const GroupedRows& to);
  void (*unpack_columns)(const ConstGroupedRows& from, std::size_t rows, std::size_t columns, float* values,
                         std::size_t stride);
  // Groups are kGroup consecutive columns of a row, the last one what is left: scales and minimums [rows,
  // groups_of(columns)].
  void (*pack_rows)(const float* values, std::size_t stride, std::size_t rows, std::size_t columns,
                    const GroupedRows& to);
  void (*unpack_rows)(const ConstGroupedRows& from, std::size_t rows, std::size_t columns, float* values,
                      std::size_t stride);
};

}  // namespace flashllm
