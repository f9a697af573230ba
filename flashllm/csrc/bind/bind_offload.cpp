// The throughput engine: a model's layers over lent weights, and attention over a batch's pages.
#include "bind/bindings.h"
#include "offload/batch_attention.h"
#include "offload/batch_model.h"

namespace flashllm {

namespace {

// Arrays of values of some dtype: those that are read, and those that are written.
using Values = Array<nb::ro>;
using Floats = Array<float>;
using StateRows = Array<float, Two>;
using Table = Array<const std::int32_t, Two>;
using Longs = Array<const std::int64_t, One>;

// Keys and values are the caller's: `attend(first, queries, keys, values, out)` keeps those of the tokens
// from number `first` of the call on, and fills `out`; arrays [tokens, width] of values of the dtype in fp32,
// valid during the call.
class PyMemory final : public AttentionMemory {
 public:
  void begin(nb::object attend) {
    attend_ = std::move(attend);
    first_ = 0;
  }
  void end() { attend_.reset(); }

  void attend(const AttentionShape& shape, const Part& part, const float* queries, const float* keys,
              const float* values, float* out) override {
    const std::size_t attended = shape.heads * shape.head_dim, cached = shape.kv_heads * shape.head_dim;
    const std::size_t n = part.count;
    const nb::gil_scoped_acquire locked;
    attend_(first_, given_rows(queries, n, attended), given_rows(keys, n, cached),
            given_rows(values, n, cached), given_rows(out, n, attended));
    first_ += part.count;
  }

 private:
  nb::object attend_;
  std::size_t first_ = 0;
};

// Weights that are lent: they must lie where they are as long as this, which holds their arrays. Vectors are
// in fp32.
template <typename Weights>
struct PyLent {
  PyLent(nb::dict arrays, const std::map<std::string, std::string>& encodings, Dtype dtype, SimdLevel simd)
      : tensors(tensors_of(std::move(arrays)),
                {codec_of(dtype), parse_codecs(encodings), InputForm::int16, true}, dtype, simd) {}
  PyLent(const PyLent&) = delete;

  NamedTensors tensors;
  Weights weights;
};
using PyLentLayer = PyLent<LentLayer>;
using PyLentEnds = PyLent<ModelWeights>;

class PyBatchModel {
 public:
  PyBatchModel(nb::handle block, const std::string& dtype, std::shared_ptr<ThreadPool> pool,
               std::size_t rows_together, const std::string& simd)
      : pool_(std::move(pool)),
        simd_(parse_simd(simd)),
        of_(read_architecture(block, parse_dtype(dtype))),
        model_(of_.model, rows_together, memory_, *pool_, simd_) {
    require(rows_together != 0, "rows_together must be positive");
  }

  // The model's layer `number`: tensors by canonical name without the layer's, vectors in fp32 and with their
  // norms' shift; matrices of the dtype, or bytes of the encoding that `encodings` has for them.
  std::unique_ptr<PyLentLayer> lend_layer(std::size_t number, nb::dict tensors,
                                          const std::map<std::string, std::string>& encodings,
                                          bool down_by_inputs) const {
    require(number < of_.layers.size(), "a layer beyond those there are");
    auto lent = std::make_unique<PyLentLayer>(std::move(tensors), encodings, of_.model.block.dtype, simd_);
    lent->weights = read_lent(lent->tensors, of_, number, down_by_inputs);
    return lent;
  }

  // What lies before or behind the layers: what of it is there, the embedding's rows left out.
  std::unique_ptr<PyLentEnds> lend_ends(nb::dict tensors) const {
    auto lent = std::make_unique<PyLentEnds>(std::move(tensors), std::map<std::string, std::string>(),
                                             of_.model.block.dtype, simd_);
    lent->weights = read_ends(lent->tensors, of_, true);
    return lent;
  }

  void embed(const PyLentEnds& ends, const Values& rows, const Longs& positions, const AnyArray& states) {
    const std::size_t n = check_positions(positions);
    const ModelSpec& spec = of_.model;
    require_dtype(rows, spec.block.dtype, "rows");
    require_rows(rows, n, spec.embed_dim, "rows");
    check_states(states, n);
    require(spec.embed_dim == spec.block.d_model || ends.weights.project_in.data != nullptr,
            "the embedding's projection is not there");
    const nb::gil_scoped_release unlocked;
    model_.embed(ends.weights, bytes_of(rows), positions.data(), n, bytes_of(states));
  }

  // `watch(x [tokens, width] fp32, neuron)`: sees the inputs of the layer's products, each once: those of
  // query, key and value, then of out, of each mixer, with -1; then those of up and gate and those of down,
  // with the first of their neurons: of each expert in turn; and those of other matrices, with -2.
  // `recurrent` [slots, floats], `slots`: as LentStates, of a layer that keeps a state.
  void run(const PyLentLayer& layer, const AnyArray& states, const Longs& positions, nb::object attend,
           bool decoding, nb::object watch, const std::optional<StateRows>& recurrent,
           const std::optional<IdArray>& slots) {
    const std::size_t n = check_positions(positions);
    check_states(states, n);
    LentStates kept;
    if (recurrent)
      kept = {recurrent->data(), recurrent->shape(0), recurrent->shape(1), slots ? slots->data() : nullptr,
              slots ? slots->shape(0) : 0};
    if (watch.is_none()) {
      model_.set_watch({});
    } else {
      model_.set_watch([&](const float* x, std::size_t count, std::size_t width, std::ptrdiff_t neuron) {
        const nb::gil_scoped_acquire locked;
        watch(given_rows(x, count, width), neuron);
      });
    }
    memory_.begin(std::move(attend));
    struct End {
      PyBatchModel& model;
      ~End() {
        model.memory_.end();
        model.model_.set_watch({});
      }
    } const end{*this};
    const nb::gil_scoped_release unlocked;
    model_.run(layer.weights, kept, positions.data(), n, decoding, bytes_of(states));
  }

  void head(const PyLentEnds& ends, const Values& states, const Floats& logits) {
    require(states.ndim() == 2, "states must be [rows, d_model]");
    const std::size_t n = states.shape(0);
    check_states(states, n);
    require_rows(logits, n, of_.model.vocab, "logits");
    require(ends.weights.head.data != nullptr, "the head is not there");
    const nb::gil_scoped_release unlocked;
    model_.head(ends.weights, bytes_of(states), n, logits.data());
  }

 private:
  template <typename Array>
  void check_states(const Array& states, std::size_t rows) const {
    require_dtype(states, of_.model.block.dtype, "states");
    require_rows(states, rows, of_.model.block.d_model, "states");
  }
  static std::size_t check_positions(const Longs& positions) {
    for (std::size_t t = 0; t < positions.shape(0); ++t)
      require(positions.data()[t] >= 0, "a position must not be negative");
    return positions.shape(0);
  }

  std::shared_ptr<ThreadPool> pool_;
  SimdLevel simd_;
  const Architecture of_;
  PyMemory memory_;
  BatchModel model_;
};

void make_attention(BatchAttention* self, nb::handle mixer, const std::string& dtype, ThreadPool& pool,
                    int bits, const std::string& simd) {
  const AttentionSpec spec = read_mixer(mixer);
  const AttentionShape shape = spec.shape(parse_dtype(dtype));
  const PageFormat format(shape.kv_heads, shape.head_dim, shape.dtype, bits, spec.is_latent());
  new (self) BatchAttention(shape, spec.alibi, format, pool, parse_simd(simd));
}

// An array [slots, bytes of a page].
template <typename Array>
auto arena_of(const BatchAttention& self, const Array& array, bool is_sealed = false) {
  const std::size_t nbytes = is_sealed ? self.format().sealed_nbytes() : self.format().page_nbytes();
  require_aligned(array, 16, "an arena");  // scales, pairs and words are read in place
  require(array.shape(1) == nbytes, std::string("an arena of ") + (is_sealed ? "sealed" : "plain") +
                                        " pages must be [slots, " + std::to_string(nbytes) + "]");
  return Arena<std::remove_pointer_t<decltype(bytes_of(array))>>{bytes_of(array), array.shape(0), nbytes};
}

void write(const BatchAttention& self, const FloatRows& keys, const FloatRows& values, const ByteRows& arena,
           const IdArray& slots, const IdArray& positions) {
  const std::size_t n = slots.shape(0), width = self.shape().kv_heads * self.shape().head_dim;
  require_rows(keys, n, width, "keys");
  require_rows(values, n, width, "values");
  require(positions.shape(0) == n, "every slot needs a position");
  self.write(keys.data(), values.data(), n, arena_of(self, arena), slots.data(), positions.data());
}

void seal(const BatchAttention& self, const ConstRows& arena, const IdArray& slots, const ByteRows& out_arena,
          const IdArray& out_slots) {
  require(slots.shape(0) == out_slots.shape(0), "every slot needs an output slot");
  self.seal(arena_of(self, arena), slots.data(), slots.shape(0), arena_of(self, out_arena, true),
            out_slots.data());
}

using Sinks = std::optional<FloatArray>;

// Those of a call that fits the layer; nullptr where there are none.
const float* sinks_of(const BatchAttention& self, const FloatRows& q, const Floats& out, const Sinks& sinks) {
  const AttentionShape& shape = self.shape();
  require_rows(q, q.shape(0), shape.heads * shape.head_dim, "q");
  require_rows(out, q.shape(0), shape.heads * shape.head_dim, "out");
  require(!sinks || sinks->shape(0) == shape.heads, "every head needs a sink");
  return sinks ? sinks->data() : nullptr;
}

void prompt(const BatchAttention& self, const FloatRows& q, const ConstRows& arena, std::size_t first_slot,
            std::size_t first_position, const Floats& out, const Sinks& sinks) {
  const float* taken = sinks_of(self, q, out, sinks);
  self.prompt(q.data(), q.shape(0), arena_of(self, arena), first_slot, first_position, out.data(), taken);
}

void decode(const BatchAttention& self, const FloatRows& q, const std::vector<ConstRows>& arenas,
            const Table& table, const Longs& offsets, const Longs& lengths, const Floats& out, double share,
            const Sinks& sinks) {
  const float* taken = sinks_of(self, q, out, sinks);
  require(offsets.shape(0) == q.shape(0) + 1 && lengths.shape(0) == q.shape(0),
          "lengths must have one value a query, offsets one more");
  require(table.shape(1) == 2, "the table of pages must be [pages, 2]: arena, slot");
  std::vector<Arena<const std::byte>> lie;
  for (const ConstRows& arena : arenas) lie.push_back(arena_of(self, arena, !lie.empty()));
  self.decode(q.data(), q.shape(0), lie, {table.data(), table.shape(0), offsets.data(), lengths.data()},
              out.data(), share, taken);
}

}  // namespace

void init_offload(nb::module_& m) {
  // Values, in place.
  m.def(
      "activate",
      [](const Floats& values, const std::string& activation, float threshold) {
        activate(parse_activation(activation, threshold), 0.0F, values.data(), values.size(),
                 best_simd_level());
      },
      "values"_a, "activation"_a, "threshold"_a = 0.0F);

  nb::class_<PyLentLayer>(m, "LentLayer");
  nb::class_<PyLentEnds>(m, "LentEnds");
  nb::class_<PyBatchModel>(m, "BatchModel")
      .def(nb::init<nb::handle, const std::string&, std::shared_ptr<ThreadPool>, std::size_t,
                    const std::string&>(),
           nb::kw_only(), "block"_a, "dtype"_a, "pool"_a, "rows_together"_a, "simd"_a = "auto")
      .def("lend_layer", &PyBatchModel::lend_layer, "number"_a, "tensors"_a, "encodings"_a,
           "down_by_inputs"_a)
      .def("lend_ends", &PyBatchModel::lend_ends, "tensors"_a)
      .def("embed", &PyBatchModel::embed, "ends"_a, "rows"_a, "positions"_a, "states"_a)
      .def("run", &PyBatchModel::run, "layer"_a, "states"_a, "positions"_a, "attend"_a, "decoding"_a = false,
           "watch"_a.none() = nb::none(), "recurrent"_a = nb::none(), "slots"_a = nb::none())
      .def("head", &PyBatchModel::head, "ends"_a, "states"_a, "logits"_a);

  // Calls let the interpreter's lock go.
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<BatchAttention>(m, "BatchAttention")
      .def("__init__", &make_attention, "mixer"_a, "dtype"_a, "pool"_a, nb::kw_only(), "bits"_a = 0,
           "simd"_a = "auto", nb::keep_alive<1, 4>())
      .def_prop_ro("window", [](const BatchAttention& self) { return self.shape().window; })
      .def_prop_ro("page_nbytes", [](const BatchAttention& self) { return self.format().page_nbytes(); })
      .def_prop_ro("sealed_nbytes", [](const BatchAttention& self) { return self.format().sealed_nbytes(); })
      .def("write", &write, "keys"_a, "values"_a, "arena"_a, "slots"_a, "positions"_a, Unlocked())
      .def("seal", &seal, "arena"_a, "slots"_a, "out_arena"_a, "out_slots"_a, Unlocked())
      .def("prompt", &prompt, "q"_a, "arena"_a, "first_slot"_a, "first_position"_a, "out"_a,
           "sinks"_a.none() = nb::none(), Unlocked())
      .def("decode", &decode, "q"_a, "arenas"_a, "table"_a, "offsets"_a, "lengths"_a, "out"_a,
           "share"_a = 1.0, "sinks"_a.none() = nb::none(), Unlocked());
}

}  // namespace flashllm
