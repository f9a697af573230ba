// What one FFN layer is made of, and how its neurons are kept and read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ffn/neuron_norm.h"
#include "io/row_source.h"
#include "kernels/rows.h"
#include "planes/scale_planes.h"

namespace flashllm {

// What lies in a layer's rows, and what of its neurons is resident. What it points to must stay.
struct NeuronWeights {
  RowFormat format;
  const float* up_bias = nullptr;    // [num_neurons] or nullptr
  const float* gate_bias = nullptr;  // the same; of a gated FFN
  // [num_neurons, d_model] without gaps, in the rows' codec: the resident gate of rows that hold none.
  const std::byte* gate = nullptr;
  const float* down_bias = nullptr;  // [d_model] or nullptr
  ScalePlane plane;                  // of down columns whose scales lie apart
  NeuronNorm neuron_norm;            // before the down columns, of models that have one
};

// How units are kept and read.
struct UnitRule {
  std::string cache_policy = "window";
  std::int32_t window = 1;
  std::int32_t unit_rows = 1;  // neurons that are read and kept together: those of an expert, or one
};

struct FfnLayerOptions : NeuronWeights, UnitRule {
  std::int32_t layer = 0;
  std::int32_t num_neurons = 0;
  Activation activation = Activation::relu;
  // The cache.
  std::int32_t capacity = 0;          // units that the memory handed over holds
  std::int32_t bypass_capacity = 0;   // of those read for one token alone, which layers may share
  const float* popularity = nullptr;  // of each unit, or nullptr; read by the constructor alone
  RowSource rows;                     // on flash; units and stride are told above
  SimdLevel simd = SimdLevel::scalar;

  RowUnits units() const { return {num_neurons, unit_rows}; }
  // Of a unit's rows: those of experts that lie in another file are put matrix by matrix.
  RowFormat format_of(std::int32_t unit) const {
    RowFormat found = format;
    if (rows.experts != nullptr && unit < rows.experts->count)
      found.unit = static_cast<std::uint32_t>(rows.experts->size);
    return found;
  }
};

}  // namespace flashllm
