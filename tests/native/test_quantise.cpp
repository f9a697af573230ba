// Scales of groups: finite, within their memory, and at least as close as those of the plain range.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "quantise/group_fit.h"

using namespace flashllm;

namespace {

// The squared error of weights rounded to code * scale + minimum.
double squared_error(const GroupFit& fit, const float* weights, float scale, float minimum) {
  const double lowest = fit.has_minimum ? 0.0 : -std::ldexp(1.0, static_cast<int>(fit.bits) - 1);
  const double highest = lowest + std::ldexp(1.0, static_cast<int>(fit.bits)) - 1.0;
  double error = 0.0;
  for (std::size_t i = 0; i < fit.group; ++i) {
    const double offset = static_cast<double>(weights[i]) - static_cast<double>(minimum);
    const double code = scale == 0.0F ? 0.0 : std::nearbyint(offset / static_cast<double>(scale));
    const double left = offset - std::clamp(code, lowest, highest) * static_cast<double>(scale);
    error += left * left;
  }
  return error;
}

double error_of_the_plain_range(const GroupFit& fit, const float* weights) {
  const auto [least, most] = std::minmax_element(weights, weights + fit.group);
  if (fit.has_minimum) {
    const float codes = static_cast<float>((1 << fit.bits) - 1);
    return squared_error(fit, weights, (*most - *least) / codes, *least);
  }
  const float largest = *most > -*least ? *most : *least;
  return squared_error(fit, weights, -largest / static_cast<float>(1 << (fit.bits - 1)), 0.0F);
}

}  // namespace

void test_quantise(int scale) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  constexpr std::size_t kGroups = 12;
  for (int round = 0; round < 4 * scale; ++round) {
    for (const GroupFit fit : {GroupFit{8, 32, false}, GroupFit{8, 64, false}, GroupFit{4, 32, false},
                               GroupFit{4, 64, false}, GroupFit{4, 32, true}, GroupFit{4, 64, true}}) {
      std::vector<float> weights(kGroups * fit.group), scales(kGroups), minimums(kGroups);
      for (std::size_t g = 0; g < kGroups; ++g)
        for (std::size_t i = 0; i < fit.group; ++i)
          weights[g * fit.group + i] = normal(random) * std::pow(10.0F, static_cast<float>(g) - 6.0F);
      std::fill_n(weights.begin(), fit.group, 0.0F);
      std::fill_n(weights.begin() + static_cast<std::ptrdiff_t>(fit.group), fit.group, 0.25F);
      fit_groups(fit, weights.data(), kGroups, scales.data(), fit.has_minimum ? minimums.data() : nullptr);
      for (std::size_t g = 0; g < kGroups; ++g) {
        const float* group = weights.data() + g * fit.group;
        CHECK(std::isfinite(scales[g]) && std::isfinite(minimums[g]));
        const double plain = error_of_the_plain_range(fit, group);
        double energy = 0.0;
        for (std::size_t i = 0; i < fit.group; ++i)
          energy += static_cast<double>(group[i]) * static_cast<double>(group[i]);
        CHECK(squared_error(fit, group, scales[g], minimums[g]) <= plain * 1.001 + energy * 1e-6);
      }
      CHECK(scales[0] == 0.0F && minimums[0] == 0.0F);
    }
  }
}
