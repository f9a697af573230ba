// Chooses the scales (and minimums) of weights in groups by least squares, for conversion
// (flashllm/base/group_codes.py says what becomes of them).
//
// A few ranges are tried for each group; the codes that a range gives have one scale (and minimum) that fits
// them best, and the fit with the least squared error is taken. Sums have one order on every processor, so
// that a conversion's bytes do not depend on the machine.
#pragma once

#include <cstddef>

namespace flashllm {

struct GroupFit {
  std::size_t bits;   // 8 or 4
  std::size_t group;  // weights, a multiple of 8
  bool has_minimum;
};

// weights: [groups, fit.group], finite; scales and minimums: [groups], before they are rounded to fp16;
// minimums: nullptr where there are none. Without them the weight of largest magnitude gets about the lowest
// code, of either sign.
void fit_groups(const GroupFit& fit, const float* weights, std::size_t groups, float* scales,
                float* minimums);

}  // namespace flashllm
