// Compute threads, SIMD levels, and resident linears.
#include <stdexcept>
#include <vector>

#include "bind/bindings.h"
#include "io/error.h"
#include "kernels/kernels.h"
#include "kernels/matmul.h"
#include "kernels/rows.h"
#include "kernels/thread_pool.h"
#include "model/arithmetic.h"
#include "pack/row_encode.h"

namespace flashllm {

namespace {

#define FLASHLLM_NAMED(name, ...) NAMED(RowCodec, name),
constexpr Named<RowCodec> kCodecs[] = {{"float32", RowCodec::f32},
                                       {"float16", RowCodec::f16},
                                       {"bfloat16", RowCodec::bf16},
                                       FLASHLLM_CODECS(FLASHLLM_NAMED)};
#undef FLASHLLM_NAMED

constexpr Named<InputForm> kInputs[] = {
    {"float32", InputForm::f32}, NAMED(InputForm, int8), NAMED(InputForm, int16)};

constexpr nb::dlpack::dtype type_of(nb::dlpack::dtype_code code, std::uint8_t bits) {
  return {static_cast<std::uint8_t>(code), bits, 1};
}
constexpr std::pair<nb::dlpack::dtype, Element> kElements[] = {
    {type_of(nb::dlpack::dtype_code::Float, 32), Element::f32},
    {type_of(nb::dlpack::dtype_code::Float, 16), Element::f16},
    {type_of(nb::dlpack::dtype_code::Bfloat, 16), Element::bf16},
    {type_of(nb::dlpack::dtype_code::Int, 8), Element::i8},
    {type_of(nb::dlpack::dtype_code::UInt, 8), Element::u8}};

constexpr Named<Activation::Kind> kActivations[] = {
    NAMED(Activation, relu),      NAMED(Activation, squared_relu), NAMED(Activation, drelu),
    NAMED(Activation, fatrelu),   NAMED(Activation, silu),         NAMED(Activation, gelu),
    NAMED(Activation, gelu_tanh), NAMED(Activation, quick_gelu),   NAMED(Activation, clamped_swiglu)};

}  // namespace

RowCodec parse_codec(const std::string& name) { return by_name("an encoding", name, kCodecs); }

std::map<std::string, RowCodec> parse_codecs(const std::map<std::string, std::string>& names) {
  std::map<std::string, RowCodec> codecs;
  for (const auto& [of, name] : names) codecs.emplace(of, parse_codec(name));
  return codecs;
}

InputForm parse_inputs(const std::string& name) { return by_name("inputs", name, kInputs); }

SimdLevel parse_simd(const std::string& name) {
  if (name == "auto") return best_simd_level();
  const SimdLevel level = by_name("a SIMD level", name, kSimdLevels);
  require_simd_level(level);
  return level;
}

Activation parse_activation(const std::string& name, float threshold, float cut) {
  return {by_name("an activation", name, kActivations), threshold, cut};
}

TensorSource tensors_of(nb::dict arrays) {
  return [arrays = std::move(arrays)](const std::string& name) -> std::optional<Tensor> {
    if (!arrays.contains(name.c_str())) return std::nullopt;
    const auto array = nb::cast<AnyArray>(arrays[name.c_str()]);
    Tensor tensor{static_cast<const std::byte*>(array.data()), Element::other, array.itemsize(), {}};
    for (const auto& [type, element] : kElements)
      if (array.dtype() == type) tensor.element = element;
    for (std::size_t i = 0; i < array.ndim(); ++i) tensor.shape.push_back(array.shape(i));
    return tensor;
  };
}

namespace {

using Rows = Array<Two>;

// OverflowError in Python.
void throw_unless_whole(Encoded result) {
  if (result == Encoded::not_finite) throw std::overflow_error("a weight is not finite");
  if (result == Encoded::too_large)
    throw std::overflow_error("a group's scale is outside the range of float16");
}

// One linear over weights that are not its own, for measurements and tests; a model's are inside it. Weights,
// inputs and outputs are of one dtype (bf16 also as uint16), but for weights of a grouped encoding, whose
// rows are bytes.
struct PyLinear {
  RowMatrix weights;  // rows are outputs, or inputs (`by_inputs`, coded weights alone)
  Dtype dtype;
  bool by_inputs;
  ThreadPool& pool;
  SimdLevel level;

  std::size_t inputs() const { return by_inputs ? weights.rows : weights.columns; }
  std::size_t outputs() const { return by_inputs ? weights.columns : weights.rows; }

  // x: [tokens, inputs], out: [tokens, outputs]; as for few tokens, where memory is the limit. `many`: as for
  // a prompt, where arithmetic is; outputs may then be fp32, not rounded.
  void forward(const Rows& x, const Rows& out, bool many) const {
    const Dtype to = many && out.dtype() == nb::dtype<float>() ? Dtype::f32 : dtype;
    const std::size_t tokens = x.shape(0);
    require_dtype(x, dtype, "inputs");
    require_dtype(out, to, "outputs");
    require(x.shape(1) == inputs() && out.shape(0) == tokens && out.shape(1) == outputs(),
            "inputs must be [tokens, inputs], outputs [tokens, outputs]");
    const auto* from = static_cast<const std::byte*>(x.data());
    auto* made = static_cast<std::byte*>(out.data());
    if (by_inputs) return linear_by_columns(weights, from, tokens, dtype, to, made, pool, level);
    if (many) {
      const TokenForm form = form_of_many(weights.codec, weights.inputs, dtype, weights.columns, level);
      const PackedTokens packed(from, tokens, weights.columns, dtype, form, pool, level);
      return linear_many(weights, packed, to, made, pool, level);
    }
    std::vector<float> wide(tokens * inputs()), sums(tokens * outputs());
    Arithmetic arithmetic(dtype, pool, level);
    arithmetic.widen(from, wide.size(), wide.data());
    linear(weights, wide.data(), tokens, sums.data(), pool, level);
    arithmetic.narrow(sums.data(), sums.size(), made);
  }
};

void make_linear(PyLinear* self, const Rows& weight, const std::optional<FloatArray>& bias,
                 const std::string& dtype, ThreadPool& pool, const std::string& simd,
                 const std::optional<std::string>& encoding, std::optional<std::size_t> columns,
                 const std::string& inputs, bool by_inputs) {
  const Dtype parsed = parse_dtype(dtype);
  const RowCodec codec = encoding ? parse_codec(*encoding) : codec_of(parsed);
  require(
      by_inputs ? is_coded(codec) && codec != RowCodec::bf12 : is_coded(codec) || codec == codec_of(parsed),
      "a linear's encoding must be its dtype or one in groups");
  RowMatrix weights;
  weights.codec = codec;
  weights.data = static_cast<const std::byte*>(weight.data());
  weights.rows = weight.shape(0);
  weights.inputs = inputs_of(weights.codec, parse_inputs(inputs));
  weights.columns = columns.value_or(weight.shape(1));
  weights.stride = vector_nbytes(weights.codec, weights.columns);
  require(weight.shape(1) * weight.itemsize() == weights.stride &&
              weight.itemsize() == (is_coded(weights.codec) ? 1 : dtype_nbytes(parsed)),
          "a linear's weight is not of its dtype or encoding");
  require(!bias || bias->shape(0) == (by_inputs ? weights.columns : weights.rows),
          "a linear's bias must have one value an output");
  if (bias) weights.bias = bias->data();
  new (self) PyLinear{weights, parsed, by_inputs, pool, parse_simd(simd)};
}

}  // namespace

void init_compute(nb::module_& m) {
  m.def("best_simd_level", [] { return name_of(best_simd_level(), kSimdLevels); });

  nb::class_<ThreadPool>(m, "ThreadPool")
      .def(nb::init<int>(), "threads"_a)
      .def(
          "set_side_work", [](ThreadPool& self, Reader* reader) { self.set_side_work(reader); }, "reader"_a,
          nb::keep_alive<1, 2>());

  m.def(
      "read_bandwidth",
      [](ThreadPool& pool, std::size_t nbytes, double seconds, const std::string& simd) {
        const SimdLevel level = parse_simd(simd);
        const nb::gil_scoped_release unlocked;
        return read_bandwidth(pool, nbytes, seconds, level);
      },
      "pool"_a, "nbytes"_a, "seconds"_a, "simd"_a = "auto");

  m.def(
      "encode_rows",
      [](const Rows& weights, const std::string& dtype, const std::string& encoding, const ByteRows& out,
         ThreadPool& pool) {
        const RowCodec codec = parse_codec(encoding);
        const Dtype parsed = parse_dtype(dtype);
        group_shape(codec);
        require_dtype(weights, parsed, "weights");
        require(weights.shape(1) != 0 && out.shape(0) == weights.shape(0) &&
                    out.shape(1) == vector_nbytes(codec, weights.shape(1)),
                "out must have a vector of the encoding for every row of weights");
        const nb::gil_scoped_release unlocked;
        throw_unless_whole(encode_rows(codec, static_cast<const std::byte*>(weights.data()), parsed,
                                       weights.shape(0), weights.shape(1), out.data(), pool,
                                       best_simd_level()));
      },
      "weights"_a, "dtype"_a, "encoding"_a, "out"_a, "pool"_a);

  nb::class_<PyLinear>(m, "Linear")
      .def("__init__", &make_linear, "weight"_a, "bias"_a.none(), "dtype"_a, "pool"_a, "simd"_a = "auto",
           "encoding"_a.none() = nb::none(), "columns"_a.none() = nb::none(), "inputs"_a = "float32",
           "by_inputs"_a = false, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 5>())
      .def("forward", &PyLinear::forward, "x"_a, "out"_a, "many"_a = false,
           nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace flashllm
