// The arithmetic between a model's matrices: products, norms and roundings of fp32 values [tokens, width].
// Sums are fp32, each in one order; whatever leaves a step is rounded to the model's dtype.
//
// Knows one model's dtype and the threads; neither blocks nor sequences.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/matmul.h"
#include "kernels/norm.h"
#include "kernels/rows.h"
#include "kernels/thread_pool.h"

namespace flashllm {

class Arithmetic {
 public:
  static constexpr std::size_t kTokenGrain = 4;  // tokens a thread takes, of what is done token by token

  // `level_of_many`: of the products with a prompt's inputs. Keeps a reference to the pool.
  Arithmetic(Dtype dtype, ThreadPool& pool, SimdLevel level, SimdLevel level_of_many);

  ThreadPool& pool() const { return pool_; }
  SimdLevel level() const { return level_; }

  // y may be x.
  void normalize(const Norm& norm, std::size_t count, const float* x, float* y);
  // To 8 bits, token by token.
  void round_inputs(std::size_t count, std::size_t width, float* x);
  // The inputs [count, width] of the products that follow: `x` must stay as it is until the last of them.
  // `many`: they are a prompt's.
  void take_inputs(const float* x, std::size_t count, std::size_t width, bool many);
  // out [count, rows], rounded: the inputs taken times the weights.
  void project(const RowMatrix& weights, std::size_t count, float* out);

  void round(float* values, std::size_t n);
  // The values in the dtype, in scratch that holds until the next call or the next inputs.
  std::byte* narrowed(const float* values, std::size_t n);
  void widen(const std::byte* from, std::size_t n, float* to);

 private:
  template <typename Body>
  void each_share(std::size_t n, const Body& body);

  const Dtype dtype_;
  ThreadPool& pool_;
  const SimdLevel level_, level_of_many_;
  const KernelTable& kernels_;
  const float* inputs_ = nullptr;         // of the next products, [tokens, width]
  std::unique_ptr<PackedTokens> packed_;  // the same, of a prompt
  std::vector<std::byte> narrow_, products_, rounded_;
};

}  // namespace flashllm
