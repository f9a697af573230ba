// What a decoder block is made of: the options that an architecture chooses (flashllm/arch), and a block's
// weights.
//
//   pre-norm:  h += out(attention(norm(h)));  h += FFN(ffn_norm(h))
//   post-norm: h = norm(h + out(attention(h)));  h = ffn_norm(h + FFN(h))
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"
#include "kernels/norm.h"
#include "kernels/rotary.h"
#include "model/ffn_layer.h"

namespace flashllm {

struct BlockSpec {
  Dtype dtype = Dtype::f32;
  std::size_t d_model = 0;
  std::size_t heads = 0;
  std::size_t kv_heads = 0;  // divides heads: grouped queries
  std::size_t head_dim = 0;
  bool pre_norm = true;
  float query_scale = 1.0F;  // of a query, before its products with the keys
  Rotary rotary;             // of no dimension: positions are part of the embedding, or there are none
};

// Its parts must live as long as the block.
struct BlockWeights {
  Norm attention_norm, ffn_norm;
  LinearWeights query, key, value, out;
  const float* up_bias = nullptr;    // [d_ff] or nullptr
  const float* gate_bias = nullptr;  // [d_ff] or nullptr
  const float* down_bias = nullptr;  // [d_model] or nullptr
  FfnLayer* ffn = nullptr;           // nullptr: the model has no neuron caches and runs dense
};

}  // namespace flashllm
