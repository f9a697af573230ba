// Counters, cache replay, and the FFN layer of the token loop with what it is made of.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "bind/bindings.h"
#include "bind/py_ffn.h"
#include "cache/cache_replay.h"
#include "ffn/ffn_layer.h"
#include "ffn/gathered_products.h"
#include "io/xxh3.h"

namespace flashllm {

namespace {

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
  const FfnCounters taken = std::exchange(counters, {});
  return dict_of({{"io_ns", taken.io_ns},
                  {"memory_ns", taken.memory_ns},
                  {"compute_ns", taken.compute_ns},
                  {"io_busy_ns", taken.io_busy_ns},
                  {"bytes_read", taken.bytes_read},
                  {"requests", taken.requests},
                  {"retries", taken.retries},
                  {"active", taken.active},
                  {"hits", taken.hits},
                  {"misses", taken.misses},
                  {"moves", taken.moves},
                  {"parts", taken.parts},
                  {"united", taken.united},
                  {"rejected_bytes", taken.rejected_bytes},
                  {"prefetched", taken.prefetched},
                  {"prefetch_used", taken.prefetch_used}});
}

RowMatrix matrix_of(const AnyArray& array, RowCodec codec, std::size_t rows, std::size_t columns) {
  RowMatrix matrix;
  matrix.codec = codec;
  matrix.data = static_cast<const std::byte*>(array.data());
  matrix.rows = rows;
  matrix.columns = columns;
  matrix.stride = vector_nbytes(codec, columns);
  require(!has_plane(codec) && array.ndim() == 2 && array.shape(0) == rows &&
              array.nbytes() == rows * matrix.stride,
          "a predictor's tensors do not fit the layer");
  return matrix;
}

// A predictor by its tensors, which must stay.
class PredictorReader {
 public:
  PredictorReader(const nb::dict& tensors, const std::string& prefix,
                  const std::map<std::string, std::string>& encodings)
      : tensors_(tensors), prefix_(prefix), encodings_(encodings) {}

  bool contains(const std::string& name) const { return tensors_.contains((prefix_ + name).c_str()); }
  template <typename Array = AnyArray>
  Array get(const std::string& name) const {
    return nb::cast<Array>(tensors_[(prefix_ + name).c_str()]);
  }
  float number(const char* name) const {
    return nb::cast<float>(tensors_[(prefix_ + name).c_str()].attr("item")());
  }
  // Floats, codes of 8 bits with a scale a row, groups of 4 bits, or what an encoding says.
  RowMatrix factor(const std::string& name, std::size_t rows, std::size_t columns) const {
    const auto array = get(name);
    const auto encoding = encodings_.find(prefix_ + name);
    if (encoding != encodings_.end()) return matrix_of(array, parse_codec(encoding->second), rows, columns);
    const bool codes = array.dtype() == nb::dtype<std::int8_t>();
    require(codes == contains(name + "_scale"), "8-bit predictor factors need scales, and others have none");
    if (array.dtype() == nb::dtype<std::uint8_t>()) {
      RowMatrix groups = matrix_of(array, RowCodec::int4_32, rows, columns);
      groups.inputs = InputForm::int8;
      return groups;
    }
    if (!codes) return matrix_of(array, codec_of(dtype_of(array)), rows, columns);
    RowMatrix matrix = matrix_of(array, RowCodec::int8, rows, columns);
    const auto scale = get(name + "_scale");
    require(scale.ndim() == 1 && scale.shape(0) == rows && dtype_of(scale) == Dtype::f16,
            "an 8-bit predictor factor needs one float16 scale a row");
    matrix.scales = static_cast<const std::uint16_t*>(scale.data());
    return matrix;
  }

 private:
  const nb::dict& tensors_;
  const std::string& prefix_;
  const std::map<std::string, std::string>& encodings_;
};

std::unique_ptr<Predictor> read_low_rank(const PredictorReader& reader, std::size_t neurons,
                                         std::size_t width) {
  const auto rank = reader.get("a").shape(0);
  const RowMatrix a = reader.factor("a", rank, width);
  RowMatrix b = reader.factor("b", neurons, rank);
  const bool relu = !reader.contains("bias");
  if (!relu) {
    const auto bias = reader.get<FloatArray>("bias");
    require(bias.shape(0) == neurons, "a predictor's tensors do not fit the layer");
    b.bias = bias.data();
  }
  return std::make_unique<LowRankPredictor>(a, b, reader.number("threshold"), relu);
}

std::unique_ptr<Predictor> read_coded_gate(const PredictorReader& reader, const FfnLayer& layer) {
  require(layer.layout().gated(), "a coded gate needs the gate itself in the rows");
  const auto neurons = static_cast<std::size_t>(layer.num_neurons());
  RowMatrix gate = matrix_of(reader.get("gate"), RowCodec::int4_64, neurons, layer.width());
  gate.bias = layer.gate_bias();
  return std::make_unique<CodedGatePredictor>(gate, layer.activation(), reader.number("margin"));
}

}  // namespace

std::vector<std::int32_t> checked_ids(const IdArray& active, std::int32_t units) {
  std::vector<std::int32_t> ids(active.data(), active.data() + active.shape(0));
  for (std::size_t i = 0; i < ids.size(); ++i)
    require(ids[i] >= 0 && ids[i] < units && (i == 0 || ids[i] > ids[i - 1]),
            "active neurons must be ascending ids of this layer");
  return ids;
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

FfnLayerOptions read_ffn(ResidentTensors& tensors, const RowFormat& rows, std::size_t layer,
                         std::size_t neurons, Activation activation) {
  const std::string name = "layers." + std::to_string(layer) + ".";
  FfnLayerOptions options;
  options.format = rows;
  options.layer = static_cast<std::int32_t>(layer);
  options.num_neurons = static_cast<std::int32_t>(neurons);
  options.activation = activation;
  options.simd = tensors.level();
  options.up_bias = tensors.floats(name + "ffn.up_bias", neurons);
  options.gate_bias = tensors.floats(name + "ffn.gate_bias", neurons);
  options.down_bias = tensors.floats(name + "ffn.down_bias", rows.d_model);
  if (tensors.contains(name + "gate.weight")) {
    require(!rows.gated(), "a resident gate is of rows that hold none");
    options.gate = tensors.matrix(name + "gate", neurons, rows.d_model, rows.codec).data;
  }
  if (has_plane(rows.down_codec)) options.plane = tensors.plane(name + "down.", neurons, rows.d_model);
  require(rows.gated() || options.gate != nullptr || options.gate_bias == nullptr,
          "an FFN without a gate has no gate bias");
  return options;
}

PyFfnLayer::PyFfnLayer(FfnLayerOptions options, std::shared_ptr<ResidentTensors> tensors,
                       std::shared_ptr<NeuronSource> source, LayerRows rows, std::shared_ptr<ThreadPool> pool,
                       std::shared_ptr<FfnCounters> counters)
    : tensors_(std::move(tensors)),
      source_(std::move(source)),
      rows_(std::move(rows)),
      pool_(std::move(pool)),
      counters_(std::move(counters)) {
  options.cache_policy = source_->cache_policy;
  options.window = source_->window;
  options.unit_rows = source_->unit_rows;
  options.wait_first = source_->wait_first;
  options.split_rows = source_->split_rows;
  options.file_offset = rows_.offset;
  options.checksums = rows_.checksums.data();
  options.checksum_rows = rows_.checksum_rows;
  require(options.num_neurons > 0 && options.unit_rows > 0 && options.checksum_rows > 0,
          "an FFN layer needs neurons, in units that have some");
  const RowUnits units = options.units();
  const auto neurons = static_cast<std::size_t>(options.num_neurons);
  require(rows_.checksums.shape(0) * static_cast<std::size_t>(options.checksum_rows) >= neurons,
          "too few checksums");
  if (rows_.popularity) {
    require(rows_.popularity->shape(0) == static_cast<std::size_t>(units.count()),
            "popularity has the wrong length");
    options.popularity = rows_.popularity->data();
  }
  const std::size_t nbytes = static_cast<std::size_t>(units.size) * options.format.stride;
  const auto& bypass = source_->bypass_rows;
  options.capacity = units_in(rows_.memory, nbytes, units.count(), "the neuron cache");
  if (bypass) options.bypass_capacity = units_in(*bypass, nbytes, units.count(), "bypass rows");
  require(options.capacity + options.bypass_capacity > 0, "the neuron cache needs room for at least one row");
  layer_ =
      std::make_unique<FfnLayer>(options, *source_->reader, *source_->file, *pool_, bytes_of(rows_.memory),
                                 bypass ? bytes_of(*bypass) : nullptr, *counters_);
  if (options.gate != nullptr) layer_->predict_by_gate();
  rows_.popularity.reset();  // read by the constructor alone
}

void PyFfnLayer::set_predictor(const nb::dict& tensors, const std::string& prefix,
                               const std::map<std::string, std::string>& encodings,
                               std::shared_ptr<PyPrefetch> prefetch) {
  const PredictorReader reader(tensors, prefix, encodings);
  const bool is_gate = reader.contains("gate");
  auto predictor =
      is_gate ? read_coded_gate(reader, *layer_)
              : read_low_rank(reader, static_cast<std::size_t>(layer_->num_neurons()), layer_->width());
  if (!is_gate && !reader.contains("bias")) layer_->predict_by_stream();
  if (prefetch == nullptr) {
    layer_->set_predictor(std::move(predictor));
  } else {
    require(prefetch->buffer().stride() == layer_->layout().stride,
            "prefetched rows have another stride than the layer's");
    layer_->set_prefetch(std::move(predictor), prefetch->buffer());
    prefetch_ = std::move(prefetch);
  }
  predictors_.push_back(tensors);
}

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

  nb::class_<RowFormat>(m, "RowFormat")
      .def(
          "__init__",
          [](RowFormat* self, const std::string& encoding, const std::string& down_encoding,
             std::uint32_t stride, std::uint32_t d_model, std::uint32_t up, std::int32_t gate,
             std::uint32_t down, const std::string& inputs) {
            const RowCodec codec = parse_codec(encoding);
            RowFormat format{codec, parse_codec(down_encoding), stride, d_model, up, down, gate};
            format.inputs = parse_inputs(inputs, codec);
            format.check();
            new (self) RowFormat(format);
          },
          nb::kw_only(), nb::arg("encoding"), nb::arg("down_encoding"), nb::arg("stride"), nb::arg("d_model"),
          nb::arg("up"), nb::arg("gate"), nb::arg("down"), nb::arg("inputs"));

  nb::class_<ResidentTensors>(m, "ResidentTensors")
      .def(
          "__init__",
          [](ResidentTensors* self, nb::dict tensors, const std::string& dtype, const std::string& encoding,
             std::map<std::string, std::string> other_encodings, const std::string& inputs,
             const std::string& simd) {
            new (self) ResidentTensors(std::move(tensors), {encoding, std::move(other_encodings), inputs},
                                       parse_dtype(dtype), parse_simd(simd));
          },
          nb::arg("tensors"), nb::kw_only(), nb::arg("dtype"), nb::arg("encoding"),
          nb::arg("other_encodings"), nb::arg("inputs"), nb::arg("simd") = "auto");

  nb::class_<NeuronSource>(m, "NeuronSource")
      .def(nb::init<std::shared_ptr<Reader>, std::shared_ptr<DirectFile>, std::string, std::int32_t,
                    std::int32_t, std::optional<ByteArray>, bool, bool>(),
           nb::kw_only(), nb::arg("reader"), nb::arg("file"), nb::arg("cache_policy"), nb::arg("window"),
           nb::arg("unit_rows") = 1, nb::arg("bypass_rows").none() = nb::none(),
           nb::arg("wait_first") = false, nb::arg("split_rows") = false);

  nb::class_<LayerRows>(m, "LayerRows")
      .def(nb::init<ByteArray, std::uint64_t, ChecksumArray, std::int32_t, std::optional<FloatArray>>(),
           nb::kw_only(), nb::arg("memory"), nb::arg("offset"), nb::arg("checksums"),
           nb::arg("checksum_rows") = 1, nb::arg("popularity").none() = nb::none());

  nb::class_<GatheredProducts>(m, "GatheredProducts")
      .def(
          "__init__",
          [](GatheredProducts* self, const RowFormat& format, const ConstBytes& row, std::int32_t neurons,
             const std::string& path, ThreadPool& pool) {
            require(row.nbytes() == format.stride && neurons > 0,
                    "rows need neurons, of `stride` bytes each");
            new (self) GatheredProducts(format, bytes_of(row), neurons, path, pool);
          },
          nb::arg("row_format"), nb::arg("row"), nb::arg("neurons"), nb::arg("path"), nb::arg("pool"),
          nb::keep_alive<1, 6>())
      .def(
          "run",
          [](GatheredProducts& self, const IdArray& active) {
            const std::vector<std::int32_t> ids = checked_ids(active, self.num_neurons());
            const nb::gil_scoped_release unlocked;
            self.run(ids);
          },
          nb::arg("active"));

  nb::class_<PyFfnLayer>(m, "FfnLayer")
      .def("set_predictor", &PyFfnLayer::set_predictor, nb::arg("tensors"), nb::arg("prefix") = "",
           nb::arg("encodings") = std::map<std::string, std::string>(),
           nb::arg("prefetch").none() = nb::none())
      .def(
          "set_capacity", [](PyFfnLayer& self, std::int32_t rows) { self.layer().set_capacity(rows); },
          nb::arg("rows"))
      .def_prop_ro("capacity", [](PyFfnLayer& self) { return self.layer().capacity(); });
}

}  // namespace flashllm
