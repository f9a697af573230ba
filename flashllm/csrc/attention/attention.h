// Attention over the KV cache: a few independent tokens (a step of generation), or many of one sequence (a
// prompt). Scores and sums are fp32, and each query's are added in one order: its bits depend neither on the
// threads nor on what else is computed. The two ways do differ from each other in the last bits.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/kernels.h"

namespace flashllm {

constexpr std::size_t kPageTokens = 64;  // positions of a page

class PageFormat;

// Keys and values of one layer of a sequence, in pages of kPageTokens positions that lie anywhere. A head's
// keys in a page are one run of rows, head_dim elements each; the values' run is `value_offset` after the
// keys'. Offsets and strides are in bytes.
//
// With `packed_pages` every full page is there packed too, or packed alone. A query sees the page that it is
// in plain, and those before it packed: so its bits depend on its position, and not on what came in one pass.
// Without a `format` these are plain rows as well, made from packed ones (expanded_pages.h).
struct KvView {
  const std::byte* const* pages = nullptr;  // by the number of the page
  std::size_t offset = 0;                   // of the layer in each page
  std::size_t head_stride = 0;
  std::size_t value_offset = 0;
  const PageFormat* format = nullptr;              // of the packed pages (page_format.h)
  const std::byte* const* packed_pages = nullptr;  // by the number of the page
  std::size_t packed_offset = 0;                   // of the layer in each

  const std::byte* key_rows(std::size_t kv_head, std::size_t page) const {
    return pages[page] + offset + kv_head * head_stride;
  }
  const std::byte* value_rows(std::size_t kv_head, std::size_t page) const {
    return key_rows(kv_head, page) + value_offset;
  }
  const std::byte* packed(std::size_t page) const { return packed_pages[page] + packed_offset; }
};

// What is added to a head's scores by position (Press et al. 2022, ALiBi): scale * slope * position, of which
// the query's own is taken away, so that it grows with the distance; softmax does not see the difference.
struct Alibi {
  std::vector<float> slopes;  // of each head; none: nothing is added
  float scale = 1.0F;
  bool rounded = false;  // the position, and slope * position, to bf16 (Falcon-RW, as it was trained)

  float term(std::size_t head, std::size_t position) const;
  // What a query's score of a key is raised by.
  float bias(std::size_t head, std::size_t key, std::size_t query) const;
};

struct AttentionShape {
  std::size_t heads = 0;
  std::size_t kv_heads = 0;  // divides heads: grouped queries
  std::size_t head_dim = 0;
  std::size_t value_dim = 0;  // a key's first elements that are its value; 0: values have rows of their own
  std::size_t value_row = 0;  // of `attend_many` alone: elements of such a row, and of an output; 0: head_dim
  Dtype dtype = Dtype::f32;
  float softcap = 0.0F;    // scores become cap * tanh(score / cap) (Gemma 2); 0: they stay
  std::size_t window = 0;  // positions that a query sees, its own included; 0: all before it
  // FlexGen, section 5 (sparse attention), of `attend_each` alone. Weights are a softmax over all positions
  // seen, but only the values of ceil(share * seen) of them are added, the heaviest of each head, and the
  // last one's; ties go to the earlier position, and weights are not scaled up to a sum of one (as in the
  // paper's system).
  double share = 1.0;
  // [heads] or nullptr: a score of each head that softmax counts and that belongs to no position (attention
  // sinks, Xiao et al. 2024, as gpt-oss learns them); it is not capped.
  const float* sinks = nullptr;
  const Alibi* alibi = nullptr;  // added after the soft cap; nullptr: nothing is

  std::size_t row_of_value() const { return value_row == 0 ? head_dim : value_row; }
  // Elements of a head's output that are computed, the first of its row.
  std::size_t out_dim() const { return value_dim == 0 ? row_of_value() : value_dim; }
  // The first of `length` positions that the last one sees.
  std::size_t first_seen(std::size_t length) const {
    return window == 0 || window >= length ? 0 : length - window;
  }
};

// The soft cap of n scores, in place. Nothing where the shape has none.
void cap_scores(const AttentionShape& shape, float* scores, std::size_t n);

// One token: q and out [heads, head_dim]; it attends to the first `length` positions, its own included, or to
// the last of them that its window holds.
struct AttendingToken {
  const float* q = nullptr;
  KvView kv;
  std::size_t length = 0;
  float* out = nullptr;
};

// Tokens of any sequences, in one loop over the threads.
void attend_each(const AttentionShape& shape, const AttendingToken* tokens, std::size_t n, ThreadPool& pool,
                 SimdLevel level);

// Causal attention of n consecutive tokens of a sequence: q [n, heads, head_dim], out [n, heads,
// row_of_value]; token i attends to positions 0 to first_position + i, the last of them that its window
// holds. Online softmax over pages of keys (Dao et al. 2022), so that memory does not grow with the context.
// On levels with pair kernels, weights of bf16 values are rounded to bf16.
void attend_many(const AttentionShape& shape, const float* q, std::size_t n, std::size_t first_position,
                 const KvView& kv, float* out, ThreadPool& pool, SimdLevel level);

}  // namespace flashllm
