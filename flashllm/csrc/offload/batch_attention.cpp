#include "offload/batch_attention.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "kernels/thread_pool.h"

namespace flashllm {

BatchAttention::BatchAttention(const AttentionShape& shape, Alibi alibi, const PageFormat& format,
                               ThreadPool& pool, SimdLevel level)
    : pool_(pool), level_(level), alibi_(std::move(alibi)), format_(format), shape_(shape) {
  require(shape.heads != 0 && shape.heads % shape.kv_heads == 0, "heads must be a multiple of kv_heads");
  require(alibi_.slopes.empty() || alibi_.slopes.size() == shape.heads, "every head needs a slope");
  if (!alibi_.slopes.empty()) shape_.alibi = &alibi_;
}

AttentionShape BatchAttention::with(const float* sinks) const {
  AttentionShape shape = shape_;
  shape.sinks = sinks;
  return shape;
}

void BatchAttention::write(const float* keys, const float* values, std::size_t n,
                           const Arena<std::byte>& arena, const std::int32_t* slots,
                           const std::int32_t* positions) const {
  constexpr std::size_t kGrain = 16;
  const std::size_t width = shape_.kv_heads * shape_.head_dim;
  const std::vector<std::byte*> pages = arena.pages(slots, n);
  require(std::all_of(positions, positions + n, [](std::int32_t position) { return position >= 0; }),
          "a position must not be negative");
  pool_.parallel_for(n, kGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i)
      format_.write(keys + i * width, values + i * width, static_cast<std::size_t>(positions[i]), pages[i]);
  });
}

void BatchAttention::seal(const Arena<const std::byte>& arena, const std::int32_t* slots, std::size_t n,
                          const Arena<std::byte>& out_arena, const std::int32_t* out_slots) const {
  const std::vector<const std::byte*> from = arena.pages(slots, n);
  const std::vector<std::byte*> to = out_arena.pages(out_slots, n);
  std::atomic<bool> is_finite{true};
  pool_.parallel_for(n, 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i)
      if (!format_.seal(from[i], to[i], level_)) is_finite = false;
  });
  require(is_finite, "keys and values that are not finite cannot be packed");
}

void BatchAttention::prompt(const float* q, std::size_t n, const Arena<const std::byte>& arena,
                            std::size_t first_slot, std::size_t first_position, float* out,
                            const float* sinks) const {
  std::vector<const std::byte*> pages((first_position + n + kPageTokens - 1) / kPageTokens);
  require(first_slot <= arena.slots && pages.size() <= arena.slots - first_slot,
          "the sequence's pages reach beyond the arena's " + std::to_string(arena.slots) + " slots");
  for (std::size_t i = 0; i < pages.size(); ++i)
    pages[i] = arena.page(static_cast<std::int64_t>(first_slot + i));
  attend_many(with(sinks), q, n, first_position, format_.view(pages.data()), out, pool_, level_);
}

void BatchAttention::decode(const float* q, std::size_t n, const std::vector<Arena<const std::byte>>& arenas,
                            const PageTable& table, float* out, double share, const float* sinks) const {
  require(share > 0.0 && share <= 1.0, "share must be more than 0 and at most 1");
  AttentionShape shape = with(sinks);
  shape.share = share;
  std::vector<const std::byte*> pages(table.count);
  for (std::size_t p = 0; p < pages.size(); ++p) {
    const auto arena = static_cast<std::size_t>(table.pages[2 * p]);
    require(arena < arenas.size(), "no arena " + std::to_string(table.pages[2 * p]));
    pages[p] = arenas[arena].page(table.pages[2 * p + 1]);
  }
  const std::size_t width = shape.heads * shape.head_dim;
  std::vector<AttendingToken> tokens(n);
  for (std::size_t i = 0; i < n; ++i) {
    const std::int64_t begin = table.offsets[i], end = table.offsets[i + 1], length = table.lengths[i];
    const std::string which = "sequence " + std::to_string(i) + ": ";
    require(0 <= begin && begin <= end && end <= static_cast<std::int64_t>(pages.size()),
            "offsets must rise from 0 up to the table's length");
    const std::int64_t last = begin + (length - 1) / static_cast<std::int64_t>(kPageTokens);
    require(length > 0 && last < end,
            which + "its pages do not hold " + std::to_string(length) + " positions");
    KvView kv = format_.view(pages.data() + begin);
    if (format_.is_packed()) {
      bool sealed = table.pages[2 * last] == 0;
      for (std::int64_t p = begin; p < last; ++p) sealed = sealed && table.pages[2 * p] > 0;
      require(sealed, which + "all of its pages but the last must be sealed");
      kv.format = &format_;
      kv.packed_pages = kv.pages;
    }
    tokens[i] = {q + i * width, kv, static_cast<std::size_t>(length), out + i * width};
  }
  attend_each(shape, tokens.data(), n, pool_, level_);
}

}  // namespace flashllm
