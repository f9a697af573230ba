// Compute threads, SIMD levels, and resident linears.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "kernels/kernels.h"
#include "kernels/matmul.h"
#include "kernels/rows.h"
#include "model/arithmetic.h"
#include "pack/group_fit.h"
#include "pack/row_encode.h"

namespace flashllm {

namespace {

constexpr Named<RowCodec> kCodecs[] = {{"float32", RowCodec::f32},
                                       {"float16", RowCodec::f16},
                                       {"bfloat16", RowCodec::bf16},
                                       {"int8_32", RowCodec::int8_32},
                                       {"int8_64", RowCodec::int8_64},
                                       {"int4_32", RowCodec::int4_32},
                                       {"int4_64", RowCodec::int4_64},
                                       {"int4_32_min", RowCodec::int4_32_min},
                                       {"int4_64_min", RowCodec::int4_64_min},
                                       {"bf12", RowCodec::bf12},
                                       {"int5_32", RowCodec::int5_32},
                                       {"int5_32_min", RowCodec::int5_32_min},
                                       {"q4_k", RowCodec::q4_k},
                                       {"q5_k", RowCodec::q5_k},
                                       {"q6_k", RowCodec::q6_k},
                                       {"mxfp4", RowCodec::mxfp4},
                                       {"codes4", RowCodec::codes4},
                                       {"codes5", RowCodec::codes5},
                                       {"codes6", RowCodec::codes6},
                                       {"codes8", RowCodec::codes8},
                                       {"codes_fp4", RowCodec::codes_fp4}};

constexpr Named<InputForm> kInputs[] = {
    {"float32", InputForm::f32}, {"int8", InputForm::int8}, {"int16", InputForm::int16}};

constexpr nb::dlpack::dtype type_of(nb::dlpack::dtype_code code, std::uint8_t bits) {
  return {static_cast<std::uint8_t>(code), bits, 1};
}
constexpr std::pair<nb::dlpack::dtype, Element> kElements[] = {
    {type_of(nb::dlpack::dtype_code::Float, 32), Element::f32},
    {type_of(nb::dlpack::dtype_code::Float, 16), Element::f16},
    {type_of(nb::dlpack::dtype_code::Bfloat, 16), Element::bf16},
    {type_of(nb::dlpack::dtype_code::Int, 8), Element::i8},
    {type_of(nb::dlpack::dtype_code::UInt, 8), Element::u8}};

constexpr Named<Activation::Kind> kActivations[] = {{"relu", Activation::relu},
                                                    {"squared_relu", Activation::squared_relu},
                                                    {"drelu", Activation::drelu},
                                                    {"fatrelu", Activation::fatrelu},
                                                    {"silu", Activation::silu},
                                                    {"gelu", Activation::gelu},
                                                    {"gelu_tanh", Activation::gelu_tanh},
                                                    {"quick_gelu", Activation::quick_gelu},
                                                    {"clamped_swiglu", Activation::clamped_swiglu}};

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
using Halves = Array<std::uint16_t, One>;

// OverflowError in Python.
void throw_unless_whole(Encoded result) {
  if (result == Encoded::not_finite) throw std::overflow_error("a weight is not finite");
  if (result == Encoded::too_large)
    throw std::overflow_error("a group's scale is outside the range of float16");
}

// A linear over memory that is not its own: of the throughput engine, for measurements and tests; a model's
// are inside it. Weights, inputs and outputs are of one dtype (bf16 also as uint16), but for weights of a
// grouped encoding, whose rows are bytes. Rows are outputs, or inputs (`by_inputs`, encoded weights alone).
class PyLinear {
 public:
  PyLinear(Rows weight, std::optional<FloatArray> bias, const std::string& dtype,
           std::shared_ptr<ThreadPool> pool, const std::string& simd,
           const std::optional<std::string>& encoding, std::optional<std::size_t> columns,
           const std::string& inputs, bool by_inputs)
      : weight_(std::move(weight)),
        bias_(std::move(bias)),
        pool_(std::move(pool)),
        simd_(parse_simd(simd)),
        by_inputs_(by_inputs) {
    dtype_ = parse_dtype(dtype);
    weights_.codec = encoding.has_value() ? parse_codec(*encoding) : codec_of(dtype_);
    weights_.data = static_cast<const std::byte*>(weight_.data());
    weights_.rows = weight_.shape(0);
    weights_.inputs = inputs_of(weights_.codec, parse_inputs(inputs));
    weights_.columns = columns.value_or(weight_.shape(1));
    weights_.stride = vector_nbytes(weights_.codec, weights_.columns);
    require(by_inputs ? weights_.codec != RowCodec::bf12 && is_coded(weights_.codec)
                      : is_coded(weights_.codec) || weights_.codec == codec_of(dtype_),
            "a linear's encoding must be its dtype or one in groups");
    require(weight_.shape(1) * weight_.itemsize() == weights_.stride &&
                weight_.itemsize() == (is_coded(weights_.codec) ? 1 : dtype_nbytes(dtype_)),
            "a linear's weight is not of its dtype or encoding");
    if (bias_.has_value()) {
      require(bias_->shape(0) == width(), "a linear's bias must have one value an output");
      weights_.bias = bias_->data();
    }
  }

  // x: [tokens, inputs], out: [tokens, outputs]; as for few tokens, where memory is the limit.
  void forward(const Rows& x, const Rows& out) {
    check(x, out, dtype_);
    const nb::gil_scoped_release unlocked;
    few(x, out, dtype_);
  }

  // The same for a prompt, where arithmetic is the limit. Outputs in fp32 are not rounded.
  void forward_many(const Rows& x, const Rows& out) {
    const Dtype to = out.dtype() == nb::dtype<float>() ? Dtype::f32 : dtype_;
    check(x, out, to);
    const nb::gil_scoped_release unlocked;
    if (by_inputs_) return few(x, out, to);
    const PackedTokens packed(static_cast<const std::byte*>(x.data()), x.shape(0), weights_.columns, dtype_,
                              form_of_many(weights_.codec, weights_.inputs, dtype_, weights_.columns, simd_),
                              *pool_, simd_);
    linear_many(weights_, packed, to, static_cast<std::byte*>(out.data()), *pool_, simd_);
  }

 private:
  std::size_t inputs() const { return by_inputs_ ? weights_.rows : weights_.columns; }
  std::size_t width() const { return by_inputs_ ? weights_.columns : weights_.rows; }

  void few(const Rows& x, const Rows& out, Dtype to) const {
    const std::size_t tokens = x.shape(0);
    const auto* from = static_cast<const std::byte*>(x.data());
    auto* last = static_cast<std::byte*>(out.data());
    if (by_inputs_) return linear_by_columns(weights_, from, tokens, dtype_, to, last, *pool_, simd_);
    std::vector<float> wide(tokens * inputs()), made(tokens * width());
    Arithmetic arithmetic(dtype_, *pool_, simd_);
    arithmetic.widen(from, wide.size(), wide.data());
    linear(weights_, wide.data(), tokens, made.data(), *pool_, simd_);
    arithmetic.narrow(made.data(), made.size(), last);
  }

  void check(const Rows& x, const Rows& out, Dtype out_dtype) const {
    require(x.itemsize() == dtype_nbytes(dtype_) && out.itemsize() == dtype_nbytes(out_dtype),
            "inputs and outputs must be of the weights' dtype");
    require(x.shape(1) == inputs() && out.shape(0) == x.shape(0) && out.shape(1) == width(),
            "inputs must be [tokens, inputs], outputs [tokens, outputs]");
  }

  Rows weight_;
  std::optional<FloatArray> bias_;
  std::shared_ptr<ThreadPool> pool_;
  SimdLevel simd_;
  bool by_inputs_;
  Dtype dtype_ = Dtype::f32;
  RowMatrix weights_;
};

}  // namespace

void init_compute(nb::module_& m) {
  m.def("best_simd_level", [] { return name_of(best_simd_level(), kSimdLevels); });

  nb::class_<ThreadPool>(m, "ThreadPool")
      .def(nb::init<int>(), nb::arg("threads"))
      .def(
          "set_side_work", [](ThreadPool& self, Reader* reader) { self.set_side_work(reader); },
          nb::arg("reader"), nb::keep_alive<1, 2>())
      .def_prop_ro("threads", &ThreadPool::threads);

  m.def(
      "read_bandwidth",
      [](ThreadPool& pool, std::size_t nbytes, double seconds, const std::string& simd) {
        const SimdLevel level = parse_simd(simd);
        const nb::gil_scoped_release unlocked;
        return read_bandwidth(pool, nbytes, seconds, level);
      },
      nb::arg("pool"), nb::arg("nbytes"), nb::arg("seconds"), nb::arg("simd") = "auto");

  m.def(
      "fit_groups",
      [](const FloatRows& weights, const std::string& encoding, const Halves& scales,
         const std::optional<Halves>& minimums) {
        const GroupShape shape = group_shape(parse_codec(encoding));
        require(weights.shape(1) == shape.group && shape.has_minimum == minimums.has_value() &&
                    scales.shape(0) == weights.shape(0) &&
                    (!shape.has_minimum || minimums->shape(0) == weights.shape(0)),
                "groups are of the encoding's size, with a scale and, where it has them, a minimum each");
        const nb::gil_scoped_release unlocked;
        if (!fit_groups(shape, weights.data(), weights.shape(0), scales.data(),
                        shape.has_minimum ? minimums->data() : nullptr))
          throw_unless_whole(Encoded::too_large);
      },
      nb::arg("weights"), nb::arg("encoding"), nb::arg("scales"), nb::arg("minimums").none());
  m.def(
      "encode_rows",
      [](const Rows& weights, const std::string& dtype, const std::string& encoding, const ByteRows& out,
         ThreadPool& pool) {
        const RowCodec codec = parse_codec(encoding);
        const Dtype parsed = parse_dtype(dtype);
        group_shape(codec);
        require(weights.itemsize() == dtype_nbytes(parsed), "weights must be of the dtype that is said");
        require(weights.shape(1) != 0 && out.shape(0) == weights.shape(0) &&
                    out.shape(1) == vector_nbytes(codec, weights.shape(1)),
                "out must have a vector of the encoding for every row of weights");
        const nb::gil_scoped_release unlocked;
        throw_unless_whole(encode_rows(codec, static_cast<const std::byte*>(weights.data()), parsed,
                                       weights.shape(0), weights.shape(1), out.data(), pool,
                                       best_simd_level()));
      },
      nb::arg("weights"), nb::arg("dtype"), nb::arg("encoding"), nb::arg("out"), nb::arg("pool"));

  nb::class_<PyLinear>(m, "Linear")
      .def(nb::init<Rows, std::optional<FloatArray>, const std::string&, std::shared_ptr<ThreadPool>,
                    const std::string&, const std::optional<std::string>&, std::optional<std::size_t>,
                    const std::string&, bool>(),
           nb::arg("weight"), nb::arg("bias").none(), nb::arg("dtype"), nb::arg("pool"),
           nb::arg("simd") = "auto", nb::arg("encoding").none() = nb::none(),
           nb::arg("columns").none() = nb::none(), nb::arg("inputs") = "float32",
           nb::arg("by_inputs") = false)
      .def("forward", &PyLinear::forward, nb::arg("x"), nb::arg("out"))
      .def("forward_many", &PyLinear::forward_many, nb::arg("x"), nb::arg("out"));
}

}  // namespace flashllm
