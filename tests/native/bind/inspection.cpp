// What tests and benchmarks see and set of the core's parts, and the product does not: traces, clocks, and
// what is cached.
#include "bind/bindings.h"
#include "bind/py_ffn.h"
#include "bind_testing.h"
#include "cache_replay.h"
#include "ffn/gathered_products.h"
#include "io/row_stream.h"
#include "simd_levels.h"
#include "trace_predictor.h"

namespace flashllm {

namespace {

// The one caller in Python checks a tensor's data_ptr.
template <typename T>
T* at_address(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

using Activity = Array<const std::uint8_t, nb::ndim<4>>;
constexpr std::size_t kTraceStreams = 3;  // the order of tools/activity_trace.py

// activity: [tokens, layers, streams, bytes of a bit set] of whole words, reread at every pass.
void set_trace(PyFfnLayer& self, const Activity& activity, std::size_t layer) {
  const std::size_t set_nbytes = activity.shape(3), set_words = set_nbytes / 8;
  require(activity.shape(2) == kTraceStreams && layer < activity.shape(1) && set_nbytes % 8 == 0 &&
              set_nbytes * 8 >= static_cast<std::size_t>(self.layer().num_neurons()),
          "the trace does not fit the layer");
  ActivityTrace active;
  active.active = reinterpret_cast<const std::uint64_t*>(activity.data()) + layer * kTraceStreams * set_words;
  active.firing = active.active + set_words;
  active.token_words = activity.shape(1) * kTraceStreams * set_words;
  active.tokens = activity.shape(0);
  active.units = self.layer().units();
  ActivityTrace prefetched = active;
  prefetched.active = active.firing + set_words;
  prefetched.firing = nullptr;
  follow(self.layer(), active, prefetched);
}

// x: [tokens, d_model] of the dtype at an address, in fp32.
std::vector<float> widened(const PyFfnLayer& self, std::uintptr_t x, std::size_t tokens) {
  std::vector<float> inputs(tokens * self.layer().width());
  self.tensors().kernels().to_f32(at_address<const void>(x), inputs.size(), inputs.data());
  return inputs;
}

// A token over a given active set (ascending units). x, y: [d_model] of the dtype.
void forward_active(PyFfnLayer& self, std::uintptr_t x, const IdArray& active, std::uintptr_t y) {
  const std::vector<std::int32_t> ids = checked_ids(active, self.layer().units().count());
  const nb::gil_scoped_release unlocked;
  std::vector<float> out(self.layer().width());
  self.layer().forward(widened(self, x, 1).data(), 0, ids, out.data());
  self.tensors().kernels().from_f32(out.data(), out.size(), at_address<std::byte>(y));
}

// Every unit leaves the cache.
void forget(PyFfnLayer& self) {
  NeuronCache& cache = self.layer().cache();
  const std::int32_t* units = cache.slots().pointers();
  cache.forget({units, units + cache.slots().num_used()});
}

void fill_from(PyFfnLayer& self, const ConstBytes& rows, std::int32_t first_neuron, std::int32_t count) {
  require(first_neuron >= 0 && count >= 0 && count <= INT32_MAX - first_neuron &&
              rows.nbytes() >= static_cast<std::size_t>(count) * self.layer().layout().stride,
          "rows to fill from must be `count` whole rows from a neuron on");
  const nb::gil_scoped_release unlocked;
  self.layer().fill_from(bytes_of(rows), first_neuron, count);
}

// A layer by itself: a model's are inside it.
void make_layer(PyFfnLayer* self, std::size_t layer, std::shared_ptr<NamedTensors> tensors,
                const RowFormat& format, std::size_t neurons, const std::string& activation, float cut,
                std::shared_ptr<NeuronSource> source, const FileRows& rows, const LayerCache& cache,
                std::shared_ptr<ThreadPool> pool, std::shared_ptr<FfnCounters> counters) {
  const FfnLayerOptions options =
      read_ffn(*tensors, format, layer, neurons, parse_activation(activation, 0.0F, cut));
  new (self) PyFfnLayer(
      options, {std::move(tensors), std::move(source), std::move(pool), std::move(counters)}, rows, cache);
}

// A part of a token's products over some neurons.
template <void (GatheredProducts::*part)(const std::vector<std::int32_t>&)>
void multiply(GatheredProducts& self, const IdArray& active) {
  const std::vector<std::int32_t> ids = checked_ids(active, self.num_neurons());
  const nb::gil_scoped_release unlocked;
  (self.*part)(ids);
}

nb::dict take(RowStream& self) {
  const StreamTimes times = self.take();
  return dict_of({NAMED_MEMBER(times, wait_ns), NAMED_MEMBER(times, busy_ns), NAMED_MEMBER(times, bytes),
                  NAMED_MEMBER(times, requests), NAMED_MEMBER(times, retries)});
}

}  // namespace

void init_inspection(nb::module_& m) {
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
          nb::kw_only(), "cache_policy"_a, "num_units"_a, "capacity"_a, "bypass"_a, "window"_a,
          "popularity"_a.none())
      .def(
          "token",
          [](CacheReplay& self, const IdArray& active) {
            return self.token(checked_ids(active, self.num_units()));
          },
          "active"_a)
      .def(
          "missing",
          [](const CacheReplay& self, const IdArray& units) {
            return self.missing(checked_ids(units, self.num_units()));
          },
          "units"_a);

  m.def("simd_levels", [] {
    std::vector<std::string> names;
    for (const SimdLevel level : simd_levels()) names.emplace_back(name_of(level, kSimdLevels));
    return names;
  });

  bound<GatheredProducts>(m, "GatheredProducts")
      .def("up", &multiply<&GatheredProducts::up>, "active"_a)
      .def("down", &multiply<&GatheredProducts::down>, "active"_a);

  bound<DirectFile>(m, "DirectFile").def_prop_ro("memory_alignment", &DirectFile::memory_alignment);

  bound<Reader>(m, "Reader")
      .def("take_busy_ns", &Reader::take_busy_ns)
      .def_prop_ro("threads", [](const Reader& self) { return self.options().threads; })
      .def_prop_ro("queue_depth", [](const Reader& self) { return self.options().queue_depth; });

  bound<RowStream>(m, "RowStream").def("drain", [](RowStream& self) { self.drain(); }).def("take", &take);

  bound<PyFfnLayer>(m, "FfnLayer")
      .def("__init__", &make_layer, nb::kw_only(), "layer"_a, "tensors"_a, "row_format"_a, "neurons"_a,
           "activation"_a, "activation_cut"_a = 0.0F, "source"_a, "rows"_a, "cache"_a, "pool"_a, "counters"_a)
      .def("set_trace", &set_trace, "activity"_a, "layer"_a, nb::keep_alive<1, 2>())
      .def("forward_active", &forward_active, "x"_a, "active"_a, "y"_a)
      .def(
          "predict",
          [](PyFfnLayer& self, std::uintptr_t x) {
            return self.layer().predict(widened(self, x, 1).data(), 0);
          },
          "x"_a)
      .def(
          "begin_fill",
          [](PyFfnLayer& self, std::uintptr_t x, std::size_t tokens) {
            const nb::gil_scoped_release unlocked;
            self.layer().begin_fill(widened(self, x, tokens).data(), tokens);
          },
          "x"_a, "tokens"_a)
      .def("fill_from", &fill_from, "rows"_a, "first_neuron"_a, "count"_a)
      .def("cached", [](PyFfnLayer& self) { return self.layer().cached(); })
      .def("forget", &forget)
      // Rows are read by any request: unchecked, as checksums are of whole ones.
      .def("read_unchecked", [](PyFfnLayer& self) { self.layer().source().checksums = nullptr; })
      .def("wait_first", [](PyFfnLayer& self) { self.layer().waits_first() = true; })
      .def_prop_ro("current_window",
                   [](PyFfnLayer& self) { return self.layer().cache().policy().current_window(); });
}

}  // namespace flashllm
