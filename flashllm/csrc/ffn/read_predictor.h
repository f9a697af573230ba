// A layer's predictor out of tensors by name, of one of the kinds of flashllm/format/predictors.py.
#pragma once

#include <map>
#include <string>

#include "ffn/ffn_layer.h"
#include "kernels/tensor.h"

namespace flashllm {

struct PredictorTensors {
  TensorSource tensors;                       // which stay where they are
  std::string prefix;                         // of their names
  std::map<std::string, RowCodec> encodings;  // of some of them, by name
};

// Gives it to the layer; with `buffer`, as the one that tells this layer's neurons from the input of the
// layer before. Throws CoreError where tensors are missing or do not fit.
void read_predictor(const PredictorTensors& from, FfnLayer& layer, Prefetch* buffer);

}  // namespace flashllm
