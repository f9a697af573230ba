#include "model/layer.h"

#include <algorithm>
#include <cmath>
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
  const float* beside = nullptr;
  const auto make = [&] {
    second_.resize(part.count * spec_.d_model);
    make_beside(weights, part, states, input, second_.data());
    beside = second_.data();
  };
  const std::function<void()> meanwhile = std::ref(make);  // by reference nothing is allocated
  ffn_.run({layer, part, input, states, projected_.data(), weights.spec.beside != 0 ? &meanwhile : nullptr});
  add_ffn(layer, weights, part, states, attended_.data(), input, beside);
}

const float* Layer::attend(std::size_t layer, const BlockWeights& weights, const Part& part, float* states,
                           float* attended) {
  const std::size_t count = part.count, n = count * spec_.d_model;
  const bool before = norms_input(weights.spec.norms);
  normed_.resize(n);
  projected_.resize(std::max(projected_.size(), n));  // parts of a stretch differ in length
  if (spec_.streams != 0) predict_streams(weights, part, states);
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
  if (spec_.laurel != 0) make_laurel(weights, part);
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
    if (spec_.laurel != 0) add_laurel(count, states);
    if (spec.norms == NormPlace::sum) arithmetic_.normalize(weights.attention_norm, count, states, states);
  }
}

void Layer::add_ffn(std::size_t layer, const BlockWeights& weights, const Part& part, float* states,
                    const float* attended, const float* input, const float* beside) {
  const std::size_t count = part.count, n = count * spec_.d_model;
  const float scale = weights.spec.ffn_scale;
  if (weights.spec.beside != 0) add_beside(weights, part, states, input, beside);
  for (std::size_t i = 0; scale != 1.0F && i < n; ++i) projected_[i] *= scale;
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
  if (spec_.streams != 0) correct_streams(weights, part, states);
  if (spec_.per_layer != 0) add_per_layer(layer, weights, part, states);
  if (weights.scale != 1.0F) arithmetic_.scale(states, weights.scale, n);
  check_finite(layer, states + (spec_.streams == 0 ? 0 : n), count * std::max<std::size_t>(1, spec_.streams));
}

// values = activation(values), rounded.
void Layer::activate_rows(const BlockWeights& weights, std::size_t count, std::size_t width, float* values) {
  arithmetic_.pool().parallel_for(count, Arithmetic::kTokenGrain, [&](std::size_t begin, std::size_t end) {
    activate(weights.spec.activation, 0.0F, values + begin * width, (end - begin) * width,
             arithmetic_.level());
  });
  arithmetic_.round(values, count * width);
}

// to [tokens, d_model]: the dense part's outputs, behind its norms, or those of a shared expert, which reads
// what the experts read, `input`; nullptr: it is made again. `to` may be the input.
void Layer::make_beside(const BlockWeights& weights, const Part& part, const float* states,
                        const float* input, float* to) {
  const LayerSpec& spec = weights.spec;
  const std::size_t count = part.count, width = spec.beside;
  const bool gated = weights.beside_gate.data != nullptr;
  up_.resize(count * width);
  if (input == nullptr || spec.beside_norms) {
    const Norm& norm = spec.beside_norms  ? weights.beside_norm
                       : spec.shared_norm ? weights.attention_norm
                                          : weights.ffn_norm;
    input = norms_input(spec.norms) ? to : states;
    if (input != states) arithmetic_.normalize(norm, count, states, to);
  }
  arithmetic_.take_inputs(input, count, spec_.d_model, part.is_prompt(), Arithmetic::kOthers);
  arithmetic_.project(weights.beside_up, count, up_.data());
  if (gated) {
    gate_.resize(count * width);
    arithmetic_.project(weights.beside_gate, count, gate_.data());
  }
  const bool weighed = weights.shared_gate.data != nullptr;
  if (weighed) {
    routed_.resize(count);
    arithmetic_.project(weights.shared_gate, count, routed_.data());
  }
  activate_rows(weights, count, width, gated ? gate_.data() : up_.data());
  if (gated) arithmetic_.multiply(up_.data(), gate_.data(), count * width);
  arithmetic_.take_inputs(up_.data(), count, width, part.is_prompt(), Arithmetic::kOthers);
  arithmetic_.project(weights.beside_down, count, to);
  if (spec.beside_norms) arithmetic_.normalize(weights.beside_output_norm, count, to, to);
  if (weighed) weigh_by_gate(count, to);
}

// projected_: of the experts' outputs, the sum of these, behind their norm, and of what is beside them.
void Layer::add_beside(const BlockWeights& weights, const Part& part, const float* states, const float* input,
                       const float* beside) {
  const std::size_t count = part.count, n = count * spec_.d_model;
  if (beside == nullptr) {
    normed_.resize(std::max(normed_.size(), n));
    make_beside(weights, part, states, input, normed_.data());
    beside = normed_.data();
  }
  if (weights.spec.beside_norms) {
    arithmetic_.round(projected_.data(), n);
    arithmetic_.normalize(weights.experts_output_norm, count, projected_.data(), projected_.data());
  }
  for (std::size_t i = 0; i < n; ++i) projected_[i] += beside[i];
}

// Times the sigmoid of each token's product in routed_, rounded.
void Layer::weigh_by_gate(std::size_t count, float* outputs) {
  const std::size_t width = spec_.d_model;
  for (float& weight : routed_) weight = sigmoid(weight);
  arithmetic_.round(routed_.data(), count);
  for (std::size_t i = 0; i < count * width; ++i) outputs[i] *= routed_[i / width];
  arithmetic_.round(outputs, count * width);
}

// routed_: what each of the streams counts by these states.
void Layer::route_streams(const BlockWeights& weights, const Part& part, const float* states) {
  const std::size_t count = part.count, width = spec_.d_model;
  normed_.resize(std::max(normed_.size(), count * width));
  arithmetic_.normalize(weights.stream_router_norm, count, states, normed_.data());
  for (std::size_t i = 0; i < count * width; ++i) normed_[i] /= static_cast<float>(width);
  arithmetic_.round(normed_.data(), count * width);
  routed_.resize(count * spec_.streams);
  arithmetic_.project(weights.stream_router, normed_.data(), count, part.is_prompt(), routed_.data());
  for (float& each : routed_) each = std::tanh(each);
  arithmetic_.round(routed_.data(), routed_.size());
}

// What each stream will be; the first of them is what the layer computes on.
void Layer::predict_streams(const BlockWeights& weights, const Part& part, float* states) {
  const std::size_t count = part.count, width = spec_.d_model, n = count * width, all = spec_.streams;
  float* streams = states + n;
  route_streams(weights, part, streams);
  streams_.resize(all * n);
  std::vector<float> factors(all * all);
  for (std::size_t t = 0; t < count; ++t) {
    for (std::size_t k = 0; k < all * all; ++k) {
      factors[k] = 0.0F;
      for (std::size_t p = 0; p < all; ++p)
        factors[k] += weights.stream_predict[k * all + p] * routed_[t * all + p];
    }
    arithmetic_.round(factors.data(), factors.size());
    for (std::size_t to = 0; to < all; ++to) {
      float* made = streams_.data() + to * n + t * width;
      std::fill_n(made, width, 0.0F);
      for (std::size_t from = 0; from < all; ++from)
        for (std::size_t j = 0; j < width; ++j)
          made[j] += factors[to * all + from] * streams[from * n + t * width + j];
    }
  }
  arithmetic_.round(streams_.data(), all * n);
  arithmetic_.add(streams, streams_.data(), all * n);
  std::copy_n(streams, n, states);
}

// Each stream by how far the layer's outcome is from what was predicted of the first.
void Layer::correct_streams(const BlockWeights& weights, const Part& part, float* states) {
  const std::size_t count = part.count, width = spec_.d_model, n = count * width, all = spec_.streams;
  float* streams = states + n;
  route_streams(weights, part, states);
  streams_.resize(std::max(streams_.size(), all * n));
  for (std::size_t i = 0; i < n; ++i) states[i] -= streams[i];
  arithmetic_.round(states, n);
  std::vector<float> factors(all);
  for (std::size_t t = 0; t < count; ++t) {
    for (std::size_t to = 0; to < all; ++to) {
      factors[to] = 0.0F;
      for (std::size_t p = 0; p < all; ++p)
        factors[to] += weights.stream_correct[to * all + p] * routed_[t * all + p];
    }
    arithmetic_.round(factors.data(), all);
    for (float& factor : factors) factor += 1.0F;
    arithmetic_.round(factors.data(), all);
    for (std::size_t to = 0; to < all; ++to)
      for (std::size_t j = t * width; j < (t + 1) * width; ++j)
        streams_[to * n + j] = states[j] * factors[to];
  }
  arithmetic_.round(streams_.data(), all * n);
  arithmetic_.add(streams, streams_.data(), all * n);
}

// laurel_: the mixer's inputs (Gemma 3n: a learned augmented residual layer), and a map of low rank of them.
void Layer::make_laurel(const BlockWeights& weights, const Part& part) {
  const std::size_t count = part.count, n = count * spec_.d_model;
  laurel_.resize(n);
  gate_.resize(count * spec_.laurel);
  arithmetic_.project(weights.laurel_in, normed_.data(), count, part.is_prompt(), gate_.data());
  arithmetic_.project(weights.laurel_out, gate_.data(), count, part.is_prompt(), laurel_.data());
  arithmetic_.normalize(weights.laurel_norm, count, laurel_.data(), laurel_.data());
  arithmetic_.add(laurel_.data(), normed_.data(), n);
}

void Layer::add_laurel(std::size_t count, float* states) {
  const std::size_t n = count * spec_.d_model;
  arithmetic_.add(states, laurel_.data(), n);
  for (std::size_t i = 0; i < n; ++i) states[i] /= std::sqrt(2.0F);
  arithmetic_.round(states, n);
}

// What the layer takes of each token's row, through a gate that its states make; of streams the first makes
// it, and all others take it.
void Layer::add_per_layer(std::size_t layer, const BlockWeights& weights, const Part& part, float* states) {
  require(part.per_layer != nullptr, "per-layer embeddings belong to a pass through all layers");
  const std::size_t count = part.count, width = spec_.per_layer, n = count * spec_.d_model;
  for (std::size_t i = 0; spec_.streams != 0 && i < n; ++i)
    states[i] = states[n + i] * weights.stream_scale[i % spec_.d_model];
  if (spec_.streams != 0) arithmetic_.round(states, n);
  gate_.resize(count * width);
  arithmetic_.project(weights.per_layer_gate, states, count, part.is_prompt(), gate_.data());
  activate_rows(weights, count, width, gate_.data());
  for (std::size_t t = 0; t < count; ++t) {
    const float* row = part.per_layer + t * spec_.row_width() + layer * width;
    for (std::size_t i = 0; i < width; ++i) gate_[t * width + i] *= row[i];
  }
  arithmetic_.round(gate_.data(), count * width);
  arithmetic_.project(weights.per_layer_out, gate_.data(), count, part.is_prompt(), projected_.data());
  arithmetic_.normalize(weights.per_layer_norm, count, projected_.data(), projected_.data());
  if (spec_.streams == 0) return add_projected(count, states);
  for (std::size_t s = 2; s <= spec_.streams; ++s) arithmetic_.add(states + s * n, projected_.data(), n);
}

// states += projected_
void Layer::add_projected(std::size_t count, float* states) {
  const std::size_t n = count * spec_.d_model;
  arithmetic_.round(projected_.data(), n);
  if (spec_.residual_scale != 1.0F) arithmetic_.scale(projected_.data(), spec_.residual_scale, n);
  arithmetic_.add(states, projected_.data(), n);
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
