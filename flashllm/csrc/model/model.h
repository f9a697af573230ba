// A token's way through the whole model, in one call:
//
//   embedding -> for each block: norm, q k v, rotary, KV cache, attention, out, norm, FFN -> norm -> head ->
//   logits
//
// A pass takes new tokens of several sequences. Its kind is decided once, before it starts, and says how the
// FFNs and the products run; what a sequence gets never depends on what else is in the pass. Many tokens go
// in parts. A prompt's go layer by layer, a stretch of several parts at a time: whatever a layer reads from
// flash is read once a stretch. Whatever leaves a step is rounded to the model's dtype; sums are fp32, each
// in one order.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "ffn/counters.h"
#include "io/row_stream.h"
#include "io/stopwatch.h"
#include "model/arithmetic.h"
#include "model/ends.h"
#include "model/feed_forward.h"
#include "model/layer.h"
#include "model/pass.h"
#include "model/spec.h"

namespace flashllm {

class Model {
 public:
  // Keeps references to all of them. `check` is called between layers, parts and blocks of rows of a pass of
  // more than a few tokens, and may throw, to end it. Throws CoreError where the weights do not fit the spec.
  Model(const ModelSpec& spec, const ModelWeights& weights, const RowFormat& rows, Activation activation,
        RowStream& stream, ThreadPool& pool, FfnCounters& counters, SimdLevel level,
        std::function<void()> check);

  const ModelSpec& spec() const { return spec_; }
  std::size_t num_layers() const { return weights_.blocks.size(); }

  // logits: [wanted, vocab] after each token whose index is in `wanted` (ascending). Every sequence has its
  // new tokens afterwards; where it throws (CoreError, or what `check` throws), none has changed. `tap`: of a
  // prompt's pass, or nullptr. The last `drafted` tokens of a pass of few may be guesses: what the neuron
  // caches learn of these waits for `accept`. `stretches`: of a prompt that nobody observes, at most one a
  // part; 0: one a part.
  void step(const std::vector<Token>& tokens, Pass pass, const std::vector<std::size_t>& wanted,
            float* logits, Tap* tap = nullptr, std::size_t drafted = 0, std::size_t stretches = 0);
  // Of the drafted tokens of the last step the first `count` were right.
  void accept(std::size_t count) { ffn_.accept(count); }

  // The parts of a prompt pass, for those who go through a model layer by layer. states: [tokens, d_model]
  // fp32. `run_block` keeps keys and values as layer `kv_layer` of the sequences.
  void embed(const Token* tokens, std::size_t count, float* states) { ends_.embed(tokens, count, states); }
  void run_block(std::size_t layer, std::size_t kv_layer, const std::vector<Token>& tokens, float* states,
                 Tap* tap);

  // Of the pass under way: its parts that have left a layer, and how many are to, over all layers.
  struct Progress {
    std::size_t done = 0, total = 0;
  };
  const Progress& progress() const { return progress_; }

  // After a pass that did not finish: no read stays under way, and no row counts that did not come.
  void interrupt() noexcept { ffn_.give_up(); }

 private:
  void run(std::vector<Part>& stretch);
  void run_layer(std::size_t layer, const std::vector<Part>& stretch);
  void release_states(std::size_t part_tokens) noexcept;
  void look();  // calls `check`

  const ModelSpec spec_;
  const ModelWeights weights_;
  FfnCounters& counters_;
  const std::function<void()> check_;
  Stopwatch watch_;
  Arithmetic arithmetic_;
  Ends ends_;
  SequenceMemory memory_;
  FeedForward ffn_;
  Layer layer_;
  // Of a stretch, [tokens, d_model]: states; what the attention of a parallel block adds to them.
  std::vector<float> hidden_, attended_;
  Progress progress_;
};

}  // namespace flashllm
