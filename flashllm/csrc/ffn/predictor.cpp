#include "ffn/predictor.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace flashllm {

namespace {

constexpr std::size_t kActivationGrain = 1 << 10;  // neurons a thread takes at a time
constexpr std::size_t kListed = 512;               // neurons looked at together
constexpr float kFarOut = 64.0F;                   // below its negative every activation is zero, or tiny
constexpr int kHalvings = 60;                      // of an interval, by when nothing is left to halve

// Between `no` and `yes`, the number where `fires` begins to hold.
template <typename Fires>
float edge(float no, float yes, const Fires& fires) {
  for (int i = 0; i < kHalvings; ++i) {
    const float middle = 0.5F * (no + yes);
    (fires(middle) ? yes : no) = middle;
  }
  return no;
}

float activated(Activation activation, float value) {
  activate(activation, 0.0F, &value, 1, best_simd_level());
  return value;
}

// Where the magnitude is largest below zero: of a SiLU and its like it falls to both sides.
float negative_peak(Activation activation) {
  const auto magnitude = [&](float x) { return std::fabs(activated(activation, x)); };
  float low = -8.0F, high = 0.0F;
  for (int i = 0; i < kHalvings; ++i) {
    const float one = low + (high - low) / 3.0F, two = high - (high - low) / 3.0F;
    (magnitude(one) < magnitude(two) ? low : high) = magnitude(one) < magnitude(two) ? one : two;
  }
  return 0.5F * (low + high);
}

// The neurons that `fires` holds for, ascending. Few fire, and at random: a branch for each would be
// mispredicted.
template <typename Fires>
void list_where(std::size_t neurons, const Fires& fires, std::vector<std::int32_t>& active) {
  active.clear();
  std::int32_t found[kListed];
  for (std::size_t first = 0; first < neurons; first += kListed) {
    std::size_t count = 0;
    for (std::size_t neuron = first; neuron < std::min(first + kListed, neurons); ++neuron) {
      found[count] = static_cast<std::int32_t>(neuron);
      count += fires(neuron) ? 1 : 0;
    }
    active.insert(active.end(), found, found + count);  // no more memory than those that fire
  }
}

}  // namespace

FiringRange firing_range(Activation activation) {
  const float infinity = std::numeric_limits<float>::infinity();
  const auto fires = [&](float x) { return activated(activation, x) != 0.0F; };
  const Activation whole{activation.kind, activation.threshold};
  FiringRange range;
  const bool has_tail = activated(whole, -1.0F) != 0.0F;  // no ReLU
  if (has_tail && activation.cut == 0.0F) {
    range.above = -infinity;
    return range;
  }
  float yes = 1.0F;
  while (!fires(yes) && yes < infinity) yes *= 2.0F;
  range.above = edge(0.0F, yes, fires);
  const float peak = has_tail ? negative_peak(whole) : 0.0F;
  if (has_tail && fires(peak)) {
    range.low = edge(-kFarOut, peak, fires);
    range.high = edge(0.0F, peak, fires);
  }
  return range;
}

CodedGatePredictor::CodedGatePredictor(const RowMatrix& gate, Activation activation, float margin)
    : gate_(gate), named_(firing_range(activation)), products_(gate.rows) {
  const bool has_low = named_.low < named_.high;
  named_.above -= margin;
  if (has_low) {
    named_.low -= margin;
    named_.high += margin;
  }
}

void CodedGatePredictor::predict(const float* x, std::size_t /*token*/, ThreadPool& pool, SimdLevel level,
                                 std::vector<std::int32_t>& active) {
  dot_all(gate_, x, products_.data(), pool, level);
  const auto fires = [this](std::size_t neuron) {
    const float product = products_[neuron];
    return (product > named_.above) | ((product > named_.low) & (product < named_.high));
  };
  list_where(products_.size(), fires, active);
}

LowRankPredictor::LowRankPredictor(const RowMatrix& a, const RowMatrix& b, float threshold, bool relu)
    : a_(a), b_(b), threshold_(threshold), relu_(relu), projected_(a.rows), logits_(b.rows) {}

void LowRankPredictor::predict(const float* x, std::size_t /*token*/, ThreadPool& pool, SimdLevel level,
                               std::vector<std::int32_t>& active) {
  dot_all(a_, x, projected_.data(), pool, level);
  if (relu_)
    for (float& value : projected_) value = std::max(value, 0.0F);
  dot_all(b_, projected_.data(), logits_.data(), pool, level);
  const auto above = [this](std::size_t neuron) { return logits_[neuron] > threshold_; };
  const auto reaches = [this](std::size_t neuron) { return logits_[neuron] >= threshold_; };
  if (relu_)
    list_where(logits_.size(), reaches, active);
  else
    list_where(logits_.size(), above, active);
}

void GatePredictor::predict(const float* x, std::size_t token, ThreadPool& pool, SimdLevel level,
                            std::vector<std::int32_t>& active) {
  if (values_.size() <= token) values_.resize(token + 1);
  std::vector<float>& values = values_[token];
  values.resize(gate_.rows);
  dot_all(gate_, x, values.data(), pool, level);
  pool.parallel_for(values.size(), kActivationGrain, [&](std::size_t begin, std::size_t end) {
    activate(activation_, 0.0F, values.data() + begin, end - begin, level);
  });
  list_where(values.size(), [&values](std::size_t neuron) { return values[neuron] != 0.0F; }, active);
}

}  // namespace flashllm
