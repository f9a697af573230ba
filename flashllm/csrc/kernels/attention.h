// Attention of one query token over the KV cache, one head a task (FlashAttention is for many queries; one
// reads the cache once whatever is done). Scores and sums are fp32, in one order, so bits do not depend on
// the threads.
#pragma once

#include <cstddef>

#include "kernels/kernels.h"

namespace flashllm {

struct AttentionShape {
  std::size_t heads = 0;
  std::size_t kv_heads = 0;  // divides heads: grouped queries
  std::size_t head_dim = 0;
  std::size_t length = 0;       // cached positions, the query's own included
  std::size_t head_stride = 0;  // bytes from one KV head to the next
  std::size_t row_stride = 0;   // bytes from one position to the next
  Dtype dtype = Dtype::f32;
  float scale = 1.0F;
};

// q: [heads, head_dim], out: [heads, head_dim], scores: scratch of [heads, length]; fp32. k and v: the cache.
void attend_one(const AttentionShape& shape, const float* q, const std::byte* k, const std::byte* v,
                float* scores, float* out, ThreadPool& pool, SimdLevel level);

}  // namespace flashllm
