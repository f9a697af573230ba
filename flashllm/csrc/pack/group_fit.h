// Chooses the scales (and minimums) of weights in groups by least squares (flashllm/base/group_codes.py says
// what becomes of them).
//
// Codes that a scale (and minimum) gives have one that fits their weights best, and of a few of these the one
// that loses least is taken. Without minimums a few ranges are tried for each group. With them it is a few
// steps from the group's own range on: other ranges lose fewer squares, and a model more, as they cut off a
// group's largest weights. Sums have one order on every processor, so that bytes do not depend on the
// machine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/row_codecs.h"

namespace flashllm {

// weights: [groups, shape.group], finite; scales and minimums: [groups], fp16; minimums: nullptr where there
// are none. Without them the weight of largest magnitude gets about the lowest code, of either sign. False
// where fp16 cannot say one of them, and the result is then undefined.
bool fit_groups(const CodecShape& shape, const float* weights, std::size_t groups, std::uint16_t* scales,
                std::uint16_t* minimums);

}  // namespace flashllm
