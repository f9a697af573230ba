#include "model/block_attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "attention/attention.h"
#include "kernels/norm.h"

namespace flashllm {

void BlockAttention::set_positions(const Part& part) {
  if (rotary_.empty()) return;
  std::vector<std::size_t> positions;
  for (std::size_t t = 0; t < part.count; ++t) positions.push_back(part.tokens[t].position);
  for (RotaryTable& rotary : rotary_) rotary.set_positions(positions.data(), positions.size());
}

void BlockAttention::attend(const BlockWeights& weights, const Part& part, float* out) {
  const AttentionSpec& spec = weights.spec.attention;
  const std::size_t count = part.count, attended = spec.query_dim(), mixed = spec.mixed_dim();
  const std::size_t gates = spec.gates();
  if (gates != 0) {
    gate_.resize(count * gates);
    arithmetic_.project(weights.out_gate, count, gate_.data());
  }
  mixed_.resize(count * (spec.is_latent() ? mixed : attended));
  float* outputs = mixed_.data();
  if (spec.is_latent()) {
    latent_.attend(weights, part, rotary_of(spec), outputs);
  } else {
    project_heads(weights, part);
    memory_.attend(weights.attention_shape(spec_.dtype), part, query_.data(),
                   spec.shared < 0 ? keys_.data() : nullptr, values_.data(), outputs);
    arithmetic_.round(outputs, count * attended);
    const std::size_t heads = spec.value_width() != spec.head_dim ? count * spec.heads : 0;
    for (std::size_t h = 1; h < heads; ++h)  // forward, and never over what is still to come
      std::copy_n(outputs + h * spec.head_dim, spec.value_width(), outputs + h * spec.value_width());
  }
  if (gates != 0) {
    const std::size_t width = mixed / gates;  // that a number of the gate is for
    arithmetic_.pool().parallel_for(count, Arithmetic::kTokenGrain, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin * gates; i < end * gates; ++i) {
        const float by = spec.gate == Gate::sigmoid ? sigmoid(gate_[i]) : softplus(gate_[i]);
        for (std::size_t j = i * width; j < (i + 1) * width; ++j) outputs[j] *= by;
      }
    });
    arithmetic_.round(outputs, count * mixed);
  }
  if (weights.mixed_norm.width != 0) arithmetic_.normalize(weights.mixed_norm, count, outputs, outputs);
  if (spec_.rounded_inputs) arithmetic_.round_inputs(count, mixed, outputs);
  arithmetic_.project(weights.out, outputs, count, part.is_prompt(), out);
  for (std::size_t i = 0; spec.out_scale != 1.0F && i < count * weights.out.rows; ++i)
    out[i] *= spec.out_scale;
}

void BlockAttention::project_heads(const BlockWeights& weights, const Part& part) {
  const AttentionSpec& spec = weights.spec.attention;
  query_.resize(part.count * spec.query_dim());
  keys_.resize(part.count * spec.kv_dim());
  values_.resize(part.count * spec.kv_dim());
  arithmetic_.project(weights.query, part.count, query_.data());
  if (spec.shared < 0) {
    arithmetic_.project(weights.key, part.count, keys_.data());
    if (spec.key_is_value)
      values_ = keys_;
    else
      arithmetic_.project(weights.value, part.count, values_.data());
    widen_values(spec, part.count);
  }
  prepare_heads(weights, part);
}

// values_, as they are projected: their scale, and zeros behind each head, where the cache keeps more of it.
void BlockAttention::widen_values(const AttentionSpec& spec, std::size_t count) {
  const std::size_t width = spec.value_width(), heads = count * spec.kv_heads;
  if (spec.value_scale != 1.0F) arithmetic_.scale(values_.data(), spec.value_scale, heads * width);
  if (width == spec.head_dim) return;
  for (std::size_t h = heads; h-- > 0;) {  // backward, and never over what is still to come
    float* head = values_.data() + h * spec.head_dim;
    if (h != 0)
      std::copy_backward(values_.data() + h * width, values_.data() + (h + 1) * width, head + width);
    std::fill(head + width, head + spec.head_dim, 0.0F);
  }
}

// query_, keys_ and values_: their norms, the rotation of the first two, the scale of the queries, which
// comes with the last of both.
void BlockAttention::prepare_heads(const BlockWeights& weights, const Part& part) {
  const AttentionSpec& spec = weights.spec.attention;
  const std::size_t count = part.count, attended = spec.query_dim(), cached = spec.kv_dim();
  const bool turns_first = spec.head_norm == HeadNorm::turned_head, has_keys = spec.shared < 0;
  const RotaryTable* rotary = rotary_of(spec);
  const auto step = [&](bool normalizes, bool turns, bool scales) {
    if (!normalizes && !turns && !scales) return;
    const bool together = spec.head_norm == HeadNorm::projection, own = spec.head_norm == HeadNorm::heads;
    arithmetic_.pool().parallel_for(count, Arithmetic::kTokenGrain, [&](std::size_t begin, std::size_t end) {
      for (std::size_t t = begin; t < end; ++t) {
        float *query = query_.data() + t * attended, *key = has_keys ? keys_.data() + t * cached : nullptr;
        if (normalizes) {
          normalize_heads(weights.query_norm, together ? 1 : spec.heads, own, query);
          if (has_keys) normalize_heads(weights.key_norm, together ? 1 : spec.kv_heads, own, key);
          if (has_keys && spec.value_norm)
            normalize_heads(weights.value_norm, spec.kv_heads, false, values_.data() + t * cached);
        }
        if (turns) {
          rotary->apply(part.first + t, query, spec.heads, spec.head_dim);
          if (has_keys) rotary->apply(part.first + t, key, spec.kv_heads, spec.head_dim);
        }
        if (!scales) continue;
        const float by = spec.query_scale * spec.growth.at(part.tokens[t].position);
        for (std::size_t i = 0; i < attended; ++i) query[i] *= by;
      }
    });
    if (has_keys && (normalizes || turns)) arithmetic_.round(keys_.data(), count * cached);
    if (has_keys && normalizes && spec.value_norm) arithmetic_.round(values_.data(), count * cached);
    arithmetic_.round(query_.data(), count * attended);
  };
  const bool normalizes = spec.head_norm != HeadNorm::none, turns = rotary != nullptr;
  step(normalizes && !turns_first, turns && turns_first, false);
  step(turns_first, turns && !turns_first, spec.query_scale != 1.0F || spec.growth.grows());
}

const RotaryTable* BlockAttention::rotary_of(const AttentionSpec& spec) const {
  return spec.rotary >= 0 ? &rotary_[static_cast<std::size_t>(spec.rotary)] : nullptr;
}

}  // namespace flashllm
