// The arithmetic of an FFN's neurons whose rows lie scattered in memory: their values, and the sum of their
// down columns. Does not know why these neurons, nor how their rows came there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffn/ffn_options.h"
#include "kernels/thread_pool.h"

namespace flashllm {

class NeuronProducts {
 public:
  // Keeps references. At most `most` neurons are gathered at a time; nothing is allocated later.
  NeuronProducts(const FfnLayerOptions& options, ThreadPool& pool, std::size_t most);

  // The neurons of the next call, in its order.
  void clear();
  void gather(std::int32_t neuron, const std::byte* row) {
    ids_.push_back(neuron);
    rows_.push_back(row);
  }

  // values[at[i]] = activation(up . x + bias), or activation(gate . x) * (up . x), of the i-th neuron
  // gathered. gate_values: the gate's activations by neuron, where they are known; else nullptr.
  void up(const float* x, const float* gate_values, const std::vector<std::int32_t>& at, float* values);
  // y += the sum of the down columns, the i-th times scales[i], in the order in which they were gathered.
  void down(const float* scales, float* y);

 private:
  template <typename VectorOf>
  void dots(const float* x, const VectorOf& vector_of, const float* bias, Activation activation);

  const FfnLayerOptions& options_;
  ThreadPool& pool_;
  std::vector<std::int32_t> ids_;
  std::vector<const std::byte*> rows_;
  std::vector<const void*> vectors_;
  std::vector<float> products_;
};

}  // namespace flashllm
