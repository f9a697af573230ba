// The throughput engine: a model's layers over lent weights, and attention over a batch's KV blocks.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/kv_block.h"
#include "bind/bindings.h"
#include "bind/py_spec.h"
#include "kernels/kernels.h"
#include "offload/batch_model.h"

namespace flashllm {

namespace {

// Arrays of values of some dtype: those that are read, and those that are written.
using Values = Array<nb::ro>;
using Floats = Array<float>;
using Table = Array<const std::int32_t, Two>;
using Longs = Array<const std::int64_t, One>;

// bf16 comes as uint16 from numpy, which has no such type.
template <typename Array>
void require_dtype(const Array& array, Dtype dtype, const char* what) {
  const nb::dlpack::dtype type = array.dtype();
  const auto is = [&](nb::dlpack::dtype_code code) {
    return type.code == static_cast<std::uint8_t>(code) && type.bits == 8 * dtype_nbytes(dtype);
  };
  require(dtype == Dtype::bf16 ? is(nb::dlpack::dtype_code::Bfloat) || is(nb::dlpack::dtype_code::UInt)
                               : is(nb::dlpack::dtype_code::Float),
          std::string(what) + " must be of the model's dtype");
}

// Scales, pairs and words are read in place.
template <typename Array>
void require_aligned(const Array& array, const char* what) {
  constexpr std::uintptr_t kAlignment = 16;
  require(reinterpret_cast<std::uintptr_t>(array.data()) % kAlignment == 0,
          std::string(what) + " must lie at a multiple of 16 bytes");
}

template <typename Array>
void require_rows(const Array& array, std::size_t rows, std::size_t width, const char* what) {
  require(array.ndim() == 2 && array.shape(0) == rows && array.shape(1) == width,
          std::string(what) + " must be [" + std::to_string(rows) + ", " + std::to_string(width) + "]");
}

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
    const auto array = [&](auto* rows, std::size_t width) {
      using Row = std::remove_pointer_t<decltype(rows)>;
      return nb::cast(nb::ndarray<nb::numpy, Row, nb::ndim<2>>(rows, {part.count, width}, nb::none()));
    };
    const nb::gil_scoped_acquire locked;
    attend_(first_, array(queries, attended), array(keys, cached), array(values, cached),
            array(out, attended));
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
    NamedTensors& from = lent->tensors;
    LentLayer& weights = lent->weights;
    weights.number = number;
    weights.block = read_block(from, "", of_, number);
    const std::size_t count = weights.block.spec.neurons, width = of_.model.block.d_model;
    LentNeurons& neurons = weights.neurons;
    neurons.up = from.linear("up", count, width);
    neurons.up.bias = from.floats("ffn.up_bias", count);
    if (of_.gated) {
      neurons.gate = from.linear("gate", count, width);
      neurons.gate.bias = from.floats("ffn.gate_bias", count);
    }
    neurons.down_by_inputs = down_by_inputs;
    neurons.down = down_by_inputs ? from.linear("down", count, width) : from.linear("down", width, count);
    neurons.down.bias = from.floats("ffn.down_bias", width);
    weights.router = read_router(from, "", weights.block.spec.experts, width);
    require(weights.router == nullptr || down_by_inputs || !is_coded(neurons.down.codec),
            "the columns of an expert cannot be taken out of rows of codes");
    check_block(of_.model, weights.block);
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
  // query, key and value, then of out, with -1; then those of up and gate and those of down, with the first
  // of their neurons: of each expert in turn.
  void run(const PyLentLayer& layer, const AnyArray& states, const Longs& positions, nb::object attend,
           bool decoding, nb::object watch) {
    const std::size_t n = check_positions(positions);
    check_states(states, n);
    if (watch.is_none()) {
      model_.set_watch({});
    } else {
      model_.set_watch([&](const float* x, std::size_t count, std::size_t width, std::ptrdiff_t neuron) {
        const nb::gil_scoped_acquire locked;
        watch(nb::ndarray<nb::numpy, const float, nb::ndim<2>>(x, {count, width}, nb::none()), neuron);
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
    model_.run(layer.weights, positions.data(), n, decoding, bytes_of(states));
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

constexpr Named<KvLayout> kLayouts[] = {
    {"plain", KvLayout::plain}, {"hidden", KvLayout::hidden}, {"kivi", KvLayout::kivi}};

// Attention of a batch of sequences over their KV blocks, which lie in arenas [slots, bytes of a block].
class PyBatchAttention {
 public:
  PyBatchAttention(std::size_t heads, std::size_t kv_heads, std::size_t head_dim, const std::string& dtype,
                   float scale, std::shared_ptr<ThreadPool> pool, const std::string& layout, int bits,
                   float softcap, nb::handle alibi, std::size_t value_dim, const std::string& simd)
      : pool_(std::move(pool)),
        simd_(parse_simd(simd)),
        alibi_(read_alibi(alibi)),
        format_(kv_heads, head_dim, parse_dtype(dtype), by_name("a layout of KV blocks", layout, kLayouts),
                bits, value_dim != 0) {
    require(heads != 0 && heads % kv_heads == 0, "heads must be a multiple of kv_heads");
    shape_.heads = heads;
    shape_.kv_heads = kv_heads;
    shape_.head_dim = head_dim;
    shape_.value_dim = value_dim;
    shape_.dtype = format_.dtype();
    shape_.scale = scale;
    shape_.softcap = softcap;
    require(alibi_.slopes.empty() || alibi_.slopes.size() == heads, "every head needs a slope");
    if (!alibi_.slopes.empty()) shape_.alibi = &alibi_;
  }

  std::size_t block_nbytes() const { return format_.block_nbytes(); }
  std::size_t sealed_nbytes() const { return format_.sealed_nbytes(); }

  void write(const FloatRows& keys, const FloatRows& values, const ByteRows& arena, const IdArray& slots,
             const IdArray& positions) const {
    constexpr std::size_t kGrain = 16;
    const std::size_t n = slots.shape(0), width = format_.kv_heads() * format_.head_dim();
    require_rows(keys, n, width, "keys");
    require_rows(values, n, width, "values");
    require(positions.shape(0) == n, "every slot needs a position");
    check_arena(arena, false);
    check_slots(slots, arena.shape(0));
    for (std::size_t i = 0; i < n; ++i) require(positions.data()[i] >= 0, "a position must not be negative");
    const nb::gil_scoped_release unlocked;
    pool_->parallel_for(n, kGrain, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i)
        format_.write(keys.data() + i * width, values.data() + i * width,
                      static_cast<std::size_t>(positions.data()[i]),
                      bytes_of(arena) + at(slots, i) * block_nbytes());
    });
  }

  void seal(const ConstRows& arena, const IdArray& slots, const ByteRows& out_arena,
            const IdArray& out_slots) const {
    check_arena(arena, false);
    check_arena(out_arena, true);
    check_slots(slots, arena.shape(0));
    check_slots(out_slots, out_arena.shape(0));
    require(slots.shape(0) == out_slots.shape(0), "every slot needs an output slot");
    const nb::gil_scoped_release unlocked;
    std::atomic<bool> is_finite{true};
    pool_->parallel_for(slots.shape(0), 1, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i)
        if (!format_.seal(bytes_of(arena) + at(slots, i) * block_nbytes(),
                          bytes_of(out_arena) + at(out_slots, i) * sealed_nbytes(), simd_))
          is_finite = false;
    });
    require(is_finite, "keys and values that are not finite cannot be packed");
  }

  // Causal attention of consecutive tokens, the first at `first_position`, over the plain blocks that lie one
  // after another from `first_slot` on.
  void prompt(const FloatRows& q, const ConstRows& arena, std::size_t first_slot, std::size_t first_position,
              const Floats& out, std::size_t window, const std::optional<FloatArray>& sinks) const {
    check_queries(q, out);
    check_arena(arena, false);
    const AttentionShape shape = of_layer(window, sinks);
    std::vector<const std::byte*> pages((first_position + q.shape(0) + kKvBlock - 1) / kKvBlock);
    require(first_slot <= arena.shape(0) && pages.size() <= arena.shape(0) - first_slot,
            "the sequence's blocks reach beyond the arena's " + std::to_string(arena.shape(0)) + " slots");
    for (std::size_t i = 0; i < pages.size(); ++i)
      pages[i] = bytes_of(arena) + (first_slot + i) * block_nbytes();
    const nb::gil_scoped_release unlocked;
    attend_many(shape, q.data(), q.shape(0), first_position, format_.view(pages.data()), out.data(), *pool_,
                simd_);
  }

  // Attention of one token a sequence, to its first lengths[i] positions, its own included, which lie in the
  // blocks [offsets[i], offsets[i + 1]) of the table: the last one, which it is in, is plain and in the first
  // arena; those before it are sealed, in the other arenas, where they are packed.
  void decode(const FloatRows& q, const std::vector<ConstRows>& arenas, const Table& table,
              const Longs& offsets, const Longs& lengths, const Floats& out, double share, std::size_t window,
              const std::optional<FloatArray>& sinks) const {
    check_queries(q, out);
    const std::size_t n = q.shape(0);
    require(offsets.shape(0) == n + 1 && lengths.shape(0) == n,
            "lengths must have one value a query, offsets one more");
    require(table.shape(1) == 2, "the table of blocks must be [blocks, 2]: arena, slot");
    require(share > 0.0 && share <= 1.0, "share must be more than 0 and at most 1");
    AttentionShape shape = of_layer(window, sinks);
    shape.share = share;
    for (std::size_t a = 0; a < arenas.size(); ++a) check_arena(arenas[a], a > 0);
    const std::vector<const std::byte*> blocks = check_table(arenas, table);
    std::vector<AttendingToken> tokens(n);
    for (std::size_t i = 0; i < n; ++i) {
      const std::int64_t begin = offsets.data()[i], end = offsets.data()[i + 1], length = lengths.data()[i];
      require(0 <= begin && begin <= end && end <= static_cast<std::int64_t>(blocks.size()),
              "offsets must rise from 0 up to the table's length");
      const std::int64_t last = begin + (length - 1) / static_cast<std::int64_t>(kKvBlock);
      require(length > 0 && last < end, "sequence " + std::to_string(i) + ": its blocks do not hold " +
                                            std::to_string(length) + " positions");
      for (std::int64_t b = begin; format_.is_packed() && b <= last; ++b)
        require((table.data()[2 * b] > 0) == (b < last),
                "sequence " + std::to_string(i) + ": all of its blocks but the last must be sealed");
      KvView kv = format_.view(blocks.data() + begin);
      if (format_.is_packed()) {
        kv.format = &format_;
        kv.packed_pages = kv.pages;
      }
      tokens[i] = {q.data() + i * q.shape(1), kv, static_cast<std::size_t>(length),
                   out.data() + i * q.shape(1)};
    }
    const nb::gil_scoped_release unlocked;
    attend_each(shape, tokens.data(), n, *pool_, simd_);
  }

 private:
  AttentionShape of_layer(std::size_t window, const std::optional<FloatArray>& sinks) const {
    require(!sinks || sinks->shape(0) == shape_.heads, "every head needs a sink");
    AttentionShape shape = shape_;
    shape.window = window;
    shape.sinks = sinks ? sinks->data() : nullptr;
    return shape;
  }
  static std::size_t at(const IdArray& slots, std::size_t i) {
    return static_cast<std::size_t>(slots.data()[i]);
  }

  template <typename Array>
  void check_arena(const Array& arena, bool is_sealed) const {
    const std::size_t nbytes = is_sealed ? sealed_nbytes() : block_nbytes();
    require_aligned(arena, "an arena");
    require(arena.shape(1) == nbytes, std::string("an arena of ") + (is_sealed ? "sealed" : "plain") +
                                          " blocks must be [slots, " + std::to_string(nbytes) + "]");
  }

  static void check_slot(std::int64_t slot, std::size_t slots) {
    require(slot >= 0 && slot < static_cast<std::int64_t>(slots),
            "slot " + std::to_string(slot) + " is not one of the arena's " + std::to_string(slots));
  }
  static void check_slots(const IdArray& slots, std::size_t count) {
    for (std::size_t i = 0; i < slots.shape(0); ++i) check_slot(slots.data()[i], count);
  }

  // Where each block of the table lies.
  static std::vector<const std::byte*> check_table(const std::vector<ConstRows>& arenas, const Table& table) {
    std::vector<const std::byte*> blocks(table.shape(0));
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      const std::int32_t number = table.data()[2 * b], slot = table.data()[2 * b + 1];
      require(number >= 0 && static_cast<std::size_t>(number) < arenas.size(),
              "no arena " + std::to_string(number));
      const ConstRows& arena = arenas[static_cast<std::size_t>(number)];
      check_slot(slot, arena.shape(0));
      blocks[b] = bytes_of(arena) + static_cast<std::size_t>(slot) * arena.shape(1);
    }
    return blocks;
  }

  void check_queries(const FloatRows& q, const Floats& out) const {
    const std::size_t width = shape_.heads * shape_.head_dim;
    require_rows(q, q.shape(0), width, "q");
    require_rows(out, q.shape(0), width, "out");
  }

  std::shared_ptr<ThreadPool> pool_;
  SimdLevel simd_;
  const Alibi alibi_;
  KvBlockFormat format_;
  AttentionShape shape_;
};

}  // namespace

void init_offload(nb::module_& m) {
  // Values, in place.
  m.def(
      "activate",
      [](const Floats& values, const std::string& activation, float threshold) {
        activate(parse_activation(activation, threshold), 0.0F, values.data(), values.size());
      },
      nb::arg("values"), nb::arg("activation"), nb::arg("threshold") = 0.0F);

  nb::class_<PyLentLayer>(m, "LentLayer");
  nb::class_<PyLentEnds>(m, "LentEnds");
  nb::class_<PyBatchModel>(m, "BatchModel")
      .def(nb::init<nb::handle, const std::string&, std::shared_ptr<ThreadPool>, std::size_t,
                    const std::string&>(),
           nb::kw_only(), nb::arg("block"), nb::arg("dtype"), nb::arg("pool"), nb::arg("rows_together"),
           nb::arg("simd") = "auto")
      .def("lend_layer", &PyBatchModel::lend_layer, nb::arg("number"), nb::arg("tensors"),
           nb::arg("encodings"), nb::arg("down_by_inputs"))
      .def("lend_ends", &PyBatchModel::lend_ends, nb::arg("tensors"))
      .def("embed", &PyBatchModel::embed, nb::arg("ends"), nb::arg("rows"), nb::arg("positions"),
           nb::arg("states"))
      .def("run", &PyBatchModel::run, nb::arg("layer"), nb::arg("states"), nb::arg("positions"),
           nb::arg("attend"), nb::arg("decoding") = false, nb::arg("watch").none() = nb::none())
      .def("head", &PyBatchModel::head, nb::arg("ends"), nb::arg("states"), nb::arg("logits"));

  nb::class_<PyBatchAttention>(m, "BatchAttention")
      .def(nb::init<std::size_t, std::size_t, std::size_t, const std::string&, float,
                    std::shared_ptr<ThreadPool>, const std::string&, int, float, nb::handle, std::size_t,
                    const std::string&>(),
           nb::kw_only(), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("dtype"),
           nb::arg("scale"), nb::arg("pool"), nb::arg("layout") = "plain", nb::arg("bits") = 4,
           nb::arg("softcap") = 0.0F, nb::arg("alibi").none() = nb::none(), nb::arg("value_dim") = 0,
           nb::arg("simd") = "auto")
      .def_prop_ro("block_nbytes", &PyBatchAttention::block_nbytes)
      .def_prop_ro("sealed_nbytes", &PyBatchAttention::sealed_nbytes)
      .def("write", &PyBatchAttention::write, nb::arg("keys"), nb::arg("values"), nb::arg("arena"),
           nb::arg("slots"), nb::arg("positions"))
      .def("seal", &PyBatchAttention::seal, nb::arg("arena"), nb::arg("slots"), nb::arg("out_arena"),
           nb::arg("out_slots"))
      .def("prompt", &PyBatchAttention::prompt, nb::arg("q"), nb::arg("arena"), nb::arg("first_slot"),
           nb::arg("first_position"), nb::arg("out"), nb::arg("window") = 0,
           nb::arg("sinks").none() = nb::none())
      .def("decode", &PyBatchAttention::decode, nb::arg("q"), nb::arg("arenas"), nb::arg("table"),
           nb::arg("offsets"), nb::arg("lengths"), nb::arg("out"), nb::arg("share") = 1.0,
           nb::arg("window") = 0, nb::arg("sinks").none() = nb::none());
}

}  // namespace flashllm
