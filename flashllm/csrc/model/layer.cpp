#include "model/layer.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "io/error.h"

namespace flashllm {

namespace {

unsigned exponent_is_full(float value) {  // of infinities, and of what is no number
  constexpr std::uint32_t kExponent = 0x7f800000;
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<unsigned>((bits & kExponent) == kExponent);
}

}  // namespace

void Layer::run(std::size_t layer, const BlockWeights& weights, const Part& part, float* states) {
  if (weights.spec.parallel) attended_.resize(part.count * spec_.d_model);
  const float* input = attend(layer, weights, part, states, attended_.data());
  if (weights.spec.neurons == 0) return;
  ffn_.run({layer, part, input, states, projected_.data()});
  add_ffn(layer, weights, part, states, attended_.data());
}

const float* Layer::attend(std::size_t layer, const BlockWeights& weights, const Part& part, float* states,
                           float* attended) {
  const std::size_t count = part.count, n = count * spec_.d_model;
  const bool before = norms_input(weights.spec.norms);
  normed_.resize(n);
  projected_.resize(std::max(projected_.size(), n));  // parts of a stretch differ in length
  if (weights.spec.mixes()) mix(weights, part, states, attended);
  if (weights.spec.neurons == 0) {
    check_finite(layer, states, count);
    return nullptr;
  }
  if (before && !weights.spec.shared_norm)
    arithmetic_.normalize(weights.ffn_norm, count, states, normed_.data());
  if (spec_.rounded_inputs) arithmetic_.round_inputs(count, spec_.d_model, normed_.data());
  const float* input = before ? normed_.data() : states;
  check_finite(layer, input, count);  // a predictor names no neurons for it, and nothing would show
  return input;
}

// The mixer, or both, and what they add to the states.
void Layer::mix(const BlockWeights& weights, const Part& part, float* states, float* attended) {
  const LayerSpec& spec = weights.spec;
  const std::size_t count = part.count, n = count * spec_.d_model;
  const bool before = norms_input(spec.norms), behind = norms_output(spec.norms);
  if (before) arithmetic_.normalize(weights.attention_norm, count, states, normed_.data());
  if (spec_.rounded_inputs) arithmetic_.round_inputs(count, spec_.d_model, normed_.data());
  arithmetic_.take_inputs(before ? normed_.data() : states, count, spec_.d_model, part.is_prompt());
  // The inputs that are taken are those of the mixer that runs: the second one takes them again.
  const bool both = spec.attention.heads != 0 && spec.state.value_heads != 0;
  if (spec.attention.heads != 0) attention_.attend(weights, part, projected_.data());
  if (both) {
    second_.resize(n);
    arithmetic_.take_inputs(before ? normed_.data() : states, count, spec_.d_model, part.is_prompt());
  }
  if (spec.state.value_heads != 0)
    state_.mix(spec.state, weights.state, part, both ? second_.data() : projected_.data());
  for (std::size_t i = 0; both && i < n; ++i) projected_[i] += second_[i];
  if (behind)
    arithmetic_.normalize(weights.attention_output_norm, count, projected_.data(), projected_.data());
  if (spec.parallel) {
    std::copy_n(projected_.data(), n, attended);
  } else {
    add_projected(count, states);
    if (spec.norms == NormPlace::sum) arithmetic_.normalize(weights.attention_norm, count, states, states);
  }
}

void Layer::add_ffn(std::size_t layer, const BlockWeights& weights, const Part& part, float* states,
                    const float* attended) {
  const std::size_t count = part.count, n = count * spec_.d_model;
  const float scale = weights.spec.ffn_scale;
  for (std::size_t i = 0; scale != 1.0F && i < n; ++i) projected_[i] *= scale;
  if (weights.spec.beside != 0) add_beside(weights, part, states);
  if (norms_output(weights.spec.norms)) {
    arithmetic_.round(projected_.data(), n);
    arithmetic_.normalize(weights.ffn_output_norm, count, projected_.data(), projected_.data());
  }
  if (weights.spec.parallel) {
    arithmetic_.round(projected_.data(), n);
    for (std::size_t i = 0; i < n; ++i) projected_[i] += attended[i];
  }
  add_projected(count, states);
  if (weights.spec.norms == NormPlace::sum) arithmetic_.normalize(weights.ffn_norm, count, states, states);
  if (spec_.per_layer != 0) add_per_layer(layer, weights, part, states);
  if (weights.scale != 1.0F) {
    for (std::size_t i = 0; i < n; ++i) states[i] *= weights.scale;
    arithmetic_.round(states, n);
  }
  check_finite(layer, states, count);
}

// values = activation(values), rounded.
void Layer::activate_rows(const BlockWeights& weights, std::size_t count, std::size_t width, float* values) {
  arithmetic_.pool().parallel_for(count, Arithmetic::kTokenGrain, [&](std::size_t begin, std::size_t end) {
    activate(weights.spec.activation, 0.0F, values + begin * width, (end - begin) * width);
  });
  arithmetic_.round(values, count * width);
}

// projected_: of the experts' outputs, the sum of these and of the dense part's, each behind its norm.
void Layer::add_beside(const BlockWeights& weights, const Part& part, const float* states) {
  const std::size_t count = part.count, width = weights.spec.beside, n = count * spec_.d_model;
  arithmetic_.round(projected_.data(), n);
  arithmetic_.normalize(weights.experts_output_norm, count, projected_.data(), projected_.data());
  normed_.resize(std::max(normed_.size(), n));
  up_.resize(count * width);
  gate_.resize(count * width);
  arithmetic_.normalize(weights.beside_norm, count, states, normed_.data());
  arithmetic_.take_inputs(normed_.data(), count, spec_.d_model, part.is_prompt());
  arithmetic_.project(weights.beside_up, count, up_.data());
  arithmetic_.project(weights.beside_gate, count, gate_.data());
  activate_rows(weights, count, width, gate_.data());
  for (std::size_t i = 0; i < count * width; ++i) up_[i] *= gate_[i];
  arithmetic_.round(up_.data(), count * width);
  arithmetic_.take_inputs(up_.data(), count, width, part.is_prompt());
  arithmetic_.project(weights.beside_down, count, normed_.data());
  arithmetic_.normalize(weights.beside_output_norm, count, normed_.data(), normed_.data());
  for (std::size_t i = 0; i < n; ++i) projected_[i] += normed_[i];
}

// What the layer takes of each token's row, through a gate that its states make.
void Layer::add_per_layer(std::size_t layer, const BlockWeights& weights, const Part& part, float* states) {
  require(part.per_layer != nullptr, "per-layer embeddings belong to a pass through all layers");
  const std::size_t count = part.count, width = spec_.per_layer;
  gate_.resize(count * width);
  arithmetic_.take_inputs(states, count, spec_.d_model, part.is_prompt());
  arithmetic_.project(weights.per_layer_gate, count, gate_.data());
  activate_rows(weights, count, width, gate_.data());
  for (std::size_t t = 0; t < count; ++t) {
    const float* row = part.per_layer + t * spec_.row_width() + layer * width;
    for (std::size_t i = 0; i < width; ++i) gate_[t * width + i] *= row[i];
  }
  arithmetic_.round(gate_.data(), count * width);
  arithmetic_.take_inputs(gate_.data(), count, width, part.is_prompt());
  arithmetic_.project(weights.per_layer_out, count, projected_.data());
  arithmetic_.normalize(weights.per_layer_norm, count, projected_.data(), projected_.data());
  add_projected(count, states);
}

// states += projected_
void Layer::add_projected(std::size_t count, float* states) {
  const std::size_t n = count * spec_.d_model;
  arithmetic_.round(projected_.data(), n);
  if (spec_.residual_scale != 1.0F) {
    for (std::size_t i = 0; i < n; ++i) projected_[i] *= spec_.residual_scale;
    arithmetic_.round(projected_.data(), n);
  }
  for (std::size_t i = 0; i < n; ++i) states[i] += projected_[i];
  arithmetic_.round(states, n);
}

// Of `count` tokens' states: whatever followed would be nonsense without a sign of it.
void Layer::check_finite(std::size_t layer, const float* values, std::size_t count) const {
  const std::size_t n = count * spec_.d_model;
  unsigned others = 0;
  for (std::size_t i = 0; i < n; ++i) others |= exponent_is_full(values[i]);
  if (others == 0) return;
  throw CoreError(ErrorKind::numbers,
                  "layer " + std::to_string(layer) +
                      " computed a number that is not finite: an overflow, or damaged weights; check the "
                      "model with `flashllm verify`, or convert it with --dtype float32");
}

}  // namespace flashllm
