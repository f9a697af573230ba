#include "bind/resident_tensors.h"

#include <optional>
#include <utility>

namespace flashllm {

ResidentTensors::ResidentTensors(nb::dict tensors, Encodings encodings, Dtype dtype, SimdLevel level)
    : tensors_(std::move(tensors)),
      encodings_(std::move(encodings)),
      resident_codec_(parse_codec(encodings_.resident)),
      dtype_(dtype),
      level_(level),
      kernels_(kernel_table(level, dtype)) {}

// The tensor [rows, columns] of a canonical name, where it lies.
const std::byte* ResidentTensors::tensor(const std::string& name, std::size_t elements) {
  const auto array = nb::cast<AnyArray>(tensors_[name.c_str()]);
  require(array.size() == elements && array.itemsize() == dtype_nbytes(dtype_),
          name + " does not fit the model");
  return static_cast<const std::byte*>(array.data());
}

// Rows of a grouped codec, one after the other.
const std::byte* ResidentTensors::coded(const std::string& name, std::size_t nbytes) {
  const auto array = nb::cast<ByteArray>(tensors_[name.c_str()]);
  require(array.nbytes() == nbytes, name + " does not fit the model");
  return reinterpret_cast<const std::byte*>(array.data());
}

ScalePlane ResidentTensors::plane(const std::string& prefix, std::size_t neurons, std::size_t width) {
  const auto part = [&](const char* name) {
    const std::string key = prefix + name;
    return contains(key) ? std::optional(nb::cast<AnyArray>(tensors_[key.c_str()])) : std::nullopt;
  };
  const auto scales = part("scales");
  require(scales.has_value(), prefix + "scales is missing");
  return plane_of(*scales, part("minimums"), part("factors"), part("minimum_factors"), neurons, width);
}

RowMatrix ResidentTensors::linear(const std::string& name, std::size_t rows, std::size_t columns) {
  const auto other = encodings_.others.find(name + ".weight");
  const bool differs = other != encodings_.others.end();
  return matrix(name, rows, columns, differs ? parse_codec(other->second) : resident_codec_);
}

RowMatrix ResidentTensors::matrix(const std::string& name, std::size_t rows, std::size_t columns,
                                  RowCodec codec) {
  RowMatrix weights;
  weights.rows = rows;
  weights.columns = columns;
  weights.stride = vector_nbytes(codec, columns);
  weights.codec = codec;
  weights.inputs = parse_inputs(encodings_.inputs, codec);
  weights.data = is_coded(codec) ? coded(name + ".weight", rows * weights.stride)
                                 : tensor(name + ".weight", rows * columns);
  weights.bias = floats(name + ".bias", rows);
  return weights;
}

Norm ResidentTensors::norm(const std::string& name, const NormStyle& style, std::size_t width,
                           std::size_t elements) {
  Norm norm;
  norm.kind = style.kind;
  norm.width = width;
  norm.epsilon = style.epsilon;
  norm.weight = floats(name + ".weight", elements, style.shift);
  norm.bias = floats(name + ".bias", elements);
  return norm;
}

const float* ResidentTensors::floats(const std::string& name, std::size_t n, float shift) {
  if (!contains(name)) return nullptr;
  if (encodings_.wide_vectors) {
    const auto array = nb::cast<FloatArray>(tensors_[name.c_str()]);
    require(array.shape(0) == n, name + " does not fit the model");
    return array.data();
  }
  auto values = std::make_unique<float[]>(n);
  kernels_.to_f32(tensor(name, n), n, values.get());
  if (shift != 0.0F)
    for (std::size_t i = 0; i < n; ++i) values[i] += shift;
  floats_.push_back(std::move(values));
  return floats_.back().get();
}

}  // namespace flashllm
