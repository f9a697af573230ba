// A layer's attention: from the inputs of its products to its output. Who keeps keys and values is told.
#pragma once

#include <vector>

#include "kernels/rotary.h"
#include "model/arithmetic.h"
#include "model/attention_memory.h"
#include "model/block.h"
#include "model/latent_attention.h"
#include "model/pass.h"

namespace flashllm {

class BlockAttention {
 public:
  // Keeps references to the spec, the arithmetic and the memory, and what `rotary` points to.
  BlockAttention(const BlockSpec& spec, const std::vector<Rotary>& rotary, Arithmetic& arithmetic,
                 AttentionMemory& memory)
      : spec_(spec),
        arithmetic_(arithmetic),
        memory_(memory),
        latent_(spec, arithmetic, memory),
        rotary_(rotary.begin(), rotary.end()) {}

  // The positions of a part's tokens, or of a stretch's, which hold for all layers.
  void set_positions(const Part& part);
  // What they are turned by: kept while other passes come, and put back.
  std::vector<RotaryTable>& positions() { return rotary_; }
  LatentAttention& latent() { return latent_; }
  // The inputs taken (Arithmetic::take_inputs) -> out [tokens, d_model].
  void attend(const BlockWeights& weights, const Part& part, float* out);

 private:
  void project_heads(const BlockWeights& weights, const Part& part);
  void widen_values(const AttentionSpec& spec, std::size_t count);
  void prepare_heads(const BlockWeights& weights, const Part& part);
  const RotaryTable* rotary_of(const AttentionSpec& spec) const;

  const BlockSpec& spec_;
  Arithmetic& arithmetic_;
  AttentionMemory& memory_;
  LatentAttention latent_;
  std::vector<RotaryTable> rotary_;
  // Scratch of a part: [tokens, heads * head_dim], and [tokens, kv_heads * head_dim]; of latent attention
  // mixed_ alone, [tokens, heads * value_dim].
  std::vector<float> query_, mixed_, gate_, keys_, values_;
};

}  // namespace flashllm
