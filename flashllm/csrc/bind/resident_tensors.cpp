#include "bind/resident_tensors.h"

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
  constexpr std::size_t kUnit = 32;
  const auto has = [&](const char* part) { return contains(prefix + part); };
  const auto array = [&](const char* part) { return nb::cast<AnyArray>(tensors_[(prefix + part).c_str()]); };
  // The values of a part, one for every `group` neurons; nullptr where there is no such part.
  const auto values = [&](const char* part, std::size_t group, const auto& is_of_type) -> const void* {
    if (!has(part)) return nullptr;
    const AnyArray found = array(part);
    require(is_of_type(found) && found.ndim() == 2 && found.shape(0) * group == neurons &&
                found.shape(1) == width,
            "a plane of scales does not fit the layer");
    return found.data();
  };
  const auto halves = [&](const char* part, std::size_t group) {
    const auto is_half = [](const AnyArray& found) { return dtype_of(found) == Dtype::f16; };
    return static_cast<const std::uint16_t*>(values(part, group, is_half));
  };
  const auto bytes = [&](const char* part, std::size_t group) {
    const auto is_byte = [](const AnyArray& found) { return found.dtype() == nb::dtype<std::int8_t>(); };
    return static_cast<const std::int8_t*>(values(part, group, is_byte));
  };
  require(has("scales"), prefix + "scales is missing");
  ScalePlane plane;
  plane.group = has("factors") && array("factors").shape(0) * kUnit > neurons ? kUnit / 2 : kUnit;
  const auto is_power = [](const AnyArray& found) { return found.dtype() == nb::dtype<std::uint8_t>(); };
  if (is_power(array("scales"))) {
    require(!has("minimums") && !has("factors") && !has("minimum_factors"),
            "a plane of scales does not fit the layer");
    plane.powers = static_cast<const std::uint8_t*>(values("scales", kUnit, is_power));
    return plane;
  }
  const std::size_t shared = has("factors") ? kSharedFactors : plane.group;
  plane.scales = halves("scales", shared);
  plane.minimums = halves("minimums", shared);
  plane.factors = bytes("factors", plane.group);
  plane.minimum_factors = bytes("minimum_factors", plane.group);
  require((plane.minimum_factors != nullptr) == (plane.factors != nullptr && plane.minimums != nullptr),
          "a plane lacks factors, or has too many");
  return plane;
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
