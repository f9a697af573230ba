#include "attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention/page_format.h"
#include "kernels/half.h"
#include "kernels/levels/levels.h"
#include "kernels/scratch.h"

namespace flashllm {

namespace {

constexpr std::size_t kTogether = 8;  // rows of a page that are unpacked, or fetched, together
static_assert(kPageTokens % kTogether == 0, "pages must be whole");
constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kAhead = 8192;  // bytes of rows between those read and those fetched

// Keys or values of one token's query, some rows at a time: where they are plain as they lie, where they are
// packed unpacked into scratch.
class CachedRows {
 public:
  CachedRows(const AttentionShape& shape, const AttendingToken& token, std::size_t kv_head, SimdLevel level)
      : kv_(token.kv),
        kv_head_(kv_head),
        length_(token.length),
        plain_from_(token.kv.format == nullptr ? 0 : (token.length - 1) / kPageTokens * kPageTokens),
        plain_nbytes_(shape.head_dim * dtype_nbytes(shape.dtype)),
        ahead_(round_up(kAhead / plain_nbytes_, kTogether)),
        plain_(kernel_table(level, shape.dtype)),
        wide_(kernel_table(level, Dtype::f32)),
        group_kernels_(level_kernels(level).groups),
        unpacked_(kv_.format == nullptr ? 0 : kTogether * kv_.format->unpacked_row()) {}

  struct Run {
    const std::byte* data;
    std::size_t stride;
    std::size_t n;
    const KernelTable& kernels;
  };
  // From position p on.
  Run keys(std::size_t p) const { return run(p, true, kTogether - p % kTogether, 0); }
  Run values(std::size_t p) const { return run(p, false, kTogether - p % kTogether, 0); }
  // One, where it is packed as row `at` of the scratch.
  Run value(std::size_t p, std::size_t at) const { return run(p, false, 1, at); }

 private:
  Run run(std::size_t p, bool is_key, std::size_t few, std::size_t to) const {
    const std::size_t page = p / kPageTokens, at = p % kPageTokens;
    if (p >= plain_from_) {
      fetch(p + ahead_, is_key, few);
      return {plain_rows(p, is_key), plain_nbytes_, std::min(few, length_ - p), plain_};
    }
    float* unpacked = unpacked_.get() + to * kv_.format->unpacked_row();
    const auto side = is_key ? PageFormat::Side::keys : PageFormat::Side::values;
    kv_.format->unpack(side, kv_.packed(page), kv_head_, at, few, unpacked, group_kernels_);
    return {reinterpret_cast<const std::byte*>(unpacked), kv_.format->unpacked_row() * sizeof(float), few,
            wide_};
  }

  const std::byte* plain_rows(std::size_t p, bool is_key) const {
    const std::size_t page = p / kPageTokens;
    const std::byte* rows = is_key ? kv_.key_rows(kv_head_, page) : kv_.value_rows(kv_head_, page);
    return rows + p % kPageTokens * plain_nbytes_;
  }
  // Pages lie apart: the processor does not know where the next one is. Always inline: a call that only
  // fetches changes nothing that GCC knows of, and goes.
  __attribute__((always_inline)) void fetch(std::size_t p, bool is_key, std::size_t n) const {
    if (p >= length_) return;
    const std::byte* rows = plain_rows(p, is_key);
    const std::size_t nbytes = std::min(n, length_ - p) * plain_nbytes_;
    for (std::size_t at = 0; at < nbytes; at += kCacheLine) __builtin_prefetch(rows + at);
  }

  const KvView& kv_;
  std::size_t kv_head_, length_, plain_from_, plain_nbytes_, ahead_;
  const KernelTable &plain_, &wide_;
  const GroupKernels* group_kernels_;
  Scratch<float> unpacked_;
};

// Adds the values of the `kept` positions from `first` on that weigh most, and of the last one, in their
// order. Weights are not negative, so that their bits are in their order; a NaN comes before all.
void add_heaviest(const CachedRows& cached, const float* weights, std::size_t first, std::size_t seen,
                  std::size_t kept, std::size_t out_dim, float* out) {
  std::vector<std::uint64_t> heaviest(seen);
  for (std::size_t i = 0; i < seen; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, weights + i, sizeof(bits));
    heaviest[i] = (static_cast<std::uint64_t>(~bits) << 32) | i;
  }
  std::nth_element(heaviest.begin(), heaviest.begin() + static_cast<std::ptrdiff_t>(kept), heaviest.end());
  heaviest.resize(kept);
  for (std::uint64_t& each : heaviest) each &= 0xFFFFFFFFU;
  std::sort(heaviest.begin(), heaviest.end());
  if (heaviest.empty() || heaviest.back() != seen - 1) heaviest.push_back(seen - 1);
  const void* rows[kTogether];
  float of_rows[kTogether];
  const KernelTable* kernels = nullptr;
  std::size_t n = 0;
  const auto add = [&] {
    if (n > 0) kernels->add_scaled_rows(rows, of_rows, n, 0, out_dim, out);
    n = 0;
  };
  for (const std::uint64_t i : heaviest) {
    const CachedRows::Run value = cached.value(first + i, n);
    if (n > 0 && &value.kernels != kernels) add();
    kernels = &value.kernels;
    rows[n] = value.data;
    of_rows[n] = weights[i];
    if (++n == kTogether) add();
  }
  add();
}

// The weights of a head's values, out of its scores of the `seen` positions from `first` on, in place; with
// sinks there is room for one score more.
void raise_and_weigh(const AttentionShape& shape, std::size_t head, std::size_t first, std::size_t seen,
                     float* scores, Softmax softmax) {
  cap_scores(shape, scores, seen);
  if (shape.alibi != nullptr)
    for (std::size_t i = 0; i < seen; ++i) scores[i] += shape.alibi->bias(head, first + i, first + seen - 1);
  if (shape.sinks != nullptr) scores[seen] = shape.sinks[head];
  softmax(scores, seen + (shape.sinks == nullptr ? 0 : 1));
}

// Some heads that share a KV head, for one token. scores: [heads and one more, positions seen, and the sink]
void attend_heads(const AttentionShape& shape, const AttendingToken& token, std::size_t first_head,
                  std::size_t heads, float* scores, SimdLevel level, Softmax softmax) {
  const CachedRows cached(shape, token, first_head / (shape.heads / shape.kv_heads), level);
  // In aligned memory, and where one is missing to a whole tile, with one of zeros.
  const std::size_t computed = heads + (heads % kHeadsTogether == kHeadsTogether - 1 ? 1 : 0);
  const std::size_t row = shape.head_dim, width = heads * row, computed_width = computed * row;
  const Scratch<float> q(computed_width), out(computed_width);
  std::copy_n(token.q + first_head * row, width, q.get());
  std::fill(q.get() + width, q.get() + computed_width, 0.0F);
  const std::size_t first = shape.first_seen(token.length), seen = token.length - first;
  const std::size_t terms = seen + (shape.sinks == nullptr ? 0 : 1);
  for (std::size_t p = first, n = 0; p < token.length; p += n) {
    const CachedRows::Run keys = cached.keys(p);
    n = keys.n;
    keys.kernels.score_keys(keys.data, keys.stride, n, q.get(), computed, row, scores + p - first, terms);
  }
  for (std::size_t h = 0; h < heads; ++h) {
    raise_and_weigh(shape, first_head + h, first, seen, scores + h * terms, softmax);
  }
  std::fill_n(out.get(), computed_width, 0.0F);
  const auto kept = static_cast<std::size_t>(
      std::min(std::ceil(shape.share * static_cast<double>(seen)), static_cast<double>(seen)));
  if (kept < seen) {
    for (std::size_t h = 0; h < heads; ++h)
      add_heaviest(cached, scores + h * terms, first, seen, kept, shape.out_dim(), out.get() + h * row);
  } else {
    const void* rows[kTogether];
    for (std::size_t p = first, n = 0; p < token.length; p += n) {
      const CachedRows::Run values = cached.values(p);
      n = values.n;
      for (std::size_t i = 0; i < n; ++i) rows[i] = values.data + i * values.stride;
      values.kernels.add_values(rows, n, scores + p - first, terms, computed, shape.out_dim(), out.get(),
                                row);
    }
  }
  std::copy_n(out.get(), width, token.out + first_head * row);
}

}  // namespace

float Alibi::term(std::size_t head, std::size_t position) const {
  if (!rounded) return scale * slopes[head] * static_cast<float>(position);
  const auto to_bf16 = [](float value) { return bfloat_to_float(float_to_bfloat(value)); };
  return scale * to_bf16(slopes[head] * to_bf16(static_cast<float>(position)));
}

float Alibi::bias(std::size_t head, std::size_t key, std::size_t query) const {
  if (rounded) return term(head, key) - term(head, query);
  return scale * slopes[head] * (static_cast<float>(key) - static_cast<float>(query));
}

void cap_scores(const AttentionShape& shape, float* scores, std::size_t n) {
  if (shape.softcap == 0.0F) return;
  const float factor = 1.0F / shape.softcap;
  for (std::size_t i = 0; i < n; ++i) scores[i] = shape.softcap * std::tanh(scores[i] * factor);
}

void attend_each(const AttentionShape& shape, const AttendingToken* tokens, std::size_t n, ThreadPool& pool,
                 SimdLevel level) {
  const Softmax softmax = level_kernels(level).softmax;
  const std::size_t group = shape.heads / shape.kv_heads;
  // Heads that share keys are one task, so that keys are read from memory once, or as few as leave every
  // thread one.
  const std::size_t tokens_heads = std::max<std::size_t>(1, n * shape.kv_heads);
  const std::size_t wanted = (static_cast<std::size_t>(pool.threads()) + tokens_heads - 1) / tokens_heads;
  const std::size_t together = (group + wanted - 1) / wanted;
  const std::size_t parts = (group + together - 1) / together, tasks = shape.kv_heads * parts;  // of a token
  std::size_t longest = 0;
  for (std::size_t i = 0; i < n; ++i) longest = std::max(longest, tokens[i].length);
  pool.parallel_for(n * tasks, 1, [&](std::size_t begin, std::size_t end) {
    const Scratch<float> scores((together + 1) * (longest + 1));
    for (std::size_t task = begin; task < end; ++task) {
      const std::size_t kv_head = task % tasks / parts, first = task % parts * together;
      attend_heads(shape, tokens[task / tasks], kv_head * group + first, std::min(together, group - first),
                   scores.get(), level, softmax);
    }
  });
}

}  // namespace flashllm
