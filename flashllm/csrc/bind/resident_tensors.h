// A model's resident weights by their canonical names (flashllm/arch/tensors.py), as the core's kernels take
// them. Every array is checked against the sizes it is asked for; vectors are widened to fp32 and kept here.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bind/bindings.h"
#include "bind/py_spec.h"
#include "kernels/norm.h"
#include "kernels/rows.h"

namespace flashllm {

// How matrices are stored, by the names of the codecs.
struct Encodings {
  std::string resident;                       // of most
  std::map<std::string, std::string> others;  // by tensor
  std::string inputs;                         // what they are multiplied by, as parse_inputs
  bool wide_vectors = false;  // are in fp32, with their norms' shift: they are used as they lie
};

class ResidentTensors {
 public:
  // tensors: of the dtype (bf16 as uint16), or bytes of an encoding. Throws CoreError, as all below, where
  // something is missing or does not fit.
  ResidentTensors(nb::dict tensors, Encodings encodings, Dtype dtype, SimdLevel level);

  ResidentTensors(const ResidentTensors&) = delete;
  ResidentTensors& operator=(const ResidentTensors&) = delete;

  Dtype dtype() const { return dtype_; }
  SimdLevel level() const { return level_; }
  const KernelTable& kernels() const { return kernels_; }
  bool contains(const std::string& name) const { return tensors_.contains(name.c_str()); }
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
  // Of a layer's down columns, whose tensors are called `prefix` and a part's name.
  ScalePlane plane(const std::string& prefix, std::size_t neurons, std::size_t width);

 private:
  const std::byte* tensor(const std::string& name, std::size_t elements);
  const std::byte* coded(const std::string& name, std::size_t nbytes);

  nb::dict tensors_;
  const Encodings encodings_;
  const RowCodec resident_codec_;
  const Dtype dtype_;
  const SimdLevel level_;
  const KernelTable& kernels_;
  std::vector<std::unique_ptr<float[]>> floats_;
};

}  // namespace flashllm
