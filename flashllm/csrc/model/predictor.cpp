#include "model/predictor.h"

namespace flashllm {

namespace {

std::size_t rows_of(const Predictor::Factor& factor) {
  return std::visit([](const auto& weights) { return weights.rows; }, factor);
}

void product(const Predictor::Factor& factor, const float* x, float* out, ThreadPool& pool, SimdLevel level) {
  if (const auto* floats = std::get_if<LinearWeights>(&factor))
    linear(*floats, x, 1, out, pool, level);
  else
    linear_int8(std::get<Int8Weights>(factor), x, out, pool, level);
}

}  // namespace

Predictor::Predictor(const Factor& a, const Factor& b, float threshold)
    : a_(a), b_(b), threshold_(threshold), projected_(rows_of(a)), logits_(rows_of(b)) {}

void Predictor::predict(const float* x, ThreadPool& pool, SimdLevel level,
                        std::vector<std::int32_t>& active) {
  product(a_, x, projected_.data(), pool, level);
  product(b_, projected_.data(), logits_.data(), pool, level);
  active.clear();
  for (std::size_t neuron = 0; neuron < logits_.size(); ++neuron)
    if (logits_[neuron] > threshold_) active.push_back(static_cast<std::int32_t>(neuron));
}

}  // namespace flashllm
