// The slot table (for its tests), counters, and the FFN layer of the token loop.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "bind/bindings.h"
#include "cache/cache_replay.h"
#include "io/xxh3.h"
#include "model/ffn_layer.h"

namespace flashllm {

namespace {

constexpr std::size_t kTraceStreams = 3;  // active, firing, early: flashllm/format/trace.py
using TraceArray = Exact<nb::ndarray<const std::uint8_t, nb::ndim<4>, nb::device::cpu, nb::c_contig>>;

std::vector<std::int32_t> checked_ids(const IdArray& active, std::int32_t num_neurons) {
  std::vector<std::int32_t> ids(active.data(), active.data() + active.shape(0));
  for (std::size_t i = 0; i < ids.size(); ++i)
    require(ids[i] >= 0 && ids[i] < num_neurons && (i == 0 || ids[i] > ids[i - 1]),
            "active neurons must be ascending ids of this layer");
  return ids;
}

bool is_permutation(const IdArray& rows) {
  std::vector<bool> taken(rows.shape(0), false);
  for (std::size_t i = 0; i < rows.shape(0); ++i) {
    const std::int32_t row = rows.data()[i];
    if (row < 0 || static_cast<std::size_t>(row) >= rows.shape(0) || taken[static_cast<std::size_t>(row)])
      return false;
    taken[static_cast<std::size_t>(row)] = true;
  }
  return true;
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
  result["early_read"] = counters.early_read;
  result["early_used"] = counters.early_used;
  counters = FfnCounters{};
  return result;
}

// Early reads with all they refer to.
class PyEarlyReads {
 public:
  PyEarlyReads(ByteArray rows, std::uint32_t stride, std::int32_t num_neurons, std::shared_ptr<Reader> reader,
               std::shared_ptr<DirectFile> file)
      : rows_(std::move(rows)), reader_(std::move(reader)), file_(std::move(file)), stride_(stride) {
    require(stride != 0 && num_neurons > 0 && rows_.nbytes() >= stride, "early reads need room for a row");
    require(reinterpret_cast<std::uintptr_t>(rows_.data()) % kHashedMultiple == 0,
            "early rows must start at a multiple of 64 bytes; take them from allocate()");
    const auto capacity =
        std::min<std::size_t>(rows_.nbytes() / stride, static_cast<std::size_t>(num_neurons));
    reads_ = std::make_unique<EarlyReads>(reinterpret_cast<std::byte*>(rows_.data()),
                                          static_cast<std::int32_t>(capacity), stride, num_neurons, *reader_,
                                          *file_);
  }
  EarlyReads& reads() { return *reads_; }
  std::uint32_t stride() const { return stride_; }

 private:
  ByteArray rows_;
  std::shared_ptr<Reader> reader_;
  std::shared_ptr<DirectFile> file_;
  std::uint32_t stride_;
  std::unique_ptr<EarlyReads> reads_;
};

class PyFfnLayer {
 public:
  PyFfnLayer(int layer, const std::string& dtype, std::uint32_t stride, std::uint32_t d_model,
             std::int32_t num_neurons, std::uint32_t up, std::int32_t gate, std::uint32_t down,
             const std::string& activation, const std::string& cache_policy, std::int32_t window,
             std::optional<FloatArray> popularity, std::uint64_t file_offset,
             std::optional<FloatArray> up_bias, std::optional<FloatArray> down_bias, ChecksumArray checksums,
             ByteArray rows, std::optional<ByteArray> bypass_rows, std::shared_ptr<Reader> reader,
             std::shared_ptr<DirectFile> file, std::shared_ptr<ThreadPool> pool,
             std::shared_ptr<FfnCounters> counters, const std::string& simd, bool overlap, bool bundled,
             bool cached, std::optional<IdArray> row_of)
      : up_bias_(std::move(up_bias)),
        down_bias_(std::move(down_bias)),
        checksums_(std::move(checksums)),
        row_of_(std::move(row_of)),
        rows_(std::move(rows)),
        bypass_rows_(std::move(bypass_rows)),
        reader_(std::move(reader)),
        file_(std::move(file)),
        pool_(std::move(pool)),
        counters_(std::move(counters)) {
    FfnLayerOptions options;
    options.layout = {parse_dtype(dtype), stride, d_model, up, down, gate};
    options.layer = layer;
    options.num_neurons = num_neurons;
    options.cache_policy = cache_policy;
    options.window = window;
    options.activation = parse_activation(activation);
    options.file_offset = file_offset;
    options.simd = parse_simd(simd);
    options.overlap = overlap;
    options.bundled = bundled;
    options.cached = cached;
    element_nbytes_ = dtype_nbytes(options.layout.dtype);
    const auto fits = [&](std::size_t element) { return (element + d_model) * element_nbytes_ <= stride; };
    require(d_model != 0 && num_neurons > 0, "an FFN layer needs a width and neurons");
    require(fits(up) && fits(down) && (gate < 0 || fits(static_cast<std::size_t>(gate))),
            "a row's stride is shorter than its weights");
    require(stride >= kMinHashed && stride % kHashedMultiple == 0,
            "a row's stride must be a multiple of 64 bytes and at least 512, got " + std::to_string(stride));
    require(reinterpret_cast<std::uintptr_t>(rows_.data()) % kHashedMultiple == 0,
            "the neuron cache must start at a multiple of 64 bytes; take it from allocate()");
    require(gate < 0 || !up_bias_, "a gated FFN has no up bias");
    require(checksums_.shape(0) >= static_cast<std::size_t>(num_neurons), "too few checksums");
    require(rows_.nbytes() >= stride, "the neuron cache needs room for at least one row");
    require(!up_bias_ || up_bias_->shape(0) == static_cast<std::size_t>(num_neurons),
            "up bias has the wrong length");
    require(!down_bias_ || down_bias_->shape(0) == d_model, "down bias has the wrong length");
    options.capacity = static_cast<std::int32_t>(std::min<std::size_t>(rows_.nbytes() / stride, num_neurons));
    options.checksums = checksums_.data();
    if (row_of_) {
      require(row_of_->shape(0) == static_cast<std::size_t>(num_neurons) && is_permutation(*row_of_),
              "row_of must give every neuron a row of its own");
      options.row_of = row_of_->data();
    }
    if (bypass_rows_) {
      require(reinterpret_cast<std::uintptr_t>(bypass_rows_->data()) % kHashedMultiple == 0,
              "bypass rows must start at a multiple of 64 bytes; take them from allocate()");
      options.bypass_capacity =
          static_cast<std::int32_t>(std::min<std::size_t>(bypass_rows_->nbytes() / stride, num_neurons));
    }
    if (popularity) {
      require(popularity->shape(0) == static_cast<std::size_t>(num_neurons),
              "popularity has the wrong length");
      options.popularity = popularity->data();  // read by the constructor alone
    }
    if (up_bias_) options.up_bias = up_bias_->data();
    if (down_bias_) options.down_bias = down_bias_->data();
    kernels_ = &kernel_table(options.simd, options.layout.dtype);
    d_model_ = d_model;
    stride_ = stride;
    x_.resize(d_model);
    y_.resize(d_model);
    layer_ = std::make_unique<FfnLayer>(
        options, *reader_, *file_, *pool_, reinterpret_cast<std::byte*>(rows_.data()),
        bypass_rows_ ? reinterpret_cast<std::byte*>(bypass_rows_->data()) : nullptr, *counters_);
  }

  // Factors of 8 bits come with a scale for each row, others without. With `early` it is the predictor that
  // tells this layer's neurons from the input of the layer before, and `early` holds what is read on its
  // word.
  void set_predictor(AnyArray a, AnyArray b, FloatArray bias, float threshold,
                     std::optional<AnyArray> a_scale, std::optional<AnyArray> b_scale,
                     std::shared_ptr<PyEarlyReads> early) {
    require(a.ndim() == 2 && b.ndim() == 2 && a.shape(0) == b.shape(1) && a.shape(1) == d_model_ &&
                b.shape(0) == bias.shape(0) &&
                b.shape(0) == static_cast<std::size_t>(layer_->slots().num_neurons()),
            "predictor factors do not fit the layer");
    const Predictor predictor(factor_of(a, a_scale, nullptr), factor_of(b, b_scale, bias.data()), threshold);
    PredictorArrays& kept = early == nullptr ? predictor_arrays_ : early_arrays_;
    kept = {std::move(a), std::move(b), std::move(bias), std::move(a_scale), std::move(b_scale)};
    if (early == nullptr) return layer_->set_predictor(predictor);
    require(early->stride() == stride_, "early rows have another stride than the layer's");
    early_ = std::move(early);
    layer_->set_early(predictor, early_->reads());
  }

  // The layer after this one, which must live as long as this does.
  void set_next(PyFfnLayer& next, std::shared_ptr<EarlyControl> control) {
    control_ = std::move(control);
    layer_->set_next(next.layer_.get(), control_.get());
  }
  void set_last(std::shared_ptr<EarlyControl> control) {
    control_ = std::move(control);
    layer_->set_next(nullptr, control_.get());
  }

  // activity: [tokens, layers, streams, bytes of a bit set] of whole words, kept and reread at every pass.
  void set_trace(TraceArray activity, std::size_t layer) {
    const std::size_t set_nbytes = activity.shape(3);
    require(activity.shape(2) == kTraceStreams && layer < activity.shape(1) && set_nbytes % 8 == 0 &&
                set_nbytes * 8 >= static_cast<std::size_t>(layer_->slots().num_neurons()),
            "the trace does not fit the layer");
    trace_array_ = std::move(activity);
    const auto* words = reinterpret_cast<const std::uint64_t*>(trace_array_.data());
    const std::size_t set_words = set_nbytes / 8;
    TracedActivity trace;
    trace.active = words + layer * kTraceStreams * set_words;
    trace.firing = trace.active + set_words;
    trace.early = trace.firing + set_words;
    trace.token_words = trace_array_.shape(1) * kTraceStreams * set_words;
    trace.tokens = trace_array_.shape(0);
    layer_->set_trace(trace);
  }

  // x, y: [tokens, d_model] in the rows' dtype; each token has its own active set.
  void forward(std::uintptr_t x, std::size_t tokens, std::uintptr_t y) {
    for (std::size_t t = 0; t < tokens; ++t) {
      load(x, t);
      layer_->forward(x_.data(), t, layer_->predict(x_.data(), t), y_.data(), tokens == 1);
      kernels_->from_f32(y_.data(), d_model_, at_address<std::byte>(y) + t * d_model_ * element_nbytes_);
    }
  }

  // One token over a given active set (ascending).
  void forward_active(std::uintptr_t x, const IdArray& active, std::uintptr_t y) {
    const std::vector<std::int32_t> ids = checked_ids(active, layer_->slots().num_neurons());
    const nb::gil_scoped_release unlocked;
    load(x, 0);
    layer_->forward(x_.data(), 0, ids, y_.data());
    kernels_->from_f32(y_.data(), d_model_, at_address<void>(y));
  }

  std::vector<std::int32_t> predict(std::uintptr_t x) {
    load(x, 0);
    return layer_->predict(x_.data(), 0);
  }

  void begin_fill(std::uintptr_t x, std::size_t tokens) {
    std::vector<float> inputs(tokens * d_model_);
    kernels_->to_f32(at_address<const void>(x), inputs.size(), inputs.data());
    layer_->begin_fill(inputs.data(), tokens);
  }

  void fill_from(const ConstBytes& rows, std::int32_t first_neuron, std::int32_t count) {
    require(first_neuron >= 0 && count >= 0 && count <= INT32_MAX - first_neuron &&
                rows.nbytes() >= static_cast<std::size_t>(count) * stride_,
            "rows to fill from must be `count` whole rows from a neuron on");
    const nb::gil_scoped_release unlocked;
    layer_->fill_from(reinterpret_cast<const std::byte*>(rows.data()), first_neuron, count);
  }

  void abandon_fill() { layer_->abandon_fill(); }

  std::vector<std::int32_t> cached() const {
    const SlotTable& slots = layer_->slots();
    return {slots.pointers(), slots.pointers() + slots.num_used()};
  }
  std::int32_t capacity() const { return layer_->slots().capacity(); }
  std::int32_t current_window() const { return layer_->policy().current_window(); }
  bool has_predictor() const { return layer_->has_predictor(); }
  FfnLayer& layer() { return *layer_; }

 private:
  void load(std::uintptr_t x, std::size_t token) {
    kernels_->to_f32(at_address<const std::byte>(x) + token * d_model_ * element_nbytes_, d_model_,
                     x_.data());
  }

  static Predictor::Factor factor_of(const AnyArray& array, const std::optional<AnyArray>& scale,
                                     const float* bias) {
    const bool codes = array.dtype() == nb::dtype<std::int8_t>();
    require(codes == scale.has_value(), "8-bit predictor factors need scales, and others have none");
    if (codes) {
      require(scale->ndim() == 1 && scale->shape(0) == array.shape(0) && dtype_of(*scale) == Dtype::f16,
              "an 8-bit predictor factor needs one float16 scale a row");
      Int8Weights weights;
      weights.codes = static_cast<const std::int8_t*>(array.data());
      weights.rows = array.shape(0);
      weights.columns = array.shape(1);
      weights.scales = static_cast<const std::uint16_t*>(scale->data());
      weights.bias = bias;
      return weights;
    }
    LinearWeights weights;
    weights.dtype = dtype_of(array);
    weights.data = static_cast<const std::byte*>(array.data());
    weights.rows = array.shape(0);
    weights.columns = array.shape(1);
    weights.stride = weights.columns * dtype_nbytes(weights.dtype);
    weights.bias = bias;
    return weights;
  }

  std::optional<FloatArray> up_bias_, down_bias_;
  ChecksumArray checksums_;
  std::optional<IdArray> row_of_;
  ByteArray rows_;
  std::optional<ByteArray> bypass_rows_;
  std::shared_ptr<Reader> reader_;
  std::shared_ptr<DirectFile> file_;
  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<FfnCounters> counters_;
  struct PredictorArrays {
    AnyArray a, b;
    FloatArray bias;
    std::optional<AnyArray> a_scale, b_scale;
  };
  PredictorArrays predictor_arrays_, early_arrays_;
  std::shared_ptr<PyEarlyReads> early_;
  std::shared_ptr<EarlyControl> control_;
  TraceArray trace_array_;
  const KernelTable* kernels_ = nullptr;
  std::size_t d_model_ = 0, stride_ = 0, element_nbytes_ = 0;
  std::vector<float> x_, y_;
  std::unique_ptr<FfnLayer> layer_;
};

std::vector<std::tuple<int, int>> exchange(SlotTable& table, const std::vector<std::int32_t>& leaving,
                                           const std::vector<std::int32_t>& coming) {
  for (const auto* ids : {&leaving, &coming})
    for (const std::int32_t neuron : *ids)
      require(neuron >= 0 && neuron < table.num_neurons(), "no such neuron");
  std::vector<SlotTable::Move> moves;
  table.exchange(leaving, coming, moves);
  std::vector<std::tuple<int, int>> result;
  for (const SlotTable::Move& move : moves) result.emplace_back(move.from, move.to);
  return result;
}

}  // namespace

FfnLayer& ffn_layer_of(nb::handle ffn) { return nb::cast<PyFfnLayer&>(ffn).layer(); }

void init_ffn(nb::module_& m) {
  nb::class_<FfnCounters>(m, "Counters").def(nb::init<>()).def("take", &take);

  nb::class_<SlotTable>(m, "SlotTable")
      .def(nb::init<std::int32_t, std::int32_t>(), nb::arg("num_neurons"), nb::arg("capacity"))
      .def_prop_ro("num_used", &SlotTable::num_used)
      .def_prop_ro("capacity", &SlotTable::capacity)
      .def("slot_of",
           [](const SlotTable& self, std::int32_t neuron) {
             require(neuron >= 0 && neuron < self.num_neurons(), "no such neuron");
             return self.slot_of(neuron);
           })
      .def("pointers",
           [](const SlotTable& self) {
             return std::vector<std::int32_t>(self.pointers(), self.pointers() + self.num_used());
           })
      .def("exchange", &exchange, nb::arg("leaving"), nb::arg("coming"));

  nb::class_<EarlyControl>(m, "EarlyControl")
      .def(nb::init<>())
      .def_prop_ro("reads_ahead", &EarlyControl::reads_ahead);

  nb::class_<PyEarlyReads>(m, "EarlyReads")
      .def(nb::init<ByteArray, std::uint32_t, std::int32_t, std::shared_ptr<Reader>,
                    std::shared_ptr<DirectFile>>(),
           nb::kw_only(), nb::arg("rows"), nb::arg("stride"), nb::arg("num_neurons"), nb::arg("reader"),
           nb::arg("file"));

  nb::class_<CacheReplay>(m, "CacheReplay")
      .def(
          "__init__",
          [](CacheReplay* self, const std::string& policy, std::int32_t num_neurons, std::int32_t capacity,
             std::int32_t bypass, std::int32_t window, std::optional<FloatArray> popularity) {
            require(!popularity || popularity->shape(0) == static_cast<std::size_t>(num_neurons),
                    "popularity has the wrong length");
            new (self) CacheReplay(policy, num_neurons, capacity, bypass, window,
                                   popularity ? popularity->data() : nullptr);
          },
          nb::kw_only(), nb::arg("cache_policy"), nb::arg("num_neurons"), nb::arg("capacity"),
          nb::arg("bypass"), nb::arg("window"), nb::arg("popularity").none())
      .def(
          "token",
          [](CacheReplay& self, const IdArray& active) {
            return self.token(checked_ids(active, self.num_neurons()));
          },
          nb::arg("active"));

  nb::class_<PyFfnLayer>(m, "FfnLayer")
      .def(nb::init<int, const std::string&, std::uint32_t, std::uint32_t, std::int32_t, std::uint32_t,
                    std::int32_t, std::uint32_t, const std::string&, const std::string&, std::int32_t,
                    std::optional<FloatArray>, std::uint64_t, std::optional<FloatArray>,
                    std::optional<FloatArray>, ChecksumArray, ByteArray, std::optional<ByteArray>,
                    std::shared_ptr<Reader>, std::shared_ptr<DirectFile>, std::shared_ptr<ThreadPool>,
                    std::shared_ptr<FfnCounters>, const std::string&, bool, bool, bool,
                    std::optional<IdArray>>(),
           nb::kw_only(), nb::arg("layer"), nb::arg("dtype"), nb::arg("stride"), nb::arg("d_model"),
           nb::arg("num_neurons"), nb::arg("up"), nb::arg("gate"), nb::arg("down"), nb::arg("activation"),
           nb::arg("cache_policy"), nb::arg("window"), nb::arg("popularity").none(), nb::arg("file_offset"),
           nb::arg("up_bias").none(), nb::arg("down_bias").none(), nb::arg("checksums"), nb::arg("rows"),
           nb::arg("bypass_rows").none(), nb::arg("reader"), nb::arg("file"), nb::arg("pool"),
           nb::arg("counters"), nb::arg("simd") = "auto", nb::arg("overlap") = true,
           nb::arg("bundled") = true, nb::arg("cached") = true, nb::arg("row_of") = nb::none())
      .def("set_predictor", &PyFfnLayer::set_predictor, nb::arg("a"), nb::arg("b"), nb::arg("bias"),
           nb::arg("threshold"), nb::arg("a_scale").none() = nb::none(),
           nb::arg("b_scale").none() = nb::none(), nb::arg("early").none() = nb::none())
      .def("set_next", &PyFfnLayer::set_next, nb::arg("next"), nb::arg("control"), nb::keep_alive<1, 2>())
      .def("set_last", &PyFfnLayer::set_last, nb::arg("control"))
      .def("set_trace", &PyFfnLayer::set_trace, nb::arg("activity"), nb::arg("layer"))
      .def("forward", &PyFfnLayer::forward, nb::arg("x"), nb::arg("tokens"), nb::arg("y"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("forward_active", &PyFfnLayer::forward_active, nb::arg("x"), nb::arg("active"), nb::arg("y"))
      .def("predict", &PyFfnLayer::predict, nb::arg("x"))
      .def("begin_fill", &PyFfnLayer::begin_fill, nb::arg("x"), nb::arg("tokens"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("fill_from", &PyFfnLayer::fill_from, nb::arg("rows"), nb::arg("first_neuron"), nb::arg("count"))
      .def("abandon_fill", &PyFfnLayer::abandon_fill)
      .def("cached", &PyFfnLayer::cached)
      .def_prop_ro("capacity", &PyFfnLayer::capacity)
      .def_prop_ro("current_window", &PyFfnLayer::current_window)
      .def_prop_ro("has_predictor", &PyFfnLayer::has_predictor);
}

}  // namespace flashllm
