#include "model/block_attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <utility>

#include "attention/attention.h"
#include "io/error.h"
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
  query_.resize(count * attended);
  keys_.resize(count * spec.kv_dim());
  values_.resize(count * (spec.is_latent() ? mixed : spec.kv_dim()));
  mixed_.resize(count * attended);
  const std::size_t gates = spec.gates();
  if (gates != 0) {
    gate_.resize(count * gates);
    arithmetic_.project(weights.out_gate, count, gate_.data());
  }
  spec.is_latent() ? project_latent(weights, part) : project_heads(weights, part);
  const bool own = spec.shared < 0;
  memory_.attend(shape(weights), part, query_.data(), own ? keys_.data() : nullptr,
                 spec.is_latent() ? keys_.data() : values_.data(), mixed_.data());
  arithmetic_.round(mixed_.data(), count * attended);
  float* outputs = mixed_.data();
  if (spec.is_latent()) {
    outputs = values_.data();
    arithmetic_.project_heads(weights.value, spec.heads, mixed_.data(), spec.head_dim, count,
                              part.is_prompt(), outputs, spec.latent.value_dim);
    arithmetic_.round(outputs, count * mixed);
  } else if (spec.value_width() != spec.head_dim) {
    for (std::size_t h = 1; h < count * spec.heads; ++h)  // forward, and never over what is still to come
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

// query_ and keys_ of latent attention: a head's plain part goes to the keys' space, its rotated part is
// that.
void BlockAttention::project_latent(const BlockWeights& weights, const Part& part) {
  const AttentionSpec& spec = weights.spec.attention;
  const LatentSpec& latent = spec.latent;
  const std::size_t count = part.count, row = spec.head_dim, rank = latent.rank, plain = latent.plain_dim;
  const std::size_t projected = spec.projected_dim();
  projected_.resize(count * spec.heads * projected);
  arithmetic_.project(weights.key, count, keys_.data());
  if (latent.query_rank != 0) {
    low_.resize(count * latent.query_rank);
    arithmetic_.project(weights.query_down, count, low_.data());
    arithmetic_.normalize(weights.query_norm, count, low_.data(), low_.data());
    arithmetic_.take_inputs(low_.data(), count, latent.query_rank, part.is_prompt());
  }
  arithmetic_.project(weights.query, count, projected_.data());
  arithmetic_.project_heads(weights.key_up, spec.heads, projected_.data(), projected, count, part.is_prompt(),
                            query_.data(), row);
  const RotaryTable* rotary = rotary_of(spec);
  arithmetic_.pool().parallel_for(count, Arithmetic::kTokenGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t t = begin; t < end; ++t) {
      float *key = keys_.data() + t * row, *heads = projected_.data() + t * spec.heads * projected,
            *query = query_.data() + t * spec.heads * row;
      normalize(weights.key_norm, key, key);
      if (rotary != nullptr) {
        rotary->apply(part.first + t, key + rank, 1, row);
        rotary->apply(part.first + t, heads + plain, spec.heads, projected);
      }
      for (std::size_t h = 0; h < spec.heads; ++h)
        std::copy_n(heads + h * projected + plain, row - rank, query + h * row + rank);
      const float by = spec.query_scale * spec.growth.at(part.tokens[t].position);
      for (std::size_t i = 0; i < spec.query_dim(); ++i) query[i] *= by;
    }
  });
  arithmetic_.round(keys_.data(), count * row);
  arithmetic_.round(query_.data(), count * spec.query_dim());
}

const RotaryTable* BlockAttention::rotary_of(const AttentionSpec& spec) const {
  return spec.rotary >= 0 ? &rotary_[static_cast<std::size_t>(spec.rotary)] : nullptr;
}

AttentionShape BlockAttention::shape(const BlockWeights& weights) const {
  AttentionShape shape = weights.spec.attention.shape(spec_.dtype);
  shape.sinks = weights.sinks;
  return shape;
}

void SequenceMemory::attend(const AttentionShape& shape, const Part& part, const float* queries,
                            const float* keys, const float* values, float* out) {
  const std::size_t attended = shape.heads * shape.head_dim, cached = shape.kv_heads * shape.head_dim;
  if (keys != nullptr) {
    for (std::size_t t = 0; t < part.count; ++t)
      part.tokens[t].sequence->append(part.kv_layer, part.tokens[t].position, keys + t * cached,
                                      values + t * cached);
    seal_pages(part);
  }
  if (!part.is_prompt()) {
    std::vector<AttendingToken> attending;
    for (std::size_t t = 0; t < part.count; ++t)
      attending.push_back({queries + t * attended, part.tokens[t].sequence->view(part.kv_layer),
                           part.tokens[t].position + 1, out + t * attended});
    attend_each(shape, attending.data(), attending.size(), pool_, level_);
    return;
  }
  for_each_sequence(part.tokens, part.count, [&](const Token& first, const Token& last) {
    const std::size_t at = static_cast<std::size_t>(&first - part.tokens) * attended;
    attend_many(shape, queries + at, last.position + 1 - first.position, first.position,
                first.sequence->view(part.kv_layer), out + at, pool_, level_);
  });
}

// The pages that the part's tokens fill, where they are packed.
void SequenceMemory::seal_pages(const Part& part) const {
  if (!part.tokens[0].sequence->shape().is_packed()) return;
  std::vector<std::pair<SequenceState*, std::size_t>> full;
  for (std::size_t t = 0; t < part.count; ++t)
    if ((part.tokens[t].position + 1) % kKvBlock == 0)
      full.emplace_back(part.tokens[t].sequence, part.tokens[t].position / kKvBlock);
  std::atomic<bool> is_finite{true};
  pool_.parallel_for(full.size(), 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i)
      if (!full[i].first->seal(part.kv_layer, full[i].second)) is_finite = false;
  });
  if (!is_finite)
    throw CoreError(ErrorKind::numbers,
                    "a layer computed keys or values that are not finite: an overflow, or "
                    "damaged weights; check the model with `flashllm verify`");
}

}  // namespace flashllm
