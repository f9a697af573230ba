// A layer's FFN over every neuron for many tokens, the neurons handed in block by block as they stream by.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ffn/neuron_norm.h"
#include "kernels/matmul.h"
#include "kernels/rows.h"
#include "planes/scale_planes.h"

namespace flashllm {

class DenseFfn {
 public:
  // `dtype`: of what goes in and comes out.
  DenseFfn(const RowFormat& format, Dtype dtype, ThreadPool& pool, SimdLevel level)
      : format_(format),
        dtype_(dtype),
        pool_(pool),
        level_(level_of_many(format.down_codec, level_of_many(format.codec, level))) {}

  // x: [tokens, d_model]; `plane`: the layer's, of down columns whose scales lie apart, and then blocks are
  // of neurons from `first` on.
  void begin(const std::byte* x, std::size_t tokens, Activation activation, const ScalePlane* plane = nullptr,
             std::size_t first = 0);
  // The activations of `count` rows of neurons, h [count, padded()]; the first `tokens()` of each row may be
  // changed before they are added. up_bias, gate_bias: the neurons', or nullptr; gate: their gate [count,
  // d_model] without gaps in the rows' codec, where rows of a gated FFN hold none.
  float* activations(const std::byte* rows, std::size_t count, const float* up_bias,
                     const float* gate_bias = nullptr, const std::byte* gate = nullptr);
  // Adds what these neurons contribute, `count` rows. Blocks come in the order of ids.
  void add(const std::byte* rows, std::size_t count);
  // Of a layer with a norm before its down columns: the activations of all its neurons, block after block,
  // then `apply`, and then all are added.
  void keep_values(const NeuronNorm& norm);
  void apply();
  // y: [tokens, d_model]; down_bias: [d_model] or nullptr. Lets go of the buffers.
  void finish(const float* down_bias, std::byte* y);
  // The same as a part of a larger sum: y[at[m]] += factors[m] * (token m's + bias); y: rows of d_model;
  // bias: [d_model] or nullptr.
  void finish_into(const std::int32_t* at, const float* factors, const float* bias, float* y);

  std::size_t tokens() const { return x_.has_value() ? x_->tokens() : 0; }
  std::size_t padded() const { return x_.has_value() ? x_->padded() : 0; }

 private:
  const RowFormat format_;
  const Dtype dtype_;
  Activation activation_;  // of the layer
  ThreadPool& pool_;
  const SimdLevel level_;
  std::optional<PackedTokens> x_;
  const ScalePlane* plane_ = nullptr;
  std::size_t y_stride_ = 0, next_ = 0;  // next_: the first neuron of the next block
  NeuronNorm norm_;
  std::size_t kept_ = 0;  // neurons before the block, where the layer's values are kept
  std::vector<float> y_, h_, up_;
};

}  // namespace flashllm
