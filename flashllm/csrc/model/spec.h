// What a model is made of: the options that an architecture chooses, and the resident weights.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/norm.h"
#include "kernels/rotary.h"
#include "kernels/rows.h"
#include "model/block.h"

namespace flashllm {

struct ModelSpec {
  BlockSpec block;
  std::size_t vocab = 0;
  std::size_t embed_dim = 0;        // of the embedding; d_model unless it is projected
  std::size_t position_offset = 0;  // of the first row of the position embedding that is used
  float embedding_scale = 1.0F;     // is rounded to the model's dtype
  float logit_scale = 1.0F;
  bool rounded_logits = true;     // to the model's dtype
  float logit_softcap = 0.0F;     // logits are cap * tanh(logit / cap); 0: as they are
  std::vector<Rotary> rotary;     // that layers choose from
  std::size_t part_tokens = 256;  // of a prompt that go through the layers together, at most
  std::size_t fill_tokens =
      0;                 // the last tokens of a prompt, from which the neuron caches are filled; 0: never
  bool prefetch = true;  // the rows of the next layer are read before its turn
  bool loads = false;    // what no token wanted yet is read behind those that come
};

struct ModelWeights {
  RowMatrix embedding;                           // [vocab, embed_dim]
  RowMatrix positions;                           // [context + offset, d_model]; no data: there are none
  RowMatrix project_in, project_out;             // no data: there are none
  Norm embedding_norm;                           // of width 0: there is none
  Norm final_norm;                               // the same
  RowMatrix head;                                // [vocab, embed_dim]
  RowMatrix per_layer_projection;                // of per-layer embeddings, with
  Norm per_layer_norm;                           // of each layer's part
  std::vector<RowMatrix> stream_in, stream_out;  // of streams but the first, from it and to it
  std::vector<BlockWeights> blocks;
};

}  // namespace flashllm
