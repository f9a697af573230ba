// The experts of a layer over many tokens: each expert that any of them goes to is read once, and computed
// for the tokens that go to it. A token's sum is over its experts in their order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffn/dense_ffn.h"
#include "ffn/experts.h"
#include "io/row_stream.h"

namespace flashllm {

class ExpertFfn {
 public:
  // `dtype`: of what goes in.
  ExpertFfn(const RowFormat& format, Dtype dtype, ThreadPool& pool, SimdLevel level)
      : format_(format),
        dtype_(dtype),
        pool_(pool),
        kernels_(kernel_table(level, dtype)),
        dense_(format, dtype, pool, level) {}

  // x: [tokens, d_model] fp32, of values that the dtype has; it stays as it is until the last block. Which
  // rows are to be handed in, ascending. `plane`: the layer's, of down columns whose scales lie apart.
  const std::vector<RowRun>& begin(Router& router, const float* x, std::size_t tokens, Activation activation,
                                   const ScalePlane* plane = nullptr);
  // The next rows of those, none of two runs. Biases: [num_neurons] or nullptr. y [tokens, d_model]: gets
  // what an expert contributes when its last rows are there.
  void add(const RowBlock& block, const float* up_bias, const float* gate_bias, float* y);

 private:
  void begin_run();

  const RowFormat format_;
  const Dtype dtype_;
  ThreadPool& pool_;
  const KernelTable& kernels_;
  DenseFfn dense_;
  Activation activation_;
  const float* x_ = nullptr;
  const ScalePlane* plane_ = nullptr;
  std::vector<RowRun> runs_;
  ExpertTokens experts_;
  std::size_t run_ = 0, rows_ = 0;  // the run at hand, and its rows that came
  std::vector<std::byte> gathered_;
};

}  // namespace flashllm
