// The layers of a model for batches of sequences, over weights that are lent for a call: the throughput
// engine moves a layer's weights to where they are computed with, then puts many tokens through it. States
// are of the model's dtype between two layers; a batch goes through a layer in parts, so that the working
// memory does not grow with it. A sequence's bits do not depend on what else is in the batch.
//
// Knows neither where weights lie when they are not lent, nor sequences: who attends has the keys and values,
// and recurrent states are lent with the weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ffn/experts.h"
#include "model/ends.h"
#include "model/layer.h"
#include "model/spec.h"
#include "model/weights.h"
#include "planes/scale_planes.h"

namespace flashllm {

// The matrices of all of a layer's neurons, or of a run of them.
struct LentNeurons {
  RowMatrix up, gate, down;     // the gate has no data where there is none
  bool down_by_inputs = false;  // as linear_by_columns has it
  ScalePlane plane;             // of the layer's down columns, where their scales lie apart
  std::ptrdiff_t first = 0;     // of the layer's neurons

  // `count` neurons from `first` on, without what `down` adds of its own.
  LentNeurons run(std::size_t first, std::size_t count) const;
};

struct LentLayer {
  std::size_t number = 0;  // of the model's layers
  BlockWeights block;
  LentNeurons neurons;
  std::unique_ptr<Router> router;  // of a mixture of experts
};

// The model's layer of this number, out of tensors by their names without the layer's. `down_by_inputs`: as
// in LentNeurons. Throws CoreError where they do not fit.
LentLayer read_lent(NamedTensors& tensors, const Architecture& of, std::size_t number, bool down_by_inputs);

// A layer's feed-forward part over whole matrices: every product is rounded to the model's dtype. Of a
// mixture of experts each that any token goes to is computed once, for those tokens.
class LentFfn final : public FfnPart {
 public:
  explicit LentFfn(Arithmetic& arithmetic) : arithmetic_(arithmetic) {}
  void use(const LentLayer& weights) { weights_ = &weights; }
  void run(const FfnTurn& turn) override;

 private:
  void compute(const LentNeurons& neurons, const float* x, std::size_t count, bool many, float* y);
  void add_columns_of(const LentNeurons& neurons, std::size_t count, float* y);
  void activate(std::size_t n, bool gated);
  void run_experts(const FfnTurn& turn);

  Arithmetic& arithmetic_;
  const LentLayer* weights_ = nullptr;
  // Scratch of a part: [tokens, neurons]; of an expert's tokens, [tokens, d_model].
  std::vector<float> up_, gate_, gathered_, made_;
  ExpertTokens experts_;
};

// Recurrent states of a layer, [slots, floats] (state_mixer.h), and in which slot that of each of a batch's
// sequences lies.
struct LentStates {
  float* data = nullptr;
  std::size_t slots = 0, floats = 0;
  const std::int32_t* of_sequences = nullptr;
  std::size_t count = 0;

  // Each token's; zeros where its sequence begins. Throws CoreError (usage) where they do not fit.
  std::vector<float*> of_tokens(const std::int64_t* positions, std::size_t tokens, bool decoding) const;
};

class BatchModel {
 public:
  // Keeps references to the pool and the memory. At most `rows_together` tokens go through a layer together.
  BatchModel(const ModelSpec& spec, std::size_t rows_together, AttentionMemory& memory, ThreadPool& pool,
             SimdLevel level);

  void set_watch(Arithmetic::Watch watch) { arithmetic_.set_watch(std::move(watch)); }

  // rows [count, embed_dim] of the embedding -> states [count, d_model]
  void embed(const ModelWeights& weights, const std::byte* rows, const std::int64_t* positions,
             std::size_t count, std::byte* states);
  // states [count, d_model], in place. `decoding`: each is of a sequence of its own; else sequences begin at
  // position 0.
  void run(const LentLayer& weights, const LentStates& recurrent, const std::int64_t* positions,
           std::size_t count, bool decoding, std::byte* states);
  // logits [count, vocab], not rounded
  void head(const ModelWeights& weights, const std::byte* states, std::size_t count, float* logits);

 private:
  // body(part, offset of its states). `recurrent`: of each token, or of none.
  template <typename Body>
  void each_part(const std::int64_t* positions, const std::vector<float*>& recurrent, std::size_t count,
                 Pass pass, const Body& body);

  const ModelSpec spec_;
  const std::size_t rows_together_;
  Arithmetic arithmetic_;
  LentFfn ffn_;
  Layer layer_;
  std::vector<float> states_;  // of a part
};

}  // namespace flashllm
