// Rotary position embedding (Su et al. 2021): each pair of a head's elements is turned by an angle that grows
// with the token's position. The cosines and sines of a pass are computed once, for all its layers.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace flashllm {

struct Rotary {
  // Which elements are a pair: i and i + dims / 2 (Llama, GPT-NeoX), or 2 i and 2 i + 1 (GPT-J).
  enum class Style { half, interleaved };
  std::vector<float> inverse_frequency;  // of each pair
  Style style = Style::half;
  float scaling = 1.0F;  // of cosines and sines (transformers' attention_scaling)

  bool operator==(const Rotary& other) const {
    return inverse_frequency == other.inverse_frequency && style == other.style && scaling == other.scaling;
  }
};

class RotaryTable {
 public:
  explicit RotaryTable(Rotary rotary) : rotary_(std::move(rotary)) {}

  // Angles of a pass's tokens: position * inverse_frequency in fp32, as in transformers.
  void set_positions(const std::size_t* positions, std::size_t n);

  // Turns heads [count, head_dim] of the pass's token `index`, in place. Threads may share the table.
  void apply(std::size_t index, float* heads, std::size_t count, std::size_t head_dim) const;

 private:
  Rotary rotary_;
  std::vector<float> cosines_, sines_;  // [tokens, dims / 2]
};

}  // namespace flashllm
