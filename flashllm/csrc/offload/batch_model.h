// The layers of a model for batches of sequences, over weights that are lent for a call: the throughput
// engine moves a layer's weights to where they are computed with, then puts many tokens through it. States
// are of the model's dtype between two layers; a batch goes through a layer in parts, so that the working
// memory does not grow with it. A sequence's bits do not depend on what else is in the batch.
//
// Knows neither where weights lie when they are not lent, nor sequences: who attends has the keys and values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "model/ends.h"
#include "model/layer.h"
#include "model/spec.h"

namespace flashllm {

struct LentLayer {
  std::size_t number = 0;  // of the model's layers
  BlockWeights block;
  RowMatrix up, gate, down;     // the gate has no data where there is none
  bool down_by_inputs = false;  // as linear_by_columns has it
};

// A layer's feed-forward part over whole matrices: every product is rounded to the model's dtype.
class LentFfn final : public FfnPart {
 public:
  LentFfn(Activation activation, Arithmetic& arithmetic) : activation_(activation), arithmetic_(arithmetic) {}
  void use(const LentLayer& weights) { weights_ = &weights; }
  void run(const FfnTurn& turn) override;

 private:
  void activate(std::size_t n);

  const Activation activation_;
  Arithmetic& arithmetic_;
  const LentLayer* weights_ = nullptr;
  std::vector<float> up_, gate_;  // scratch of a part, [tokens, neurons]
};

class BatchModel {
 public:
  // Keeps references to the pool and the memory. At most `rows_together` tokens go through a layer together.
  BatchModel(const ModelSpec& spec, Activation activation, std::size_t rows_together, AttentionMemory& memory,
             ThreadPool& pool, SimdLevel level);

  const ModelSpec& spec() const { return spec_; }
  void set_watch(Arithmetic::Watch watch) { arithmetic_.set_watch(std::move(watch)); }

  // rows [count, embed_dim] of the embedding -> states [count, d_model]
  void embed(const ModelWeights& weights, const std::byte* rows, const std::int64_t* positions,
             std::size_t count, std::byte* states);
  // states [count, d_model], in place. `decoding`: each is of a sequence of its own.
  void run(const LentLayer& weights, const std::int64_t* positions, std::size_t count, bool decoding,
           std::byte* states);
  // logits [count, vocab], not rounded
  void head(const ModelWeights& weights, const std::byte* states, std::size_t count, float* logits);

 private:
  // body(part, offset of its states)
  template <typename Body>
  void each_part(const std::int64_t* positions, std::size_t count, Pass pass, const Body& body);

  const ModelSpec spec_;
  const std::size_t rows_together_;
  Arithmetic arithmetic_;
  LentFfn ffn_;
  Layer layer_;
  std::vector<float> states_;  // of a part
};

}  // namespace flashllm
