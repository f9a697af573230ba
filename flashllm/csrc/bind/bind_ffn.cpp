// Counters, and the FFN layer of the token loop with what it is made of.
#include <algorithm>

#include "bind/bindings.h"
#include "bind/py_ffn.h"
#include "ffn/ffn_layer.h"
#include "ffn/gathered_products.h"
#include "ffn/read_predictor.h"
#include "io/xxh3.h"

namespace flashllm {

namespace {

// How many units of `nbytes` memory holds, at most `most`.
std::int32_t units_in(const ByteArray& memory, std::size_t nbytes, std::int32_t most,
                      const std::string& what) {
  require(nbytes != 0, what + " needs units that have bytes");
  require_aligned(memory, kHashedMultiple, what);
  return static_cast<std::int32_t>(
      std::min<std::size_t>(memory.nbytes() / nbytes, static_cast<std::size_t>(most)));
}

nb::dict take(FfnCounters& counters) {
  const FfnCounters taken = std::exchange(counters, {});
  return dict_of({NAMED_MEMBER(taken, io_ns), NAMED_MEMBER(taken, memory_ns), NAMED_MEMBER(taken, compute_ns),
                  NAMED_MEMBER(taken, io_busy_ns), NAMED_MEMBER(taken, bytes_read),
                  NAMED_MEMBER(taken, requests), NAMED_MEMBER(taken, retries), NAMED_MEMBER(taken, active),
                  NAMED_MEMBER(taken, hits), NAMED_MEMBER(taken, misses), NAMED_MEMBER(taken, united),
                  NAMED_MEMBER(taken, rejected_bytes), NAMED_MEMBER(taken, prefetched),
                  NAMED_MEMBER(taken, prefetch_used), NAMED_MEMBER(taken, behind_bytes)});
}

}  // namespace

std::vector<std::int32_t> checked_ids(const IdArray& active, std::int32_t units) {
  std::vector<std::int32_t> ids(active.data(), active.data() + active.shape(0));
  for (std::size_t i = 0; i < ids.size(); ++i)
    require(ids[i] >= 0 && ids[i] < units && (i == 0 || ids[i] > ids[i - 1]),
            "active neurons must be ascending ids of this layer");
  return ids;
}

PyFfnLayer::PyFfnLayer(FfnLayerOptions options, FfnParts parts, FileRows rows, const LayerCache& cache)
    : parts_(std::move(parts)), rows_(std::move(rows)), memory_(cache.memory) {
  const NeuronSource& source = *parts_.source;
  static_cast<UnitRule&>(options) = source;
  options.rows = rows_.source(options.format.stride);
  require(options.num_neurons > 0 && options.unit_rows > 0 &&
              static_cast<std::size_t>(options.num_neurons) <= rows_.count,
          "an FFN layer needs neurons with rows, in units that have some");
  const RowUnits units = options.units();
  if (cache.popularity) {
    require(cache.popularity->shape(0) == static_cast<std::size_t>(units.count()),
            "popularity has the wrong length");
    options.popularity = cache.popularity->data();
  }
  const std::size_t nbytes = static_cast<std::size_t>(units.size) * options.format.stride;
  const auto& bypass = source.bypass_rows;
  options.capacity = units_in(memory_, nbytes, units.count(), "the neuron cache");
  if (bypass) options.bypass_capacity = units_in(*bypass, nbytes, units.count(), "bypass rows");
  require(options.capacity + options.bypass_capacity > 0, "the neuron cache needs room for at least one row");
  layer_ = std::make_unique<FfnLayer>(options, *source.reader, *source.file, *parts_.pool, bytes_of(memory_),
                                      bypass ? bytes_of(*bypass) : nullptr, *parts_.counters);
  if (options.gate != nullptr) layer_->predict_by_gate();
}

void PyFfnLayer::set_predictor(const nb::dict& tensors, const std::string& prefix,
                               const std::map<std::string, std::string>& encodings,
                               std::shared_ptr<Prefetch> prefetch) {
  read_predictor({tensors_of(tensors), prefix, parse_codecs(encodings)}, *layer_, prefetch.get());
  if (prefetch) prefetch_ = std::move(prefetch);
  predictors_.push_back(tensors);
}

void PyFfnLayer::guess_by_router(std::shared_ptr<Prefetch> prefetch) {
  require(layer_->router() != nullptr && layer_->units().size > 1, "no router names the units of this layer");
  layer_->set_prefetch(std::make_unique<RouterGuess>(*layer_->router()), *prefetch);
  prefetch_ = std::move(prefetch);
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
      "activation"_a, "threshold"_a = 0.0F, "cut"_a = 0.0F);

  nb::class_<FfnCounters>(m, "Counters").def(nb::init<>()).def("take", &take);

  nb::class_<Prefetch>(m, "Prefetch")
      .def(
          "__init__",
          [](Prefetch* self, const ByteArray& rows, std::size_t unit_nbytes, std::int32_t num_units,
             Reader& reader, const DirectFile& file) {
            require(num_units > 0, "a prefetch buffer needs units");
            const std::int32_t capacity = units_in(rows, unit_nbytes, num_units, "a prefetch buffer");
            require(capacity > 0, "a prefetch buffer needs room for at least one unit");
            new (self) Prefetch(bytes_of(rows), capacity, unit_nbytes, num_units, reader, file);
          },
          nb::kw_only(), "rows"_a, "unit_nbytes"_a, "num_units"_a, "reader"_a, "file"_a,
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>());

  nb::class_<RowFormat>(m, "RowFormat")
      .def(
          "__init__",
          [](RowFormat* self, const std::string& encoding, const std::string& down_encoding,
             std::uint32_t stride, std::uint32_t d_model, std::uint32_t up, std::int32_t gate,
             std::uint32_t down, const std::string& inputs, std::uint32_t unit) {
            const RowCodec codec = parse_codec(encoding);
            RowFormat format{codec, parse_codec(down_encoding), stride, d_model, up, down, gate};
            format.inputs = inputs_of(codec, parse_inputs(inputs));
            format.unit = unit;
            format.check();
            new (self) RowFormat(format);
          },
          nb::kw_only(), "encoding"_a, "down_encoding"_a, "stride"_a, "d_model"_a, "up"_a, "gate"_a, "down"_a,
          "inputs"_a, "unit"_a = 1);

  nb::class_<NamedTensors>(m, "ResidentTensors")
      .def(
          "__init__",
          [](NamedTensors* self, nb::dict tensors, const std::string& dtype, const std::string& encoding,
             const std::map<std::string, std::string>& other_encodings, const std::string& inputs,
             const std::string& simd) {
            new (self)
                NamedTensors(tensors_of(std::move(tensors)),
                             {parse_codec(encoding), parse_codecs(other_encodings), parse_inputs(inputs)},
                             parse_dtype(dtype), parse_simd(simd));
          },
          "tensors"_a, nb::kw_only(), "dtype"_a, "encoding"_a, "other_encodings"_a, "inputs"_a,
          "simd"_a = "auto");

  // Made by hand: nb::init leaves out the braces of the base, and Clang warns of that.
  nb::class_<NeuronSource>(m, "NeuronSource")
      .def(
          "__init__",
          [](NeuronSource* self, std::string cache_policy, std::int32_t window, std::int32_t unit_rows,
             std::shared_ptr<Reader> reader, std::shared_ptr<DirectFile> file,
             std::optional<ByteArray> bypass_rows) {
            new (self) NeuronSource{{std::move(cache_policy), window, unit_rows},
                                    std::move(reader),
                                    std::move(file),
                                    std::move(bypass_rows)};
          },
          nb::kw_only(), "cache_policy"_a, "window"_a, "unit_rows"_a = 1, "reader"_a, "file"_a,
          "bypass_rows"_a.none() = nb::none());

  nb::class_<LayerCache>(m, "LayerCache")
      .def(nb::init<ByteArray, std::optional<FloatArray>>(), "memory"_a, "popularity"_a.none() = nb::none());

  nb::class_<GatheredProducts>(m, "GatheredProducts")
      .def(
          "__init__",
          [](GatheredProducts* self, const RowFormat& format, const ConstBytes& row, std::int32_t neurons,
             const std::string& path, ThreadPool& pool, const std::string& simd) {
            require(row.nbytes() == format.stride && neurons > 0,
                    "rows need neurons, of `stride` bytes each");
            new (self) GatheredProducts(format, bytes_of(row), neurons, path, pool, parse_simd(simd));
          },
          "row_format"_a, "row"_a, "neurons"_a, "path"_a, "pool"_a, "simd"_a = "auto", nb::keep_alive<1, 6>())
      .def(
          "run",
          [](GatheredProducts& self, const IdArray& active) {
            const std::vector<std::int32_t> ids = checked_ids(active, self.num_neurons());
            const nb::gil_scoped_release unlocked;
            self.run(ids);
          },
          "active"_a);

  nb::class_<PyFfnLayer>(m, "FfnLayer")
      .def("set_predictor", &PyFfnLayer::set_predictor, "tensors"_a, "prefix"_a = "",
           "encodings"_a = std::map<std::string, std::string>(), "prefetch"_a.none() = nb::none())
      .def("guess_by_router", &PyFfnLayer::guess_by_router, "prefetch"_a)
      .def(
          "set_capacity", [](PyFfnLayer& self, std::int32_t rows) { self.layer().set_capacity(rows); },
          "rows"_a)
      .def_prop_ro("capacity", [](PyFfnLayer& self) { return self.layer().capacity(); });
}

}  // namespace flashllm
