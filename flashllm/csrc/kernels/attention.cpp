#include "kernels/attention.h"

#include <algorithm>

namespace flashllm {

namespace {

constexpr std::size_t kPositionsTogether = 64;

void attend_head(const AttentionShape& shape, const float* q, const std::byte* k, const std::byte* v,
                 float* scores, float* out, const KernelTable& kernels, Softmax softmax) {
  kernels.dot_matrix(k, shape.row_stride, shape.length, q, shape.head_dim, scores);
  softmax(scores, shape.length, shape.scale);
  std::fill(out, out + shape.head_dim, 0.0F);
  const void* rows[kPositionsTogether];
  for (std::size_t p = 0; p < shape.length; p += kPositionsTogether) {
    const std::size_t n = std::min(kPositionsTogether, shape.length - p);
    for (std::size_t i = 0; i < n; ++i) rows[i] = v + (p + i) * shape.row_stride;
    kernels.add_scaled_rows(rows, scores + p, n, 0, shape.head_dim, out);
  }
}

}  // namespace

void attend_one(const AttentionShape& shape, const float* q, const std::byte* k, const std::byte* v,
                float* scores, float* out, ThreadPool& pool, SimdLevel level) {
  const KernelTable& kernels = kernel_table(level, shape.dtype);
  const Softmax softmax = softmax_kernel(level);
  const std::size_t group = shape.heads / shape.kv_heads;
  pool.parallel_for(shape.heads, 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t h = begin; h < end; ++h) {
      const std::size_t offset = h / group * shape.head_stride;
      attend_head(shape, q + h * shape.head_dim, k + offset, v + offset, scores + h * shape.length,
                  out + h * shape.head_dim, kernels, softmax);
    }
  });
}

}  // namespace flashllm
