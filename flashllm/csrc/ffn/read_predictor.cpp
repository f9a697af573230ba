#include "ffn/read_predictor.h"

#include <memory>
#include <optional>
#include <utility>

#include "io/error.h"

namespace flashllm {

namespace {

// By their names without the prefix.
class PredictorReader {
 public:
  explicit PredictorReader(const PredictorTensors& from) : from_(from) {}

  bool contains(const std::string& name) const { return from_.tensors(from_.prefix + name).has_value(); }
  Tensor get(const std::string& name) const {
    const std::optional<Tensor> found = from_.tensors(from_.prefix + name);
    require(found.has_value(), from_.prefix + name + " is missing");
    return *found;
  }
  float number(const std::string& name) const {
    const Tensor found = get(name);
    const bool is_half = found.is(Element::f16, {1});
    require(is_half || found.is(Element::f32, {1}), from_.prefix + name + " is not a number");
    float value = 0.0F;
    kernel_table(SimdLevel::scalar, is_half ? Dtype::f16 : Dtype::f32).to_f32(found.data, 1, &value);
    return value;
  }
  RowMatrix matrix(const std::string& name, RowCodec codec, std::size_t rows, std::size_t columns) const {
    const Tensor found = get(name);
    RowMatrix matrix;
    matrix.codec = codec;
    matrix.data = found.data;
    matrix.rows = rows;
    matrix.columns = columns;
    matrix.stride = vector_nbytes(codec, columns);
    check(!has_plane(codec) && found.shape.size() == 2 && found.shape[0] == rows &&
          found.nbytes() == rows * matrix.stride);
    return matrix;
  }
  // Floats, groups of 8 or 4 bits, or what an encoding says.
  RowMatrix factor(const std::string& name, std::size_t rows, std::size_t columns) const {
    const auto encoding = from_.encodings.find(from_.prefix + name);
    if (encoding != from_.encodings.end()) return matrix(name, encoding->second, rows, columns);
    switch (get(name).element) {
      case Element::f32:
        return matrix(name, RowCodec::f32, rows, columns);
      case Element::f16:
        return matrix(name, RowCodec::f16, rows, columns);
      case Element::bf16:
        return matrix(name, RowCodec::bf16, rows, columns);
      case Element::i8:
        return groups(name, RowCodec::int8_32, rows, columns);
      case Element::u8:
        return groups(name, RowCodec::int4_32, rows, columns);
      case Element::other:
        break;
    }
    throw CoreError(ErrorKind::usage, "weights must be float32, float16 or bfloat16");
  }
  static void check(bool fits) { require(fits, "a predictor's tensors do not fit the layer"); }

 private:
  RowMatrix groups(const std::string& name, RowCodec codec, std::size_t rows, std::size_t columns) const {
    RowMatrix groups = matrix(name, codec, rows, columns);
    groups.inputs = inputs_of(codec, InputForm::int16);
    return groups;
  }

  const PredictorTensors& from_;
};

std::unique_ptr<Predictor> read_low_rank(const PredictorReader& reader, std::size_t neurons,
                                         std::size_t width) {
  const Tensor first = reader.get("a");
  PredictorReader::check(!first.shape.empty());
  const RowMatrix a = reader.factor("a", first.shape[0], width);
  RowMatrix b = reader.factor("b", neurons, first.shape[0]);
  const bool relu = !reader.contains("bias");
  if (!relu) {
    const Tensor bias = reader.get("bias");
    PredictorReader::check(bias.is(Element::f32, {neurons}));
    b.bias = bias.as<float>();
  }
  return std::make_unique<LowRankPredictor>(a, b, reader.number("threshold"), relu);
}

std::unique_ptr<Predictor> read_coded_gate(const PredictorReader& reader, const FfnLayer& layer) {
  require(layer.layout().gated(), "a coded gate needs the gate itself in the rows");
  RowMatrix gate =
      reader.matrix("gate", RowCodec::int4_64, static_cast<std::size_t>(layer.num_neurons()), layer.width());
  gate.bias = layer.gate_bias();
  return std::make_unique<CodedGatePredictor>(gate, layer.activation(), reader.number("margin"));
}

}  // namespace

void read_predictor(const PredictorTensors& from, FfnLayer& layer, Prefetch* buffer) {
  const PredictorReader reader(from);
  const bool is_gate = reader.contains("gate");
  auto predictor = is_gate
                       ? read_coded_gate(reader, layer)
                       : read_low_rank(reader, static_cast<std::size_t>(layer.num_neurons()), layer.width());
  if (!is_gate && !reader.contains("bias")) layer.predict_by_stream();
  if (buffer == nullptr) return layer.set_predictor(std::move(predictor));
  layer.set_prefetch(std::move(predictor), *buffer);
}

}  // namespace flashllm
