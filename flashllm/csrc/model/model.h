// A token's way through the whole model, in one call:
//
//   embedding -> for each layer: norm, q k v, rotary, KV cache, attention, out, norm, FFN -> norm -> head ->
//   logits
//
// A pass takes new tokens of several sequences. Its kind is decided once, before it starts, and says how the
// FFNs and the products run; what a sequence gets never depends on what else is in the pass. Many tokens go
// in parts. A prompt's go layer by layer, a stretch of several parts at a time: whatever a layer reads from
// flash is read once a stretch. Whatever leaves a step is rounded to the model's dtype; sums are fp32, each
// in one order.
//
// A pass can wait between two of its steps, a part at a layer or a block of a layer's rows, while others
// pass: what is read and what is computed stay the same.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
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
#include "model/token_table.h"

namespace flashllm {

class Model {
 public:
  // Keeps references to all of them. `table`: of per-layer embeddings; of a model without these its
  // embedding, where the weights have none; or nullptr. Throws CoreError where the weights do not fit the
  // spec.
  Model(const ModelSpec& spec, const ModelWeights& weights, RowStream& stream, TokenTable* table,
        ThreadPool& pool, FfnCounters& counters, SimdLevel level);

  const ModelSpec& spec() const { return spec_; }
  std::size_t num_layers() const { return weights_.blocks.size(); }

  // Of the drafted tokens of the last step the first `count` were right.
  void accept(std::size_t count) { ffn_.accept(count); }

  // The parts of a prompt pass, for those who go through a model layer by layer. states: [tokens, d_model]
  // fp32. `run_block` keeps keys and values as the sequences' layer 0.
  void embed(const Token* tokens, std::size_t count, float* states);
  void run_block(std::size_t layer, const std::vector<Token>& tokens, float* states, Tap* tap);

  // After a pass that did not finish: no read stays under way, and no row counts that did not come.
  void interrupt() noexcept {
    layer_.expanded() = {};
    if (table_ != nullptr) table_->give_up();
    ffn_.give_up();
  }

 private:
  friend class RunningPass;
  bool reads_embedding() const { return table_ != nullptr && spec_.block.row_width() == 0; }

  const ModelSpec spec_;
  const ModelWeights weights_;
  TokenTable* const table_;
  FfnCounters& counters_;
  Stopwatch watch_;
  Arithmetic arithmetic_;
  Ends ends_;
  SequenceMemory memory_;
  FeedForward ffn_;
  Layer layer_;
};

// New tokens on their way through a model, which outlives them.
class RunningPass {
 public:
  // logits: [wanted, vocab] after each token whose index is in `wanted` (ascending). `check` is called
  // between layers, parts and blocks of rows of a pass of more than a few tokens, and may throw, to end it.
  // `tap`: of a prompt's pass, or nullptr. The last `drafted` tokens of a pass of few may be guesses: what
  // the neuron caches learn of these waits for `Model::accept`, before any other pass goes on. `stretches`:
  // of a prompt that nobody observes, at most one a part; 0: one a part. `expanded`: as Part has it.
  RunningPass(Model& model, std::vector<Token> tokens, Pass pass, std::vector<std::size_t> wanted,
              float* logits, std::function<void()> check, Tap* tap = nullptr, std::size_t drafted = 0,
              std::size_t stretches = 0, std::size_t expanded = 0);
  ~RunningPass() { close(); }
  RunningPass(const RunningPass&) = delete;
  RunningPass& operator=(const RunningPass&) = delete;

  // Goes on, at least one step, until it has ended or `stop` says so between two of them; whether it has
  // ended. Every sequence has its new tokens then; where it throws (CoreError, or what `check` throws),
  // none has changed, and the pass is closed.
  template <typename Stop>
  bool advance(const Stop& stop) {
    try {
      resume();
      while (step())
        if (stop()) return suspend(), false;
    } catch (...) {
      close();
      throw;
    }
    end();
    return true;
  }
  // The sequences are as they were, if it has not ended.
  void close() noexcept;

  // Parts that have left a layer, and how many are to, over all layers.
  struct Progress {
    std::size_t done = 0, total = 0;
  };
  const Progress& progress() const { return progress_; }

 private:
  enum class Phase { start, layer, attend, rows, add, head };  // what the next step does
  void resume();
  void suspend();
  void end();
  bool step();  // whether there are more
  void look();  // calls `check`
  void start_stretch();
  void take_rows();
  void run_layer();
  void attend_part();
  void add_part();
  void make_logits();
  void next_layer();
  float* of_part(std::vector<float>& values, const Part& part) const;
  std::size_t stretch_tokens() const { return stretch_.back().first + stretch_.back().count; }

  Model& model_;
  const std::vector<Token> tokens_;
  const Pass pass_;
  const std::vector<std::size_t> wanted_;
  float* logits_;
  const std::function<void()> check_;
  Tap* const tap_;
  const std::size_t drafted_, expanded_heads_;
  std::size_t parts_, stretches_;
  std::size_t number_ = 0;     // of the stretch
  std::vector<Part> stretch_;  // its parts
  std::size_t first_ = 0;      // its first token
  std::size_t layer_ = 0, part_ = 0, next_wanted_ = 0;
  Phase phase_ = Phase::start;
  bool is_over_ = false;
  // Of a stretch, [tokens, d_model]: states; what the attention of a parallel layer adds to them.
  std::vector<float> hidden_, attended_;
  std::vector<float> rows_;             // the same of per-layer embeddings, [tokens, layers, per_layer]
  std::optional<FfnStretch> ffn_;       // of a prompt
  std::vector<RotaryTable> positions_;  // while it waits
  Expanded expanded_;                   // the same
  Progress progress_;
};

}  // namespace flashllm
