// Attention of a prompt's queries, tile after tile.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention/attention.h"
#include "attention/page_format.h"
#include "kernels/levels/levels.h"
#include "kernels/scratch.h"
#include "kernels/transpose.h"

namespace flashllm {

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr float kLowest = -1e30F;  // below every score, yet a number: of a query that has seen no key so far
constexpr std::size_t kTileColumns = 128;  // queries of a tile: positions times heads that share keys
static_assert(kTileColumns % kPageTokens == 0, "a tile's positions are whole pages");
constexpr std::size_t kPad = 16;    // floats: a width the kernels take
constexpr std::size_t kStairs = 6;  // queries added up together where each sees one key more
constexpr std::size_t kPairNbytes = 4;

// Queries of one KV head: `positions` consecutive tokens from `first` on, by `heads` heads.
struct Tile {
  std::size_t first_head, heads;
  std::size_t first, positions;
};

// Attends tile after tile. A tile's queries are the columns of its matrices, head by head, so that softmax
// goes down columns and every product is of rows by columns; each column has its own chain of additions.
class TileAttention {
 public:
  TileAttention(const AttentionShape& shape, const float* q, std::size_t first_position, const KvView& kv,
                float* out, std::size_t most_columns, SimdLevel level)
      : shape_(shape),
        q_(q),
        first_position_(first_position),
        kv_(kv),
        out_(out),
        kernels_(kernel_table(level, shape.dtype)),
        attention_(*level_kernels(level).attention),
        multiply_add_(level_kernels(level).multiply_add),
        // Of packed pages the values are fp32, and so are then all.
        pairs_(shape.dtype == Dtype::bf16 && shape.head_dim % 2 == 0 && kv.format == nullptr
                   ? level_kernels(level).pairs
                   : nullptr),
        wide_kernels_(kernel_table(level, Dtype::f32)),
        group_kernels_(level_kernels(level).groups),
        depth_(round_up(pairs_ != nullptr ? shape.out_dim() : shape.row_of_value(), kPad)),
        panel_(pairs_ != nullptr ? std::numeric_limits<std::size_t>::max() / kPad * kPad : attention_.panel),
        queries_(shape.head_dim * round_up(most_columns, kPad)),
        scores_(kPageTokens * round_up(most_columns, kPad)),
        sums_(round_up(most_columns, kPad) * depth_),
        state_(3 * round_up(most_columns, kPad)),
        keys_(kPageTokens * round_up(std::max(shape.head_dim, shape.row_of_value()), kPad)),
        values_(kPageTokens * depth_),
        zeros_(round_up(std::max(shape.head_dim, shape.row_of_value()), kPad)),
        ends_(most_columns),
        begins_(most_columns),
        rows_(most_columns) {
    std::fill_n(zeros_.get(), round_up(std::max(shape.head_dim, shape.row_of_value()), kPad), 0.0F);
  }

  void attend(const Tile& tile) {
    tile_ = tile;
    columns_ = tile.heads * tile.positions;
    width_ = round_up(columns_, kPad);
    largest_ = state_.get();
    sum_ = largest_ + width_;
    factor_ = sum_ + width_;
    std::fill(largest_, largest_ + width_, shape_.window == 0 ? kNever : kLowest);
    std::fill(sum_, sum_ + width_, 0.0F);
    std::fill(sums_.get(), sums_.get() + columns_ * depth_, 0.0F);
    for (std::size_t h = 0, c = 0; h < tile.heads; ++h) {
      for (std::size_t i = tile.first; i < tile.first + tile.positions; ++i, ++c) {
        ends_[c] = first_position_ + i + 1;
        begins_[c] = shape_.first_seen(ends_[c]);
        rows_[c] = i * shape_.heads + tile.first_head + h;
        if (shape_.sinks == nullptr) continue;
        largest_[c] = shape_.sinks[tile.first_head + h];
        sum_[c] = 1.0F;
      }
    }
    load_queries();
    const std::size_t end = first_position_ + tile.first + tile.positions;
    last_begin_ = shape_.first_seen(end);
    for (std::size_t start = begins_[0] / kPageTokens * kPageTokens; start < end; start += kPageTokens) {
      start_ = start;
      keys_seen_ = std::min(kPageTokens, end - start);
      multiply_keys();
      attention_.online_softmax(scores_.get(), keys_seen_, width_, width_, largest_, sum_, factor_);
      for (std::size_t c = 0; c < columns_; ++c)
        if (factor_[c] != 1.0F) attention_.scale_floats(sums_.get() + c * depth_, depth_, factor_[c]);
      add_values();
    }
    store();
  }

 private:
  // Keys [skipped, seen) of this page are those that a column's query sees.
  std::size_t seen(std::size_t column) const { return in_page(ends_[column]); }
  std::size_t skipped(std::size_t column) const { return in_page(begins_[column]); }
  std::size_t in_page(std::size_t position) const {
    return position <= start_ ? 0 : std::min(position - start_, keys_seen_);
  }
  bool all_seen() const {
    return first_position_ + tile_.first + 1 >= start_ + keys_seen_ && last_begin_ <= start_;
  }
  // Whether the tile's queries, which are in one page, see this one as it is packed; and not as plain rows.
  bool is_earlier() const {
    return kv_.packed_pages != nullptr &&
           start_ / kPageTokens < (first_position_ + tile_.first) / kPageTokens;
  }
  bool is_packed() const { return kv_.format != nullptr && is_earlier(); }
  const std::byte* key_rows() const {
    const std::size_t page = start_ / kPageTokens;
    return is_earlier() ? kv_.packed(page) + kv_head() * kv_.head_stride : kv_.key_rows(kv_head(), page);
  }
  // keys_: rows [kPageTokens, head_dim] of this page
  const float* unpacked(PageFormat::Side side) const {
    const std::size_t dim = shape_.head_dim, row = kv_.format->unpacked_row();
    kv_.format->unpack(side, kv_.packed(start_ / kPageTokens), kv_head(), 0, kPageTokens, keys_.get(),
                       group_kernels_);
    for (std::size_t i = 1; i < kPageTokens && row != dim; ++i)
      std::copy_n(keys_.get() + i * row, dim, keys_.get() + i * dim);
    return keys_.get();
  }
  std::size_t kv_head() const { return tile_.first_head / (shape_.heads / shape_.kv_heads); }
  std::uint32_t* words(const Scratch<float>& floats) const {
    return reinterpret_cast<std::uint32_t*>(floats.get());
  }

  // queries_: [head_dim, width] in panels of columns, or words [head_dim / 2, width]
  void load_queries() {
    const std::size_t dim = shape_.head_dim;
    for (std::size_t first = 0; first < width_; first += kPad) {
      const Panel panel = panel_of(first, width_, dim, queries_);
      const float* from[kPad];
      for (std::size_t i = 0; i < kPad; ++i)
        from[i] = first + i < columns_ ? q_ + rows_[first + i] * dim : zeros_.get();
      std::size_t j = 0;
      for (; j + 4 <= dim; j += 4)
        for (std::size_t i = 0; i < kPad; i += 4)
          transpose(from + i, j, panel.data + j * panel.row + i, panel.row);
      for (; j < dim; ++j)
        for (std::size_t i = 0; i < kPad; ++i) panel.data[j * panel.row + i] = from[i][j];
    }
    if (pairs_ == nullptr) return;
    for (std::size_t j = 0; j < dim; j += 2) {  // in place: words of a pair lie before its rows
      const float* low = queries_.get() + j * width_;
      pairs_->pair_floats(low, low + width_, width_, words(queries_) + j / 2 * width_);
    }
  }

  // Where the column of a matrix of `rows` rows lies, and how far apart its rows do.
  struct Panel {
    float* data;
    std::size_t row;
  };
  Panel panel_of(std::size_t column, std::size_t columns, std::size_t rows,
                 const Scratch<float>& matrix) const {
    const std::size_t first = column / panel_ * panel_;
    return {matrix.get() + first * rows + column % panel_, std::min(panel_, columns - first)};
  }

  // scores_: [keys_seen_, width], minus infinity where a query does not see the key
  void multiply_keys() {
    const std::byte* rows = is_packed() ? nullptr : key_rows();
    const float* keys = reinterpret_cast<const float*>(rows);
    if (is_packed()) {
      keys = unpacked(PageFormat::Side::keys);
    } else if (pairs_ == nullptr && shape_.dtype != Dtype::f32) {
      kernels_.to_f32(rows, keys_seen_ * shape_.head_dim, keys_.get());
      keys = keys_.get();
    }
    if (all_seen()) {
      std::fill(scores_.get(), scores_.get() + keys_seen_ * width_, 0.0F);
      return multiply_keys(rows, keys, keys_seen_, 0, width_);
    }
    for (std::size_t c = 0; c < width_; c += kPad) {
      std::size_t needed = 0;
      for (std::size_t i = c; i < std::min(c + kPad, columns_); ++i) needed = std::max(needed, seen(i));
      for (std::size_t k = 0; k < keys_seen_; ++k)
        std::fill_n(scores_.get() + k * width_ + c, kPad, k < needed ? 0.0F : kNever);
      multiply_keys(rows, keys, needed, c, kPad);
      for (std::size_t i = c; i < std::min(c + kPad, columns_); ++i) {
        for (std::size_t k = 0; k < skipped(i); ++k) scores_.get()[k * width_ + i] = kNever;
        for (std::size_t k = seen(i); k < needed; ++k) scores_.get()[k * width_ + i] = kNever;
      }
    }
  }

  void multiply_keys(const std::byte* rows, const float* keys, std::size_t n, std::size_t column,
                     std::size_t width) {
    float* const scores = scores_.get() + column;
    const std::size_t dim = shape_.head_dim;
    if (pairs_ != nullptr) {
      pairs_->multiply_add({rows, dim * dtype_nbytes(Dtype::bf16), kPairNbytes}, n,
                           {words(queries_) + column, width_}, width, dim / 2, scores, width_);
    } else {
      for (std::size_t end = column + width; column < end;) {
        const Panel panel = panel_of(column, width_, dim, queries_);
        const std::size_t wide = std::min(end - column, panel_ - column % panel_);
        multiply_add_({keys, dim, 1}, n, {panel.data, panel.row}, wide, dim, scores_.get() + column, width_);
        column += wide;
      }
    }
    for (std::size_t k = 0; k < n; ++k) cap_scores(shape_, scores + k * width_, width);
    if (shape_.alibi == nullptr) return;
    const std::size_t first = static_cast<std::size_t>(scores - scores_.get());
    for (std::size_t i = 0; i < std::min(width, columns_ - std::min(columns_, first)); ++i) {
      const std::size_t head = tile_.first_head + (first + i) / tile_.positions;
      for (std::size_t k = 0; k < n; ++k)
        scores[k * width_ + i] += shape_.alibi->bias(head, start_ + k, ends_[first + i] - 1);
    }
  }

  // sums_ += weights * values, each query's in the order of the keys. A key that a query does not see weighs
  // zero: it changes nothing where values are finite, and is left out where they are not.
  void add_values() {
    pairs_ != nullptr ? load_value_pairs() : load_values();
    if (all_seen()) return add_values(0, columns_, keys_seen_);
    if (!values_finite()) {
      for (std::size_t c = 0; c < columns_; ++c) add_seen_values(c);
      return;
    }
    for (std::size_t c = 0; c < columns_; c += kStairs) {
      const std::size_t n = std::min(kStairs, columns_ - c);
      std::size_t keys = 0;
      for (std::size_t i = c; i < c + n; ++i) keys = std::max(keys, seen(i));
      add_values(c, n, keys);
    }
  }

  bool values_finite() const {
    if (pairs_ == nullptr) return attention_.all_finite(values_.get(), keys_seen_ * depth_);
    constexpr std::uint32_t kLow = 0x7F80U, kHigh = kLow << 16;  // the exponent of infinity and NaN
    const std::uint32_t* pairs = words(values_);
    bool is_finite = true;
    for (std::size_t i = 0; i < (keys_seen_ + 1) / 2 * depth_; ++i)
      is_finite &= (pairs[i] & kLow) != kLow && (pairs[i] & kHigh) != kHigh;
    return is_finite;
  }

  // The first `keys` keys of the page, for `n` columns.
  void add_values(std::size_t column, std::size_t n, std::size_t keys) {
    if (pairs_ != nullptr) return add_pairs(column, n, 0, (keys + 1) / 2, words(values_));
    for (std::size_t j = 0; j < depth_; j += panel_) {
      const Panel panel = panel_of(j, depth_, keys_seen_, values_);
      multiply_add_({scores_.get() + column, 1, width_}, n, {panel.data, panel.row}, panel.row, keys,
                    sums_.get() + column * depth_ + j, depth_);
    }
  }

  // Exactly those that the column's query sees. Of a window's first page, all that are not after it: where
  // a key before the window has a value that is not finite, so has the query's own sum.
  void add_seen_values(std::size_t column) {
    const std::size_t keys = seen(column);
    if (pairs_ == nullptr) return add_values(column, 1, keys);
    add_pairs(column, 1, 0, keys / 2, words(values_));
    if (keys % 2 == 0) return;
    const std::uint32_t* last = words(values_) + keys / 2 * depth_;
    std::uint32_t* earlier = words(keys_);
    for (std::size_t j = 0; j < depth_; ++j) earlier[j] = last[j] & 0xFFFFU;
    add_pairs(column, 1, keys / 2, 1, earlier);
  }

  // `pairs` pairs of keys from `first` on.
  void add_pairs(std::size_t column, std::size_t n, std::size_t first, std::size_t pairs,
                 const std::uint32_t* values) {
    const auto* weights = reinterpret_cast<const std::byte*>(words(scores_) + first * width_ + column);
    pairs_->multiply_add({weights, kPairNbytes, width_ * kPairNbytes}, n, {values, depth_}, depth_, pairs,
                         sums_.get() + column * depth_, depth_);
  }

  // values_: [keys_seen_, depth] in panels of columns
  void load_values() {
    if (is_packed()) {
      const auto* rows = reinterpret_cast<const std::byte*>(unpacked(PageFormat::Side::values));
      return wide_kernels_.to_panels(rows, keys_seen_, shape_.head_dim, panel_, values_.get());
    }
    kernels_.to_panels(key_rows() + kv_.value_offset, keys_seen_, shape_.row_of_value(), panel_,
                       values_.get());
  }

  // values_: words [keys_seen_ / 2, depth], and scores_: words [keys_seen_ / 2, width]; nothing follows the
  // last of an odd number of keys.
  void load_value_pairs() {
    const std::size_t row = shape_.row_of_value(), dim = shape_.out_dim();
    const auto* rows = reinterpret_cast<const std::uint16_t*>(key_rows() + kv_.value_offset);
    const auto* nothing = reinterpret_cast<const std::uint16_t*>(zeros_.get());
    for (std::size_t k = 0; k < keys_seen_; k += 2) {
      const bool has_later = k + 1 < keys_seen_;
      std::uint32_t* values = words(values_) + k / 2 * depth_;
      pairs_->pair_rows(rows + k * row, has_later ? rows + (k + 1) * row : nothing, dim, values);
      std::fill(values + dim, values + depth_, 0U);
      const float* weights = scores_.get() + k * width_;
      pairs_->pair_floats(weights, has_later ? weights + width_ : weights, width_,
                          words(scores_) + k / 2 * width_);
    }
  }

  void store() const {
    for (std::size_t c = 0; c < columns_; ++c) {
      const float* sums = sums_.get() + c * depth_;
      const float inverse = 1.0F / sum_[c];
      float* out = out_ + rows_[c] * shape_.row_of_value();
      // Plus zero: keys that weigh nothing may have turned a zero's sign.
      for (std::size_t j = 0; j < shape_.out_dim(); ++j) out[j] = sums[j] * inverse + 0.0F;
    }
  }

  const AttentionShape& shape_;
  const float* q_;
  std::size_t first_position_;
  const KvView& kv_;
  float* out_;
  const KernelTable& kernels_;
  const AttentionKernels& attention_;
  MultiplyAdd multiply_add_;
  const PairKernels* pairs_;         // nullptr: rows are widened to fp32
  const KernelTable& wide_kernels_;  // of fp32
  const GroupKernels* group_kernels_;
  std::size_t depth_;  // elements of values that are added, padded
  std::size_t panel_;
  Scratch<float> queries_, scores_, sums_, state_, keys_, values_, zeros_;
  std::vector<std::size_t> ends_, begins_,
      rows_;  // of a column: the position after its query's; the first it sees; its row in q and out
  Tile tile_{};
  std::size_t columns_ = 0, width_ = 0;                            // queries of the tile; the same, padded
  float *largest_ = nullptr, *sum_ = nullptr, *factor_ = nullptr;  // [width]
  std::size_t last_begin_ = 0;             // of the last position's query: the first it sees
  std::size_t start_ = 0, keys_seen_ = 0;  // the page of keys: its first position, how many the tile sees
};

// How many heads of a group share a tile of `positions` tokens.
std::size_t heads_together(std::size_t group, std::size_t positions, std::size_t tiles, std::size_t threads) {
  constexpr std::size_t kTilesPerThread = 2;
  std::size_t heads = std::clamp<std::size_t>(kTileColumns / positions, 1, group);
  while (heads > 1 && tiles * ((group + heads - 1) / heads) < kTilesPerThread * threads)
    heads = (heads + 1) / 2;
  return heads;
}

}  // namespace

void attend_many(const AttentionShape& shape, const float* q, std::size_t n, std::size_t first_position,
                 const KvView& kv, float* out, ThreadPool& pool, SimdLevel level) {
  if (n == 0) return;
  // Tiles end where pages of keys do: only a tile's last page is seen by some queries and not by others, or
  // plain by some and packed by others.
  const std::size_t columns = kv.packed_pages == nullptr ? kTileColumns : kPageTokens;
  const std::size_t offset = first_position % columns;
  const std::size_t tiles = (offset + n + columns - 1) / columns;
  const std::size_t positions = std::min(n, columns), group = shape.heads / shape.kv_heads;
  const std::size_t together =
      heads_together(group, positions, tiles * shape.kv_heads, static_cast<std::size_t>(pool.threads()));
  const std::size_t parts = (group + together - 1) / together, of_tile = shape.kv_heads * parts;
  pool.parallel_for(tiles * of_tile, 1, [&](std::size_t begin, std::size_t end) {
    TileAttention attention(shape, q, first_position, kv, out, together * positions, level);
    for (std::size_t task = begin; task < end; ++task) {
      const std::size_t index =
          tiles - 1 - task / of_tile;  // the longest first, so that threads end together
      const std::size_t part = task % parts, kv_head = task % of_tile / parts;
      Tile tile;
      tile.first = index == 0 ? 0 : index * columns - offset;
      tile.positions = std::min(n, (index + 1) * columns - offset) - tile.first;
      tile.first_head = kv_head * group + part * together;
      tile.heads = std::min(together, group - part * together);
      attention.attend(tile);
    }
  });
}

}  // namespace flashllm
