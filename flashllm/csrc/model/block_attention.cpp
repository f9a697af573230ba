#include "model/block_attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <utility>

#include "attention/attention.h"
#include "io/error.h"
#include "kernels/norm.h"
#include "kernels/scratch.h"

namespace flashllm {

namespace {

constexpr std::size_t kExpanded = 256;  // positions that are expanded together

// Positions of a prompt that follow nothing but such: whatever of them a pass computes, it has the same bits.
bool is_expanded(const Part& part, std::size_t token) {
  const SequenceState* sequence = part.tokens[token].sequence;
  return part.is_prompt() && sequence != nullptr && sequence->prompted() == sequence->length();
}

}  // namespace

void BlockAttention::set_positions(const Part& part) {
  if (rotary_.empty()) return;
  std::vector<std::size_t> positions;
  for (std::size_t t = 0; t < part.count; ++t) positions.push_back(part.tokens[t].position);
  for (RotaryTable& rotary : rotary_) rotary.set_positions(positions.data(), positions.size());
}

void BlockAttention::attend(const BlockWeights& weights, const Part& part, float* out) {
  const AttentionSpec& spec = weights.spec.attention;
  const std::size_t count = part.count, attended = spec.query_dim(), mixed = spec.mixed_dim();
  keys_.resize(count * spec.kv_dim());
  values_.resize(count * (spec.is_latent() ? mixed : spec.kv_dim()));
  const std::size_t gates = spec.gates();
  if (gates != 0) {
    gate_.resize(count * gates);
    arithmetic_.project(weights.out_gate, count, gate_.data());
  }
  float* outputs = values_.data();
  if (spec.is_latent()) {
    project_latent(weights, part);
    mix_latent(weights, part);
  } else {
    query_.resize(count * attended);
    mixed_.resize(count * attended);
    project_heads(weights, part);
    outputs = mixed_.data();
    memory_.attend(shape(weights), part, query_.data(), spec.shared < 0 ? keys_.data() : nullptr,
                   values_.data(), outputs);
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

// projected_ and keys_ of latent attention, rotated.
void BlockAttention::project_latent(const BlockWeights& weights, const Part& part) {
  const AttentionSpec& spec = weights.spec.attention;
  const LatentSpec& latent = spec.latent;
  const std::size_t count = part.count, row = spec.head_dim, projected = spec.projected_dim();
  projected_.resize(count * spec.heads * projected);
  arithmetic_.project(weights.key, count, keys_.data());
  if (latent.query_rank != 0) {
    low_.resize(count * latent.query_rank);
    arithmetic_.project(weights.query_down, count, low_.data());
    arithmetic_.normalize(weights.query_norm, count, low_.data(), low_.data());
    arithmetic_.take_inputs(low_.data(), count, latent.query_rank, part.is_prompt());
  }
  arithmetic_.project(weights.query, count, projected_.data());
  const RotaryTable* rotary = rotary_of(spec);
  arithmetic_.pool().parallel_for(count, Arithmetic::kTokenGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t t = begin; t < end; ++t) {
      float *key = keys_.data() + t * row, *heads = projected_.data() + t * spec.heads * projected;
      normalize(weights.key_norm, key, key);
      if (rotary == nullptr) continue;
      rotary->apply(part.first + t, key + latent.rank, 1, row);
      rotary->apply(part.first + t, heads + latent.plain_dim, spec.heads, projected);
    }
  });
  arithmetic_.round(keys_.data(), count * row);
}

// values_: the heads' outputs. What is expanded multiplies less for each key that a query sees (plain_dim +
// rotated
// + value_dim, not 2 * rank + rotated), but every key has to be made: that pays for many queries.
void BlockAttention::mix_latent(const BlockWeights& weights, const Part& part) {
  for (std::size_t begin = 0, end = 0; begin < part.count; begin = end) {
    const bool expands = is_expanded(part, begin);
    // One sequence that is expanded, or all that follow and are not.
    while (end < part.count && is_expanded(part, end) == expands &&
           (!expands || part.tokens[end].sequence == part.tokens[begin].sequence))
      ++end;
    const Part run = part.of(begin, end - begin);
    expands ? attend_expanded(weights, run, begin) : attend_absorbed(weights, run, begin);
  }
  arithmetic_.round(values_.data(), part.count * weights.spec.attention.mixed_dim());
}

// Of a part's tokens from `at` on, `part`: a head's plain part goes to the keys' space, its rotated part is
// that; what is mixed comes back.
void BlockAttention::attend_absorbed(const BlockWeights& weights, const Part& part, std::size_t at) {
  const AttentionSpec& spec = weights.spec.attention;
  const LatentSpec& latent = spec.latent;
  const std::size_t count = part.count, row = spec.head_dim, attended = spec.query_dim();
  const std::size_t projected = spec.projected_dim();
  query_.resize(count * attended);
  mixed_.resize(count * attended);
  const float *heads = projected_.data() + at * spec.heads * projected, *keys = keys_.data() + at * row;
  arithmetic_.project_heads(weights.key_up, spec.heads, heads, projected, count, part.is_prompt(),
                            query_.data(), row);
  arithmetic_.pool().parallel_for(count, Arithmetic::kTokenGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t t = begin; t < end; ++t) {
      float* query = query_.data() + t * attended;
      for (std::size_t h = 0; h < spec.heads; ++h)
        std::copy_n(heads + (t * spec.heads + h) * projected + latent.plain_dim, row - latent.rank,
                    query + h * row + latent.rank);
      const float by = spec.query_scale * spec.growth.at(part.tokens[t].position);
      for (std::size_t i = 0; i < attended; ++i) query[i] *= by;
    }
  });
  arithmetic_.round(query_.data(), count * attended);
  memory_.attend(shape(weights), part, query_.data(), keys, keys, mixed_.data());
  arithmetic_.round(mixed_.data(), count * attended);
  arithmetic_.project_heads(weights.value, spec.heads, mixed_.data(), row, count, part.is_prompt(),
                            values_.data() + at * spec.mixed_dim(), latent.value_dim);
}

// The same of one sequence's tokens, some heads after the other: they attend to keys and values of their own,
// as the queries are projected.
void BlockAttention::attend_expanded(const BlockWeights& weights, const Part& part, std::size_t at) {
  const AttentionSpec& spec = weights.spec.attention;
  const std::size_t count = part.count, projected = spec.projected_dim(), value = spec.latent.value_dim;
  const std::size_t together = part.expanded == 0 ? spec.heads : std::min(part.expanded, spec.heads);
  const bool whole = together == spec.heads;
  float* queries = projected_.data() + at * spec.heads * projected;
  float* outputs = values_.data() + at * spec.mixed_dim();
  for (std::size_t t = 0; t < count; ++t) {
    const float by = spec.query_scale * spec.growth.at(part.tokens[t].position);
    for (std::size_t i = t * spec.heads * projected; i < (t + 1) * spec.heads * projected; ++i)
      queries[i] *= by;
  }
  arithmetic_.round(queries, count * spec.heads * projected);
  AttentionShape attended = shape(weights);
  memory_.keep(attended, part, keys_.data() + at * spec.kv_dim(), keys_.data() + at * spec.kv_dim());
  if (part.number == 0 || expanded_.sequence != part.tokens[0].sequence || expanded_.layer != part.kv_layer) {
    expanded_ = {part.tokens[0].sequence, part.kv_layer};
    turn_keys(weights);
  }
  attended.head_dim = projected;
  attended.value_dim = 0;
  attended.value_row = value;
  for (std::size_t first = 0; first < spec.heads; first += together) {
    const std::size_t heads = std::min(together, spec.heads - first);
    if (!whole || expanded_.end == 0) {
      expanded_.pages = ExpandedPages(heads, projected, value, spec_.dtype);
      expanded_.own = ExpandedPages(heads, projected, value, spec_.dtype);
      expanded_.end = 0;
    }
    expand(weights, part, first, heads);
    attended.heads = attended.kv_heads = heads;
    attended.sinks = weights.sinks == nullptr ? nullptr : weights.sinks + first;
    if (!whole) {
      query_.resize(count * heads * projected);
      mixed_.resize(count * heads * value);
      for (std::size_t t = 0; t < count; ++t)
        std::copy_n(queries + (t * spec.heads + first) * projected, heads * projected,
                    query_.data() + t * heads * projected);
    }
    const bool is_packed = part.tokens[0].sequence->shape().is_packed();
    const KvView view = is_packed ? expanded_.own.view(&expanded_.pages) : expanded_.pages.view();
    attend_many(attended, whole ? queries : query_.data(), count, part.tokens[0].position, view,
                whole ? outputs : mixed_.data(), arithmetic_.pool(), arithmetic_.level());
    for (std::size_t t = 0; !whole && t < count; ++t)
      std::copy_n(mixed_.data() + t * heads * value, heads * value,
                  outputs + (t * spec.heads + first) * value);
  }
}

// expanded_, of some heads: all positions that a part's tokens see.
void BlockAttention::expand(const BlockWeights& weights, const Part& part, std::size_t first_head,
                            std::size_t heads) {
  const Token &first = part.tokens[0], &last = part.tokens[part.count - 1];
  const KvView view = first.sequence->view(part.kv_layer);
  const bool is_packed = view.format != nullptr;
  const std::size_t seen = weights.spec.attention.shape(spec_.dtype).first_seen(first.position + 1);
  const std::size_t begin = std::max(expanded_.end, seen / kKvBlock * kKvBlock);
  const std::size_t end = is_packed ? last.position / kKvBlock * kKvBlock : last.position + 1;
  expanded_.pages.hold(seen, std::max(begin, end));
  expand(weights, view, is_packed, begin, end, first_head, heads, expanded_.pages);
  expanded_.end = std::max(begin, end);
  if (!is_packed) return;
  const std::size_t own = first.position / kKvBlock * kKvBlock;
  expanded_.own.hold(own, last.position + 1);
  expand(weights, view, false, own, last.position + 1, first_head, heads, expanded_.own);
}

// Positions [first, end) of a view, some at a time; each has the same bits whatever comes with it.
void BlockAttention::expand(const BlockWeights& weights, const KvView& view, bool packed, std::size_t first,
                            std::size_t end, std::size_t first_head, std::size_t heads, ExpandedPages& to) {
  const AttentionSpec& spec = weights.spec.attention;
  const std::size_t rank = spec.latent.rank, plain = spec.latent.plain_dim, value = spec.latent.value_dim;
  const std::size_t row = spec.head_dim, item = dtype_nbytes(spec_.dtype);
  RowMatrix keys{expanded_.turned.data() + first_head * plain * rank * item, heads * plain, rank, rank * item,
                 codec_of(spec_.dtype)};
  RowMatrix values = weights.value;
  values.data += first_head * value * values.stride;
  values.rows = heads * value;
  const KernelTable& kernels = kernel_table(arithmetic_.level(), spec_.dtype);
  for (std::size_t count = 0; first < end; first += count) {
    count = std::min(kExpanded, end - first);
    rows_.resize(count * row);
    latent_.resize(count * rank);
    plain_.resize(count * keys.rows);
    expanded_values_.resize(count * values.rows);
    latent_rows(view, row, spec_.dtype, packed, first, count, arithmetic_.level(), rows_.data());
    for (std::size_t i = 0; i < count; ++i)
      std::copy_n(rows_.data() + i * row, rank, latent_.data() + i * rank);
    arithmetic_.set_inputs(latent_.data(), rank, true);
    arithmetic_.project(keys, count, plain_.data());
    arithmetic_.project(values, count, expanded_values_.data());
    arithmetic_.pool().parallel_for(count, Arithmetic::kTokenGrain, [&](std::size_t begin, std::size_t stop) {
      for (std::size_t i = begin; i < stop; ++i)
        for (std::size_t h = 0; h < heads; ++h) {
          std::byte* key = to.key(h, first + i);
          kernels.from_f32(plain_.data() + i * keys.rows + h * plain, plain, key);
          kernels.from_f32(rows_.data() + i * row + rank, row - rank, key + plain * item);
          kernels.from_f32(expanded_values_.data() + i * values.rows + h * value, value,
                           to.value(h, first + i));
        }
    });
  }
}

// expanded_.turned: as keys are rounded, so are the weights that make them.
void BlockAttention::turn_keys(const BlockWeights& weights) {
  const AttentionSpec& spec = weights.spec.attention;
  const std::size_t rank = spec.latent.rank, plain = spec.latent.plain_dim, n = plain * rank;
  const std::size_t item = dtype_nbytes(spec_.dtype);
  const KernelTable& kernels = kernel_table(arithmetic_.level(), spec_.dtype);
  expanded_.turned.resize(spec.heads * n * item);
  arithmetic_.pool().parallel_for(spec.heads, 1, [&](std::size_t begin, std::size_t end) {
    const Scratch<float> row(plain), turned(n);
    for (std::size_t h = begin; h < end; ++h) {
      for (std::size_t r = 0; r < rank; ++r) {
        widen_row(weights.key_up, h * rank + r, row.get(), arithmetic_.level());
        for (std::size_t j = 0; j < plain; ++j) turned.get()[j * rank + r] = row.get()[j];
      }
      kernels.from_f32(turned.get(), n, expanded_.turned.data() + h * n * item);
    }
  });
}

const RotaryTable* BlockAttention::rotary_of(const AttentionSpec& spec) const {
  return spec.rotary >= 0 ? &rotary_[static_cast<std::size_t>(spec.rotary)] : nullptr;
}

AttentionShape BlockAttention::shape(const BlockWeights& weights) const {
  AttentionShape shape = weights.spec.attention.shape(spec_.dtype);
  shape.sinks = weights.sinks;
  return shape;
}

void AttentionMemory::keep(const AttentionShape&, const Part&, const float*, const float*) {
  throw CoreError(ErrorKind::usage, "keys and values are kept where they are attended to");
}

void SequenceMemory::keep(const AttentionShape& shape, const Part& part, const float* keys,
                          const float* values) {
  const std::size_t cached = shape.kv_heads * shape.head_dim;
  for (std::size_t t = 0; t < part.count; ++t)
    part.tokens[t].sequence->append(part.kv_layer, part.tokens[t].position, keys + t * cached,
                                    values + t * cached);
  seal_pages(part);
}

void SequenceMemory::attend(const AttentionShape& shape, const Part& part, const float* queries,
                            const float* keys, const float* values, float* out) {
  const std::size_t attended = shape.heads * shape.head_dim;
  if (keys != nullptr) keep(shape, part, keys, values);
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
