// One linear over weights that are not its own: for measurements and tests; a model's are inside it.
#pragma once

#include <cstddef>

#include "kernels/kernels.h"
#include "kernels/rows.h"
#include "kernels/thread_pool.h"

namespace flashllm {

// Inputs and outputs are of one dtype, and so are weights that are not coded.
class Linear {
 public:
  // Rows of `weights` are outputs, or inputs (`by_inputs`, coded weights alone). Keeps a reference to the
  // pool.
  Linear(const RowMatrix& weights, Dtype dtype, bool by_inputs, ThreadPool& pool, SimdLevel level);

  Dtype dtype() const { return dtype_; }
  std::size_t inputs() const { return by_inputs_ ? weights_.rows : weights_.columns; }
  std::size_t outputs() const { return by_inputs_ ? weights_.columns : weights_.rows; }

  // x: [tokens, inputs], out: [tokens, outputs]; as for few tokens, where memory is the limit.
  void forward(const std::byte* x, std::size_t tokens, std::byte* out) const;
  // The same as for a prompt, where arithmetic is; outputs of `to`, which is the dtype, or fp32, not rounded.
  void forward_many(const std::byte* x, std::size_t tokens, Dtype to, std::byte* out) const;

 private:
  RowMatrix weights_;
  Dtype dtype_;
  bool by_inputs_;
  ThreadPool& pool_;
  SimdLevel level_;
};

}  // namespace flashllm
