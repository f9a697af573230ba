#include "offload/group_refine.h"

#include <limits>

#include "offload/group_scales.h"
#include "quantise/lanes.h"

namespace flashllm {

namespace {

constexpr int kSteps = 3;

// Sums over a group's codes c and its weights w, each less one of them: a group far from zero keeps its
// digits.
struct CodeSums {
  float lost;  // (c * scale + minimum - w)^2
  float codes, squares, products;
};

CodeSums sums_of(const float* values, std::size_t n, float scale, float minimum, float highest) {
  const float base = values[0], inverse = scale > 0.0F ? 1.0F / scale : 0.0F;
  Lanes lost{}, codes{}, squares{}, products{};
  for (std::size_t i = 0; i < n; i += kLanes) {
    const Lanes weights = load(values + i);
    const Lanes limited = smaller(larger((weights - minimum) * inverse, Lanes{}), Lanes{} + highest);
    const Lanes code = (limited + kRounder) - kRounder, off = code * scale + minimum - weights;
    lost += off * off;
    codes += code;
    squares += code * code;
    products += code * (weights - base);
  }
  return {sum(lost), sum(codes), sum(squares), sum(products)};
}

struct Line {
  std::uint16_t scale, minimum;
};

Line range_of(const float* values, std::size_t n, float highest) {
  Lanes least = load(values), most = least;
  for (std::size_t i = kLanes; i < n; i += kLanes) {
    least = smaller(least, load(values + i));
    most = larger(most, load(values + i));
  }
  float low = least[0], high = most[0];
  for (std::size_t l = 1; l < kLanes; ++l) {
    low = least[l] < low ? least[l] : low;
    high = most[l] > high ? most[l] : high;
  }
  return {half_scale((high - low) / highest), half_minimum(low)};
}

Line refined(const float* values, std::size_t n, int bits) {
  const float highest = static_cast<float>((1 << bits) - 1), count = static_cast<float>(n);
  Lanes total_of{};
  for (std::size_t i = 0; i < n; i += kLanes) total_of += load(values + i) - values[0];
  const float mean = sum(total_of) / count;  // less the first weight
  Line line = range_of(values, n, highest), best = line;
  float least = std::numeric_limits<float>::infinity();
  for (int step = 0; step <= kSteps; ++step) {
    const CodeSums sums = sums_of(values, n, half_to_float(line.scale), half_to_float(line.minimum), highest);
    if (sums.lost < least) {
      least = sums.lost;
      best = line;
    }
    const float mean_code = sums.codes / count, variance = sums.squares - count * mean_code * mean_code;
    if (!(variance > 0.0F)) break;  // one code for all, which no other line makes better
    const float scale = (sums.products - count * mean * mean_code) / variance;
    line = {half_scale(scale), half_minimum(values[0] + mean - scale * mean_code)};
  }
  return best;
}

}  // namespace

void refine_groups(const float* values, std::size_t groups, std::size_t n, int bits, std::uint16_t* scales,
                   std::uint16_t* minimums) {
  for (std::size_t g = 0; g < groups; ++g) {
    const Line line = refined(values + g * n, n, bits);
    scales[g] = line.scale;
    minimums[g] = line.minimum;
  }
}

}  // namespace flashllm
