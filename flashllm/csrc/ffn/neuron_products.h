// The arithmetic of an FFN's neurons, whose rows lie in memory by units, runs of rows wherever they are: the
// neurons' values, and the sum of their down columns. Does not know why these neurons, nor how their rows
// came there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffn/ffn_group.h"
#include "ffn/ffn_options.h"
#include "kernels/thread_pool.h"

namespace flashllm {

class NeuronProducts {
 public:
  // Keeps references. At most `most` units are gathered at a time; nothing is allocated later. Throws
  // CoreError where the processor lacks the level.
  NeuronProducts(const FfnLayerOptions& options, ThreadPool& pool, std::size_t most);

  // The units of the next call, ascending: where a unit's rows are, and its neurons' values.
  void clear() { runs_.clear(); }
  void gather(std::int32_t unit, const std::byte* rows, float* values) {
    runs_.emplace_back(units_.first(unit), rows, values);
  }

  // values = activation(up . x + bias), or activation(gate . x) * (up . x), of every neuron gathered.
  // gate_values: the gate's activations by neuron, where they are known; else nullptr.
  void up(const float* x, const float* gate_values);
  // y += the sum of the down columns times the values, in the order of neurons; a value of zero adds nothing.
  void down(float* y);

  // A unit whose rows are `rows`, for `count` tokens of a pass that want it, values as above: it is read once
  // for all. `x`: the inputs of the pass's tokens. y: [tokens of the pass, d_model]. Not where the gate is
  // resident.
  void up(const FfnShare* shares, std::size_t count, const std::byte* rows, const RowInputs& x);
  void down(const FfnShare* shares, std::size_t count, const std::byte* rows, float* y);

 private:
  struct Run {
    // Built in place: copied from the stack, the wide load waits for the narrow stores before it.
    Run(std::int32_t neuron, const std::byte* at, float* of) : first(neuron), rows(at), values(of) {}

    std::int32_t first;  // neuron
    const std::byte* rows;
    float* values;
  };
  std::size_t num_rows() const;
  template <typename Visit>
  void each(std::size_t begin, std::size_t end, const Visit& visit) const;

  void down_in_codes(float* y);
  PlaneRows columns(std::int32_t neuron, const std::byte* rows) const;

  const FfnLayerOptions& options_;
  const RowUnits units_;
  ThreadPool& pool_;
  std::vector<Run> runs_;
  bool in_codes_ = false;          // whether units' down columns are multiplied by codes
  std::vector<TokenCodes> codes_;  // a unit's values
  std::vector<float> gathered_;    // of tokens that share a unit: their values and sums
};

}  // namespace flashllm
