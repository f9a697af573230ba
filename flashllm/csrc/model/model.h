// A token's way through the whole model, in one call:
//
//   embedding -> for each block: norm, q k v, rotary, KV cache, attention, out, norm, FFN -> norm -> head ->
//   logits
//
// A pass takes new tokens of several sequences. Its kind is decided once, before it starts, and says how the
// FFNs and the products run; what a sequence gets never depends on what else is in the pass. Whatever leaves
// a step is rounded to the model's dtype; sums are fp32, each in one order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ffn/dense_ffn.h"
#include "ffn/expert_ffn.h"
#include "ffn/token_ffn.h"
#include "io/row_stream.h"
#include "io/stopwatch.h"
#include "kernels/attention.h"
#include "kernels/matmul.h"
#include "kernels/rotary.h"
#include "model/block.h"
#include "model/kv_cache.h"

namespace flashllm {

enum class Pass {
  sparse,  // few tokens a sequence: the neurons that the predictor names
  oracle,  // few: the neurons that fire, found by reading all of them
  dense,   // few: every neuron, or every neuron of the experts that the router chooses
  prompt,  // many: the same, and products of many tokens at once
};

// A new token. Those of a sequence follow each other, at positions that follow what the sequence holds.
struct Token {
  KvSequence* sequence = nullptr;
  std::size_t position = 0;
  std::int32_t id = 0;
};

struct ModelSpec {
  BlockSpec block;
  std::size_t vocab = 0;
  std::size_t embed_dim = 0;        // of the embedding; d_model unless it is projected
  std::size_t d_ff = 0;             // neurons of a layer
  std::size_t position_offset = 0;  // of the first row of the position embedding that is used
  float embedding_scale = 1.0F;
  float logit_scale = 1.0F;
  float logit_softcap = 0.0F;      // logits are cap * tanh(logit / cap); 0: as they are
  std::vector<Rotary> rotary;      // that blocks choose from; none: positions are part of the embedding
  std::size_t block_tokens = 256;  // of a prompt that go through the blocks together, at most
  std::size_t fill_tokens =
      0;                 // the last tokens of a prompt, from which the neuron caches are filled; 0: never
  bool prefetch = true;  // the rows of the next layer are read before its turn
};

struct ModelWeights {
  RowMatrix embedding;                // [vocab, embed_dim]
  RowMatrix positions;                // [context + offset, d_model]; no data: there are none
  RowMatrix project_in, project_out;  // no data: there are none
  Norm embedding_norm;                // of width 0: there is none
  Norm final_norm;                    // the same
  RowMatrix head;                     // [vocab, embed_dim]
  std::vector<BlockWeights> blocks;
};

// Sees what the FFNs of a prompt's pass see, and may change what their neurons contribute: predictors are
// trained on the one, and judged by the other.
struct Tap {
  virtual ~Tap() = default;
  // x: the FFN's input, [tokens, d_model] fp32
  virtual void input(std::size_t layer, const float* x, std::size_t tokens) = 0;
  // activations of the neurons from `first` on, of every token, before they are multiplied by the down
  // columns: those of neuron first + i start at h + i * stride
  virtual void activations(std::size_t layer, std::size_t first, std::size_t count, float* h,
                           std::size_t stride) = 0;
};

class Model {
 public:
  // Keeps references to all of them. `check` is called between blocks and may throw, to end a long pass.
  // Throws CoreError where the weights do not fit the spec.
  Model(const ModelSpec& spec, const ModelWeights& weights, const RowFormat& rows, Activation activation,
        RowStream& stream, ThreadPool& pool, FfnCounters& counters, SimdLevel level,
        std::function<void()> check);

  const ModelSpec& spec() const { return spec_; }
  std::size_t num_layers() const { return weights_.blocks.size(); }

  // logits: [wanted, vocab] after each token whose index is in `wanted` (ascending). Every sequence has its
  // new tokens afterwards; where it throws (CoreError, or what `check` throws), none has changed. `tap`: of a
  // prompt's pass, or nullptr. The last `drafted` tokens of a pass of few may be guesses: what the neuron
  // caches learn of these waits for `accept`.
  void step(const std::vector<Token>& tokens, Pass pass, const std::vector<std::size_t>& wanted,
            float* logits, Tap* tap = nullptr, std::size_t drafted = 0);
  // Of the drafted tokens of the last step the first `count` were right.
  void accept(std::size_t count);

  // The parts of a prompt pass, for those who go through a model layer by layer. states: [tokens, d_model]
  // fp32. `run_block` keeps keys and values as layer `kv_layer` of the sequences.
  void embed(const Token* tokens, std::size_t count, float* states);
  void run_block(std::size_t layer, std::size_t kv_layer, const std::vector<Token>& tokens, float* states,
                 Tap* tap);

  // After a pass that did not finish: no read stays under way, and no row counts that did not come.
  void interrupt() noexcept;

 private:
  // Tokens [begin, end) of a pass that go through the blocks together.
  struct Part {
    const Token* tokens;
    std::size_t count;
    Pass pass;
    bool fills;         // the neuron caches, from its last tokens
    bool is_last;       // of its pass
    bool is_one_block;  // not of a pass through all of them
    Tap* tap;
    std::size_t kv_layer;  // of its keys and values
    std::size_t drafted;   // of its last tokens
  };

  void run_part(const Part& part);
  void look();  // calls `check`
  void set_positions(const Part& part);
  void check_finite(std::size_t layer, const float* values, std::size_t count) const;
  void block(std::size_t layer, const Part& part);
  void attend(std::size_t layer, const Part& part);
  void prepare_heads(const BlockWeights& weights, std::size_t count);
  void attend_to_cache(const BlockWeights& weights, const Part& part);
  void feed_forward(std::size_t layer, const Part& part, const float* x);
  void feed_sparse(std::size_t layer, const Part& part, const float* x);
  void feed_oracle(std::size_t layer, const Part& part, const float* x);
  void feed_every(std::size_t layer, const Part& part, const float* x);
  void feed_prompt(std::size_t layer, const Part& part, const float* x);
  void feed_experts(std::size_t layer, const Part& part, const float* x);
  FfnTokens together(const Part& part, const float* x, std::size_t first, bool predicted) const;
  void normalize(const Norm& norm, std::size_t count, const float* x, float* y);
  void round_inputs(std::size_t count, std::size_t width, float* x);
  void take_inputs(const float* x, std::size_t count, std::size_t width, Pass pass);
  void project(const RowMatrix& weights, std::size_t count, float* out);
  void add_projected(std::size_t count);
  void round(float* values, std::size_t n);
  void widen(const std::byte* from, std::size_t n, float* to);
  void narrow(const float* from, std::size_t n, std::byte* to);
  void head(const Part& part, const std::vector<std::size_t>& rows, float* logits);
  template <typename Body>
  void each_block(std::size_t layer, int then, const Body& body);
  const std::byte* gate_rows(const BlockWeights& weights, std::size_t first) const;
  template <typename Body>
  void each_share(std::size_t n, const Body& body);
  void charge_stream();
  Activation activation(std::size_t layer) const;
  const float* seen(const FfnLayer& ffn, const float* x) const;
  const ScalePlane* plane(const BlockWeights& weights) const;  // nullptr: columns have their own scales
  int layer_after(std::size_t layer, const Part& part) const;

  const ModelSpec spec_;
  const ModelWeights weights_;
  const RowFormat rows_;
  const Activation activation_;
  RowStream& stream_;
  ThreadPool& pool_;
  FfnCounters& counters_;
  const SimdLevel level_;
  const SimdLevel level_of_many_;  // of the products with a prompt's inputs
  const KernelTable& kernels_;
  const std::function<void()> check_;
  DenseFfn dense_;
  TokenFfn few_;
  ExpertFfn experts_;
  std::vector<RotaryTable> rotary_;
  Stopwatch watch_;

  // Scratch of a part. [tokens, d_model]: hidden_, normed_, projected_, attended_; [tokens, heads *
  // head_dim]: query_, mixed_; [tokens, kv_heads * head_dim]: keys_, values_.
  std::vector<float> hidden_, normed_, query_, keys_, values_, mixed_, projected_, attended_;
  std::vector<std::byte> narrow_, products_, rounded_;
  std::vector<std::vector<std::int32_t>> active_;  // of tokens that go through an FFN together
  const float* inputs_ = nullptr;                  // of the next products, [tokens, width]
  std::unique_ptr<PackedTokens> packed_;           // the same, of a prompt
};

}  // namespace flashllm
