// A block's attention: from the inputs of its products to its output, through the KV cache of each sequence.
#pragma once

#include <vector>

#include "kernels/rotary.h"
#include "model/arithmetic.h"
#include "model/block.h"
#include "model/pass.h"

namespace flashllm {

class BlockAttention {
 public:
  // Keeps references to the spec and the arithmetic, and what `rotary` points to.
  BlockAttention(const BlockSpec& spec, const std::vector<Rotary>& rotary, Arithmetic& arithmetic)
      : spec_(spec), arithmetic_(arithmetic), rotary_(rotary.begin(), rotary.end()) {}

  // The positions of a part's tokens, which hold for all blocks.
  void set_positions(const Part& part);
  // The inputs taken (Arithmetic::take_inputs) -> out [tokens, d_model]. The sequences keep the tokens' keys
  // and values as layer `part.kv_layer`.
  void attend(const BlockWeights& weights, const Part& part, float* out);

 private:
  void prepare_heads(const BlockWeights& weights, std::size_t count);
  void seal_pages(const Part& part);
  void attend_to_cache(const BlockWeights& weights, const Part& part);

  const BlockSpec& spec_;
  Arithmetic& arithmetic_;
  std::vector<RotaryTable> rotary_;
  // Scratch of a part: [tokens, heads * head_dim], and [tokens, kv_heads * head_dim].
  std::vector<float> query_, mixed_, keys_, values_;
};

}  // namespace flashllm
