// Layer and RMS norms in fp32, and rounding to 8 bits. Every sum has one order, which is the same on every
// processor.
#pragma once

#include <cstddef>

#include "kernels/kernels.h"

namespace flashllm {

struct Norm {
  enum class Kind { layer, rms };
  Kind kind = Kind::layer;
  std::size_t width = 0;
  float epsilon = 0.0F;
  const float* weight = nullptr;  // [width]; nullptr: ones
  const float* bias = nullptr;    // [width]; nullptr: zeros
};

// One row; x and y may be the same.
//   layer: y = (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias (Ba et al. 2016)
//   rms:   y = x / sqrt(mean(x^2) + epsilon) * weight + bias (Zhang and Sennrich 2019)
void normalize(const Norm& norm, const float* x, float* y);
// `heads` rows that follow one another, in place: all with the same weight and bias [width], or, with
// `own_weights`, each with its own [heads, width].
void normalize_heads(const Norm& norm, std::size_t heads, bool own_weights, float* x);

// x, in place, as BitNet b1.58's products see it (Ma et al. 2024): to the nearest of 255 multiples of the
// largest magnitude / 127, ties to even. `Rounding` is the step of values whose largest magnitude is known.
class Rounding {
 public:
  explicit Rounding(float largest);
  float operator()(float value) const { return ((value * codes_ + kNoFraction) - kNoFraction) / codes_; }

 private:
  static constexpr float kNoFraction = 12582912.0F;  // 1.5 * 2^23: adding it leaves no fraction
  float codes_;                                      // of a value of 1
};
void round_to_8_bits(float* x, std::size_t n);

}  // namespace flashllm
