// Rows of coded weights for tests of kernels: random, and every weight finite, so that no sum hides another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/rows.h"

namespace flashllm {

inline std::vector<std::byte> random_rows(RowCodec codec, std::size_t rows, std::size_t columns,
                                          std::mt19937& random) {
  const std::size_t stride = vector_nbytes(codec, columns), units = (columns + kCodeUnit - 1) / kCodeUnit;
  const std::size_t shared = (columns + kSharedFactors - 1) / kSharedFactors;
  constexpr std::size_t kFactors = kSharedFactors / 16;
  const auto byte = [&](std::size_t at) {
    if (codec == RowCodec::bf12) return random() & 0x3F;  // exponents of numbers up to 1
    if (codec == RowCodec::mxfp4) return at < units ? 110 + random() % 20 : random();
    if (codec == RowCodec::nvfp4 && at >= sizeof(float) && at < sizeof(float) + 2 * units)
      return random() % 127;
    if (takes_factors_along(codec) && at >= 4 * shared && at < (4 + 2 * kFactors) * shared)
      return random() % 16;                         // as such files have them
    return at % 2 == 0 ? random() : random() % 60;  // small scales
  };
  std::vector<std::byte> found(rows * stride);
  for (std::size_t i = 0; i < found.size(); ++i) found[i] = static_cast<std::byte>(byte(i % stride));
  return found;
}

}  // namespace flashllm
