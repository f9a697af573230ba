// A layer's mixing by the gated delta rule (Yang et al. 2024): from the inputs of its products to its output.
//
// Queries, keys and values are convolved along the tokens, each channel by itself (Gulati et al. 2020), then
// silu. Queries and keys are of length 1. Each value head goes through the tokens one after the other
// (kernels.h, DeltaStep), at every length: bits do not depend on how a prompt is cut. What it mixes is
// normalized and multiplied by silu(gate).
//
// A sequence's state at a layer, fp32: [value_heads, key_dim, value_dim], then the last kernel - 1 inputs of
// the convolution [kernel - 1, channels], of queries, keys and values.
#pragma once

#include <cstddef>
#include <vector>

#include "model/arithmetic.h"
#include "model/block.h"
#include "model/pass.h"

namespace flashllm {

class DeltaMixer {
 public:
  explicit DeltaMixer(Arithmetic& arithmetic) : arithmetic_(arithmetic) {}  // keeps the reference
  // The inputs taken (Arithmetic::take_inputs) -> out [tokens, d_model]. The states of the tokens' sequences
  // as layer `part.kv_layer` go on.
  void mix(const BlockWeights& weights, const Part& part, float* out);

 private:
  void convolve(const BlockWeights& weights, std::size_t count, std::size_t first, std::size_t n,
                const float* before, float* now);
  void prepare_heads(const BlockWeights& weights, std::size_t count);
  void go_on(const BlockWeights& weights, std::size_t count, std::size_t first, std::size_t n,
             const float* before, float* now);

  Arithmetic& arithmetic_;
  // Scratch of a part: inputs of the convolution and what comes out, queries of all tokens, then keys, then
  // values, each [tokens, heads * dim]; gate and mixed values; [tokens, value_heads].
  std::vector<float> inputs_, convolved_, gate_, mixed_, beta_, decay_;
};

}  // namespace flashllm
