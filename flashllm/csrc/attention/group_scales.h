// A group's scale and minimum in fp16, limited to what fp16 can say. Everything is `static`: each level's
// file compiles its own copy with its own flags.
#pragma once

#include "kernels/half.h"

namespace flashllm {

constexpr float kLargestHalf = 65504.0F;

static inline std::uint16_t half_scale(float scale) {
  return float_to_half(scale < kLargestHalf ? scale : kLargestHalf);
}
// A sum with zero has no minus zero: which of two zeros is the smallest does not show.
static inline std::uint16_t half_minimum(float minimum) {
  const float above = minimum > -kLargestHalf ? minimum : -kLargestHalf;
  return float_to_half((above < kLargestHalf ? above : kLargestHalf) + 0.0F);
}

}  // namespace flashllm
