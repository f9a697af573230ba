// Layer norm in fp32: mean and variance in two passes, each a sum in one fixed order that is the same on
// every processor.
#pragma once

#include <cstddef>

#include "kernels/kernels.h"

namespace flashllm {

struct LayerNorm {
  std::size_t width = 0;
  float epsilon = 0.0F;
  const float* weight = nullptr;  // [width]
  const float* bias = nullptr;    // [width]
};

// y = (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias; x and y may be the same.
void layer_norm(const LayerNorm& norm, const float* x, float* y);

// The same for each row of x and y [rows, width], of the given dtype.
void layer_norm_rows(const LayerNorm& norm, const std::byte* x, std::size_t rows, Dtype dtype, std::byte* y,
                     ThreadPool& pool, SimdLevel level);

}  // namespace flashllm
