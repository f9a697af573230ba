#include "quantise/group_fit.h"

#include <algorithm>
#include <limits>

#include "quantise/lanes.h"

namespace flashllm {

namespace {

// Ranges tried: steps by which they differ from the group's own.
constexpr float kStretches[] = {0.0F, -0.9F, -0.6F, -0.3F, 0.3F, 0.6F, 0.9F};

// Sums over the codes c of a group's weights w.
struct CodeSums {
  float codes, squares, products;  // c, c * c, c * w
};

// Codes are (w - offset) * inverse, rounded and limited.
CodeSums sums_of(const float* weights, std::size_t n, float offset, float inverse, float lowest,
                 float highest) {
  Lanes codes{}, squares{}, products{};
  for (std::size_t i = 0; i < n; i += kLanes) {
    const Lanes values = load(weights + i);
    const Lanes limited = smaller(larger((values - offset) * inverse, Lanes{} + lowest), Lanes{} + highest);
    const Lanes code = (limited + kRounder) - kRounder;
    codes += code;
    squares += code * code;
    products += code * values;
  }
  return {sum(codes), sum(squares), sum(products)};
}

// 1 / step; 0 where there is no step, or one too small to divide by.
float inverse_of(float step) {
  const float inverse = step != 0.0F ? 1.0F / step : 0.0F;
  const float largest = std::numeric_limits<float>::max();
  return inverse <= largest && inverse >= -largest ? inverse : 0.0F;
}

float symmetric_scale(const GroupFit& fit, const float* weights, float least, float most) {
  const float highest = static_cast<float>((1 << (fit.bits - 1)) - 1), lowest = -highest - 1.0F;
  const float largest = most > -least ? most : least;
  float best = -1.0F, scale = 0.0F;
  for (const float stretch : kStretches) {
    const float inverse = inverse_of(largest / (lowest + stretch));
    const CodeSums sums = sums_of(weights, fit.group, 0.0F, inverse, lowest, highest);
    // What the best scale of these codes takes from the squared error.
    const float gain = sums.squares > 0.0F ? sums.products * sums.products / sums.squares : 0.0F;
    if (gain <= best) continue;
    best = gain;
    scale = sums.squares > 0.0F ? sums.products / sums.squares : 0.0F;
  }
  return scale;
}

// The line code * scale + minimum that fits best.
void line(const GroupFit& fit, const float* weights, float least, float most, float& scale, float& minimum) {
  const float highest = static_cast<float>((1 << fit.bits) - 1), count = static_cast<float>(fit.group);
  Lanes total_of{}, squares_of{};
  for (std::size_t i = 0; i < fit.group; i += kLanes) {
    const Lanes values = load(weights + i);
    total_of += values;
    squares_of += values * values;
  }
  const float total = sum(total_of), spread = sum(squares_of) - total * total / count;
  float best = std::numeric_limits<float>::infinity();
  scale = (most - least) / highest;  // stays where squares overflow: for fp16 it is too large then
  minimum = least;
  for (const float stretch : kStretches) {
    const float inverse = inverse_of((most - least) / (highest + stretch));
    const CodeSums sums = sums_of(weights, fit.group, least, inverse, 0.0F, highest);
    const float mean = sums.codes / count, variance = sums.squares - count * mean * mean;
    const float covariance = sums.products - mean * total;
    const float fitted = variance > 0.0F ? covariance / variance : 0.0F;
    // The squared error: the group's own, without what the line explains.
    const float error = spread - fitted * covariance;
    if (!(error < best)) continue;
    best = error;
    scale = fitted;
    minimum = total / count - fitted * mean;
  }
}

}  // namespace

void fit_groups(const GroupFit& fit, const float* weights, std::size_t groups, float* scales,
                float* minimums) {
  for (std::size_t g = 0; g < groups; ++g) {
    const float* group = weights + g * fit.group;
    Lanes least = load(group), most = least;
    for (std::size_t i = kLanes; i < fit.group; i += kLanes) {
      least = smaller(least, load(group + i));
      most = larger(most, load(group + i));
    }
    float low = least[0], high = most[0];
    for (std::size_t l = 1; l < kLanes; ++l) {
      low = std::min(low, least[l]);
      high = std::max(high, most[l]);
    }
    if (fit.has_minimum) {
      line(fit, group, low, high, scales[g], minimums[g]);
    } else {
      scales[g] = symmetric_scale(fit, group, low, high);
    }
  }
}

}  // namespace flashllm
