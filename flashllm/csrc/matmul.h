// Products of many tokens with one matrix: a prompt, where weights are used often enough that arithmetic, not
// memory, is the limit. Weights are widened to fp32 block by block, exactly; sums are fp32.
//
// Every output is one chain of fused additions in the order of its terms, so bits depend neither on the
// number of threads nor on which tokens are computed together. They do differ from the one-token kernels'
// (kernels.h).
#pragma once

#include <memory>
#include <vector>

#include "kernels.h"

namespace flashllm {

// Inputs [tokens, columns] as the kernels want them: fp32, one row a column, `padded` tokens long (the rest
// zeros).
class PackedTokens {
 public:
  // x: [tokens, columns], of the given dtype
  PackedTokens(const std::byte* x, std::size_t tokens, std::size_t columns, Dtype dtype, ThreadPool& pool,
               SimdLevel level);

  std::size_t tokens() const { return tokens_; }
  std::size_t columns() const { return columns_; }
  std::size_t padded() const { return padded_; }
  const float* row(std::size_t column) const { return values_.get() + column * padded_; }

 private:
  std::size_t tokens_, columns_, padded_;
  std::unique_ptr<float[]> values_;
};

// out[m][r] = sum_j weights[r][j] * x[m][j] (+ bias[r]), rounded to the weights' dtype; out: [tokens, rows]
void linear_many(const LinearWeights& weights, const PackedTokens& x, std::byte* out, ThreadPool& pool,
                 SimdLevel level);

// products[r][m] = sum_j weights[r][j] * x[m][j], one row a weight row, x.padded() long
void product_rows(const LinearWeights& weights, const PackedTokens& x, float* products, ThreadPool& pool,
                  SimdLevel level);

// y[m][j] += sum_i scales[i][m] * weights[i][j] for m < tokens, in the order of i. scales: rows `padded`
// long; y: rows `y_stride` floats long, a multiple of kColumnPad that holds all columns.
constexpr std::size_t kColumnPad = 16;
void add_rows(const LinearWeights& weights, const float* scales, std::size_t padded, std::size_t tokens,
              float* y, std::size_t y_stride, ThreadPool& pool, SimdLevel level);

}  // namespace flashllm
