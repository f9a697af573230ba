// A pass through the model: its kind, its tokens, and the part of them that goes through the layers together.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sequence/sequence_state.h"

namespace flashllm {

enum class Pass {
  sparse,  // few tokens a sequence: the neurons that the predictor names
  oracle,  // few: the neurons that fire, found by reading all of them
  dense,   // few: every neuron, or every neuron of the experts that the router chooses
  prompt,  // many: the same, and products of many tokens at once
};

// A new token. Those of a sequence follow each other, at positions that follow what the sequence holds.
struct Token {
  SequenceState* sequence = nullptr;
  std::size_t position = 0;
  std::int32_t id = 0;
  // Of tokens whose sequence is somebody else's: its recurrent state at the layer, changed in place.
  float* state = nullptr;

  bool is_beside(const Token& other) const { return sequence == other.sequence && state == other.state; }
};

// Calls with the first and the last of each sequence's tokens, which lie together.
template <typename Call>
void for_each_sequence(const Token* tokens, std::size_t count, const Call& call) {
  for (std::size_t begin = 0, end = 0; begin < count; begin = end) {
    while (end < count && tokens[end].is_beside(tokens[begin])) ++end;
    call(tokens[begin], tokens[end - 1]);
  }
}

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

// Tokens of a pass that go through the layers together. A prompt's go in stretches of several parts: a
// layer's rows are read once for all of them. By default they are all of a pass, at one layer.
struct Part {
  const Token* tokens = nullptr;
  std::size_t count = 0;
  Pass pass = Pass::prompt;
  Tap* tap = nullptr;
  bool fills = false;                 // the neuron caches, from its last tokens
  bool is_last = true;                // or in the last stretch of its pass
  bool is_one_block = true;           // not of a pass through all of them
  std::size_t drafted = 0;            // of its last tokens
  std::size_t number = 0, first = 0;  // in its stretch: which part, and which token its first one is
  std::size_t kv_layer = 0;           // of its keys and values
  std::size_t expanded = 0;           // heads of latent attention that are expanded together; 0: all
  const float* per_layer = nullptr;   // [tokens, layers, per_layer], where the model has such embeddings

  bool is_prompt() const { return pass == Pass::prompt; }
  // `n` of its tokens from `at` on.
  Part of(std::size_t at, std::size_t n) const {
    Part part = *this;
    part.tokens += at;
    part.count = n;
    part.first += at;
    return part;
  }
};

}  // namespace flashllm
