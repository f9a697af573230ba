// Scales and minimums of groups by least squares, from those of min-max on (group_codec.h).
//
// Codes that a scale and a minimum give have a line that fits their weights best, which gives other codes,
// and so on: a few steps, of which the one that loses least is taken. Other ranges are not tried
// (quantise/group_fit.h does): they lose fewer squares, and a model more, as they cut off a group's largest
// weights. Sums have one order on every processor.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashllm {

// values: [groups, n], finite, n a multiple of 4 and not 0; scales and minimums: [groups], fp16.
void refine_groups(const float* values, std::size_t groups, std::size_t n, int bits, std::uint16_t* scales,
                   std::uint16_t* minimums);

}  // namespace flashllm
