// Counters, cache replay, and the FFN layer of the token loop.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "bind/bindings.h"
#include "bind/ffn_arguments.h"
#include "cache/cache_replay.h"
#include "ffn/ffn_layer.h"
#include "io/xxh3.h"

namespace flashllm {

namespace {

constexpr std::size_t kTraceStreams = 3;  // the order of flashllm/format/trace.py
using TraceArray = Exact<nb::ndarray<const std::uint8_t, nb::ndim<4>, nb::device::cpu, nb::c_contig>>;

std::vector<std::int32_t> checked_ids(const IdArray& active, std::int32_t units) {
  std::vector<std::int32_t> ids(active.data(), active.data() + active.shape(0));
  for (std::size_t i = 0; i < ids.size(); ++i)
    require(ids[i] >= 0 && ids[i] < units && (i == 0 || ids[i] > ids[i - 1]),
            "active neurons must be ascending ids of this layer");
  return ids;
}

std::byte* bytes_of(const ByteArray& array) { return reinterpret_cast<std::byte*>(array.data()); }

// How many units of `nbytes` memory holds, at most `most`.
std::int32_t units_in(const ByteArray& memory, std::size_t nbytes, std::int32_t most,
                      const std::string& what) {
  require(nbytes != 0, what + " needs units that have bytes");
  require(reinterpret_cast<std::uintptr_t>(memory.data()) % kHashedMultiple == 0,
          what + " must start at a multiple of 64 bytes; take the memory from allocate()");
  return static_cast<std::int32_t>(
      std::min<std::size_t>(memory.nbytes() / nbytes, static_cast<std::size_t>(most)));
}

nb::dict take(FfnCounters& counters) {
  nb::dict result;
  result["io_ns"] = counters.io_ns;
  result["memory_ns"] = counters.memory_ns;
  result["compute_ns"] = counters.compute_ns;
  result["io_busy_ns"] = counters.io_busy_ns;
  result["bytes_read"] = counters.bytes_read;
  result["requests"] = counters.requests;
  result["retries"] = counters.retries;
  result["active"] = counters.active;
  result["hits"] = counters.hits;
  result["misses"] = counters.misses;
  result["moves"] = counters.moves;
  result["parts"] = counters.parts;
  result["united"] = counters.united;
  result["rejected_bytes"] = counters.rejected_bytes;
  result["prefetched"] = counters.prefetched;
  result["prefetch_used"] = counters.prefetch_used;
  counters = FfnCounters{};
  return result;
}

// A prefetch buffer with all it refers to.
class PyPrefetch {
 public:
  PyPrefetch(ByteArray rows, std::uint32_t stride, std::int32_t num_neurons, std::shared_ptr<Reader> reader,
             std::shared_ptr<DirectFile> file)
      : rows_(std::move(rows)), reader_(std::move(reader)), file_(std::move(file)) {
    require(num_neurons > 0, "a prefetch buffer needs neurons");
    const std::int32_t capacity = units_in(rows_, stride, num_neurons, "a prefetch buffer");
    require(capacity > 0, "a prefetch buffer needs room for at least one row");
    buffer_ = std::make_unique<Prefetch>(bytes_of(rows_), capacity, stride, num_neurons, *reader_, *file_);
  }
  Prefetch& buffer() { return *buffer_; }

 private:
  ByteArray rows_;
  std::shared_ptr<Reader> reader_;
  std::shared_ptr<DirectFile> file_;
  std::unique_ptr<Prefetch> buffer_;
};

using Biases = Exact<nb::ndarray<const float, nb::ndim<2>, nb::device::cpu, nb::c_contig>>;

// A layer with all it refers to, from keyword arguments.
class PyFfnLayer {
 public:
  explicit PyFfnLayer(const nb::kwargs& arguments) : arguments_(arguments) {
    const auto dtype = arguments_.get<std::string>("dtype");  // of x and y
    FfnLayerOptions options = arguments_.options(dtype);
    const RowUnits units = options.units();
    const std::size_t nbytes = static_cast<std::size_t>(units.size) * options.format.stride;
    const auto rows = arguments_.get<ByteArray>("rows");
    options.capacity = units_in(rows, nbytes, units.count(), "the neuron cache");
    const auto bypass_rows = arguments_.get<std::optional<ByteArray>>("bypass_rows");
    if (bypass_rows) options.bypass_capacity = units_in(*bypass_rows, nbytes, units.count(), "bypass rows");
    require(options.capacity + options.bypass_capacity > 0,
            "the neuron cache needs room for at least one row");
    layer_ = std::make_unique<FfnLayer>(
        options, arguments_.get<Reader&>("reader"), arguments_.get<const DirectFile&>("file"),
        arguments_.get<ThreadPool&>("pool"), bytes_of(rows), bypass_rows ? bytes_of(*bypass_rows) : nullptr,
        arguments_.get<FfnCounters&>("counters"));
    arguments_.require_all_taken();
    arguments_.release("popularity");
    dtype_ = parse_dtype(dtype);
    level_ = options.simd;
    kernels_ = &kernel_table(options.simd, dtype_);
    element_nbytes_ = dtype_nbytes(dtype_);
    x_.resize(options.format.d_model);
    y_.resize(options.format.d_model);
  }

  // Factors of 8 bits come with a scale for each row, others without. With `prefetch` it is the predictor
  // that tells this layer's neurons from the input of the layer before, and `prefetch` holds what is read on
  // its word.
  void set_predictor(const AnyArray& a, const AnyArray& b, const FloatArray& bias, float threshold,
                     const std::optional<AnyArray>& a_scale, const std::optional<AnyArray>& b_scale,
                     std::shared_ptr<PyPrefetch> prefetch) {
    require(a.ndim() == 2 && b.ndim() == 2 && b.shape(0) == bias.shape(0) &&
                b.shape(0) == static_cast<std::size_t>(layer_->num_neurons()),
            "predictor factors do not fit the layer");
    auto predictor =
        std::make_unique<LowRankPredictor>(factor_of(a, a_scale, nullptr, layer_->width()),
                                           factor_of(b, b_scale, bias.data(), a.shape(0)), threshold);
    PredictorArrays& kept = prefetch == nullptr ? predictor_arrays_ : prefetch_arrays_;
    if (prefetch == nullptr) {
      layer_->set_predictor(std::move(predictor));
    } else {
      require(prefetch->buffer().stride() == layer_->layout().stride,
              "prefetched rows have another stride than the layer's");
      layer_->set_prefetch(std::move(predictor), prefetch->buffer());
      prefetch_ = std::move(prefetch);
    }
    kept = {a, b, bias, a_scale, b_scale};
  }

  // PowerInfer's kind of predictor: b relu(a x) >= threshold, of the states before the FFN's norm. a [rank,
  // d_model] and b [num_neurons, rank]: floats, or bytes of an encoding.
  void set_relu_predictor(const AnyArray& a, const AnyArray& b, float threshold,
                          const std::optional<std::string>& a_encoding,
                          const std::optional<std::string>& b_encoding) {
    require(a.ndim() == 2 && b.ndim() == 2, "predictor factors do not fit the layer");
    const auto neurons = static_cast<std::size_t>(layer_->num_neurons());
    const RowMatrix first = stored_factor(a, a.shape(0), layer_->width(), a_encoding);
    const RowMatrix second = stored_factor(b, neurons, a.shape(0), b_encoding);
    layer_->set_predictor(std::make_unique<LowRankPredictor>(first, second, threshold, true));
    layer_->predict_by_stream();
    relu_arrays_ = {a, b};
  }

  // The layer's gate in codes of 4 bits as the predictor: [num_neurons, bytes of a row].
  void set_coded_gate(const AnyArray& codes, float margin) {
    const auto neurons = static_cast<std::size_t>(layer_->num_neurons());
    RowMatrix gate;
    gate.codec = RowCodec::int4_64;
    gate.rows = neurons;
    gate.columns = layer_->width();
    gate.stride = vector_nbytes(gate.codec, gate.columns);
    require(layer_->layout().gated(), "a coded gate needs the gate itself in the rows");
    require(codes.ndim() == 2 && codes.dtype() == nb::dtype<std::uint8_t>() && codes.shape(0) == neurons &&
                codes.shape(1) == gate.stride,
            "a coded gate does not fit the layer");
    gate.data = static_cast<const std::byte*>(codes.data());
    gate.bias = layer_->gate_bias();
    layer_->set_predictor(std::make_unique<CodedGatePredictor>(gate, layer_->activation(), margin));
    coded_gate_ = codes;
  }

  // The layer's neurons are `experts` of `size` each and `shared` behind them. weights: [experts, d_model] of
  // the layer's dtype (bf16 as uint16); bias [experts], shared_gate [1, d_model], down_bias [experts,
  // d_model]: or None.
  void set_router(const AnyArray& weights, std::size_t chosen, std::size_t size, std::size_t shared,
                  bool softmax_of_all, bool normalized, const std::optional<FloatArray>& bias,
                  const std::optional<AnyArray>& shared_gate, const std::optional<Biases>& down_bias) {
    require(weights.ndim() == 2, "a router must be [experts, d_model]");
    require(!bias || bias->shape(0) == weights.shape(0), "a router's bias must be [experts]");
    ExpertsSpec spec;
    spec.count = weights.shape(0);
    spec.chosen = chosen;
    spec.size = size;
    spec.shared = shared;
    spec.softmax_of_all = softmax_of_all;
    spec.normalized = normalized;
    RowMatrix router = resident_matrix(weights, spec.count);
    router.bias = bias ? bias->data() : nullptr;
    const RowMatrix gate = shared_gate ? resident_matrix(*shared_gate, 1) : RowMatrix{};
    require(!down_bias || (down_bias->shape(0) == spec.count && down_bias->shape(1) == layer_->width()),
            "down biases of experts must be [experts, d_model]");
    auto made = std::make_unique<Router>(spec, router, gate, dtype_, level_);
    if (down_bias) made->set_down_bias(down_bias->data());
    layer_->set_router(std::move(made));
    router_arrays_ = {weights, bias, shared_gate, down_bias};
  }

  // activity: [tokens, layers, streams, bytes of a bit set] of whole words, kept and reread at every pass.
  // Comes after the predictors.
  void set_trace(TraceArray activity, std::size_t layer) {
    const std::size_t set_nbytes = activity.shape(3);
    require(activity.shape(2) == kTraceStreams && layer < activity.shape(1) && set_nbytes % 8 == 0 &&
                set_nbytes * 8 >= static_cast<std::size_t>(layer_->num_neurons()),
            "the trace does not fit the layer");
    trace_array_ = std::move(activity);
    const std::size_t set_words = set_nbytes / 8;
    ActivityTrace active;
    active.active =
        reinterpret_cast<const std::uint64_t*>(trace_array_.data()) + layer * kTraceStreams * set_words;
    active.firing = active.active + set_words;
    active.token_words = trace_array_.shape(1) * kTraceStreams * set_words;
    active.tokens = trace_array_.shape(0);
    active.units = layer_->units();
    ActivityTrace prefetched = active;
    prefetched.active = active.firing + set_words;
    prefetched.firing = nullptr;
    layer_->set_trace(active, prefetched);
  }

  // x, y: [tokens, d_model] of the dtype; each token has its own active set.
  void forward(std::uintptr_t x, std::size_t tokens, std::uintptr_t y) {
    for (std::size_t t = 0; t < tokens; ++t) {
      load(x, t);
      layer_->forward(x_.data(), t, layer_->predict(x_.data(), t), y_.data());
      store(y, t);
    }
  }

  // One token over a given active set (ascending units).
  void forward_active(std::uintptr_t x, const IdArray& active, std::uintptr_t y) {
    const std::vector<std::int32_t> ids = checked_ids(active, layer_->units().count());
    const nb::gil_scoped_release unlocked;
    load(x, 0);
    layer_->forward(x_.data(), 0, ids, y_.data());
    store(y, 0);
  }

  std::vector<std::int32_t> predict(std::uintptr_t x) {
    load(x, 0);
    return layer_->predict(x_.data(), 0);
  }

  void begin_fill(std::uintptr_t x, std::size_t tokens) {
    std::vector<float> inputs(tokens * x_.size());
    kernels_->to_f32(at_address<const void>(x), inputs.size(), inputs.data());
    layer_->begin_fill(inputs.data(), tokens);
  }

  void fill_from(const ConstBytes& rows, std::int32_t first_neuron, std::int32_t count) {
    require(first_neuron >= 0 && count >= 0 && count <= INT32_MAX - first_neuron &&
                rows.nbytes() >= static_cast<std::size_t>(count) * layer_->layout().stride,
            "rows to fill from must be `count` whole rows from a neuron on");
    const nb::gil_scoped_release unlocked;
    layer_->fill_from(reinterpret_cast<const std::byte*>(rows.data()), first_neuron, count);
  }

  FfnLayer& layer() { return *layer_; }

 private:
  void load(std::uintptr_t x, std::size_t token) {
    kernels_->to_f32(at_address<const std::byte>(x) + token * x_.size() * element_nbytes_, x_.size(),
                     x_.data());
  }
  void store(std::uintptr_t y, std::size_t token) {
    kernels_->from_f32(y_.data(), y_.size(), at_address<std::byte>(y) + token * y_.size() * element_nbytes_);
  }

  // A predictor's factor [rows, columns]: floats, codes of 8 bits, or bytes of 4-bit groups.
  static RowMatrix factor_of(const AnyArray& array, const std::optional<AnyArray>& scale, const float* bias,
                             std::size_t columns) {
    const bool codes = array.dtype() == nb::dtype<std::int8_t>();
    const bool groups = array.dtype() == nb::dtype<std::uint8_t>();
    require(codes == scale.has_value(), "8-bit predictor factors need scales, and others have none");
    RowMatrix matrix;
    matrix.codec = groups ? RowCodec::int4_32 : codes ? RowCodec::int8 : codec_of(dtype_of(array));
    if (groups) matrix.inputs = InputForm::int8;
    matrix.data = static_cast<const std::byte*>(array.data());
    matrix.rows = array.shape(0);
    matrix.columns = columns;
    matrix.stride = vector_nbytes(matrix.codec, matrix.columns);
    require(array.shape(1) * array.itemsize() == matrix.stride, "predictor factors do not fit the layer");
    matrix.bias = bias;
    if (codes) {
      require(scale->ndim() == 1 && scale->shape(0) == array.shape(0) && dtype_of(*scale) == Dtype::f16,
              "an 8-bit predictor factor needs one float16 scale a row");
      matrix.scales = static_cast<const std::uint16_t*>(scale->data());
    }
    return matrix;
  }

  static RowMatrix stored_factor(const AnyArray& array, std::size_t rows, std::size_t columns,
                                 const std::optional<std::string>& encoding) {
    RowMatrix matrix;
    matrix.codec = encoding ? parse_codec(*encoding) : codec_of(dtype_of(array));
    matrix.data = static_cast<const std::byte*>(array.data());
    matrix.rows = rows;
    matrix.columns = columns;
    matrix.stride = vector_nbytes(matrix.codec, columns);
    require(!has_plane(matrix.codec) && array.shape(0) == rows && array.nbytes() == rows * matrix.stride,
            "predictor factors do not fit the layer");
    return matrix;
  }

  // [rows, d_model] of the layer's dtype.
  RowMatrix resident_matrix(const AnyArray& array, std::size_t rows) const {
    require(array.size() == rows * layer_->width() && array.itemsize() == element_nbytes_,
            "a router does not fit the layer");
    RowMatrix matrix;
    matrix.codec = codec_of(dtype_);
    matrix.data = static_cast<const std::byte*>(array.data());
    matrix.rows = rows;
    matrix.columns = layer_->width();
    matrix.stride = vector_nbytes(matrix.codec, matrix.columns);
    return matrix;
  }

  struct PredictorArrays {
    AnyArray a, b;
    FloatArray bias;
    std::optional<AnyArray> a_scale, b_scale;
  };

  FfnArguments arguments_;  // keeps what they refer to alive
  PredictorArrays predictor_arrays_, prefetch_arrays_;
  AnyArray coded_gate_;
  std::tuple<AnyArray, AnyArray> relu_arrays_;
  std::tuple<AnyArray, std::optional<FloatArray>, std::optional<AnyArray>, std::optional<Biases>>
      router_arrays_;
  Dtype dtype_ = Dtype::f32;
  SimdLevel level_ = SimdLevel::scalar;
  std::shared_ptr<PyPrefetch> prefetch_;
  TraceArray trace_array_;
  const KernelTable* kernels_ = nullptr;
  std::size_t element_nbytes_ = 0;
  std::vector<float> x_, y_;
  std::unique_ptr<FfnLayer> layer_;
};

}  // namespace

FfnLayer& ffn_layer_of(nb::handle ffn) { return nb::cast<PyFfnLayer&>(ffn).layer(); }

void init_ffn(nb::module_& m) {
  // (above, low, high): the activation is not zero above `above`, and between `low` and `high` where low <
  // high.
  m.def(
      "firing_range",
      [](const std::string& activation, float threshold, float cut) {
        const FiringRange range = firing_range(parse_activation(activation, threshold, cut));
        return std::make_tuple(range.above, range.low, range.high);
      },
      nb::arg("activation"), nb::arg("threshold") = 0.0F, nb::arg("cut") = 0.0F);

  nb::class_<FfnCounters>(m, "Counters").def(nb::init<>()).def("take", &take);

  nb::class_<PyPrefetch>(m, "Prefetch")
      .def(nb::init<ByteArray, std::uint32_t, std::int32_t, std::shared_ptr<Reader>,
                    std::shared_ptr<DirectFile>>(),
           nb::kw_only(), nb::arg("rows"), nb::arg("stride"), nb::arg("num_neurons"), nb::arg("reader"),
           nb::arg("file"));

  nb::class_<CacheReplay>(m, "CacheReplay")
      .def(
          "__init__",
          [](CacheReplay* self, const std::string& policy, std::int32_t num_units, std::int32_t capacity,
             std::int32_t bypass, std::int32_t window, std::optional<FloatArray> popularity) {
            require(!popularity || popularity->shape(0) == static_cast<std::size_t>(num_units),
                    "popularity has the wrong length");
            new (self) CacheReplay(policy, num_units, capacity, bypass, window,
                                   popularity ? popularity->data() : nullptr);
          },
          nb::kw_only(), nb::arg("cache_policy"), nb::arg("num_units"), nb::arg("capacity"),
          nb::arg("bypass"), nb::arg("window"), nb::arg("popularity").none())
      .def(
          "token",
          [](CacheReplay& self, const IdArray& active) {
            return self.token(checked_ids(active, self.num_units()));
          },
          nb::arg("active"))
      .def(
          "missing",
          [](const CacheReplay& self, const IdArray& units) {
            return self.missing(checked_ids(units, self.num_units()));
          },
          nb::arg("units"));

  nb::class_<PyFfnLayer>(m, "FfnLayer")
      .def("__init__",
           [](PyFfnLayer* self, const nb::kwargs& arguments) { new (self) PyFfnLayer(arguments); })
      .def("set_predictor", &PyFfnLayer::set_predictor, nb::arg("a"), nb::arg("b"), nb::arg("bias"),
           nb::arg("threshold"), nb::arg("a_scale").none() = nb::none(),
           nb::arg("b_scale").none() = nb::none(), nb::arg("prefetch").none() = nb::none())
      .def("set_relu_predictor", &PyFfnLayer::set_relu_predictor, nb::arg("a"), nb::arg("b"),
           nb::arg("threshold"), nb::arg("a_encoding").none() = nb::none(),
           nb::arg("b_encoding").none() = nb::none())
      .def("set_coded_gate", &PyFfnLayer::set_coded_gate, nb::arg("codes"), nb::arg("margin"))
      .def("predict_by_gate", [](PyFfnLayer& self) { self.layer().predict_by_gate(); })
      .def("set_router", &PyFfnLayer::set_router, nb::arg("weights"), nb::kw_only(), nb::arg("chosen"),
           nb::arg("size"), nb::arg("shared"), nb::arg("softmax_of_all"), nb::arg("normalized"),
           nb::arg("bias").none() = nb::none(), nb::arg("shared_gate").none() = nb::none(),
           nb::arg("down_bias").none() = nb::none())
      .def("set_trace", &PyFfnLayer::set_trace, nb::arg("activity"), nb::arg("layer"))
      .def("forward", &PyFfnLayer::forward, nb::arg("x"), nb::arg("tokens"), nb::arg("y"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("forward_active", &PyFfnLayer::forward_active, nb::arg("x"), nb::arg("active"), nb::arg("y"))
      .def("predict", &PyFfnLayer::predict, nb::arg("x"))
      .def("begin_fill", &PyFfnLayer::begin_fill, nb::arg("x"), nb::arg("tokens"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("fill_from", &PyFfnLayer::fill_from, nb::arg("rows"), nb::arg("first_neuron"), nb::arg("count"))
      .def("abandon_fill", [](PyFfnLayer& self) { self.layer().abandon_fill(); })
      .def(
          "set_capacity", [](PyFfnLayer& self, std::int32_t rows) { self.layer().set_capacity(rows); },
          nb::arg("rows"))
      .def("cached", [](PyFfnLayer& self) { return self.layer().cached(); })
      .def_prop_ro("capacity", [](PyFfnLayer& self) { return self.layer().capacity(); })
      .def_prop_ro("current_window",
                   [](PyFfnLayer& self) { return self.layer().cache().policy().current_window(); })
      .def_prop_ro("has_predictor", [](PyFfnLayer& self) { return self.layer().has_predictor(); });
}

}  // namespace flashllm
