#include "model/predictor.h"

#include "io/error.h"

namespace flashllm {

LowRankPredictor::LowRankPredictor(const RowMatrix& a, const RowMatrix& b, float threshold)
    : a_(a), b_(b), threshold_(threshold), projected_(a.rows), logits_(b.rows) {}

void LowRankPredictor::predict(const float* x, std::size_t /*token*/, ThreadPool& pool, SimdLevel level,
                               std::vector<std::int32_t>& active) {
  dot_all(a_, x, projected_.data(), pool, level);
  dot_all(b_, projected_.data(), logits_.data(), pool, level);
  active.clear();
  for (std::size_t neuron = 0; neuron < logits_.size(); ++neuron)
    if (logits_[neuron] > threshold_) active.push_back(static_cast<std::int32_t>(neuron));
}

void TracePredictor::predict(const float* x, std::size_t token, ThreadPool& pool, SimdLevel level,
                             std::vector<std::int32_t>& active) {
  if (token >= trace_.tokens)
    throw CoreError(ErrorKind::usage, "the pass has more tokens than the trace at hand");
  if (real_) real_->predict(x, token, pool, level, active);
  const std::uint64_t* set = trace_.active + token * trace_.token_words;
  active.clear();
  for (std::int32_t neuron = 0; neuron < trace_.num_neurons; ++neuron)
    if (in_bit_set(set, neuron)) active.push_back(neuron);
}

const std::uint64_t* TracePredictor::firing(std::size_t token) const {
  if (trace_.firing == nullptr || token >= trace_.tokens) return nullptr;
  return trace_.firing + token * trace_.token_words;
}

}  // namespace flashllm
