// A layer's FFN over every neuron for a few tokens, the neurons handed in block by block as they stream by.
// Each token has the kernels of one token, and so its bits whatever it is computed with; a tile of many
// tokens' products (dense_ffn.h) would mostly be padding.
#pragma once

#include <cstddef>
#include <vector>

#include "ffn/neuron_norm.h"
#include "kernels/rows.h"
#include "planes/scale_planes.h"

namespace flashllm {

// y[m] += the down columns of neurons, the first of which has the id `first`, times their values: of neuron i
// h.data[m * h.row + i * h.step]; in the order of ids. y: [tokens, d_model]. Each token has the bits it has
// alone.
void add_columns(const RowMatrix& columns, std::int32_t first, const ScalePlane* plane, TileRows h,
                 std::size_t tokens, float* y, ThreadPool& pool, SimdLevel level);
// Of outputs [begin, end), `begin` a multiple of 64, and a few tokens, by the calling thread.
void add_columns(const RowMatrix& columns, std::int32_t first, const ScalePlane* plane, TileRows h,
                 std::size_t tokens, std::size_t begin, std::size_t end, float* y, SimdLevel level);

class TokenFfn {
 public:
  TokenFfn(ThreadPool& pool, SimdLevel level) : pool_(pool), level_(level) {}

  // x: [tokens, d_model]; y: as large, set to zero and added to until the last block. Both must stay.
  // `format`: of the layer's rows; `plane`: of its down columns, where their scales lie apart.
  void begin(const RowFormat& format, const float* x, std::size_t tokens, Activation activation, float* y,
             const ScalePlane* plane = nullptr);
  // What `count` neurons are worth to each token. Blocks come in the order of ids. up_bias, gate_bias: the
  // neurons', or nullptr; gate: their gate [count, d_model] without gaps in the rows' codec, where rows of a
  // gated FFN hold none.
  void multiply(const std::byte* rows, std::size_t count, const float* up_bias, const float* gate_bias,
                const std::byte* gate);
  // Adds what the neurons contribute that were multiplied last.
  void add(const std::byte* rows, std::size_t count);
  // Of a layer with a norm before its down columns: all its neurons are multiplied, block after block, then
  // `apply`, and then all are added.
  void keep_values(const NeuronNorm& norm);
  void apply();

 private:
  // h_[t][first_ + i] of neurons i in [begin, end) of a block.
  void activations(const RowMatrix& driver, const RowMatrix* up, std::size_t begin, std::size_t end);

  RowFormat format_;
  ThreadPool& pool_;
  const SimdLevel level_;
  RowInputs x_;
  float* y_ = nullptr;
  std::size_t tokens_ = 0;
  Activation activation_;
  std::vector<float> h_;                // [tokens, stride_]: values of a block, or of the layer
  std::vector<float> up_;               // the same of up products, where gates are cut
  std::size_t stride_ = 0, first_ = 0;  // first_: of the block, where the layer's are kept
  NeuronNorm norm_;
  const ScalePlane* plane_ = nullptr;
  std::int32_t next_ = 0;  // the first neuron of the next block
};

}  // namespace flashllm
