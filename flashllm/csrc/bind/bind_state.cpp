// What sequences leave behind, and attention over it for tests and benchmarks: a model's is inside it.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <vector>

#include "bind/bindings.h"
#include "bind/py_spec.h"
#include "model/sequence_state.h"

namespace flashllm {

namespace {

using Rows = Exact<nb::ndarray<const float, nb::ndim<3>, nb::device::cpu, nb::c_contig>>;
using Output = Exact<nb::ndarray<float, nb::ndim<3>, nb::device::cpu, nb::c_contig>>;

using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

// Of the layers of `block`, a BlockSpec.
StateShape read_shape(nb::object block, std::size_t context, std::size_t part_tokens,
                      const std::string& dtype, int bits) {
  const SpecReader reader(std::move(block));
  std::vector<LayerKv> layers;
  for (const nb::handle each : reader.get<nb::tuple>("layers"))
    layers.push_back({reader.get<std::size_t>("kv_heads"), reader.get<std::size_t>("head_dim"),
                      SpecReader(nb::borrow(each)).get_or<std::size_t>("window", 0)});
  return StateShape(layers, context, part_tokens, parse_dtype(dtype), bits);
}

// The pages of `owner`, which lives as long as the arrays.
std::vector<std::vector<Bytes>> arrays_of(nb::handle owner, const SequenceState::Spans& spans) {
  std::vector<std::vector<Bytes>> arrays;
  for (const auto& of_kind : spans) {
    arrays.emplace_back();
    for (const SequenceState::Span& span : of_kind)
      arrays.back().emplace_back(reinterpret_cast<std::uint8_t*>(span.data),
                                 std::initializer_list{span.nbytes}, owner);
  }
  return arrays;
}

// One sequence of one layer.
class PyKvAttention {
 public:
  PyKvAttention(std::size_t heads, std::size_t kv_heads, std::size_t head_dim, std::size_t context,
                const std::string& dtype, float scale, std::shared_ptr<ThreadPool> pool,
                const std::string& simd)
      : pool_(std::move(pool)),
        simd_(parse_simd(simd)),
        sequence_(std::make_shared<StatePool>(
            StateShape({{kv_heads, head_dim, 0}}, context, context, parse_dtype(dtype)))) {
    require(heads != 0 && heads % kv_heads == 0, "heads must be a multiple of kv_heads");
    shape_.heads = heads;
    shape_.kv_heads = kv_heads;
    shape_.head_dim = head_dim;
    shape_.dtype = sequence_.shape().dtype();
    shape_.scale = scale;
  }

  void append(const Rows& keys, const Rows& values) {
    for (const Rows* rows : {&keys, &values})
      require(rows->shape(0) == keys.shape(0) && rows->shape(1) == shape_.kv_heads &&
                  rows->shape(2) == shape_.head_dim,
              "keys and values must be [tokens, kv_heads, head_dim]");
    const std::size_t first = sequence_.length(), row = shape_.kv_heads * shape_.head_dim;
    sequence_.reserve(first + keys.shape(0));
    for (std::size_t i = 0; i < keys.shape(0); ++i)
      sequence_.append(0, first + i, keys.data() + i * row, values.data() + i * row);
    sequence_.commit(first + keys.shape(0));
  }

  void attend_each(const Rows& q, const Output& out) {
    check(q, out);
    std::vector<AttendingToken> tokens(q.shape(0));
    const std::size_t row = shape_.heads * shape_.head_dim;
    for (std::size_t i = 0; i < tokens.size(); ++i)
      tokens[i] = {q.data() + i * row, sequence_.view(0), first(q) + i + 1, out.data() + i * row};
    const nb::gil_scoped_release unlocked;
    flashllm::attend_each(shape_, tokens.data(), tokens.size(), *pool_, simd_);
  }

  void attend_many(const Rows& q, const Output& out) {
    check(q, out);
    const nb::gil_scoped_release unlocked;
    flashllm::attend_many(shape_, q.data(), q.shape(0), first(q), sequence_.view(0), out.data(), *pool_,
                          simd_);
  }

  std::size_t keep(std::size_t length) { return sequence_.keep(length); }
  std::size_t length() const { return sequence_.length(); }

 private:
  std::size_t first(const Rows& q) const { return sequence_.length() - q.shape(0); }
  void check(const Rows& q, const Output& out) const {
    require(q.shape(0) <= sequence_.length(), "more queries than cached tokens");
    require(q.shape(1) == shape_.heads && q.shape(2) == shape_.head_dim && out.shape(0) == q.shape(0) &&
                out.shape(1) == q.shape(1) && out.shape(2) == q.shape(2),
            "queries and outputs must be [tokens, heads, head_dim]");
  }

  std::shared_ptr<ThreadPool> pool_;
  SimdLevel simd_;
  SequenceState sequence_;
  AttentionShape shape_;
};

}  // namespace

void init_state(nb::module_& m) {
  nb::class_<StateShape>(m, "StateShape")
      .def(
          "__init__",
          [](StateShape* self, nb::object block, std::size_t context, std::size_t part_tokens,
             const std::string& dtype, int bits) {
            new (self) StateShape(read_shape(std::move(block), context, part_tokens, dtype, bits));
          },
          nb::arg("block"), nb::arg("context"), nb::arg("part_tokens"), nb::arg("dtype"), nb::arg("bits") = 0)
      .def_prop_ro("block_nbytes", &StateShape::block_nbytes)
      .def("nbytes", &StateShape::nbytes, nb::arg("length"));

  nb::class_<StatePool>(m, "StatePool")
      .def(nb::init<const StateShape&>(), nb::arg("shape"))
      .def_prop_ro("nbytes", &StatePool::nbytes);

  nb::class_<SequenceState>(m, "SequenceState")
      .def(nb::init<std::shared_ptr<StatePool>>(), nb::arg("pool"))
      .def_prop_ro("length", &SequenceState::length)
      .def_prop_ro("context", [](const SequenceState& self) { return self.shape().context(); })
      .def("nbytes_to_add", &SequenceState::nbytes_to_add, nb::arg("length"))
      .def("commit", &SequenceState::commit, nb::arg("length"))
      .def("can_keep", &SequenceState::can_keep, nb::arg("length"))
      .def("keep", &SequenceState::keep, nb::arg("length"))
      .def("copy_from", &SequenceState::copy_from, nb::arg("other"))
      .def("save",
           [](nb::handle_t<SequenceState> self) {
             return arrays_of(self, nb::cast<SequenceState&>(self).save());
           })
      .def(
          "restore",
          [](nb::handle_t<SequenceState> self, std::size_t length, const std::vector<std::size_t>& pages) {
            return arrays_of(self, nb::cast<SequenceState&>(self).restore(length, pages));
          },
          nb::arg("length"), nb::arg("pages"));

  nb::class_<PyKvAttention>(m, "KvAttention")
      .def(nb::init<std::size_t, std::size_t, std::size_t, std::size_t, const std::string&, float,
                    std::shared_ptr<ThreadPool>, const std::string&>(),
           nb::kw_only(), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("context"),
           nb::arg("dtype"), nb::arg("scale"), nb::arg("pool"), nb::arg("simd") = "auto")
      .def_prop_ro("length", &PyKvAttention::length)
      .def("append", &PyKvAttention::append, nb::arg("keys"), nb::arg("values"))
      .def("attend_each", &PyKvAttention::attend_each, nb::arg("q"), nb::arg("out"))
      .def("attend_many", &PyKvAttention::attend_many, nb::arg("q"), nb::arg("out"))
      .def("keep", &PyKvAttention::keep, nb::arg("length"));
}

}  // namespace flashllm
