// Compute threads, SIMD levels, and resident linears.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <vector>

#include "bind/bindings.h"
#include "kernels/kernels.h"
#include "kernels/matmul.h"
#include "kernels/rows.h"
#include "quantise/group_fit.h"

namespace flashllm {

Dtype parse_dtype(const std::string& name) {
  if (name == "float32") return Dtype::f32;
  if (name == "float16") return Dtype::f16;
  if (name == "bfloat16") return Dtype::bf16;
  throw CoreError(ErrorKind::usage, "unknown dtype " + name);
}

RowCodec parse_codec(const std::string& name) {
  if (name == "int8_32") return RowCodec::int8_32;
  if (name == "int8_64") return RowCodec::int8_64;
  if (name == "int4_32") return RowCodec::int4_32;
  if (name == "int4_64") return RowCodec::int4_64;
  if (name == "int4_32_min") return RowCodec::int4_32_min;
  if (name == "int4_64_min") return RowCodec::int4_64_min;
  if (name == "bf12") return RowCodec::bf12;
  if (name == "int5_32") return RowCodec::int5_32;
  if (name == "int5_32_min") return RowCodec::int5_32_min;
  if (name == "q4_k") return RowCodec::q4_k;
  if (name == "q5_k") return RowCodec::q5_k;
  if (name == "q6_k") return RowCodec::q6_k;
  if (name == "mxfp4") return RowCodec::mxfp4;
  if (name == "codes4") return RowCodec::codes4;
  if (name == "codes5") return RowCodec::codes5;
  if (name == "codes6") return RowCodec::codes6;
  if (name == "codes8") return RowCodec::codes8;
  if (name == "codes_fp4") return RowCodec::codes_fp4;
  return codec_of(parse_dtype(name));
}

ScalePlane plane_of(const AnyArray& scales, const std::optional<AnyArray>& minimums,
                    const std::optional<AnyArray>& factors, const std::optional<AnyArray>& minimum_factors,
                    std::size_t neurons, std::size_t width) {
  constexpr std::size_t kUnit = 32;
  ScalePlane plane;
  plane.group = factors && factors->shape(0) * kUnit > neurons ? kUnit / 2 : kUnit;
  const auto check_shape = [&](const AnyArray& array, std::size_t group, bool fits) {
    require(fits && array.ndim() == 2 && array.shape(0) * group == neurons && array.shape(1) == width,
            "a plane of scales does not fit the layer");
    return array.data();
  };
  const auto check = [&](const AnyArray& array, std::size_t group, bool half) {
    return check_shape(array, group,
                       half ? dtype_of(array) == Dtype::f16 : array.dtype() == nb::dtype<std::int8_t>());
  };
  if (scales.dtype() == nb::dtype<std::uint8_t>()) {
    plane.powers = static_cast<const std::uint8_t*>(
        check_shape(scales, kUnit, !minimums && !factors && !minimum_factors));
    return plane;
  }
  const std::size_t shared = factors ? kSharedFactors : plane.group;
  plane.scales = static_cast<const std::uint16_t*>(check(scales, shared, true));
  if (minimums) plane.minimums = static_cast<const std::uint16_t*>(check(*minimums, shared, true));
  if (factors) plane.factors = static_cast<const std::int8_t*>(check(*factors, plane.group, false));
  require(minimum_factors.has_value() == (factors && minimums), "a plane lacks factors, or has too many");
  if (minimum_factors)
    plane.minimum_factors = static_cast<const std::int8_t*>(check(*minimum_factors, plane.group, false));
  return plane;
}

InputForm parse_inputs(const std::string& name, RowCodec codec) {
  if (name != "float32" && name != "int8" && name != "int16")
    throw CoreError(ErrorKind::usage, "unknown form of inputs " + name);
  // The widest that was asked for and that the weights are multiplied by.
  if (name == "int16" && takes_inputs(codec, InputForm::int16)) return InputForm::int16;
  return name != "float32" && takes_inputs(codec, InputForm::int8) ? InputForm::int8 : InputForm::f32;
}

// "auto" is the best of this processor.
SimdLevel parse_simd(const std::string& name) {
  if (name == "auto") return best_simd_level();
  SimdLevel level = SimdLevel::scalar;
  if (name == "neon") {
    level = SimdLevel::neon;
  } else if (name == "avx2") {
    level = SimdLevel::avx2;
  } else if (name == "avx512") {
    level = SimdLevel::avx512;
  } else if (name == "avx512_bf16") {
    level = SimdLevel::avx512_bf16;
  } else if (name != "scalar") {
    throw CoreError(ErrorKind::usage, "unknown SIMD level " + name);
  }
  require_simd_level(level);
  return level;
}

namespace {

Activation::Kind parse_activation_kind(const std::string& name) {
  if (name == "relu") return Activation::relu;
  if (name == "squared_relu") return Activation::squared_relu;
  if (name == "drelu") return Activation::drelu;
  if (name == "fatrelu") return Activation::fatrelu;
  if (name == "silu") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "quick_gelu") return Activation::quick_gelu;
  if (name == "clamped_swiglu") return Activation::clamped_swiglu;
  throw CoreError(ErrorKind::usage, "unknown activation " + name);
}

}  // namespace

Activation parse_activation(const std::string& name, float threshold, float cut) {
  return {parse_activation_kind(name), threshold, cut};
}

Dtype dtype_of(const AnyArray& array) {
  if (array.dtype() == nb::dtype<float>()) return Dtype::f32;
  if (array.dtype().bits == 16) {
    if (array.dtype().code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float)) return Dtype::f16;
    if (array.dtype().code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat)) return Dtype::bf16;
  }
  throw CoreError(ErrorKind::usage, "weights must be float32, float16 or bfloat16");
}

namespace {

using Rows = Exact<nb::ndarray<nb::ndim<2>, nb::device::cpu, nb::c_contig>>;
using Groups = Exact<nb::ndarray<const float, nb::ndim<2>, nb::device::cpu, nb::c_contig>>;
using Fits = Exact<nb::ndarray<float, nb::ndim<1>, nb::device::cpu, nb::c_contig>>;

// A resident linear, for measurements and tests; a model's are inside it. Weights, inputs and outputs are of
// one dtype (bf16 also as uint16), but for weights of a grouped encoding, whose rows are bytes.
class PyLinear {
 public:
  PyLinear(Rows weight, std::optional<FloatArray> bias, const std::string& dtype,
           std::shared_ptr<ThreadPool> pool, const std::string& simd,
           const std::optional<std::string>& encoding, std::optional<std::size_t> columns,
           const std::string& inputs)
      : weight_(std::move(weight)), bias_(std::move(bias)), pool_(std::move(pool)), simd_(parse_simd(simd)) {
    dtype_ = parse_dtype(dtype);
    weights_.codec = encoding.has_value() ? parse_codec(*encoding) : codec_of(dtype_);
    weights_.data = static_cast<const std::byte*>(weight_.data());
    weights_.rows = weight_.shape(0);
    weights_.inputs = parse_inputs(inputs, weights_.codec);
    weights_.columns = columns.value_or(weight_.shape(1));
    weights_.stride = vector_nbytes(weights_.codec, weights_.columns);
    require(is_coded(weights_.codec) || weights_.codec == codec_of(dtype_),
            "a linear's encoding must be its dtype or one in groups");
    require(weight_.shape(1) * weight_.itemsize() == weights_.stride &&
                weight_.itemsize() == (is_coded(weights_.codec) ? 1 : dtype_nbytes(dtype_)),
            "a linear's weight is not of its dtype or encoding");
    if (bias_.has_value()) {
      require(bias_->shape(0) == weights_.rows, "a linear's bias must have one value a row");
      weights_.bias = bias_->data();
    }
  }

  // x: [tokens, columns], out: [tokens, rows]; as for few tokens, where memory is the limit.
  void forward(const Rows& x, const Rows& out) {
    check(x, out, dtype_);
    const nb::gil_scoped_release unlocked;
    const KernelTable& kernels = kernel_table(simd_, dtype_);
    x_.resize(x.size());
    out_.resize(out.size());
    kernels.to_f32(x.data(), x_.size(), x_.data());
    linear(weights_, x_.data(), x.shape(0), out_.data(), *pool_, simd_);
    kernels.from_f32(out_.data(), out_.size(), out.data());
  }

  // The same for a prompt, where arithmetic is the limit. Outputs in fp32 are not rounded.
  void forward_many(const Rows& x, const Rows& out) {
    const bool is_wide = out.dtype() == nb::dtype<float>();
    check(x, out, is_wide ? Dtype::f32 : dtype_);
    const nb::gil_scoped_release unlocked;
    const SimdLevel level = level_of_many(weights_.codec, simd_);
    const PackedTokens packed(static_cast<const std::byte*>(x.data()), x.shape(0), weights_.columns, dtype_,
                              *pool_, level);
    linear_many(weights_, packed, is_wide ? Dtype::f32 : dtype_, static_cast<std::byte*>(out.data()), *pool_,
                level);
  }

 private:
  void check(const Rows& x, const Rows& out, Dtype out_dtype) const {
    require(x.itemsize() == dtype_nbytes(dtype_) && out.itemsize() == dtype_nbytes(out_dtype),
            "inputs and outputs must be of the weights' dtype");
    require(x.shape(1) == weights_.columns && out.shape(0) == x.shape(0) && out.shape(1) == weights_.rows,
            "inputs must be [tokens, columns], outputs [tokens, rows]");
  }

  Rows weight_;
  std::optional<FloatArray> bias_;
  std::shared_ptr<ThreadPool> pool_;
  SimdLevel simd_;
  Dtype dtype_ = Dtype::f32;
  RowMatrix weights_;
  std::vector<float> x_, out_;
};

const char* simd_name(SimdLevel level) {
  switch (level) {
    case SimdLevel::avx512:
      return "avx512";
    case SimdLevel::avx512_bf16:
      return "avx512_bf16";
    case SimdLevel::avx2:
      return "avx2";
    case SimdLevel::neon:
      return "neon";
    case SimdLevel::scalar:
      break;
  }
  return "scalar";
}

}  // namespace

void init_compute(nb::module_& m) {
  m.def("best_simd_level", [] { return simd_name(best_simd_level()); });
  m.def("simd_levels", [] {
    std::vector<std::string> names;
    for (const SimdLevel level : simd_levels()) names.emplace_back(simd_name(level));
    return names;
  });

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
      [](const Groups& weights, std::size_t bits, std::optional<Fits> minimums, const Fits& scales) {
        const GroupFit fit{bits, weights.shape(1), minimums.has_value()};
        require((bits == 8 || bits == 4) && !(bits == 8 && fit.has_minimum),
                "groups have codes of 8 or 4 bits, and minimums with 4 alone");
        require(fit.group % 8 == 0 && scales.shape(0) == weights.shape(0) &&
                    (!fit.has_minimum || minimums->shape(0) == weights.shape(0)),
                "groups are a multiple of 8 weights, with a scale and a minimum each");
        const nb::gil_scoped_release unlocked;
        fit_groups(fit, weights.data(), weights.shape(0), scales.data(),
                   fit.has_minimum ? minimums->data() : nullptr);
      },
      nb::arg("weights"), nb::arg("bits"), nb::arg("minimums").none(), nb::arg("scales"));

  nb::class_<PyLinear>(m, "Linear")
      .def(nb::init<Rows, std::optional<FloatArray>, const std::string&, std::shared_ptr<ThreadPool>,
                    const std::string&, const std::optional<std::string>&, std::optional<std::size_t>,
                    const std::string&>(),
           nb::arg("weight"), nb::arg("bias").none(), nb::arg("dtype"), nb::arg("pool"),
           nb::arg("simd") = "auto", nb::arg("encoding").none() = nb::none(),
           nb::arg("columns").none() = nb::none(), nb::arg("inputs") = "float32")
      .def("forward", &PyLinear::forward, nb::arg("x"), nb::arg("out"))
      .def("forward_many", &PyLinear::forward_many, nb::arg("x"), nb::arg("out"));
}

}  // namespace flashllm
