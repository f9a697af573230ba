// The decoder's layers at one new token a sequence, over linears, norms and FFN layers bound elsewhere.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <vector>

#include "bind/bindings.h"
#include "model/decoder.h"

namespace flashllm {

namespace {

class PyDecoder {
 public:
  PyDecoder(std::size_t d_model, std::size_t heads, std::size_t kv_heads, std::size_t head_dim,
            std::size_t context, std::size_t batch, const std::string& dtype, float query_scale,
            std::shared_ptr<ThreadPool> pool, std::shared_ptr<FfnCounters> counters, const std::string& simd)
      : shape_{d_model, heads, kv_heads, head_dim, context, batch, parse_dtype(dtype), query_scale},
        pool_(std::move(pool)),
        counters_(std::move(counters)),
        decoder_(shape_, *pool_, *counters_, parse_simd(simd)) {}

  // keys, values: [batch, kv_heads, context, head_dim]
  void add_layer(nb::object norm, nb::object query, nb::object key, nb::object value, nb::object out,
                 nb::object ffn_norm, nb::object ffn, AnyArray keys, AnyArray values) {
    for (const AnyArray* cache : {&keys, &values})
      require(cache->ndim() == 4 && cache->shape(0) == shape_.batch && cache->shape(1) == shape_.kv_heads &&
                  cache->shape(2) == shape_.context && cache->shape(3) == shape_.head_dim &&
                  dtype_of(*cache) == shape_.dtype,
              "the KV cache does not fit the decoder");
    DecoderLayer layer;
    layer.norm = layer_norm_of(norm);
    layer.ffn_norm = layer_norm_of(ffn_norm);
    layer.query = linear_weights_of(query);
    layer.key = linear_weights_of(key);
    layer.value = linear_weights_of(value);
    layer.out = linear_weights_of(out);
    layer.keys = static_cast<std::byte*>(keys.data());
    layer.values = static_cast<std::byte*>(values.data());
    layer.ffn = &ffn_layer_of(ffn);
    decoder_.add_layer(layer);
    for (nb::object* part : {&norm, &query, &key, &value, &out, &ffn_norm, &ffn})
      parts_.push_back(std::move(*part));
    caches_.push_back(std::move(keys));
    caches_.push_back(std::move(values));
  }

  void forward(std::size_t layer, std::uintptr_t x, std::size_t sequences, std::size_t position,
               std::uintptr_t out) {
    decoder_.forward(layer, at_address<const std::byte>(x), sequences, position, at_address<std::byte>(out));
  }

 private:
  const DecoderShape shape_;
  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<FfnCounters> counters_;
  std::vector<nb::object> parts_;  // kept alive
  std::vector<AnyArray> caches_;
  Decoder decoder_;
};

}  // namespace

void init_decoder(nb::module_& m) {
  nb::class_<PyDecoder>(m, "Decoder")
      .def(nb::init<std::size_t, std::size_t, std::size_t, std::size_t, std::size_t, std::size_t,
                    const std::string&, float, std::shared_ptr<ThreadPool>, std::shared_ptr<FfnCounters>,
                    const std::string&>(),
           nb::kw_only(), nb::arg("d_model"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
           nb::arg("context"), nb::arg("batch"), nb::arg("dtype"), nb::arg("query_scale"), nb::arg("pool"),
           nb::arg("counters"), nb::arg("simd") = "auto")
      .def("add_layer", &PyDecoder::add_layer, nb::kw_only(), nb::arg("norm"), nb::arg("query"),
           nb::arg("key"), nb::arg("value"), nb::arg("out"), nb::arg("ffn_norm"), nb::arg("ffn"),
           nb::arg("keys"), nb::arg("values"))
      .def("forward", &PyDecoder::forward, nb::arg("layer"), nb::arg("x"), nb::arg("sequences"),
           nb::arg("position"), nb::arg("out"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace flashllm
