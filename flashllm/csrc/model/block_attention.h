// A layer's attention: from the inputs of its products to its output. Who keeps keys and values is told.
#pragma once

#include <vector>

#include "kernels/rotary.h"
#include "model/arithmetic.h"
#include "model/block.h"
#include "model/pass.h"

namespace flashllm {

// Who keeps keys and values, and so attends to them.
class AttentionMemory {
 public:
  virtual ~AttentionMemory() = default;
  // Keeps keys and values [tokens, kv_heads * head_dim] of a part's tokens; each token's queries attend to
  // what is kept up to it: queries and out [tokens, heads * head_dim]. keys nullptr: they are kept already,
  // an earlier layer's.
  virtual void attend(const AttentionShape& shape, const Part& part, const float* queries, const float* keys,
                      const float* values, float* out) = 0;
};

// The memory of a model that runs: each token's sequence keeps its keys and values, as layer `part.kv_layer`.
class SequenceMemory final : public AttentionMemory {
 public:
  SequenceMemory(ThreadPool& pool, SimdLevel level) : pool_(pool), level_(level) {}
  void attend(const AttentionShape& shape, const Part& part, const float* queries, const float* keys,
              const float* values, float* out) override;

 private:
  void seal_pages(const Part& part) const;

  ThreadPool& pool_;
  const SimdLevel level_;
};

class BlockAttention {
 public:
  // Keeps references to the spec, the arithmetic and the memory, and what `rotary` points to.
  BlockAttention(const BlockSpec& spec, const std::vector<Rotary>& rotary, Arithmetic& arithmetic,
                 AttentionMemory& memory)
      : spec_(spec), arithmetic_(arithmetic), memory_(memory), rotary_(rotary.begin(), rotary.end()) {}

  // The positions of a part's tokens, or of a stretch's, which hold for all blocks.
  void set_positions(const Part& part);
  // What they are turned by: kept while other passes come, and put back.
  std::vector<RotaryTable>& positions() { return rotary_; }
  // The inputs taken (Arithmetic::take_inputs) -> out [tokens, d_model].
  void attend(const BlockWeights& weights, const Part& part, float* out);

 private:
  void project_heads(const BlockWeights& weights, const Part& part);
  void widen_values(const AttentionSpec& spec, std::size_t count);
  void prepare_heads(const BlockWeights& weights, const Part& part);
  void project_latent(const BlockWeights& weights, const Part& part);
  const RotaryTable* rotary_of(const AttentionSpec& spec) const;
  AttentionShape shape(const BlockWeights& weights) const;

  const BlockSpec& spec_;
  Arithmetic& arithmetic_;
  AttentionMemory& memory_;
  std::vector<RotaryTable> rotary_;
  // Scratch of a part: [tokens, heads * head_dim], and [tokens, kv_heads * head_dim]. Of latent attention
  // values_ are the heads' outputs, projected_ their queries before they meet keys; low_ is of the query's
  // rank.
  std::vector<float> query_, mixed_, gate_, keys_, values_, projected_, low_;
};

}  // namespace flashllm
