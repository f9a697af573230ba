#include "model/block_attention.h"

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
  const std::size_t count = part.count, attended = spec.query_dim(), cached = spec.kv_dim();
  query_.resize(count * attended);
  keys_.resize(count * cached);
  values_.resize(count * cached);
  mixed_.resize(count * attended);
  arithmetic_.project(weights.query, count, query_.data());
  arithmetic_.project(weights.key, count, keys_.data());
  arithmetic_.project(weights.value, count, values_.data());
  if (spec.gated) {
    gate_.resize(count * attended);
    arithmetic_.project(weights.out_gate, count, gate_.data());
  }
  prepare_heads(weights, part);
  memory_.attend(shape(weights), part, query_.data(), keys_.data(), values_.data(), mixed_.data());
  arithmetic_.round(mixed_.data(), count * attended);
  if (spec.gated) {
    arithmetic_.pool().parallel_for(count, Arithmetic::kTokenGrain, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin * attended; i < end * attended; ++i)
        mixed_[i] *= 1.0F / (1.0F + std::exp(-gate_[i]));
    });
    arithmetic_.round(mixed_.data(), count * attended);
  }
  if (weights.mixed_norm.width != 0)
    arithmetic_.normalize(weights.mixed_norm, count, mixed_.data(), mixed_.data());
  if (spec_.rounded_inputs) arithmetic_.round_inputs(count, attended, mixed_.data());
  arithmetic_.take_inputs(mixed_.data(), count, attended, part.is_prompt());
  arithmetic_.project(weights.out, count, out);
}

// query_ and keys_: their norms, their rotation, the scale of the queries.
void BlockAttention::prepare_heads(const BlockWeights& weights, const Part& part) {
  const AttentionSpec& spec = weights.spec.attention;
  const std::size_t count = part.count, attended = spec.query_dim(), cached = spec.kv_dim();
  if (spec.head_norm != HeadNorm::none) {
    const bool together = spec.head_norm == HeadNorm::projection, own = spec.head_norm == HeadNorm::heads;
    arithmetic_.pool().parallel_for(count, Arithmetic::kTokenGrain, [&](std::size_t begin, std::size_t end) {
      for (std::size_t t = begin; t < end; ++t) {
        normalize_heads(weights.query_norm, together ? 1 : spec.heads, own, query_.data() + t * attended);
        normalize_heads(weights.key_norm, together ? 1 : spec.kv_heads, own, keys_.data() + t * cached);
      }
    });
    arithmetic_.round(query_.data(), count * attended);
    arithmetic_.round(keys_.data(), count * cached);
  }
  const RotaryTable* rotary = spec.rotary >= 0 ? &rotary_[static_cast<std::size_t>(spec.rotary)] : nullptr;
  if (rotary == nullptr && spec.query_scale == 1.0F) return;
  arithmetic_.pool().parallel_for(count, Arithmetic::kTokenGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t t = begin; t < end; ++t) {
      float* query = query_.data() + t * attended;
      if (rotary != nullptr) {
        rotary->apply(part.first + t, query, spec.heads, spec.head_dim);
        rotary->apply(part.first + t, keys_.data() + t * cached, spec.kv_heads, spec.head_dim);
      }
      if (spec.query_scale != 1.0F)
        for (std::size_t i = 0; i < attended; ++i) query[i] *= spec.query_scale;
    }
  });
  if (rotary != nullptr) arithmetic_.round(keys_.data(), count * cached);
  arithmetic_.round(query_.data(), count * attended);
}

AttentionShape BlockAttention::shape(const BlockWeights& weights) const {
  const AttentionSpec& spec = weights.spec.attention;
  AttentionShape shape;
  shape.heads = spec.heads;
  shape.kv_heads = spec.kv_heads;
  shape.head_dim = spec.head_dim;
  shape.dtype = spec_.dtype;
  shape.softcap = spec.softcap;
  shape.window = spec.window;
  shape.sinks = weights.sinks;
  if (!spec.alibi.slopes.empty()) shape.alibi = &spec.alibi;
  return shape;
}

void SequenceMemory::attend(const AttentionShape& shape, const Part& part, const float* queries,
                            const float* keys, const float* values, float* out) {
  const std::size_t attended = shape.heads * shape.head_dim, cached = shape.kv_heads * shape.head_dim;
  for (std::size_t t = 0; t < part.count; ++t)
    part.tokens[t].sequence->append(part.kv_layer, part.tokens[t].position, keys + t * cached,
                                    values + t * cached);
  seal_pages(part);
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
