// The throughput engine: what lies between a layer's products, and attention over a batch's KV blocks.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind/bindings.h"
#include "offload/batch_attention.h"
#include "offload/elementwise.h"

namespace flashllm {

namespace {

// Arrays of values of some dtype: those that are read, and those that are written.
using Values = Exact<nb::ndarray<nb::ro, nb::device::cpu, nb::c_contig>>;
using Written = Exact<nb::ndarray<nb::device::cpu, nb::c_contig>>;
using Arena = Exact<nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::device::cpu, nb::c_contig>>;
using WrittenArena = Exact<nb::ndarray<std::uint8_t, nb::ndim<2>, nb::device::cpu, nb::c_contig>>;
using Table = Exact<nb::ndarray<const std::int32_t, nb::ndim<2>, nb::device::cpu, nb::c_contig>>;
using Longs = Exact<nb::ndarray<const std::int64_t, nb::ndim<1>, nb::device::cpu, nb::c_contig>>;
using Floats = Exact<nb::ndarray<float, nb::device::cpu, nb::c_contig>>;
using ConstFloats = Exact<nb::ndarray<const float, nb::device::cpu, nb::c_contig>>;

template <typename Array>
auto bytes_of(const Array& array) {
  if constexpr (std::is_const_v<std::remove_pointer_t<decltype(array.data())>>) {
    return reinterpret_cast<const std::byte*>(array.data());
  } else {
    return reinterpret_cast<std::byte*>(array.data());
  }
}

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

class PyElementwise {
 public:
  PyElementwise(const std::string& dtype, std::shared_ptr<ThreadPool> pool, const std::string& simd)
      : pool_(std::move(pool)), elementwise_(parse_dtype(dtype), *pool_, parse_simd(simd)) {}

  void normalize(const Values& x, const Written& out, const std::string& kind, float epsilon,
                 const std::optional<FloatArray>& weight, const std::optional<FloatArray>& bias) const {
    check(x, "x");
    check(out, "out");
    require(kind == "layer" || kind == "rms", "a norm is layer or rms, got " + kind);
    require(x.ndim() == 2, "x must be [rows, width]");
    require_rows(out, x.shape(0), x.shape(1), "out");
    Norm norm;
    norm.kind = kind == "rms" ? Norm::Kind::rms : Norm::Kind::layer;
    norm.width = x.shape(1);
    norm.epsilon = epsilon;
    for (const auto* each : {&weight, &bias})
      require(!each->has_value() || (*each)->shape(0) == norm.width,
              "a norm's weight and bias must have one value a column");
    norm.weight = weight.has_value() ? weight->data() : nullptr;
    norm.bias = bias.has_value() ? bias->data() : nullptr;
    const nb::gil_scoped_release unlocked;
    elementwise_.normalize(norm, bytes_of(x), x.shape(0), bytes_of(out));
  }

  void rotate(const Written& x, std::size_t heads, const Longs& positions,
              const FloatArray& inverse_frequency, std::size_t dims, const std::string& style, float scaling,
              float factor) const {
    check(x, "x");
    require(style == "half" || style == "interleaved", "a rotary style is half or interleaved, got " + style);
    require(x.ndim() == 2 && heads != 0 && x.shape(1) % heads == 0, "x must be [tokens, heads * head_dim]");
    require(positions.shape(0) == x.shape(0), "every token needs a position");
    require(inverse_frequency.shape(0) == dims / 2, "inverse_frequency must have dims / 2 values");
    for (std::size_t t = 0; t < positions.shape(0); ++t)
      require(positions.data()[t] >= 0, "a position must not be negative");
    Rotary rotary;
    rotary.inverse_frequency = inverse_frequency.data();
    rotary.dims = dims;
    rotary.style = style == "half" ? Rotary::Style::half : Rotary::Style::interleaved;
    rotary.scaling = scaling;
    const nb::gil_scoped_release unlocked;
    elementwise_.rotate(rotary, positions.data(), x.shape(0), heads, x.shape(1) / heads, factor, bytes_of(x));
  }

  void activate(const Written& x, const std::optional<Values>& gate, const std::string& activation,
                float threshold) const {
    check(x, "x");
    const Activation parsed = parse_activation(activation, threshold);
    if (gate.has_value()) {
      check(*gate, "gate");
      require(gate->size() == x.size(), "x and gate must have the same size");
    }
    const nb::gil_scoped_release unlocked;
    elementwise_.activate(parsed, gate.has_value() ? bytes_of(*gate) : nullptr, x.size(), bytes_of(x));
  }

  void add(const Written& x, const Values& y) const {
    check(x, "x");
    check(y, "y");
    require(x.size() == y.size(), "x and y must have the same size");
    const nb::gil_scoped_release unlocked;
    elementwise_.add(bytes_of(y), x.size(), bytes_of(x));
  }

  void scale(const Written& x, float factor) const {
    check(x, "x");
    const nb::gil_scoped_release unlocked;
    elementwise_.scale(factor, x.size(), bytes_of(x));
  }

  void widen(const Values& x, const Floats& out) const {
    check(x, "x");
    require(x.size() == out.size(), "x and out must have the same size");
    const nb::gil_scoped_release unlocked;
    elementwise_.widen(bytes_of(x), x.size(), out.data());
  }

  void narrow(const ConstFloats& x, const Written& out) const {
    check(out, "out");
    require(x.size() == out.size(), "x and out must have the same size");
    const nb::gil_scoped_release unlocked;
    elementwise_.narrow(x.data(), x.size(), bytes_of(out));
  }

 private:
  template <typename Array>
  void check(const Array& array, const char* what) const {
    require_dtype(array, elementwise_.dtype(), what);
  }

  std::shared_ptr<ThreadPool> pool_;
  Elementwise elementwise_;
};

KvLayout parse_layout(const std::string& name) {
  if (name == "plain") return KvLayout::plain;
  if (name == "hidden") return KvLayout::hidden;
  if (name == "kivi") return KvLayout::kivi;
  throw CoreError(ErrorKind::usage, "unknown layout of KV blocks " + name);
}

class PyBatchAttention {
 public:
  PyBatchAttention(std::size_t heads, std::size_t kv_heads, std::size_t head_dim, const std::string& dtype,
                   float scale, std::shared_ptr<ThreadPool> pool, const std::string& layout, int bits,
                   float softcap, const std::string& simd)
      : pool_(std::move(pool)),
        simd_(parse_simd(simd)),
        attention_(heads, KvBlockFormat(kv_heads, head_dim, parse_dtype(dtype), parse_layout(layout), bits),
                   {scale, softcap}, *pool_, simd_) {}

  std::size_t block_nbytes() const { return format().block_nbytes(); }
  std::size_t sealed_nbytes() const { return format().sealed_nbytes(); }

  void write(const Values& keys, const Values& values, const WrittenArena& arena, const IdArray& slots,
             const IdArray& positions) const {
    constexpr std::size_t kGrain = 16;
    const std::size_t n = slots.shape(0), width = format().kv_heads() * format().head_dim();
    require_dtype(keys, format().dtype(), "keys");
    require_dtype(values, format().dtype(), "values");
    require_rows(keys, n, width, "keys");
    require_rows(values, n, width, "values");
    require(positions.shape(0) == n, "every slot needs a position");
    check_arena(arena, false);
    check_slots(slots, arena.shape(0));
    for (std::size_t i = 0; i < n; ++i) require(positions.data()[i] >= 0, "a position must not be negative");
    const std::size_t row = width * dtype_nbytes(format().dtype());
    const nb::gil_scoped_release unlocked;
    pool_->parallel_for(n, kGrain, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i)
        format().write(bytes_of(keys) + i * row, bytes_of(values) + i * row,
                       static_cast<std::size_t>(positions.data()[i]),
                       bytes_of(arena) + at(slots, i) * block_nbytes());
    });
  }

  void seal(const Arena& arena, const IdArray& slots, const WrittenArena& out_arena,
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
        if (!format().seal(bytes_of(arena) + at(slots, i) * block_nbytes(),
                           bytes_of(out_arena) + at(out_slots, i) * sealed_nbytes(), simd_))
          is_finite = false;
    });
    require(is_finite, "keys and values that are not finite cannot be packed");
  }

  void prompt(const Values& q, const Arena& arena, std::size_t first_slot, std::size_t first_position,
              const Written& out, std::size_t window) const {
    check_queries(q, out);
    check_arena(arena, false);
    const std::size_t blocks = (first_position + q.shape(0) + kKvBlock - 1) / kKvBlock;
    require(first_slot <= arena.shape(0) && blocks <= arena.shape(0) - first_slot,
            "the sequence's blocks reach beyond the arena's " + std::to_string(arena.shape(0)) + " slots");
    const nb::gil_scoped_release unlocked;
    attention_.prompt(bytes_of(q), q.shape(0), bytes_of(arena) + first_slot * block_nbytes(), first_position,
                      window, bytes_of(out));
  }

  std::uint64_t decode(const Values& q, const std::vector<Arena>& arenas, const std::vector<bool>& sealed,
                       const Table& table, const Longs& offsets, const Longs& lengths, const Written& out,
                       double share, std::size_t window) const {
    check_queries(q, out);
    const std::size_t n = q.shape(0);
    require(arenas.size() == sealed.size(), "every arena must be told to be sealed or not");
    require(offsets.shape(0) == n + 1 && lengths.shape(0) == n,
            "lengths must have one value a query, offsets one more");
    require(table.shape(1) == 2, "the table of blocks must be [blocks, 2]: arena, slot");
    require(share > 0.0 && share <= 1.0, "share must be more than 0 and at most 1");
    std::vector<KvArena> places;
    for (std::size_t a = 0; a < arenas.size(); ++a) {
      check_arena(arenas[a], sealed[a]);
      places.push_back({bytes_of(arenas[a]), sealed[a]});
    }
    const std::vector<KvPlace> blocks = check_table(arenas, table);
    std::vector<DecodingToken> tokens(n);
    const std::size_t row = q.shape(1) * dtype_nbytes(format().dtype());
    for (std::size_t i = 0; i < n; ++i) {
      const std::int64_t begin = offsets.data()[i], end = offsets.data()[i + 1], length = lengths.data()[i];
      require(0 <= begin && begin <= end && end <= static_cast<std::int64_t>(blocks.size()),
              "offsets must rise from 0 up to the table's length");
      require(length > 0 && (length - 1) / static_cast<std::int64_t>(kKvBlock) < end - begin,
              "sequence " + std::to_string(i) + ": its blocks do not hold " + std::to_string(length) +
                  " positions");
      tokens[i] = {bytes_of(q) + i * row, blocks.data() + begin, static_cast<std::size_t>(length),
                   bytes_of(out) + i * row};
    }
    const nb::gil_scoped_release unlocked;
    return attention_.decode(places, tokens.data(), n, share, window);
  }

 private:
  const KvBlockFormat& format() const { return attention_.format(); }
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

  static std::vector<KvPlace> check_table(const std::vector<Arena>& arenas, const Table& table) {
    std::vector<KvPlace> blocks(table.shape(0));
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      blocks[b] = {table.data()[2 * b], table.data()[2 * b + 1]};
      require(blocks[b].arena >= 0 && static_cast<std::size_t>(blocks[b].arena) < arenas.size(),
              "no arena " + std::to_string(blocks[b].arena));
      check_slot(blocks[b].slot, arenas[static_cast<std::size_t>(blocks[b].arena)].shape(0));
    }
    return blocks;
  }

  void check_queries(const Values& q, const Written& out) const {
    require_dtype(q, format().dtype(), "q");
    require_dtype(out, format().dtype(), "out");
    const std::size_t width = attention_.heads() * format().head_dim();
    require(q.ndim() == 2 && q.shape(1) == width, "q must be [tokens, " + std::to_string(width) + "]");
    require_rows(out, q.shape(0), width, "out");
  }

  std::shared_ptr<ThreadPool> pool_;
  SimdLevel simd_;
  BatchAttention attention_;
};

}  // namespace

void init_offload(nb::module_& m) {
  nb::class_<PyElementwise>(m, "Elementwise")
      .def(nb::init<const std::string&, std::shared_ptr<ThreadPool>, const std::string&>(), nb::arg("dtype"),
           nb::arg("pool"), nb::arg("simd") = "auto")
      .def("normalize", &PyElementwise::normalize, nb::arg("x"), nb::arg("out"), nb::arg("kind"),
           nb::arg("epsilon"), nb::arg("weight").none(), nb::arg("bias").none())
      .def("rotate", &PyElementwise::rotate, nb::arg("x"), nb::arg("heads"), nb::arg("positions"),
           nb::arg("inverse_frequency"), nb::arg("dims"), nb::arg("style") = "half",
           nb::arg("scaling") = 1.0F, nb::arg("factor") = 1.0F)
      .def("activate", &PyElementwise::activate, nb::arg("x"), nb::arg("gate").none(), nb::arg("activation"),
           nb::arg("threshold") = 0.0F)
      .def("add", &PyElementwise::add, nb::arg("x"), nb::arg("y"))
      .def("scale", &PyElementwise::scale, nb::arg("x"), nb::arg("factor"))
      .def("widen", &PyElementwise::widen, nb::arg("x"), nb::arg("out"))
      .def("narrow", &PyElementwise::narrow, nb::arg("x"), nb::arg("out"));

  nb::class_<PyBatchAttention>(m, "BatchAttention")
      .def(nb::init<std::size_t, std::size_t, std::size_t, const std::string&, float,
                    std::shared_ptr<ThreadPool>, const std::string&, int, float, const std::string&>(),
           nb::kw_only(), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("dtype"),
           nb::arg("scale"), nb::arg("pool"), nb::arg("layout") = "plain", nb::arg("bits") = 4,
           nb::arg("softcap") = 0.0F, nb::arg("simd") = "auto")
      .def_prop_ro("block_nbytes", &PyBatchAttention::block_nbytes)
      .def_prop_ro("sealed_nbytes", &PyBatchAttention::sealed_nbytes)
      .def("write", &PyBatchAttention::write, nb::arg("keys"), nb::arg("values"), nb::arg("arena"),
           nb::arg("slots"), nb::arg("positions"))
      .def("seal", &PyBatchAttention::seal, nb::arg("arena"), nb::arg("slots"), nb::arg("out_arena"),
           nb::arg("out_slots"))
      .def("prompt", &PyBatchAttention::prompt, nb::arg("q"), nb::arg("arena"), nb::arg("first_slot"),
           nb::arg("first_position"), nb::arg("out"), nb::arg("window") = 0)
      .def("decode", &PyBatchAttention::decode, nb::arg("q"), nb::arg("arenas"), nb::arg("sealed"),
           nb::arg("table"), nb::arg("offsets"), nb::arg("lengths"), nb::arg("out"), nb::arg("share") = 1.0,
           nb::arg("window") = 0);
}

}  // namespace flashllm
