// What comes before the first layer and behind the last: from tokens to states, and from states to logits.
#pragma once

#include <cstddef>

#include "model/arithmetic.h"
#include "model/pass.h"
#include "model/spec.h"

namespace flashllm {

class Ends {
 public:
  // Keeps references. Of the weights the layers' may be missing, and what is not asked for.
  Ends(const ModelSpec& spec, const ModelWeights& weights, Arithmetic& arithmetic)
      : spec_(spec), weights_(weights), arithmetic_(arithmetic) {}

  // states [tokens, d_model] that enter the first layer, of tokens of the vocabulary
  void embed(const Token* tokens, std::size_t count, float* states);
  // The same of tokens whose rows of the embedding [count, embed_dim] are given; they are changed, and may be
  // the states.
  void embed_rows(float* rows, const Token* tokens, std::size_t count, float* states);
  // Of per-layer embeddings what comes of the states that enter the first layer: rows [count, layers,
  // per_layer], to each of which its token's row, which is changed, is then added. `many` as below.
  void project_rows(const float* states, std::size_t count, bool many, float* rows);
  void add_row(float* row, float* to);
  // Of streams: states [1 + streams, count, d_model], whose first are the embedded tokens', become each
  // stream's; and behind the layers [streams, count, d_model] become one, the first.
  void spread(float* states, std::size_t count, bool many);
  void gather(float* states, std::size_t count, bool many);
  // logits [count, vocab] after `count` tokens' states, which are changed. `many`: see
  // Arithmetic::take_inputs.
  void head(float* states, std::size_t count, bool many, float* logits);

 private:
  void project_as_long(const RowMatrix& weights, const float* x, const float* like, std::size_t count,
                       bool many, float* to);

  const ModelSpec& spec_;
  const ModelWeights& weights_;
  Arithmetic& arithmetic_;
};

}  // namespace flashllm
