// Matrix-vector products over 8-bit weights, each row with its own scale: half the bytes of 16-bit ones.
//
// The codes are widened and multiplied with fp32 inputs and summed in fp32; the sum is scaled once. As for
// the wider weights (kernels.h), every output is one sum in one fixed order: bits do not depend on the number
// of threads or on how many rows are handled together, but do on the instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"
#include "kernels/thread_pool.h"

namespace flashllm {

// Weight [r][j] is scales[r] * codes[r][j]; rows follow one another without gaps.
struct Int8Weights {
  const std::int8_t* codes = nullptr;
  std::size_t rows = 0;
  std::size_t columns = 0;
  const std::uint16_t* scales = nullptr;  // [rows], fp16
  const float* bias = nullptr;            // [rows] or nullptr
};

// out[r] = scales[r] * sum_j codes[r][j] * x[j] (+ bias[r]). Throws CoreError where the processor lacks the
// level.
void linear_int8(const Int8Weights& weights, const float* x, float* out, ThreadPool& pool, SimdLevel level);

}  // namespace flashllm
