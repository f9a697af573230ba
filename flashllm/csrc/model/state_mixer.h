// A layer's mixing by what keeps a state: heads, by the gated delta rule (Yang et al. 2024) or of a
// state-space model (Mamba-2: Dao and Gu 2024), or a short convolution (Liquid AI 2025: LFM2), from the
// inputs of its products to its output.
//
// Of a short convolution that is query * convolution(key * value). Of heads, queries, keys and values are
// convolved along the tokens, each channel by itself, then silu. Each value head goes through the tokens one
// after the other (kernels.h, StateStep), at every length: bits do not depend on how a prompt is cut. What it
// mixes has a gate, silu, and a norm.
//
//   delta rule:   queries and keys are of length 1; a value counts sigmoid(beta)
//   state space:  a value counts softplus(decay + its bias), and goes by the state times `skip`, too
//
// A sequence's state at a layer, fp32: [value_heads, key_dim, value_dim], then the last kernel - 1 inputs of
// the convolution [kernel - 1, channels], in the order of its tensor.
#pragma once

#include <cstddef>
#include <vector>

#include "model/arithmetic.h"
#include "model/block.h"
#include "model/pass.h"

namespace flashllm {

class StateMixer {
 public:
  explicit StateMixer(Arithmetic& arithmetic) : arithmetic_(arithmetic) {}  // keeps the reference
  // The inputs taken (Arithmetic::take_inputs) -> out [tokens, d_model]. The states of the tokens' sequences
  // as layer `part.kv_layer` go on.
  void mix(const StateSpec& spec, const StateWeights& weights, const Part& part, float* out);

 private:
  void convolve_alone(const StateSpec& spec, const StateWeights& weights, const Part& part, float* out);
  void project_by_halves(const StateSpec& spec, const StateWeights& weights, const Part& part);
  void prepare_heads(const StateSpec& spec, const StateWeights& weights, std::size_t count);
  void go_on(const StateSpec& spec, const StateWeights& weights, std::size_t first, std::size_t n,
             const float* before, float* now);
  void finish(const StateSpec& spec, const StateWeights& weights, std::size_t count);

  Arithmetic& arithmetic_;
  // Scratch of a part: inputs of the convolution and what comes out, each [tokens, heads * dim] of queries,
  // keys and values, which begin at these; gate and mixed values; [tokens, value_heads].
  std::vector<float> inputs_, convolved_, gate_, mixed_, beta_, decay_, low_;
  float *queries_ = nullptr, *keys_ = nullptr, *values_ = nullptr;
};

}  // namespace flashllm
