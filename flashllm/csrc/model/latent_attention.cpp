#include "model/latent_attention.h"

#include <algorithm>

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

// projected_ and keys_, rotated.
void LatentAttention::project(const BlockWeights& weights, const Part& part, const RotaryTable* rotary) {
  const AttentionSpec& spec = weights.spec.attention;
  const LatentSpec& latent = spec.latent;
  const std::size_t count = part.count, row = spec.head_dim, projected = spec.projected_dim();
  keys_.resize(count * row);
  projected_.resize(count * spec.heads * projected);
  arithmetic_.project(weights.key, count, keys_.data());
  if (latent.query_rank != 0) {
    low_.resize(count * latent.query_rank);
    arithmetic_.project(weights.query_down, count, low_.data());
    arithmetic_.normalize(weights.query_norm, count, low_.data(), low_.data());
    arithmetic_.take_inputs(low_.data(), count, latent.query_rank, part.is_prompt());
  }
  arithmetic_.project(weights.query, count, projected_.data());
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

void LatentAttention::attend(const BlockWeights& weights, const Part& part, const RotaryTable* rotary,
                             float* out) {
  project(weights, part, rotary);
  for (std::size_t begin = 0, end = 0; begin < part.count; begin = end) {
    const bool expands = is_expanded(part, begin);
    // One sequence that is expanded, or all that follow and are not.
    while (end < part.count && is_expanded(part, end) == expands &&
           (!expands || part.tokens[end].sequence == part.tokens[begin].sequence))
      ++end;
    const Part run = part.of(begin, end - begin);
    float* to = out + begin * weights.spec.attention.mixed_dim();
    expands ? attend_expanded(weights, run, begin, to) : attend_absorbed(weights, run, begin, to);
  }
  arithmetic_.round(out, part.count * weights.spec.attention.mixed_dim());
}

// Of a part's tokens from `at` on, `part`: a head's plain part goes to the keys' space, its rotated part is
// that; what is mixed comes back.
void LatentAttention::attend_absorbed(const BlockWeights& weights, const Part& part, std::size_t at,
                                      float* out) {
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
  memory_.attend(weights.attention_shape(spec_.dtype), part, query_.data(), keys, keys, mixed_.data());
  arithmetic_.round(mixed_.data(), count * attended);
  arithmetic_.project_heads(weights.value, spec.heads, mixed_.data(), row, count, part.is_prompt(), out,
                            latent.value_dim);
}

// The same of one sequence's tokens, some heads after the other: they attend to keys and values of their own,
// as the queries are projected.
void LatentAttention::attend_expanded(const BlockWeights& weights, const Part& part, std::size_t at,
                                      float* out) {
  const AttentionSpec& spec = weights.spec.attention;
  const std::size_t count = part.count, projected = spec.projected_dim(), value = spec.latent.value_dim;
  const std::size_t together = part.expanded == 0 ? spec.heads : std::min(part.expanded, spec.heads);
  const bool whole = together == spec.heads;
  float* queries = projected_.data() + at * spec.heads * projected;
  for (std::size_t t = 0; t < count; ++t) {
    const float by = spec.query_scale * spec.growth.at(part.tokens[t].position);
    for (std::size_t i = t * spec.heads * projected; i < (t + 1) * spec.heads * projected; ++i)
      queries[i] *= by;
  }
  arithmetic_.round(queries, count * spec.heads * projected);
  AttentionShape attended = weights.attention_shape(spec_.dtype);
  memory_.keep(attended, part, keys_.data() + at * spec.kv_dim(), keys_.data() + at * spec.kv_dim());
  if (part.number == 0 || expanded_.sequence != part.tokens[0].sequence || expanded_.layer != part.kv_layer) {
    expanded_ = Expanded();
    expanded_.sequence = part.tokens[0].sequence;
    expanded_.layer = part.kv_layer;
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
                whole ? out : mixed_.data(), arithmetic_.pool(), arithmetic_.level());
    for (std::size_t t = 0; !whole && t < count; ++t)
      std::copy_n(mixed_.data() + t * heads * value, heads * value, out + (t * spec.heads + first) * value);
  }
}

// expanded_, of some heads: all positions that a part's tokens see.
void LatentAttention::expand(const BlockWeights& weights, const Part& part, std::size_t first_head,
                             std::size_t heads) {
  const Token &first = part.tokens[0], &last = part.tokens[part.count - 1];
  const KvView view = first.sequence->view(part.kv_layer);
  const bool is_packed = view.format != nullptr;
  const std::size_t seen = weights.spec.attention.shape(spec_.dtype).first_seen(first.position + 1);
  const std::size_t begin = std::max(expanded_.end, seen / kPageTokens * kPageTokens);
  const std::size_t end = is_packed ? last.position / kPageTokens * kPageTokens : last.position + 1;
  expanded_.pages.hold(seen, std::max(begin, end));
  expand(weights, view, is_packed, begin, end, first_head, heads, expanded_.pages);
  expanded_.end = std::max(begin, end);
  if (!is_packed) return;
  const std::size_t own = first.position / kPageTokens * kPageTokens;
  expanded_.own.hold(own, last.position + 1);
  expand(weights, view, false, own, last.position + 1, first_head, heads, expanded_.own);
}

// Positions [first, end) of a view, some at a time; each has the same bits whatever comes with it.
void LatentAttention::expand(const BlockWeights& weights, const KvView& view, bool packed, std::size_t first,
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
    latent_rows(view, row, spec_.dtype, packed, first, count, arithmetic_.level(), rows_.data());
    for (std::size_t i = 0; i < count; ++i)
      std::copy_n(rows_.data() + i * row, rank, latent_.data() + i * rank);
    arithmetic_.set_inputs(latent_.data(), rank, true);
    const auto put = [&](const RowMatrix& weights, std::size_t width, const auto& place) {
      const std::byte* made = arithmetic_.project_narrow(weights, count);
      arithmetic_.pool().parallel_for(
          count, Arithmetic::kTokenGrain, [&](std::size_t begin, std::size_t stop) {
            for (std::size_t i = begin; i < stop; ++i)
              for (std::size_t h = 0; h < heads; ++h)
                std::copy_n(made + (i * weights.rows + h * width) * item, width * item, place(h, i));
          });
    };
    put(keys, plain, [&](std::size_t h, std::size_t i) {
      std::byte* key = to.key(h, first + i);
      kernels.from_f32(rows_.data() + i * row + rank, row - rank, key + plain * item);
      return key;
    });
    put(values, value, [&](std::size_t h, std::size_t i) { return to.value(h, first + i); });
  }
}

// expanded_.turned: as keys are rounded, so are the weights that make them.
void LatentAttention::turn_keys(const BlockWeights& weights) {
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

}  // namespace flashllm
