// Attention by itself, for tests and benchmarks: a model's is inside it.
#include "bind/bindings.h"
#include "sequence/sequence_state.h"

namespace flashllm {

namespace {

using Rows = Array<const float, nb::ndim<3>>;
using Output = Array<float, nb::ndim<3>>;

// One sequence of one layer.
class PyKvAttention {
 public:
  PyKvAttention(std::size_t heads, std::size_t kv_heads, std::size_t head_dim, std::size_t context,
                const std::string& dtype, std::shared_ptr<ThreadPool> pool, const std::string& simd)
      : pool_(std::move(pool)),
        simd_(parse_simd(simd)),
        sequence_(std::make_shared<StatePool>(
            StateShape({{kv_heads, head_dim, 0}}, context, context, parse_dtype(dtype)))) {
    require(heads != 0 && heads % kv_heads == 0, "heads must be a multiple of kv_heads");
    shape_.heads = heads;
    shape_.kv_heads = kv_heads;
    shape_.head_dim = head_dim;
    shape_.dtype = sequence_.shape().dtype();
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

void init_kv_attention(nb::module_& m) {
  nb::class_<PyKvAttention>(m, "KvAttention")
      .def(nb::init<std::size_t, std::size_t, std::size_t, std::size_t, const std::string&,
                    std::shared_ptr<ThreadPool>, const std::string&>(),
           nb::kw_only(), "heads"_a, "kv_heads"_a, "head_dim"_a, "context"_a, "dtype"_a, "pool"_a,
           "simd"_a = "auto")
      .def_prop_ro("length", &PyKvAttention::length)
      .def("append", &PyKvAttention::append, "keys"_a, "values"_a)
      .def("attend_each", &PyKvAttention::attend_each, "q"_a, "out"_a)
      .def("attend_many", &PyKvAttention::attend_many, "q"_a, "out"_a)
      .def("keep", &PyKvAttention::keep, "length"_a);
}

}  // namespace flashllm
