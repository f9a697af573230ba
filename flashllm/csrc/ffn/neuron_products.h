// The arithmetic of an FFN's neurons, whose rows lie in memory wherever they are: the neurons' values, and
// the sum of their down columns. Does not know why these neurons, nor how their rows came there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffn/ffn_options.h"
#include "kernels/thread_pool.h"

namespace flashllm {

class NeuronProducts {
 public:
  // Keeps references. At most `most` neurons are gathered at a time; nothing is allocated later. Throws
  // CoreError where the processor lacks the level.
  NeuronProducts(const FfnLayerOptions& options, ThreadPool& pool, std::size_t most);

  // The neurons of the next call, ascending: where a neuron's row is, and its value.
  void clear() { neurons_.clear(); }
  void gather(std::int32_t id, const std::byte* row, float* value) { neurons_.emplace_back(id, row, value); }

  // values = activation(up . x + bias), or activation(gate . x) * (up . x), of every neuron gathered.
  // gate_values: the gate's activations by neuron, where they are known; else nullptr.
  void up(const float* x, const float* gate_values);
  // y += the sum of the down columns times the values, in the order of neurons; a value of zero adds nothing.
  void down(float* y);

 private:
  struct Neuron {
    // Built in place: copied from the stack, the wide load waits for the narrow stores before it.
    Neuron(std::int32_t number, const std::byte* at, float* of) : id(number), row(at), value(of) {}

    std::int32_t id;
    const std::byte* row;
    float* value;
  };

  const FfnLayerOptions& options_;
  ThreadPool& pool_;
  std::vector<Neuron> neurons_;
};

}  // namespace flashllm
