// Compute threads, resident linears and norms, and decode attention.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

#include "bind/bindings.h"
#include "kernels/attention.h"
#include "kernels/bandwidth.h"
#include "model/dense_ffn.h"
#include "model/ffn_layer.h"

namespace flashllm {

Dtype parse_dtype(const std::string& name) {
  if (name == "float32") return Dtype::f32;
  if (name == "float16") return Dtype::f16;
  if (name == "bfloat16") return Dtype::bf16;
  throw CoreError(ErrorKind::usage, "unknown dtype " + name);
}

// "auto" is the best of this processor, or what the environment asks for, so that a whole run can do with
// less.
SimdLevel parse_simd(const std::string& asked) {
  const char* wanted = asked == "auto" ? std::getenv("FLASHLLM_SIMD") : nullptr;
  const std::string name = wanted != nullptr ? wanted : asked;
  if (name == "auto") return best_simd_level();
  SimdLevel level = SimdLevel::scalar;
  if (name == "avx2") {
    level = SimdLevel::avx2;
  } else if (name == "avx512") {
    level = SimdLevel::avx512;
  } else if (name == "avx512_bf16") {
    level = SimdLevel::avx512_bf16;
  } else if (name != "scalar") {
    throw CoreError(ErrorKind::usage, "unknown SIMD level " + name);
  }
  kernel_table(level, Dtype::f32);  // throws where the processor lacks it
  return level;
}

Activation parse_activation(const std::string& name) {
  if (name == "relu") return Activation::relu;
  if (name == "squared_relu") return Activation::squared_relu;
  throw CoreError(ErrorKind::usage, "unknown activation " + name);
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

class ComputeTimer {
 public:
  explicit ComputeTimer(FfnCounters& counters) : counters_(counters) {}
  ~ComputeTimer() {
    const auto elapsed = std::chrono::steady_clock::now() - start_;
    counters_.compute_ns +=
        static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count());
  }
  ComputeTimer(const ComputeTimer&) = delete;
  ComputeTimer& operator=(const ComputeTimer&) = delete;

 private:
  FfnCounters& counters_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// A resident linear at few tokens; inputs and outputs have the weights' dtype.
class PyLinear {
 public:
  PyLinear(AnyArray weight, std::optional<FloatArray> bias, std::shared_ptr<ThreadPool> pool,
           std::shared_ptr<FfnCounters> counters, const std::string& simd)
      : weight_(std::move(weight)),
        bias_(std::move(bias)),
        pool_(std::move(pool)),
        counters_(std::move(counters)),
        simd_(parse_simd(simd)) {
    require(weight_.ndim() == 2, "a linear's weight must have two dimensions");
    weights_.dtype = dtype_of(weight_);
    weights_.data = static_cast<const std::byte*>(weight_.data());
    weights_.rows = weight_.shape(0);
    weights_.columns = weight_.shape(1);
    weights_.stride = weights_.columns * dtype_nbytes(weights_.dtype);
    if (bias_.has_value()) {
      require(bias_->shape(0) == weights_.rows, "a linear's bias must have one value a row");
      weights_.bias = bias_->data();
    }
  }

  // x: [tokens, columns], out: [tokens, rows]
  void forward(std::uintptr_t x, std::size_t tokens, std::uintptr_t out) {
    const ComputeTimer timer(*counters_);
    const KernelTable& kernels = kernel_table(simd_, weights_.dtype);
    x_.resize(tokens * weights_.columns);
    out_.resize(tokens * weights_.rows);
    kernels.to_f32(at_address<const void>(x), x_.size(), x_.data());
    linear(weights_, x_.data(), tokens, out_.data(), *pool_, simd_);
    kernels.from_f32(out_.data(), out_.size(), at_address<void>(out));
  }

  // The same for a prompt, where arithmetic is the limit.
  void forward_many(std::uintptr_t x, std::size_t tokens, std::uintptr_t out) {
    const ComputeTimer timer(*counters_);
    const PackedTokens packed(at_address<const std::byte>(x), tokens, weights_.columns, weights_.dtype,
                              *pool_, simd_);
    linear_many(weights_, packed, at_address<std::byte>(out), *pool_, simd_);
  }

  const LinearWeights& weights() const { return weights_; }

 private:
  AnyArray weight_;
  std::optional<FloatArray> bias_;
  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<FfnCounters> counters_;
  SimdLevel simd_;
  LinearWeights weights_;
  std::vector<float> x_, out_;
};

// A layer norm of rows of a model's dtype.
class PyNorm {
 public:
  PyNorm(std::size_t width, float epsilon, const std::optional<FloatArray>& weight,
         const std::optional<FloatArray>& bias, const std::string& dtype, std::shared_ptr<ThreadPool> pool,
         std::shared_ptr<FfnCounters> counters, const std::string& simd)
      : weight_(width, 1.0F),
        bias_(width, 0.0F),
        dtype_(parse_dtype(dtype)),
        pool_(std::move(pool)),
        counters_(std::move(counters)),
        simd_(parse_simd(simd)) {
    require(width != 0, "a norm needs a width");
    for (const auto& [given, kept] : {std::pair{&weight, &weight_}, std::pair{&bias, &bias_}}) {
      if (!given->has_value()) continue;
      require((*given)->shape(0) == width, "a norm's weight and bias must have its width");
      kept->assign((*given)->data(), (*given)->data() + width);
    }
    norm_ = {width, epsilon, weight_.data(), bias_.data()};
  }

  // x, out: [rows, width]
  void forward(std::uintptr_t x, std::size_t rows, std::uintptr_t out) {
    const ComputeTimer timer(*counters_);
    layer_norm_rows(norm_, at_address<const std::byte>(x), rows, dtype_, at_address<std::byte>(out), *pool_,
                    simd_);
  }

  const LayerNorm& norm() const { return norm_; }

 private:
  std::vector<float> weight_, bias_;
  Dtype dtype_;
  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<FfnCounters> counters_;
  SimdLevel simd_;
  LayerNorm norm_;
};

// A layer's FFN over every neuron, for prompts.
class PyDenseFfn {
 public:
  PyDenseFfn(const std::string& dtype, std::uint32_t stride, std::uint32_t d_model, std::uint32_t up,
             std::int32_t gate, std::uint32_t down, const std::string& activation,
             std::optional<FloatArray> up_bias, std::optional<FloatArray> down_bias,
             std::shared_ptr<ThreadPool> pool, std::shared_ptr<FfnCounters> counters, const std::string& simd)
      : layout_{parse_dtype(dtype), stride, d_model, up, down, gate},
        up_bias_(std::move(up_bias)),
        down_bias_(std::move(down_bias)),
        pool_(std::move(pool)),
        counters_(std::move(counters)),
        ffn_(layout_, parse_activation(activation), *pool_, parse_simd(simd)) {
    require(!down_bias_ || down_bias_->shape(0) == d_model, "down bias has the wrong length");
    require(gate < 0 || !up_bias_, "a gated FFN has no up bias");
  }

  void begin(std::uintptr_t x, std::size_t tokens) {
    const ComputeTimer timer(*counters_);
    ffn_.begin(at_address<const std::byte>(x), tokens);
  }

  void add(const ConstBytes& rows, std::size_t first, std::size_t count) {
    require(rows.nbytes() >= count * layout_.stride, "a block must be `count` whole rows");
    require(!up_bias_ || up_bias_->shape(0) >= first + count, "more neurons than biases");
    const nb::gil_scoped_release unlocked;
    const ComputeTimer timer(*counters_);
    ffn_.add(reinterpret_cast<const std::byte*>(rows.data()), count,
             up_bias_ ? up_bias_->data() + first : nullptr);
  }

  void activations(std::uintptr_t h) const { ffn_.copy_activations(at_address<float>(h)); }

  void finish(std::uintptr_t y) {
    const ComputeTimer timer(*counters_);
    ffn_.finish(down_bias_ ? down_bias_->data() : nullptr, at_address<std::byte>(y));
  }

 private:
  RowLayout layout_;
  std::optional<FloatArray> up_bias_, down_bias_;
  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<FfnCounters> counters_;
  DenseFfn ffn_;
};

class PyAttention {
 public:
  PyAttention(std::size_t heads, std::size_t kv_heads, std::size_t head_dim, std::size_t max_length,
              const std::string& dtype, std::shared_ptr<ThreadPool> pool,
              std::shared_ptr<FfnCounters> counters, const std::string& simd)
      : pool_(std::move(pool)), counters_(std::move(counters)), simd_(parse_simd(simd)) {
    require(heads != 0 && kv_heads != 0 && heads % kv_heads == 0 && head_dim != 0,
            "heads must be a multiple of kv_heads");
    shape_.heads = heads;
    shape_.kv_heads = kv_heads;
    shape_.head_dim = head_dim;
    shape_.dtype = parse_dtype(dtype);
    q_.resize(heads * head_dim);
    out_.resize(heads * head_dim);
    scores_.resize(heads * max_length);
  }

  // q, out: [heads, head_dim]; k, v: [kv_heads, length, head_dim] with the strides given in bytes
  void forward(std::uintptr_t q, std::uintptr_t k, std::uintptr_t v, std::size_t length,
               std::size_t head_stride, std::size_t row_stride, float scale, std::uintptr_t out) {
    const ComputeTimer timer(*counters_);
    require(length >= 1 && shape_.heads * length <= scores_.size(),
            "attention over more positions than planned");
    shape_.length = length;
    shape_.head_stride = head_stride;
    shape_.row_stride = row_stride;
    shape_.scale = scale;
    const KernelTable& kernels = kernel_table(simd_, shape_.dtype);
    kernels.to_f32(at_address<const void>(q), q_.size(), q_.data());
    attend_one(shape_, q_.data(), at_address<const std::byte>(k), at_address<const std::byte>(v),
               scores_.data(), out_.data(), *pool_, simd_);
    kernels.from_f32(out_.data(), out_.size(), at_address<void>(out));
  }

 private:
  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<FfnCounters> counters_;
  SimdLevel simd_;
  AttentionShape shape_;
  std::vector<float> q_, out_, scores_;
};

const char* simd_name(SimdLevel level) {
  switch (level) {
    case SimdLevel::avx512:
      return "avx512";
    case SimdLevel::avx512_bf16:
      return "avx512_bf16";
    case SimdLevel::avx2:
      return "avx2";
    case SimdLevel::scalar:
      break;
  }
  return "scalar";
}

}  // namespace

LinearWeights linear_weights_of(nb::handle linear) { return nb::cast<PyLinear&>(linear).weights(); }
LayerNorm layer_norm_of(nb::handle norm) { return nb::cast<PyNorm&>(norm).norm(); }

void init_compute(nb::module_& m) {
  m.def("best_simd_level", [] { return simd_name(best_simd_level()); });
  m.def("default_simd_level", [] { return simd_name(parse_simd("auto")); });
  m.def("has_amx", &has_amx);

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

  nb::class_<PyLinear>(m, "Linear")
      .def(nb::init<AnyArray, std::optional<FloatArray>, std::shared_ptr<ThreadPool>,
                    std::shared_ptr<FfnCounters>, const std::string&>(),
           nb::arg("weight"), nb::arg("bias").none(), nb::arg("pool"), nb::arg("counters"),
           nb::arg("simd") = "auto")
      .def("forward", &PyLinear::forward, nb::arg("x"), nb::arg("tokens"), nb::arg("out"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("forward_many", &PyLinear::forward_many, nb::arg("x"), nb::arg("tokens"), nb::arg("out"),
           nb::call_guard<nb::gil_scoped_release>());

  nb::class_<PyNorm>(m, "LayerNorm")
      .def(nb::init<std::size_t, float, const std::optional<FloatArray>&, const std::optional<FloatArray>&,
                    const std::string&, std::shared_ptr<ThreadPool>, std::shared_ptr<FfnCounters>,
                    const std::string&>(),
           nb::arg("width"), nb::arg("epsilon"), nb::arg("weight").none(), nb::arg("bias").none(),
           nb::arg("dtype"), nb::arg("pool"), nb::arg("counters"), nb::arg("simd") = "auto")
      .def("forward", &PyNorm::forward, nb::arg("x"), nb::arg("rows"), nb::arg("out"),
           nb::call_guard<nb::gil_scoped_release>());

  nb::class_<PyDenseFfn>(m, "DenseFfn")
      .def(nb::init<const std::string&, std::uint32_t, std::uint32_t, std::uint32_t, std::int32_t,
                    std::uint32_t, const std::string&, std::optional<FloatArray>, std::optional<FloatArray>,
                    std::shared_ptr<ThreadPool>, std::shared_ptr<FfnCounters>, const std::string&>(),
           nb::kw_only(), nb::arg("dtype"), nb::arg("stride"), nb::arg("d_model"), nb::arg("up"),
           nb::arg("gate"), nb::arg("down"), nb::arg("activation"), nb::arg("up_bias").none(),
           nb::arg("down_bias").none(), nb::arg("pool"), nb::arg("counters"), nb::arg("simd") = "auto")
      .def("begin", &PyDenseFfn::begin, nb::arg("x"), nb::arg("tokens"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("add", &PyDenseFfn::add, nb::arg("rows"), nb::arg("first"), nb::arg("count"))
      .def("activations", &PyDenseFfn::activations, nb::arg("h"), nb::call_guard<nb::gil_scoped_release>())
      .def("finish", &PyDenseFfn::finish, nb::arg("y"), nb::call_guard<nb::gil_scoped_release>());

  nb::class_<PyAttention>(m, "Attention")
      .def(nb::init<std::size_t, std::size_t, std::size_t, std::size_t, const std::string&,
                    std::shared_ptr<ThreadPool>, std::shared_ptr<FfnCounters>, const std::string&>(),
           nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("max_length"),
           nb::arg("dtype"), nb::arg("pool"), nb::arg("counters"), nb::arg("simd") = "auto")
      .def("forward", &PyAttention::forward, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("length"),
           nb::arg("head_stride"), nb::arg("row_stride"), nb::arg("scale"), nb::arg("out"),
           nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace flashllm
