#include "offload/batch_attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "io/error.h"
#include "kernels/scratch.h"

namespace flashllm {

namespace {

constexpr std::size_t kUnpacked = 16;  // rows unpacked together: they stay in the first cache
static_assert(kKvBlock % kUnpacked == 0, "blocks must be whole");

// The heads that share one KV head, for one token. One object a thread, used for one token after another.
class GroupAttention {
 public:
  GroupAttention(const AttentionShape& shape, const KvBlockFormat& format, const std::vector<KvArena>& arenas,
                 std::size_t longest, double share, SimdLevel level)
      : shape_(shape),
        format_(format),
        arenas_(arenas),
        share_(share),
        group_(shape.heads / shape.kv_heads),
        kernels_(kernel_table(level, shape.dtype)),
        wide_kernels_(kernel_table(level, Dtype::f32)),
        group_kernels_(group_kernels(level)),
        softmax_(softmax_kernel(level)),
        q_(group_ * shape.head_dim),
        out_(group_ * shape.head_dim),
        scores_(group_ * (longest + 1)),
        unpacked_(kKvBlock * format.unpacked_row()) {
    if (share_ < 1.0) ranks_.reserve(longest);
  }

  // Returns the bytes of values read.
  std::uint64_t attend(const DecodingToken& token, std::size_t kv_head) {
    const std::size_t width = group_ * shape_.head_dim, length = token.length;
    const std::size_t at = kv_head * width * dtype_nbytes(shape_.dtype);
    const std::size_t first = shape_.first_seen(length), seen = length - first;
    const std::size_t begin = first / kKvBlock * kKvBlock;  // of the first block that is read
    stride_ = length + 1;
    kernels_.to_f32(token.q + at, width, q_.get());
    for (std::size_t p = begin; p < length; p += kKvBlock)
      multiply_keys(block_at(token.blocks[p / kKvBlock]), kv_head, p, std::min(kKvBlock, length - p));
    for (std::size_t h = 0; h < group_; ++h) {
      raise_and_weigh(shape_, kv_head * group_ + h, first, seen, scores_.get() + h * stride_ + first,
                      softmax_);
    }
    const auto kept = static_cast<std::size_t>(
        std::min(std::ceil(share_ * static_cast<double>(seen)), static_cast<double>(seen)));
    if (kept < seen) {
      is_kept_.assign(group_ * stride_, 0);
      for (std::size_t h = 0; h < group_; ++h) keep_heaviest(h, first, length, kept);
    }
    std::fill_n(out_.get(), width, 0.0F);
    std::uint64_t nbytes = 0;
    for (std::size_t p = begin; p < length; p += kKvBlock) {
      const Block block = block_at(token.blocks[p / kKvBlock]);
      const std::size_t n = std::min(kKvBlock, length - p), skipped = p < first ? first - p : 0;
      const std::size_t rows =
          kept < seen ? add_kept_values(block, kv_head, p, n) : add_values(block, kv_head, p, {skipped, n});
      nbytes += rows * format_.value_nbytes(block.is_packed);
    }
    kernels_.from_f32(out_.get(), width, token.out + at);
    return nbytes;
  }

 private:
  struct Block {
    const std::byte* data;
    bool is_packed;
  };
  struct Rows {
    std::size_t begin, end;
  };
  Block block_at(const KvPlace& place) const {
    const KvArena& arena = arenas_[static_cast<std::size_t>(place.arena)];
    const std::size_t stride = arena.sealed ? format_.sealed_nbytes() : format_.block_nbytes();
    return {arena.data + static_cast<std::size_t>(place.slot) * stride, arena.sealed && format_.is_packed()};
  }

  // scores_[h][p + i] = q[h] . key i of the block, for i < n
  void multiply_keys(const Block& block, std::size_t kv_head, std::size_t p, std::size_t n) {
    if (!block.is_packed)
      return multiply_keys(format_.view(&block.data).key_rows(kv_head, 0), format_.row_nbytes(), kernels_, p,
                           n);
    for (std::size_t i = 0; i < n; i += kUnpacked) {
      const std::size_t few = std::min(kUnpacked, n - i);
      format_.unpack_keys(block.data, kv_head, i, few, unpacked_.get(), group_kernels_);
      multiply_keys(unpacked_.get(), format_.unpacked_row() * sizeof(float), wide_kernels_, p + i, few);
    }
  }
  void multiply_keys(const void* keys, std::size_t stride, const KernelTable& kernels, std::size_t p,
                     std::size_t n) {
    for (std::size_t h = 0; h < group_; ++h)
      kernels.dot_matrix(keys, stride, n, q_.get() + h * shape_.head_dim, shape_.head_dim,
                         scores_.get() + h * stride_ + p);
  }

  // Marks the positions whose values head h adds. Weights are not negative, so that their bits are in their
  // order; a NaN comes before all.
  void keep_heaviest(std::size_t h, std::size_t first, std::size_t length, std::size_t kept) {
    const float* weights = scores_.get() + h * stride_;
    ranks_.clear();
    for (std::size_t p = first; p < length; ++p) {
      std::uint32_t bits;
      std::memcpy(&bits, weights + p, sizeof(bits));
      ranks_.push_back((static_cast<std::uint64_t>(~bits) << 32) | p);
    }
    std::nth_element(ranks_.begin(), ranks_.begin() + static_cast<std::ptrdiff_t>(kept), ranks_.end());
    for (std::size_t i = 0; i < kept; ++i) is_kept_[h * stride_ + (ranks_[i] & 0xFFFFFFFFU)] = 1;
    is_kept_[h * stride_ + length - 1] = 1;
  }

  // out_[h] += the block's values times their weights, in their order. Both return how many rows they read.
  std::size_t add_values(const Block& block, std::size_t kv_head, std::size_t p, Rows of_block) {
    const std::size_t together = block.is_packed ? kUnpacked : kKvBlock;
    const void* rows[kKvBlock];
    for (std::size_t i = of_block.begin; i < of_block.end; i += together) {
      const std::size_t few = std::min(together, of_block.end - i);
      if (block.is_packed)
        format_.unpack_values(block.data, kv_head, i, few, unpacked_.get(), group_kernels_);
      for (std::size_t j = 0; j < few; ++j) rows[j] = value_at(block, kv_head, i + j, j);
      for (std::size_t h = 0; h < group_; ++h)
        add_rows(block, rows, scores_.get() + h * stride_ + p + i, few, h);
    }
    return of_block.end - of_block.begin;
  }

  // Those of the positions that a head keeps.
  std::size_t add_kept_values(const Block& block, std::size_t kv_head, std::size_t p, std::size_t n) {
    const void* rows[kKvBlock] = {};
    std::size_t read = 0;
    for (std::size_t i = 0; i < n; ++i) {
      bool is_kept = false;
      for (std::size_t h = 0; h < group_; ++h) is_kept |= is_kept_[h * stride_ + p + i] != 0;
      if (!is_kept) continue;
      if (block.is_packed)
        format_.unpack_values(block.data, kv_head, i, 1, unpacked_.get() + i * format_.unpacked_row(),
                              group_kernels_);
      rows[i] = value_at(block, kv_head, i, i);
      ++read;
    }
    if (read == 0) return 0;
    for (std::size_t h = 0; h < group_; ++h) {
      const void* kept[kKvBlock];
      float weights[kKvBlock];
      std::size_t count = 0;
      for (std::size_t i = 0; i < n; ++i) {
        if (is_kept_[h * stride_ + p + i] == 0) continue;
        kept[count] = rows[i];
        weights[count++] = scores_.get()[h * stride_ + p + i];
      }
      add_rows(block, kept, weights, count, h);
    }
    return read;
  }

  // Value i of a plain block, or row `unpacked` of those unpacked.
  const void* value_at(const Block& block, std::size_t kv_head, std::size_t i, std::size_t unpacked) const {
    if (block.is_packed) return unpacked_.get() + unpacked * format_.unpacked_row();
    return format_.view(&block.data).value_rows(kv_head, 0) + i * format_.row_nbytes();
  }
  void add_rows(const Block& block, const void* const* rows, const float* weights, std::size_t n,
                std::size_t h) {
    (block.is_packed ? wide_kernels_ : kernels_)
        .add_scaled_rows(rows, weights, n, 0, shape_.head_dim, out_.get() + h * shape_.head_dim);
  }

  const AttentionShape& shape_;
  const KvBlockFormat& format_;
  const std::vector<KvArena>& arenas_;
  double share_;
  std::size_t group_;
  const KernelTable &kernels_, &wide_kernels_;  // of the dtype, and of fp32
  const GroupKernels& group_kernels_;
  Softmax softmax_;
  Scratch<float> q_, out_;   // [group, head_dim]
  std::size_t stride_ = 0;   // of a head's scores: those of all positions, and the sink's
  Scratch<float> scores_;    // [group, stride_]
  Scratch<float> unpacked_;  // [kKvBlock, unpacked_row]
  std::vector<std::uint64_t> ranks_;
  std::vector<std::uint8_t> is_kept_;  // [group, stride_]
};

}  // namespace

BatchAttention::BatchAttention(std::size_t heads, const KvBlockFormat& format, Scores scores,
                               ThreadPool& pool, SimdLevel level)
    : format_(format), pool_(pool), level_(level) {
  if (heads == 0 || heads % format.kv_heads() != 0)
    throw CoreError(ErrorKind::usage, "heads must be a multiple of kv_heads");
  shape_.heads = heads;
  shape_.kv_heads = format.kv_heads();
  shape_.head_dim = format.head_dim();
  shape_.dtype = format.dtype();
  shape_.scale = scores.scale;
  shape_.softcap = scores.softcap;
  shape_.alibi = scores.alibi;
}

void BatchAttention::prompt(const std::byte* q, std::size_t n, const std::byte* blocks,
                            std::size_t first_position, Of layer, std::byte* out) const {
  constexpr std::size_t kGrain = 4;  // tokens a thread widens at a time
  const KernelTable& kernels = kernel_table(level_, shape_.dtype);
  const std::size_t row = shape_.heads * shape_.head_dim, row_nbytes = row * dtype_nbytes(shape_.dtype);
  AttentionShape shape = shape_;
  shape.window = layer.window;
  shape.sinks = layer.sinks;
  const Scratch<float> wide_q(n * row), wide_out(n * row);
  pool_.parallel_for(n, kGrain, [&](std::size_t begin, std::size_t end) {
    kernels.to_f32(q + begin * row_nbytes, (end - begin) * row, wide_q.get() + begin * row);
  });
  std::vector<const std::byte*> pages((first_position + n + kKvBlock - 1) / kKvBlock);
  for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = blocks + i * format_.block_nbytes();
  attend_many(shape, wide_q.get(), n, first_position, format_.view(pages.data()), wide_out.get(), pool_,
              level_);
  pool_.parallel_for(n, kGrain, [&](std::size_t begin, std::size_t end) {
    kernels.from_f32(wide_out.get() + begin * row, (end - begin) * row, out + begin * row_nbytes);
  });
}

std::uint64_t BatchAttention::decode(const std::vector<KvArena>& arenas, const DecodingToken* tokens,
                                     std::size_t n, double share, Of layer) const {
  AttentionShape shape = shape_;
  shape.window = layer.window;
  shape.sinks = layer.sinks;
  std::size_t longest = 0;
  for (std::size_t i = 0; i < n; ++i) longest = std::max(longest, tokens[i].length);
  std::atomic<std::uint64_t> nbytes{0};
  pool_.parallel_for(n * shape_.kv_heads, 1, [&](std::size_t begin, std::size_t end) {
    GroupAttention attention(shape, format_, arenas, longest, share, level_);
    std::uint64_t read = 0;
    for (std::size_t task = begin; task < end; ++task)
      read += attention.attend(tokens[task / shape_.kv_heads], task % shape_.kv_heads);
    nbytes += read;
  });
  return nbytes;
}

}  // namespace flashllm
