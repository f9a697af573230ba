// A model's weights as its spec says they are, out of tensors by their canonical names.
#pragma once

#include <memory>
#include <string>

#include "bind/py_spec.h"
#include "bind/resident_tensors.h"
#include "ffn/experts.h"
#include "model/spec.h"

namespace flashllm {

// What lies before and behind the layers; `in_part`: but for what is missing. Throws CoreError where tensors
// do not fit, as all here.
ModelWeights read_ends(ResidentTensors& tensors, const PySpec& read, const SpecReader& reader,
                       bool in_part = false);

// The layer of this index but for the rows of its neurons, out of tensors whose names begin with `layer`.
BlockWeights read_block(ResidentTensors& tensors, const std::string& layer, const PySpec& read,
                        const SpecReader& reader, std::size_t index);

// Of a mixture of experts, whose LayerSpec is `of_layer`, out of the same; nullptr where the layer is none.
std::unique_ptr<Router> read_router(ResidentTensors& tensors, const std::string& layer,
                                    const SpecReader& of_layer, std::size_t d_model);

}  // namespace flashllm
