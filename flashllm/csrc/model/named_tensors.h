// A model's resident weights by their canonical names (flashllm/arch/tensors.py), as kernels take them. Every
// array is checked against the sizes it is asked for; vectors are widened to fp32 and kept here.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/norm.h"
#include "kernels/rows.h"
#include "kernels/tensor.h"
#include "planes/scale_planes.h"

namespace flashllm {

// How matrices are stored.
struct Encodings {
  RowCodec resident = RowCodec::f32;       // of most
  std::map<std::string, RowCodec> others;  // by tensor
  InputForm inputs = InputForm::f32;       // what they are multiplied by, as inputs_of
  bool wide_vectors = false;               // are in fp32, with their norms' shift: they are used as they lie
};

// What all norms of a model have in common.
struct NormStyle {
  Norm::Kind kind = Norm::Kind::layer;
  float epsilon = 0.0F;
  float shift = 0.0F;  // of their weights
};

class NamedTensors {
 public:
  // tensors: of the dtype (bf16 also as other elements of 16 bits), or bytes of an encoding. All below throw
  // CoreError where something is missing or does not fit.
  NamedTensors(TensorSource tensors, Encodings encodings, Dtype dtype, SimdLevel level);

  NamedTensors(const NamedTensors&) = delete;
  NamedTensors& operator=(const NamedTensors&) = delete;

  Dtype dtype() const { return dtype_; }
  SimdLevel level() const { return level_; }
  const KernelTable& kernels() const { return kernels_; }
  bool contains(const std::string& name) const { return tensors_(name).has_value(); }
  Tensor need(const std::string& name) const;  // which must be there
  // NAME.weight [rows, columns] in the encoding that is its own, and NAME.bias, if there is one.
  RowMatrix linear(const std::string& name, std::size_t rows, std::size_t columns);
  // The same in this codec.
  RowMatrix matrix(const std::string& name, std::size_t rows, std::size_t columns, RowCodec codec);
  // A norm over `width` values. Its weights may be those of several of that width: `elements` in all.
  Norm norm(const std::string& name, const NormStyle& style, std::size_t width, std::size_t elements);
  Norm norm(const std::string& name, const NormStyle& style, std::size_t width) {
    return norm(name, style, width, width);
  }
  // A vector in fp32, plus `shift`; nullptr where there is none.
  const float* floats(const std::string& name, std::size_t n, float shift = 0.0F);
  // A vector that is in fp32 whatever the model's dtype, where it lies; nullptr where there is none.
  const float* wide_floats(const std::string& name, std::size_t n) const;
  // Of a layer's down columns, whose tensors are called `prefix` and a part's name.
  ScalePlane plane(const std::string& prefix, std::size_t neurons, std::size_t width);

 private:
  const std::byte* tensor(const std::string& name, std::size_t elements, RowCodec codec, std::size_t nbytes);

  const TensorSource tensors_;
  const Encodings encodings_;
  const Dtype dtype_;
  const SimdLevel level_;
  const KernelTable& kernels_;
  std::vector<std::unique_ptr<float[]>> floats_;
};

}  // namespace flashllm
