// Attention of a batch of sequences over their pages (attention/page_format.h), which lie in arenas of the
// caller's: pages of one size, one after another. Throws CoreError (usage) for slots, positions and lengths
// that do not fit, before anything is written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "attention/page_format.h"
#include "io/error.h"

namespace flashllm {

template <typename Byte>
struct Arena {
  Byte* data = nullptr;
  std::size_t slots = 0;
  std::size_t page_nbytes = 0;

  Byte* page(std::int64_t slot) const {
    if (slot >= 0 && slot < static_cast<std::int64_t>(slots))
      return data + static_cast<std::size_t>(slot) * page_nbytes;
    throw CoreError(ErrorKind::usage,
                    "slot " + std::to_string(slot) + " is not one of the arena's " + std::to_string(slots));
  }
  std::vector<Byte*> pages(const std::int32_t* of_slots, std::size_t n) const {
    std::vector<Byte*> result(n);
    for (std::size_t i = 0; i < n; ++i) result[i] = page(of_slots[i]);
    return result;
  }
};

// The pages of a batch's sequences: those of sequence i are [offsets[i], offsets[i + 1]) of the table, each
// a number of an arena and a slot in it.
struct PageTable {
  const std::int32_t* pages = nullptr;  // [count, 2]
  std::size_t count = 0;
  const std::int64_t* offsets = nullptr;  // [sequences + 1]
  const std::int64_t* lengths = nullptr;  // [sequences]: positions that are attended to
};

class BatchAttention {
 public:
  // Keeps a reference to the pool.
  BatchAttention(const AttentionShape& shape, Alibi alibi, const PageFormat& format, ThreadPool& pool,
                 SimdLevel level);
  BatchAttention(const BatchAttention&) = delete;

  const AttentionShape& shape() const { return shape_; }
  const PageFormat& format() const { return format_; }

  // keys, values [n, kv_heads * head_dim]: each to its position of the plain page in its slot.
  void write(const float* keys, const float* values, std::size_t n, const Arena<std::byte>& arena,
             const std::int32_t* slots, const std::int32_t* positions) const;
  // Throws where keys or values to be packed are not finite.
  void seal(const Arena<const std::byte>& arena, const std::int32_t* slots, std::size_t n,
            const Arena<std::byte>& out_arena, const std::int32_t* out_slots) const;
  // Causal attention of n consecutive tokens, the first at `first_position`, over the plain pages that lie
  // one after another from `first_slot` on. q and out [n, heads * head_dim], as below.
  void prompt(const float* q, std::size_t n, const Arena<const std::byte>& arena, std::size_t first_slot,
              std::size_t first_position, float* out, const float* sinks) const;
  // Attention of one token of each of n sequences, which is in the last of its positions: that one's page is
  // plain and in the first arena; those before it are sealed, in the other arenas, where they are packed.
  void decode(const float* q, std::size_t n, const std::vector<Arena<const std::byte>>& arenas,
              const PageTable& table, float* out, double share, const float* sinks) const;

 private:
  AttentionShape with(const float* sinks) const;

  ThreadPool& pool_;
  const SimdLevel level_;
  const Alibi alibi_;
  const PageFormat format_;
  AttentionShape shape_;
};

}  // namespace flashllm
