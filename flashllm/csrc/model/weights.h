// A model's weights as its architecture says they are, out of tensors by their canonical names.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "ffn/experts.h"
#include "ffn/ffn_options.h"
#include "io/row_source.h"
#include "model/named_tensors.h"
#include "model/spec.h"

namespace flashllm {

// A BlockSpec of flashllm/arch: how a model computes, and so which weights it has.
struct Architecture {
  ModelSpec model;  // but for what a run chooses
  std::vector<LayerSpec> layers;
  NormStyle norms;
  std::size_t context = 0;
  bool gated = false;
  bool sub_norms = false;
  bool embedding_norm = false;
  bool final_norm = false;
  bool learned_positions = false;
  bool tied_head = false;
};

// What lies before and behind the layers; `in_part`: but for what is missing. Throws CoreError where tensors
// do not fit, as all here.
ModelWeights read_ends(NamedTensors& tensors, const Architecture& of, bool in_part = false);

// The layer of this index but for the rows of its neurons, out of tensors whose names begin with `layer`.
BlockWeights read_block(NamedTensors& tensors, const std::string& layer, const Architecture& of,
                        std::size_t index);

// Of a mixture of experts, out of the same; nullptr where the layer is none.
std::unique_ptr<Router> read_router(NamedTensors& tensors, const std::string& layer, const ExpertsSpec& spec,
                                    std::size_t d_model);

// Those weights of the layer's neurons that are resident. Throws where they do not fit the rows.
FfnLayerOptions read_ffn(NamedTensors& tensors, const RowFormat& rows, std::size_t layer, std::size_t neurons,
                         Activation activation);

}  // namespace flashllm
