// A BlockSpec of flashllm/arch as the core has it: the names of its attributes, and what they mean here.
#pragma once

#include "bind/bindings.h"
#include "model/weights.h"

namespace flashllm {

// Throws CoreError where an option has a value that is none, and what Python throws where there is none of a
// name.
Architecture read_architecture(nb::handle block, Dtype dtype = Dtype::f32);
// Of an Attention, but for its rotary embedding, which is one of a model's.
AttentionSpec read_mixer(nb::handle mixer);

}  // namespace flashllm
