#include "model/named_tensors.h"

#include <optional>
#include <utility>

#include "io/error.h"

namespace flashllm {

NamedTensors::NamedTensors(TensorSource tensors, Encodings encodings, Dtype dtype, SimdLevel level)
    : tensors_(std::move(tensors)),
      encodings_(std::move(encodings)),
      dtype_(dtype),
      level_(level),
      kernels_(kernel_table(level, dtype)) {}

Tensor NamedTensors::need(const std::string& name) const {
  const std::optional<Tensor> found = tensors_(name);
  require(found.has_value(), name + " is missing");
  return *found;
}

// Where the elements lie, or the bytes of a grouped codec.
const std::byte* NamedTensors::tensor(const std::string& name, std::size_t elements, RowCodec codec,
                                      std::size_t nbytes) {
  const Tensor found = need(name);
  require(is_coded(codec) ? found.element == Element::u8 && found.nbytes() == nbytes
                          : found.size() == elements && found.itemsize == dtype_nbytes(dtype_of(codec)),
          name + " does not fit the model");
  return found.data;
}

ScalePlane NamedTensors::plane(const std::string& prefix, std::size_t neurons, std::size_t width) {
  constexpr std::size_t kUnit = 32;
  const auto part = [&](const char* name) { return tensors_(prefix + name); };
  const std::optional<Tensor> scales = need(prefix + "scales"), minimums = part("minimums"),
                              factors = part("factors"), minimum_factors = part("minimum_factors");
  // The values of a part, one for every `group` neurons; nullptr where there is no such part.
  const auto values = [&](const std::optional<Tensor>& found, std::size_t group,
                          Element element) -> const std::byte* {
    if (!found.has_value()) return nullptr;
    require(neurons % group == 0 && found->is(element, {neurons / group, width}),
            "a plane of scales does not fit the layer");
    return found->data;
  };
  const auto halves = [&](const std::optional<Tensor>& found, std::size_t group) {
    return reinterpret_cast<const std::uint16_t*>(values(found, group, Element::f16));
  };
  const auto bytes = [&](const std::optional<Tensor>& found, std::size_t group) {
    return reinterpret_cast<const std::int8_t*>(values(found, group, Element::i8));
  };
  ScalePlane plane;
  plane.group = factors && factors->size() * kUnit > neurons * width   ? kUnit / 2
                : !factors && scales->size() * kUnit < neurons * width ? kSharedFactors
                                                                       : kUnit;
  if (scales->element == Element::f32) {
    require(factors && !minimums && !minimum_factors && scales->is(Element::f32, {neurons / plane.group, 1}),
            "a plane of scales does not fit the layer");
    plane.quarters = reinterpret_cast<const std::uint8_t*>(values(factors, plane.group, Element::u8));
    plane.whole = reinterpret_cast<const float*>(scales->data);
    return plane;
  }
  if (scales->element == Element::u8) {
    require(!minimums && !factors && !minimum_factors, "a plane of scales does not fit the layer");
    plane.powers = reinterpret_cast<const std::uint8_t*>(values(scales, kUnit, Element::u8));
    return plane;
  }
  const std::size_t shared = factors ? kSharedFactors : plane.group;
  plane.scales = halves(scales, shared);
  plane.minimums = halves(minimums, shared);
  plane.factors = bytes(factors, plane.group);
  plane.minimum_factors = bytes(minimum_factors, plane.group);
  require((plane.minimum_factors != nullptr) == (plane.factors != nullptr && plane.minimums != nullptr),
          "a plane lacks factors, or has too many");
  return plane;
}

RowMatrix NamedTensors::linear(const std::string& name, std::size_t rows, std::size_t columns) {
  const auto other = encodings_.others.find(name + ".weight");
  const RowCodec codec = other != encodings_.others.end() ? other->second : encodings_.resident;
  require(is_coded(codec) || codec == codec_of(dtype_), name + " is not of the model's dtype");
  return matrix(name, rows, columns, codec);
}

RowMatrix NamedTensors::matrix(const std::string& name, std::size_t rows, std::size_t columns,
                               RowCodec codec) {
  RowMatrix weights;
  weights.rows = rows;
  weights.columns = columns;
  weights.stride = vector_nbytes(codec, columns);
  weights.codec = codec;
  weights.inputs = inputs_of(codec, encodings_.inputs);
  weights.data = tensor(name + ".weight", rows * columns, codec, rows * weights.stride);
  weights.bias = floats(name + ".bias", rows);
  return weights;
}

Norm NamedTensors::norm(const std::string& name, const NormStyle& style, std::size_t width,
                        std::size_t elements) {
  Norm norm;
  norm.kind = style.kind;
  norm.width = width;
  norm.epsilon = style.epsilon;
  norm.weight = floats(name + ".weight", elements, style.shift);
  norm.bias = floats(name + ".bias", elements);
  return norm;
}

const float* NamedTensors::wide_floats(const std::string& name, std::size_t n) const {
  const std::optional<Tensor> found = tensors_(name);
  if (!found.has_value()) return nullptr;
  require(found->element == Element::f32 && found->size() == n, name + " does not fit the model");
  return found->as<float>();
}

const float* NamedTensors::floats(const std::string& name, std::size_t n, float shift) {
  if (!contains(name) || encodings_.wide_vectors) return wide_floats(name, n);
  auto values = std::make_unique<float[]>(n);
  kernels_.to_f32(tensor(name, n, codec_of(dtype_), 0), n, values.get());
  if (shift != 0.0F)
    for (std::size_t i = 0; i < n; ++i) values[i] += shift;
  floats_.push_back(std::move(values));
  return floats_.back().get();
}

}  // namespace flashllm
