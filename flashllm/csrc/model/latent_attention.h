// Multi-head latent attention (DeepSeek-AI 2024), from the inputs of its products to the heads' outputs. A
// position keeps one latent row. Of tokens, queries go to that row's space (the absorbed form); of a prompt's
// positions each head's keys and values are made (the expanded one), which multiplies less for each key that
// a query sees: plain_dim + rotated + value_dim, not 2 * rank + rotated. That pays for many queries.
#pragma once

#include <cstddef>
#include <vector>

#include "attention/expanded_pages.h"
#include "kernels/rotary.h"
#include "model/arithmetic.h"
#include "model/attention_memory.h"
#include "model/block.h"
#include "model/pass.h"

namespace flashllm {

// What a layer's positions of one sequence expand to, while a stretch's parts go through the layer.
struct Expanded {
  const SequenceState* sequence = nullptr;
  std::size_t layer = 0;          // of its keys and values
  std::vector<std::byte> turned;  // key_up by what comes of it: [heads * plain_dim, rank], of the dtype
  ExpandedPages pages;            // from the rows that later pages see
  ExpandedPages own;              // where these are packed: from plain rows, of the queries' own pages
  std::size_t end = 0;            // of positions in `pages`
};

class LatentAttention {
 public:
  // Keeps references.
  LatentAttention(const BlockSpec& spec, Arithmetic& arithmetic, AttentionMemory& memory)
      : spec_(spec), arithmetic_(arithmetic), memory_(memory) {}

  // The inputs taken -> out [tokens, heads * value_dim]; `rotary` knows the part's positions, or is nullptr.
  void attend(const BlockWeights& weights, const Part& part, const RotaryTable* rotary, float* out);
  // What a stretch has expanded: kept while other passes come, and put back.
  Expanded& expanded() { return expanded_; }

 private:
  void project(const BlockWeights& weights, const Part& part, const RotaryTable* rotary);
  void attend_absorbed(const BlockWeights& weights, const Part& part, std::size_t at, float* out);
  void attend_expanded(const BlockWeights& weights, const Part& part, std::size_t at, float* out);
  void expand(const BlockWeights& weights, const Part& part, std::size_t first_head, std::size_t heads);
  void expand(const BlockWeights& weights, const KvView& view, bool packed, std::size_t first,
              std::size_t end, std::size_t first_head, std::size_t heads, ExpandedPages& to);
  void turn_keys(const BlockWeights& weights);

  const BlockSpec& spec_;
  Arithmetic& arithmetic_;
  AttentionMemory& memory_;
  // Scratch of a part: latent rows [tokens, head_dim]; queries before they meet keys, what these come from,
  // of the query's rank; queries and outputs in the space of latent rows, or of some heads.
  std::vector<float> keys_, projected_, low_, query_, mixed_;
  // Of positions that are expanded, kExpanded at most: rows as they are kept, their first `rank` elements.
  std::vector<float> rows_, latent_;
  Expanded expanded_;
};

}  // namespace flashllm
