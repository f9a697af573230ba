// What some architectures (BitNet b1.58) put between a layer's neurons and its down projection: an RMS norm
// over all of them, whose outputs may be rounded to 8 bits. Both need every neuron's value before the first
// down column is summed. Neurons whose value is zero change neither, so that active ones are enough.
//
// Or between a layer's gates and their activation (Gemma 3n's statistical top-k): what is not above a token's
// mean and so many standard deviations of all its gates becomes zero, and the others less by that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/thread_pool.h"

namespace flashllm {

struct NeuronNorm {
  const float* weight = nullptr;  // [neurons]; nullptr: there is no norm, and nothing is rounded
  std::size_t neurons = 0;        // of the layer
  float epsilon = 0.0F;
  bool rounds = false;
  bool cuts_gates = false;  // the second kind, of gates before their activation
  float deviations = 0.0F;

  explicit operator bool() const { return weight != nullptr || cuts_gates; }
};

// One token's values, in place. ids: their neurons, ascending; nullptr: they are the layer's. A token has the
// same bits whether its zeros are among them or not.
void apply(const NeuronNorm& norm, const std::int32_t* ids, std::size_t count, float* values);
// The same of many tokens, a layer's values h [neurons, padded]: those of the first `tokens` of each row.
void apply_to_columns(const NeuronNorm& norm, float* h, std::size_t padded, std::size_t tokens,
                      ThreadPool& pool);
// Gates of `tokens` tokens become values, up * activation(gate less its cut): that of neuron i and token m is
// at i * by_neuron + m * by_token, of `up` too, and one of these is 1. The activation keeps 0. A token has
// the same bits however they lie.
void cut_gates(const NeuronNorm& norm, Activation activation, float* gates, const float* up,
               std::size_t by_neuron, std::size_t by_token, std::size_t tokens, ThreadPool& pool,
               SimdLevel level);

}  // namespace flashllm
