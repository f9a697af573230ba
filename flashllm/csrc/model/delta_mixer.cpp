#include "model/delta_mixer.h"

#include <algorithm>
#include <cmath>

#include "kernels/norm.h"

namespace flashllm {

namespace {

constexpr std::size_t kChannels = 128;  // that a thread takes

float sigmoid(float x) { return 1.0F / (1.0F + std::exp(-x)); }
float softplus(float x) { return x > 20.0F ? x : std::log1p(std::exp(x)); }

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

// body(run) for each stretch of a run's tokens up to a position whose state is kept; `offset`, `floats`: the
// part of the layer's state that body has brought there.
template <typename Body>
void each_piece(const Part& part, std::size_t first, std::size_t count, std::size_t offset,
                std::size_t floats, const Body& body) {
  SequenceState& sequence = *part.tokens[first].sequence;
  const std::size_t begin = part.tokens[first].position, end = begin + count;
  for (std::size_t at = begin; at < end;) {
    const std::size_t next = sequence.next_recorded(at, end);
    body(first + at - begin, next - at);
    sequence.record(part.kv_layer, next, offset, floats);
    at = next;
  }
}

}  // namespace

void DeltaMixer::mix(const BlockWeights& weights, const Part& part, float* out) {
  const DeltaSpec& spec = weights.spec.delta;
  const std::size_t count = part.count, keys = spec.keys(), values = spec.values();
  const std::size_t state = spec.key_dim * values, inputs = (spec.kernel - 1) * spec.channels();
  inputs_.resize(count * spec.channels());
  convolved_.resize(count * spec.channels());
  gate_.resize(count * values);
  mixed_.resize(count * values);
  beta_.resize(count * spec.value_heads);
  decay_.resize(count * spec.value_heads);
  arithmetic_.project(weights.query, count, inputs_.data());
  arithmetic_.project(weights.key, count, inputs_.data() + count * keys);
  arithmetic_.project(weights.value, count, inputs_.data() + 2 * count * keys);
  arithmetic_.project(weights.out_gate, count, gate_.data());
  arithmetic_.project(weights.beta, count, beta_.data());
  arithmetic_.project(weights.decay, count, decay_.data());
  const auto each_sequence = [&](std::size_t offset, std::size_t floats, const auto& body) {
    for_each_sequence(part.tokens, count, [&](const Token& first, const Token& last) {
      each_piece(part, static_cast<std::size_t>(&first - part.tokens), last.position + 1 - first.position,
                 offset, floats, [&](std::size_t begin, std::size_t n) {
                   const auto [before, now] =
                       first.sequence->recurrent(part.kv_layer, part.tokens[begin].position);
                   body(begin, n, before + offset, now + offset);
                 });
    });
  };
  each_sequence(state, inputs, [&](std::size_t first, std::size_t n, const float* before, float* now) {
    convolve(weights, count, first, n, before, now);
  });
  arithmetic_.round(convolved_.data(), convolved_.size());
  prepare_heads(weights, count);
  each_sequence(0, state, [&](std::size_t first, std::size_t n, const float* before, float* now) {
    go_on(weights, count, first, n, before, now);
  });
  arithmetic_.round(mixed_.data(), mixed_.size());
  arithmetic_.take_inputs(mixed_.data(), count, values, part.is_prompt());
  arithmetic_.project(weights.out, count, out);
}

// `n` tokens from `first` on. `before`, `now`: the last inputs of the tokens before them, and theirs.
void DeltaMixer::convolve(const BlockWeights& weights, std::size_t count, std::size_t first, std::size_t n,
                          const float* before, float* now) {
  const DeltaSpec& spec = weights.spec.delta;
  const std::size_t kernel = spec.kernel, held = kernel - 1, channels = spec.channels(), keys = spec.keys();
  // Channels [begin, end) of all lie in a matrix of `width` columns, from `at` on.
  const auto some = [&](std::size_t begin, std::size_t end, std::size_t at, std::size_t width) {
    const float* inputs = inputs_.data() + count * at + first * width - at;
    float* out = convolved_.data() + count * at + first * width - at;
    const auto input = [&](std::size_t t) {  // of the token t - held, from the first one on
      return t < held ? before + t * channels : inputs + (t - held) * width;
    };
    float taps[kChannels];
    for (std::size_t t = 0; t < n; ++t) std::fill(out + t * width + begin, out + t * width + end, 0.0F);
    for (std::size_t j = 0; j < kernel; ++j) {
      for (std::size_t c = begin; c < end; ++c) taps[c - begin] = weights.convolution[c * kernel + j];
      for (std::size_t t = 0; t < n; ++t) {
        const float* from = input(t + j) + begin;
        float* to = out + t * width + begin;
        for (std::size_t c = 0; c < end - begin; ++c) to[c] += taps[c] * from[c];
      }
    }
    for (std::size_t t = 0; t < n; ++t)
      activate(Activation::silu, 0.0F, out + t * width + begin, end - begin);
    for (std::size_t t = 0; t < held; ++t)
      std::copy_n(input(n + t) + begin, end - begin, now + t * channels + begin);
  };
  arithmetic_.pool().parallel_for(channels, kChannels, [&](std::size_t begin, std::size_t end) {
    while (begin < end) {
      const std::size_t at = begin < keys ? 0 : begin < 2 * keys ? keys : 2 * keys;
      const std::size_t width = at < 2 * keys ? keys : spec.values();
      const std::size_t to = std::min({end, at + width, begin + kChannels});
      some(begin, to, at, width);
      begin = to;
    }
  });
}

// Queries and keys of length 1, the decay of each token's heads, and how much of a value they take.
void DeltaMixer::prepare_heads(const BlockWeights& weights, std::size_t count) {
  const DeltaSpec& spec = weights.spec.delta;
  const float scale = 1.0F / std::sqrt(static_cast<float>(spec.key_dim));
  arithmetic_.pool().parallel_for(count, Arithmetic::kTokenGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin * spec.key_heads; i < end * spec.key_heads; ++i) {
      make_unit(convolved_.data() + i * spec.key_dim, spec.key_dim, scale);
      make_unit(convolved_.data() + count * spec.keys() + i * spec.key_dim, spec.key_dim, 1.0F);
    }
    for (std::size_t i = begin * spec.value_heads; i < end * spec.value_heads; ++i) {
      const std::size_t head = i % spec.value_heads;
      beta_[i] = sigmoid(beta_[i]);
      decay_[i] =
          std::exp(-std::exp(weights.decay_log[head]) * softplus(decay_[i] + weights.decay_bias[head]));
    }
  });
}

// `n` tokens from `first` on, a head after the other, from the states [value_heads, key_dim, value_dim]
// before them to those behind.
void DeltaMixer::go_on(const BlockWeights& weights, std::size_t count, std::size_t first, std::size_t n,
                       const float* before, float* now) {
  const DeltaSpec& spec = weights.spec.delta;
  const DeltaStep step = delta_step_kernel(arithmetic_.level());
  const std::size_t keys = spec.keys(), values = spec.values(), shared = spec.value_heads / spec.key_heads;
  arithmetic_.pool().parallel_for(spec.value_heads, 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t head = begin; head < end; ++head) {
      const std::size_t at = head * spec.value_dim, state = at * spec.key_dim;
      const std::size_t key_at = (spec.tiled ? head % spec.key_heads : head / shared) * spec.key_dim;
      for (std::size_t t = first; t < first + n; ++t) {
        const float* query = convolved_.data() + t * keys + key_at;
        float* mixed = mixed_.data() + t * values + at;
        step({spec.key_dim, spec.value_dim, query, query + count * keys,
              convolved_.data() + 2 * count * keys + t * values + at, decay_[t * spec.value_heads + head],
              beta_[t * spec.value_heads + head]},
             (t == first ? before : now) + state, now + state, mixed);
        normalize(weights.mixed_norm, mixed, mixed);
        const float* gate = gate_.data() + t * values + at;
        for (std::size_t j = 0; j < spec.value_dim; ++j) mixed[j] *= gate[j] * sigmoid(gate[j]);
      }
    }
  });
}

}  // namespace flashllm
