// The arithmetic between a model's matrices: products, norms and roundings of fp32 values [tokens, width].
// Sums are fp32, each in one order; whatever leaves a step is rounded to the model's dtype.
//
// Knows one model's dtype and the threads; neither blocks nor sequences.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/matmul.h"
#include "kernels/norm.h"
#include "kernels/row_inputs.h"
#include "kernels/rows.h"
#include "kernels/thread_pool.h"

namespace flashllm {

class Arithmetic {
 public:
  static constexpr std::size_t kTokenGrain = 4;  // tokens a thread takes, of what is done token by token

  // `batches`: few tokens are each of a sequence of its own, so many that matrices of the dtype are
  // multiplied as by a prompt. Keeps a reference to the pool.
  Arithmetic(Dtype dtype, ThreadPool& pool, SimdLevel level, bool batches = false);

  ThreadPool& pool() const { return pool_; }
  SimdLevel level() const { return level_; }

  // y may be x.
  void normalize(const Norm& norm, std::size_t count, const float* x, float* y);
  // To 8 bits, token by token.
  void round_inputs(std::size_t count, std::size_t width, float* x);
  // The inputs [count, width] of the products that follow: `x` must stay as it is until the last of them.
  // `many`: they are a prompt's. `neuron`: the first of those that take or give these inputs, or kMixers: a
  // mixer's matrices take them, or kOthers: such as lie beside mixers and neurons.
  static constexpr std::ptrdiff_t kMixers = -1, kOthers = -2;
  void take_inputs(const float* x, std::size_t count, std::size_t width, bool many,
                   std::ptrdiff_t neuron = kMixers);
  // The same, and nobody sees them.
  void set_inputs(const float* x, std::size_t width, bool many);
  // out [count, rows]: the inputs taken times the weights; rounded, or as they are summed.
  void project(const RowMatrix& weights, std::size_t count, float* out, bool rounded = true);
  // The same of a prompt's, rounded and in the dtype; until the next products.
  const std::byte* project_narrow(const RowMatrix& weights, std::size_t count);
  // The same of inputs x [count, columns], which are taken.
  void project(const RowMatrix& weights, const float* x, std::size_t count, bool many, float* out,
               bool rounded = true) {
    take_inputs(x, count, weights.columns, many);
    project(weights, count, out, rounded);
  }
  // out [count, heads, out_stride], as it is summed: each head's rows of the weights times its own inputs,
  // the first of x [count, heads, x_stride], which take the place of the inputs taken.
  void project_heads(const RowMatrix& weights, std::size_t heads, const float* x, std::size_t x_stride,
                     std::size_t count, bool many, float* out, std::size_t out_stride);
  // out [count, columns], rounded, of weights that lie by their inputs (linear_by_columns).
  void project_by_columns(const RowMatrix& weights, std::size_t count, float* out);
  // Sees the inputs [count, width] as they are taken; none: nobody does.
  using Watch =
      std::function<void(const float* x, std::size_t count, std::size_t width, std::ptrdiff_t neuron)>;
  void set_watch(Watch watch) { watch_ = std::move(watch); }

  void round(float* values, std::size_t n);
  // x += y, x *= y, x *= by; rounded.
  void add(float* x, const float* y, std::size_t n);
  void multiply(float* x, const float* y, std::size_t n);
  void scale(float* x, float by, std::size_t n);
  // Room for n values of the dtype, which holds until the next call or the next inputs; and values put there.
  std::byte* narrow_scratch(std::size_t n);
  std::byte* narrowed(const float* values, std::size_t n);
  void narrow(const float* values, std::size_t n, std::byte* to);
  void widen(const std::byte* from, std::size_t n, float* to);

 private:
  bool as_many(RowCodec codec) const { return many_ || (batches_ && !is_coded(codec)); }
  const PackedTokens& packed(const RowMatrix& weights, std::size_t count);
  template <typename Body>
  void each_share(std::size_t n, const Body& body);

  const Dtype dtype_;
  ThreadPool& pool_;
  const SimdLevel level_;
  const bool batches_;
  const KernelTable& kernels_;
  Watch watch_;
  const float* inputs_ = nullptr;  // of the next products, [tokens, width]
  std::size_t width_ = 0;
  bool many_ = false;
  RowInputs few_;  // the same, as the last weights wanted them, where they are few and `has_few_`
  bool has_few_ = false;
  std::unique_ptr<PackedTokens> packed_;  // and where they are many
  std::vector<std::byte> narrow_, products_, rounded_;
  std::vector<float> of_head_, made_;  // inputs and products of one
};

}  // namespace flashllm
