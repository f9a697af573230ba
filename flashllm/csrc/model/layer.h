// A decoder layer over weights that it is handed: norm, attention, norm, feed-forward part, residuals. It
// does not know who keeps the keys and values, nor where the feed-forward part has its rows.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "model/arithmetic.h"
#include "model/block.h"
#include "model/block_attention.h"
#include "model/pass.h"
#include "model/state_mixer.h"

namespace flashllm {

// A part of a pass at one layer's FFN; all [tokens, d_model].
struct FfnTurn {
  std::size_t layer;
  const Part& part;
  const float* x;       // what goes in
  const float* states;  // what the norm before the FFN was applied to
  float* y;             // what comes out
  // Where it is something, it may be called once: while reads fly, to compute what does not want their rows.
  const std::function<void()>* meanwhile = nullptr;
};

// Computes a layer's feed-forward part.
class FfnPart {
 public:
  virtual ~FfnPart() = default;
  virtual void run(const FfnTurn& turn) = 0;
};

class Layer {
 public:
  // Keeps references, and what `rotary` points to.
  Layer(const BlockSpec& spec, const std::vector<Rotary>& rotary, Arithmetic& arithmetic,
        AttentionMemory& memory, FfnPart& ffn)
      : spec_(spec),
        arithmetic_(arithmetic),
        attention_(spec, rotary, arithmetic, memory),
        state_(arithmetic),
        ffn_(ffn) {}

  // The positions of a part's tokens, or of a stretch's, which hold for all layers.
  void set_positions(const Part& part) { attention_.set_positions(part); }
  std::vector<RotaryTable>& positions() { return attention_.positions(); }
  Expanded& expanded() { return attention_.latent().expanded(); }
  // states [tokens, d_model], in place; of streams (BlockSpec) [1 + streams, tokens, d_model]. Throws
  // CoreError (numbers) for states that are not finite.
  void run(std::size_t layer, const BlockWeights& weights, const Part& part, float* states);

  // The same in two halves, so that all parts of a stretch may pass the first one before the second. The
  // first returns what goes into the FFN, which holds until the next half; `attended`: the attention's
  // outputs wait there, of parallel layers alone.
  const float* attend(std::size_t layer, const BlockWeights& weights, const Part& part, float* states,
                      float* attended);
  // The FFN's outputs are in outputs(). `input`: what the first half returned, where that still holds.
  // `beside`: what the dense part beside the experts gives, where it is made.
  void add_ffn(std::size_t layer, const BlockWeights& weights, const Part& part, float* states,
               const float* attended, const float* input = nullptr, const float* beside = nullptr);
  float* outputs() { return projected_.data(); }

 private:
  void mix(const BlockWeights& weights, const Part& part, float* states, float* attended);
  void add_projected(std::size_t count, float* states);
  void activate_rows(const BlockWeights& weights, std::size_t count, std::size_t width, float* values);
  void make_beside(const BlockWeights& weights, const Part& part, const float* states, const float* input,
                   float* to);
  void add_beside(const BlockWeights& weights, const Part& part, const float* states, const float* input,
                  const float* beside);
  void weigh_by_gate(std::size_t count, float* outputs);
  void add_per_layer(std::size_t layer, const BlockWeights& weights, const Part& part, float* states);
  void route_streams(const BlockWeights& weights, const Part& part, const float* states);
  void predict_streams(const BlockWeights& weights, const Part& part, float* states);
  void correct_streams(const BlockWeights& weights, const Part& part, float* states);
  void make_laurel(const BlockWeights& weights, const Part& part);
  void add_laurel(std::size_t count, float* states);
  void check_finite(std::size_t layer, const float* values, std::size_t count) const;

  const BlockSpec& spec_;
  Arithmetic& arithmetic_;
  BlockAttention attention_;
  StateMixer state_;
  FfnPart& ffn_;
  std::vector<float> normed_, projected_, attended_, second_;  // scratch of a part, [tokens, d_model]
  // The same; [streams, tokens, d_model]; [tokens, streams], or of a shared expert's gate [tokens].
  std::vector<float> laurel_, streams_, routed_;
  std::vector<float> gate_, up_;  // the same, [tokens, per_layer], [tokens, beside]
};

}  // namespace flashllm
