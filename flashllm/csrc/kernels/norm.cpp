#include "kernels/norm.h"

#include <algorithm>
#include <cmath>

namespace flashllm {

namespace {

constexpr std::size_t kLanes = 16;  // partial sums side by side; part of the order

// The sum of term(x[i]) over i.
template <typename Term>
float sum(const float* x, std::size_t n, Term term) {
  float lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(x[i + lane]);
  for (std::size_t lane = 0; i + lane < n; ++lane) lanes[lane] += term(x[i + lane]);
  float total = 0.0F;
  for (const float lane : lanes) total += lane;
  return total;
}

// y = (x - mean) * scale * weight + bias
void rescale(const Norm& norm, const float* x, float mean, float scale, float* y) {
  const float *weight = norm.weight, *bias = norm.bias;
  const std::size_t n = norm.width;
  if (weight != nullptr && bias != nullptr) {
    for (std::size_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * scale * weight[i] + bias[i];
  } else if (weight != nullptr) {
    for (std::size_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * scale * weight[i];
  } else {
    for (std::size_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * scale;
    for (std::size_t i = 0; bias != nullptr && i < n; ++i) y[i] += bias[i];
  }
}

}  // namespace

void normalize(const Norm& norm, const float* x, float* y) {
  const auto n = static_cast<float>(norm.width);
  const bool centred = norm.kind == Norm::Kind::layer;
  const float mean = centred ? sum(x, norm.width, [](float value) { return value; }) / n : 0.0F;
  const float variance =
      sum(x, norm.width, [mean](float value) { return (value - mean) * (value - mean); }) / n;
  rescale(norm, x, mean, 1.0F / std::sqrt(variance + norm.epsilon), y);
}

void normalize_heads(const Norm& norm, std::size_t heads, bool own_weights, float* x) {
  Norm of_head = norm;
  for (std::size_t h = 0; h < heads; ++h) {
    const std::size_t first = own_weights ? h * norm.width : 0;
    if (norm.weight != nullptr) of_head.weight = norm.weight + first;
    if (norm.bias != nullptr) of_head.bias = norm.bias + first;
    normalize(of_head, x + h * norm.width, x + h * norm.width);
  }
}

Rounding::Rounding(float largest) {
  constexpr float kMost = 127.0F, kLeast = 1e-5F;
  codes_ = kMost / (largest < kLeast ? kLeast : largest);
}

void round_to_8_bits(float* x, std::size_t n) {
  float largest = 0.0F;
  for (std::size_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));
  const Rounding rounded(largest);
  for (std::size_t i = 0; i < n; ++i) x[i] = rounded(x[i]);
}

}  // namespace flashllm
