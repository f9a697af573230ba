// What tests and benchmarks see and set of the core's parts, and the product does not: traces, clocks, and
// what is cached.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bind/bindings.h"
#include "bind/py_ffn.h"
#include "bind/py_row_stream.h"
#include "bind_testing.h"
#include "trace_predictor.h"

namespace flashllm {

namespace {

using Activity = Exact<nb::ndarray<const std::uint8_t, nb::ndim<4>, nb::device::cpu, nb::c_contig>>;
constexpr std::size_t kTraceStreams = 3;  // the order of flashllm/format/trace.py

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

nb::dict take(PyRowStream& self) {
  const StreamTimes times = self.stream().take();
  return dict_of({{"wait_ns", times.wait_ns},
                  {"busy_ns", times.busy_ns},
                  {"bytes", times.bytes},
                  {"requests", times.requests},
                  {"retries", times.retries}});
}

}  // namespace

void init_inspection(nb::module_& m) {
  m.def("simd_levels", [] {
    std::vector<std::string> names;
    for (const SimdLevel level : simd_levels()) names.emplace_back(name_of(level, kSimdLevels));
    return names;
  });

  add_property(m.attr("DirectFile"), "memory_alignment", &DirectFile::memory_alignment);

  const nb::object reader = m.attr("Reader");
  add_method(reader, "take_busy_ns", &Reader::take_busy_ns);
  add_property(reader, "threads", [](const Reader& self) { return self.options().threads; });
  add_property(reader, "queue_depth", [](const Reader& self) { return self.options().queue_depth; });
  add_property(reader, "verify", [](const Reader& self) { return self.options().verify; });

  const nb::object stream = m.attr("RowStream");
  add_method(stream, "drain", [](PyRowStream& self) { self.stream().drain(); });
  add_method(stream, "take", &take);

  const nb::object layer = m.attr("FfnLayer");
  add_method(layer, "set_trace", &set_trace, nb::arg("activity"), nb::arg("layer"), nb::keep_alive<1, 2>());
  add_method(layer, "predict", &PyFfnLayer::predict, nb::arg("x"));
  add_method(layer, "cached", [](PyFfnLayer& self) { return self.layer().cached(); });
  add_property(layer, "current_window",
               [](PyFfnLayer& self) { return self.layer().cache().policy().current_window(); });
}

}  // namespace flashllm
