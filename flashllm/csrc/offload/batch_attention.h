// Attention of a batch of sequences whose KV blocks lie in arenas (kv_block.h): one query token a sequence,
// or many tokens of one sequence (a prompt). Scores and sums are fp32, each in one order: a query's bits
// depend neither on the threads nor on the batch. Over plain blocks they are those of `attend_each` and
// `attend_many` (attention/attention.h); packed blocks are unpacked a few rows at a time into a thread's
// scratch, for all query heads that share them, and give the bits of plain fp32 blocks of the same values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/kv_block.h"

namespace flashllm {

struct KvArena {
  const std::byte* data = nullptr;
  bool sealed = false;  // which of its format's two kinds of block it holds, and so how far apart
};

struct KvPlace {
  std::int32_t arena, slot;
};

// One token: q and out [heads, head_dim] of the model's dtype; it attends to the first `length` positions,
// its own included, which lie in the first blocks of `blocks`.
struct DecodingToken {
  const std::byte* q = nullptr;
  const KvPlace* blocks = nullptr;
  std::size_t length = 0;
  std::byte* out = nullptr;
};

class BatchAttention {
 public:
  // What becomes of scores before their softmax (attention/attention.h), and what is a layer's own.
  struct Scores {
    float scale = 1.0F;
    float softcap = 0.0F;
    Alibi alibi = {};
  };
  struct Of {
    std::size_t window = 0;
    const float* sinks = nullptr;  // [heads]
  };
  // Throws CoreError (usage) where kv_heads does not divide heads.
  BatchAttention(std::size_t heads, const KvBlockFormat& format, Scores scores, ThreadPool& pool,
                 SimdLevel level);

  const KvBlockFormat& format() const { return format_; }
  std::size_t heads() const { return shape_.heads; }

  // Causal attention of n consecutive tokens: q and out [n, heads, head_dim]; token i attends to positions 0
  // to first_position + i of the plain blocks that lie one after another from `blocks` on, or to the last
  // window of them (0: all).
  void prompt(const std::byte* q, std::size_t n, const std::byte* blocks, std::size_t first_position,
              Of layer, std::byte* out) const;

  // Attention of each token. With share < 1 (FlexGen, section 5: sparse attention): weights are a softmax
  // over all positions, but only values of the ceil(share * length) heaviest positions of each head are
  // added, and the last one's; ties go to the earlier position, and weights stay as they are, not scaled up
  // to a sum of one (as in the paper's system). With a window, `length` is what it holds. Returns the bytes
  // of values read.
  std::uint64_t decode(const std::vector<KvArena>& arenas, const DecodingToken* tokens, std::size_t n,
                       double share, Of layer) const;

 private:
  AttentionShape shape_;
  KvBlockFormat format_;
  ThreadPool& pool_;
  SimdLevel level_;
};

}  // namespace flashllm
