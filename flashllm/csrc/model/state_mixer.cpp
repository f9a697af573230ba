#include "model/state_mixer.h"

#include <cmath>

#include "kernels/levels/levels.h"
#include "kernels/norm.h"
#include "model/recurrence.h"

namespace flashllm {

namespace {

// x /= |x|, times `scale`: sums of every eighth square, then these.
void make_unit(float* x, std::size_t n, float scale) {
  constexpr float kEpsilon = 1e-6F;
  float sums[8] = {};
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (std::size_t lane = 0; lane < 8; ++lane) sums[lane] += x[i + lane] * x[i + lane];
  for (; i < n; ++i) sums[i % 8] += x[i] * x[i];
  float total = kEpsilon;
  for (const float sum : sums) total += sum;
  const float factor = scale / std::sqrt(total);
  for (i = 0; i < n; ++i) x[i] *= factor;
}

// What is projected, of a head's channels, becomes their decays.
void decay_channels(const StateSpec& spec, const StateWeights& weights, std::size_t head, float* decays) {
  const float rate = -std::exp(weights.decay_log[head]);
  const float* bias = weights.decay_bias + head * spec.key_dim;
  for (std::size_t i = 0; i < spec.key_dim; ++i) decays[i] = std::exp(rate * softplus(decays[i] + bias[i]));
}

void multiply_all(float* x, std::size_t n, float factor) {
  if (factor == 1.0F) return;
  for (std::size_t i = 0; i < n; ++i) x[i] *= factor;
}

}  // namespace

void StateMixer::mix(const StateSpec& spec, const StateWeights& weights, const Part& part, float* out) {
  if (spec.convolves_alone()) return convolve_alone(spec, weights, part, out);
  const std::size_t count = part.count, keys = spec.keys(), values = spec.values();
  const std::size_t state = spec.key_dim * values;
  // The order of a convolution's channels: queries first, or last.
  const std::size_t first = spec.by_delta_rule ? 0 : (values + keys) * count,
                    last = spec.by_delta_rule ? 2 * keys * count : 0;
  const std::size_t middle = (spec.by_delta_rule ? keys : values) * count;
  inputs_.resize(count * spec.channels());
  convolved_.resize(count * spec.channels());
  queries_ = convolved_.data() + first;
  keys_ = convolved_.data() + middle;
  values_ = convolved_.data() + last;
  gate_.resize(count * values);
  mixed_.resize(count * values);
  beta_.resize(count * spec.value_heads);
  decay_.resize(count * spec.decays());
  const auto project = [&](const RowMatrix& matrix, std::size_t width, float scale, float* to) {
    arithmetic_.project(matrix, count, to);
    multiply_all(to, count * width, scale);
  };
  project(weights.query, keys, spec.query_scale, inputs_.data() + first);
  project(weights.key, keys, spec.key_scale, inputs_.data() + middle);
  project(weights.value, values, spec.value_scale, inputs_.data() + last);
  if (spec.by_delta_rule) arithmetic_.project(weights.beta, count, beta_.data());
  if (spec.channel_rank == 0) {
    project(weights.out_gate, values, spec.gate_scale, gate_.data());
    project(weights.decay, spec.value_heads, spec.decay_scale, decay_.data());
  } else {
    project_by_halves(spec, weights, part);
  }
  const std::size_t outer = spec.by_delta_rule ? keys : values, inner = spec.by_delta_rule ? values : keys;
  convolve({spec.kernel, {outer, keys, inner}, weights.convolution, weights.convolution_bias, true}, part,
           state, inputs_.data(), convolved_.data(), arithmetic_.pool(), arithmetic_.level());
  arithmetic_.round(convolved_.data(), convolved_.size());
  prepare_heads(spec, weights, count);
  for_each_state(part, 0, state, [&](std::size_t begin, std::size_t n, const float* before, float* now) {
    go_on(spec, weights, begin, n, before, now);
  });
  finish(spec, weights, count);
  arithmetic_.round(mixed_.data(), mixed_.size());
  arithmetic_.project(weights.out, mixed_.data(), count, part.is_prompt(), out);
  multiply_all(out, count * weights.out.rows, spec.out_scale);
}

void StateMixer::convolve_alone(const StateSpec& spec, const StateWeights& weights, const Part& part,
                                float* out) {
  const std::size_t count = part.count, n = count * spec.values();
  for (std::vector<float>* each : {&inputs_, &convolved_, &gate_}) each->resize(n);
  const auto multiply_by = [&](const RowMatrix& gate, std::vector<float>& values) {
    arithmetic_.project(gate, count, gate_.data());
    arithmetic_.multiply(values.data(), gate_.data(), n);
  };
  arithmetic_.project(weights.value, count, inputs_.data());
  multiply_by(weights.key, inputs_);
  convolve({spec.kernel, {spec.values(), 0, 0}, weights.convolution, weights.convolution_bias, false}, part,
           0, inputs_.data(), convolved_.data(), arithmetic_.pool(), arithmetic_.level());
  arithmetic_.round(convolved_.data(), n);
  multiply_by(weights.query, convolved_);
  arithmetic_.project(weights.out, convolved_.data(), count, part.is_prompt(), out);
}

// decay_ and gate_ of projections of two halves: other inputs are taken.
void StateMixer::project_by_halves(const StateSpec& spec, const StateWeights& weights, const Part& part) {
  const std::size_t count = part.count, rank = spec.channel_rank;
  low_.resize(2 * count * rank);
  float *of_decay = low_.data(), *of_gate = low_.data() + count * rank;
  arithmetic_.project(weights.decay_down, count, of_decay);
  arithmetic_.project(weights.gate_down, count, of_gate);
  arithmetic_.take_inputs(of_decay, count, rank, part.is_prompt(), Arithmetic::kOthers);
  arithmetic_.project(weights.decay, count, decay_.data());
  arithmetic_.take_inputs(of_gate, count, rank, part.is_prompt(), Arithmetic::kOthers);
  arithmetic_.project(weights.out_gate, count, gate_.data());
}

// The decay of each token's heads, and how much a value counts; of a delta rule queries and keys of length 1.
void StateMixer::prepare_heads(const StateSpec& spec, const StateWeights& weights, std::size_t count) {
  const float scale = 1.0F / std::sqrt(static_cast<float>(spec.key_dim));
  arithmetic_.pool().parallel_for(count, Arithmetic::kTokenGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin * spec.key_heads; spec.by_delta_rule && i < end * spec.key_heads; ++i) {
      make_unit(queries_ + i * spec.key_dim, spec.key_dim, scale);
      make_unit(keys_ + i * spec.key_dim, spec.key_dim, 1.0F);
    }
    for (std::size_t i = begin * spec.value_heads; i < end * spec.value_heads; ++i) {
      if (spec.channel_rank != 0) {  // decays are go_on's
        beta_[i] = spec.beta_scale * sigmoid(beta_[i]);
        continue;
      }
      const std::size_t head = i % spec.value_heads;
      const float step = softplus(decay_[i] + weights.decay_bias[head]);
      beta_[i] = spec.by_delta_rule ? spec.beta_scale * sigmoid(beta_[i]) : step;
      decay_[i] = std::exp(-std::exp(weights.decay_log[head]) * step);
    }
  });
}

// `n` tokens from `first` on, a head after the other, from the states [value_heads, key_dim, value_dim]
// before them to those behind.
void StateMixer::go_on(const StateSpec& spec, const StateWeights& weights, std::size_t first, std::size_t n,
                       const float* before, float* now) {
  const bool by_channel = spec.channel_rank != 0;
  const Recurrence kind = by_channel           ? Recurrence::delta_by_channel
                          : spec.by_delta_rule ? Recurrence::delta
                                               : Recurrence::space;
  const StateStep step = level_kernels(arithmetic_.level()).state_steps[static_cast<std::size_t>(kind)];
  const std::size_t keys = spec.keys(), values = spec.values(), shared = spec.value_heads / spec.key_heads;
  arithmetic_.pool().parallel_for(spec.value_heads, 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t head = begin; head < end; ++head) {
      const std::size_t at = head * spec.value_dim, state = at * spec.key_dim;
      const std::size_t key_at = (spec.tiled ? head % spec.key_heads : head / shared) * spec.key_dim;
      for (std::size_t t = first; t < first + n; ++t) {
        const float* value = values_ + t * values + at;
        float *mixed = mixed_.data() + t * values + at, *decays = decay_.data() + t * spec.decays();
        if (by_channel) decay_channels(spec, weights, head, decays += key_at);
        step({spec.key_dim, spec.value_dim, queries_ + t * keys + key_at, keys_ + t * keys + key_at, value,
              by_channel ? 0.0F : decays[head], decays, beta_[t * spec.value_heads + head]},
             (t == first ? before : now) + state, now + state, mixed);
        if (weights.skip == nullptr) continue;
        for (std::size_t j = 0; j < spec.value_dim; ++j) mixed[j] += weights.skip[head] * value[j];
      }
    }
  });
}

// What is mixed: its norm and its gate.
void StateMixer::finish(const StateSpec& spec, const StateWeights& weights, std::size_t count) {
  const std::size_t values = spec.values(), width = weights.mixed_norm.width;
  arithmetic_.pool().parallel_for(count, Arithmetic::kTokenGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t t = begin; t < end; ++t) {
      float* mixed = mixed_.data() + t * values;
      const float* gate = gate_.data() + t * values;
      for (const bool gates : {spec.gate_first, !spec.gate_first}) {
        if (!gates && width != 0)
          normalize_heads(weights.mixed_norm, values / width, !spec.by_delta_rule, mixed);
        if (!gates) continue;
        for (std::size_t j = 0; j < values; ++j)
          mixed[j] *= (spec.channel_rank == 0 ? gate[j] : 1.0F) * sigmoid(gate[j]);
      }
    }
  });
}

}  // namespace flashllm
