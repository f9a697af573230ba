// A layer's FFN over every neuron for many tokens, the neurons handed in block by block as they stream by.
#pragma once

#include <optional>

#include "kernels/matmul.h"
#include "model/ffn_layer.h"

namespace flashllm {

class DenseFfn {
 public:
  DenseFfn(const RowLayout& layout, Activation activation, ThreadPool& pool, SimdLevel level)
      : layout_(layout), activation_(activation), pool_(pool), level_(level) {}

  // x: [tokens, d_model] in the layout's dtype
  void begin(const std::byte* x, std::size_t tokens);
  // `count` rows of neurons; up_bias: theirs, or nullptr (always with a gate). Blocks come in the order of
  // ids.
  void add(const std::byte* rows, std::size_t count, const float* up_bias);
  // y: [tokens, d_model] in the layout's dtype; down_bias: [d_model] or nullptr. Lets go of the buffers.
  void finish(const float* down_bias, std::byte* y);

  std::size_t tokens() const { return x_.has_value() ? x_->tokens() : 0; }
  // The last block's activations h [tokens, count].
  void copy_activations(float* h) const;

 private:
  LinearWeights part(const std::byte* rows, std::size_t count, std::size_t element) const;

  const RowLayout layout_;
  const Activation activation_;
  ThreadPool& pool_;
  const SimdLevel level_;
  std::optional<PackedTokens> x_;
  std::size_t y_stride_ = 0, count_ = 0;
  std::vector<float> y_, h_, up_;
};

}  // namespace flashllm
