// A layer's attention: from the inputs of its products to its output. Who keeps keys and values is told.
#pragma once

#include <vector>

#include "attention/expanded_pages.h"
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
  // Keeps them alone, where tokens have sequences, whose views attention can read. Throws CoreError
  // elsewhere.
  virtual void keep(const AttentionShape& shape, const Part& part, const float* keys, const float* values);
};

// The memory of a model that runs: each token's sequence keeps its keys and values, as layer `part.kv_layer`.
class SequenceMemory final : public AttentionMemory {
 public:
  SequenceMemory(ThreadPool& pool, SimdLevel level) : pool_(pool), level_(level) {}
  void attend(const AttentionShape& shape, const Part& part, const float* queries, const float* keys,
              const float* values, float* out) override;
  void keep(const AttentionShape& shape, const Part& part, const float* keys, const float* values) override;

 private:
  void seal_pages(const Part& part) const;

  ThreadPool& pool_;
  const SimdLevel level_;
};

// What a layer's positions of one sequence expand to, while a stretch's parts go through the layer.
struct Expanded {
  const SequenceState* sequence = nullptr;
  std::size_t layer = 0;           // of its keys and values
  std::vector<std::byte> turned;   // key_up by what comes of it: [heads * plain_dim, rank], of the dtype
  ExpandedPages pages;             // from the rows that later pages see
  ExpandedPages own;               // where these are packed: from plain rows, of the queries' own pages
  std::size_t first = 0, end = 0;  // positions in `pages`
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
  // The same of what is expanded, which is memory, too.
  Expanded& expanded() { return expanded_; }
  // The inputs taken (Arithmetic::take_inputs) -> out [tokens, d_model].
  void attend(const BlockWeights& weights, const Part& part, float* out);

 private:
  void project_heads(const BlockWeights& weights, const Part& part);
  void widen_values(const AttentionSpec& spec, std::size_t count);
  void prepare_heads(const BlockWeights& weights, const Part& part);
  void project_latent(const BlockWeights& weights, const Part& part);
  void mix_latent(const BlockWeights& weights, const Part& part);
  void attend_absorbed(const BlockWeights& weights, const Part& part, std::size_t at);
  void attend_expanded(const BlockWeights& weights, const Part& part, std::size_t at);
  void expand(const BlockWeights& weights, const Part& part, std::size_t first_head, std::size_t heads);
  void expand(const BlockWeights& weights, const KvView& view, bool packed, std::size_t first,
              std::size_t end, std::size_t first_head, std::size_t heads, ExpandedPages& to);
  void turn_keys(const BlockWeights& weights);
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
  // Of positions that are expanded, kExpanded at most: rows as they are kept, their first `rank` elements,
  // what comes of these.
  std::vector<float> rows_, latent_, plain_, expanded_values_;
  Expanded expanded_;
};

}  // namespace flashllm
