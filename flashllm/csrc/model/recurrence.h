// What mixers with a state have in common: the way along a part's tokens with the state before and behind
// them, and a depthwise convolution, whose last inputs are part of that state.
#pragma once

#include <array>
#include <cstddef>

#include "kernels/thread_pool.h"
#include "model/pass.h"

namespace flashllm {

// body(first, n, before, now) for each run of n tokens of a sequence, from the part's `first` on, up to a
// position whose state is kept; before, now: what body is to bring there of the states of layer
// `part.kv_layer`, `floats` from `offset` on; they may be the same.
template <typename Body>
void for_each_state(const Part& part, std::size_t offset, std::size_t floats, const Body& body) {
  for_each_sequence(part.tokens, part.count, [&](const Token& token, const Token& last) {
    auto first = static_cast<std::size_t>(&token - part.tokens);
    if (token.state != nullptr)
      return body(first, static_cast<std::size_t>(&last - &token) + 1, token.state + offset,
                  token.state + offset);
    SequenceState& sequence = *token.sequence;
    for (std::size_t at = token.position; at <= last.position;) {
      const std::size_t next = sequence.next_recorded(at, last.position + 1);
      const auto [before, now] = sequence.recurrent(part.kv_layer, at);
      body(first, next - at, before + offset, now + offset);
      sequence.record(part.kv_layer, next, offset, floats);
      first += next - at;
      at = next;
    }
  });
}

// Along the tokens, each channel by itself (Gulati et al. 2020): out = bias + the products of the last
// `kernel` inputs and the taps.
struct Convolution {
  std::size_t kernel;                 // tokens that it sees, their own included
  std::array<std::size_t, 3> widths;  // channels of up to three matrices
  std::array<const float*, 3> taps;   // of each matrix, [width, kernel]
  const float* bias;                  // [channels] or nullptr
  bool has_silu;                      // of what comes out

  std::size_t channels() const { return widths[0] + widths[1] + widths[2]; }
};

// Of a part's tokens: inputs and out are matrices [tokens, width], one behind the other. The states have the
// inputs before, [kernel - 1, channels], from `offset` on.
void convolve(const Convolution& convolution, const Part& part, std::size_t offset, const float* inputs,
              float* out, ThreadPool& pool, SimdLevel level);

}  // namespace flashllm
