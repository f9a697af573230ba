#include "pack/group_fit.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/half.h"
#include "pack/lanes.h"

namespace flashllm {

namespace {

// Ranges tried: steps by which they differ from the group's own.
constexpr float kStretches[] = {0.0F, -0.9F, -0.6F, -0.3F, 0.3F, 0.6F, 0.9F};
constexpr int kSteps = 3;  // of a line

// Whether fp16 can say the value, and what it makes of it.
bool in_half(float value, std::uint16_t& half) {
  half = float_to_half(value + 0.0F);  // no minus zero
  return std::isfinite(half_to_float(half));
}

// 1 / step; 0 where there is no step, or one too small to divide by.
float inverse_of(float step) {
  const float inverse = step != 0.0F ? 1.0F / step : 0.0F;
  const float largest = std::numeric_limits<float>::max();
  return inverse <= largest && inverse >= -largest ? inverse : 0.0F;
}

struct Range {
  float least, most;
};

float symmetric_scale(const CodecShape& shape, const float* weights, const Range& range) {
  const float highest = static_cast<float>((1 << (shape.bits - 1)) - 1), lowest = -highest - 1.0F;
  const float largest = range.most > -range.least ? range.most : range.least;
  float best = -1.0F, scale = 0.0F;
  for (const float stretch : kStretches) {
    const float inverse = inverse_of(largest / (lowest + stretch));
    Lanes squares_of{}, products_of{};  // of the codes c and the weights w: c * c, c * w
    for (std::size_t i = 0; i < shape.group; i += kLanes) {
      const Lanes values = load(weights + i), code = nearest(values * inverse, lowest, highest);
      squares_of += code * code;
      products_of += code * values;
    }
    const float squares = sum(squares_of), products = sum(products_of);
    // What the best scale of these codes takes from the squared error.
    const float gain = squares > 0.0F ? products * products / squares : 0.0F;
    if (gain <= best) continue;
    best = gain;
    scale = squares > 0.0F ? products / squares : 0.0F;
  }
  return scale;
}

struct Line {
  std::uint16_t scale, minimum;
};

// Sums over a group's codes c and its weights w, each less one of them: a group far from zero keeps its
// digits.
struct CodeSums {
  float lost;  // (c * scale + minimum - w)^2
  float codes, squares, products;
};

CodeSums sums_of(const CodecShape& shape, const float* weights, float scale, float minimum) {
  const float base = weights[0], inverse = inverse_of(scale);
  const float highest = static_cast<float>((1 << shape.bits) - 1);
  Lanes lost{}, codes{}, squares{}, products{};
  for (std::size_t i = 0; i < shape.group; i += kLanes) {
    const Lanes values = load(weights + i), code = nearest((values - minimum) * inverse, 0.0F, highest),
                off = code * scale + minimum - values;
    lost += off * off;
    codes += code;
    squares += code * code;
    products += code * (values - base);
  }
  return {sum(lost), sum(codes), sum(squares), sum(products)};
}

bool best_line(const CodecShape& shape, const float* weights, const Range& range, Line& best) {
  const float highest = static_cast<float>((1 << shape.bits) - 1), count = static_cast<float>(shape.group);
  Lanes total_of{};
  for (std::size_t i = 0; i < shape.group; i += kLanes) total_of += load(weights + i) - weights[0];
  const float mean = sum(total_of) / count;  // less the first weight
  Line line{};
  if (!in_half((range.most - range.least) / highest, line.scale) || !in_half(range.least, line.minimum))
    return false;
  best = line;
  float least = std::numeric_limits<float>::infinity();
  for (int step = 0; step <= kSteps; ++step) {
    const CodeSums sums = sums_of(shape, weights, half_to_float(line.scale), half_to_float(line.minimum));
    if (sums.lost < least) {
      least = sums.lost;
      best = line;
    }
    const float mean_code = sums.codes / count, variance = sums.squares - count * mean_code * mean_code;
    if (!(variance > 0.0F)) break;  // one code for all, which no other line makes better
    const float scale = (sums.products - count * mean * mean_code) / variance;
    if (!in_half(scale, line.scale) || !in_half(weights[0] + mean - scale * mean_code, line.minimum)) break;
  }
  return true;
}

Range range_of(const float* weights, std::size_t n) {
  Lanes least = load(weights), most = least;
  for (std::size_t i = kLanes; i < n; i += kLanes) {
    least = smaller(least, load(weights + i));
    most = larger(most, load(weights + i));
  }
  Range range{least[0], most[0]};
  for (std::size_t l = 1; l < kLanes; ++l) {
    range.least = std::min(range.least, least[l]);
    range.most = std::max(range.most, most[l]);
  }
  return range;
}

}  // namespace

bool fit_groups(const CodecShape& shape, const float* weights, std::size_t groups, std::uint16_t* scales,
                std::uint16_t* minimums) {
  for (std::size_t g = 0; g < groups; ++g) {
    const float* group = weights + g * shape.group;
    const Range range = range_of(group, shape.group);
    if (shape.has_minimum) {
      Line line{};
      if (!best_line(shape, group, range, line)) return false;
      scales[g] = line.scale;
      minimums[g] = line.minimum;
    } else if (!in_half(symmetric_scale(shape, group, range), scales[g])) {
      return false;
    }
  }
  return true;
}

}  // namespace flashllm
