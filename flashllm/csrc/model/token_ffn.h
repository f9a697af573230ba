// A layer's FFN over every neuron for a few tokens, the neurons handed in block by block as they stream by.
// Each token has the kernels of one token, and so its bits whatever it is computed with; a tile of many
// tokens' products (dense_ffn.h) would mostly be padding.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/rows.h"
#include "planes/scale_planes.h"

namespace flashllm {

class TokenFfn {
 public:
  TokenFfn(const RowFormat& format, ThreadPool& pool, SimdLevel level)
      : format_(format), pool_(pool), level_(level) {}

  // x: [tokens, d_model]; y: as large, set to zero and added to until the last block. Both must stay.
  // `plane`: the layer's, of down columns whose scales lie apart.
  void begin(const float* x, std::size_t tokens, Activation activation, float* y,
             const ScalePlane* plane = nullptr);
  // Adds what `count` neurons contribute. Blocks come in the order of ids. up_bias, gate_bias: the neurons',
  // or nullptr; gate: their gate [count, d_model] without gaps in the rows' codec, where rows of a gated FFN
  // hold none.
  void add(const std::byte* rows, std::size_t count, const float* up_bias, const float* gate_bias,
           const std::byte* gate);

 private:
  // h_[t][i] of neurons [begin, end) of `count`.
  void activations(const RowMatrix& driver, const RowMatrix* up, std::size_t begin, std::size_t end);

  const RowFormat format_;
  ThreadPool& pool_;
  const SimdLevel level_;
  RowInputs x_;
  float* y_ = nullptr;
  std::size_t tokens_ = 0;
  Activation activation_;
  std::vector<float> h_;  // [tokens, neurons of a block]
  std::vector<const void*> columns_;
  const ScalePlane* plane_ = nullptr;
  std::vector<std::int32_t> ids_;  // of the block's neurons, where there is a plane
  std::int32_t next_ = 0;          // the first neuron of the next block
};

}  // namespace flashllm
