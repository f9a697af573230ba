#include "model/decoder.h"

#include <algorithm>

#include "io/error.h"
#include "io/stopwatch.h"

namespace flashllm {

namespace {

void require(bool condition, const char* message) {
  if (!condition) throw CoreError(ErrorKind::usage, message);
}

}  // namespace

Decoder::Decoder(const DecoderShape& shape, ThreadPool& pool, FfnCounters& counters, SimdLevel level)
    : shape_(shape),
      pool_(pool),
      counters_(counters),
      level_(level),
      kernels_(kernel_table(level, shape.dtype)) {
  require(shape.d_model != 0 && shape.head_dim != 0 && shape.context != 0 && shape.batch != 0,
          "a decoder's sizes must not be zero");
  require(shape.kv_heads != 0 && shape.heads != 0 && shape.heads % shape.kv_heads == 0,
          "heads must be a multiple of kv_heads");
  const std::size_t attended = shape.heads * shape.head_dim;
  const std::size_t widest = std::max(shape.d_model, attended);
  hidden_.resize(shape.batch * shape.d_model);
  normed_.resize(shape.batch * shape.d_model);
  query_.resize(shape.batch * attended);
  mixed_.resize(shape.batch * attended);
  projected_.resize(shape.batch * widest);
  narrow_.resize(shape.batch * widest * dtype_nbytes(shape.dtype));
  scores_.resize(shape.heads * shape.context);
}

void Decoder::add_layer(const DecoderLayer& layer) {
  const std::size_t attended = shape_.heads * shape_.head_dim, cached = shape_.kv_heads * shape_.head_dim;
  const auto fits = [this](const LinearWeights& weights, std::size_t rows, std::size_t columns) {
    return weights.dtype == shape_.dtype && weights.rows == rows && weights.columns == columns;
  };
  require(layer.norm.width == shape_.d_model && layer.ffn_norm.width == shape_.d_model,
          "a layer's norms do not fit the decoder");
  require(fits(layer.query, attended, shape_.d_model) && fits(layer.key, cached, shape_.d_model) &&
              fits(layer.value, cached, shape_.d_model) && fits(layer.out, shape_.d_model, attended),
          "a layer's projections do not fit the decoder");
  require(layer.ffn != nullptr && layer.ffn->width() == shape_.d_model,
          "a layer's FFN does not fit the decoder");
  layers_.push_back(layer);
}

void Decoder::forward(std::size_t index, const std::byte* x, std::size_t sequences, std::size_t position,
                      std::byte* out) {
  require(index < layers_.size() && sequences <= shape_.batch && position < shape_.context,
          "a decoder layer, sequence or position beyond those there are");
  Stopwatch watch;
  const DecoderLayer& layer = layers_[index];
  const std::size_t width = shape_.d_model;
  // 1. The attention block.
  kernels_.to_f32(x, sequences * width, hidden_.data());
  normalize(layer.norm, sequences);
  attend(layer, sequences, position);
  add_projected(sequences);
  // 2. The FFN, each sequence with its own active set.
  normalize(layer.ffn_norm, sequences);
  watch.charge(counters_.compute_ns);
  for (std::size_t s = 0; s < sequences; ++s) {
    const float* input = normed_.data() + s * width;
    layer.ffn->forward(input, s, layer.ffn->predict(input, s), projected_.data() + s * width, sequences == 1);
  }
  watch.restart();  // it has counted its own time
  add_projected(sequences);
  kernels_.from_f32(hidden_.data(), sequences * width, out);
  watch.charge(counters_.compute_ns);
}

// normed_ -> projected_, the attention's output.
void Decoder::attend(const DecoderLayer& layer, std::size_t sequences, std::size_t position) {
  const std::size_t attended = shape_.heads * shape_.head_dim;
  linear(layer.query, normed_.data(), sequences, query_.data(), pool_, level_);
  round(query_.data(), sequences * attended);
  for (std::size_t i = 0; i < sequences * attended; ++i) query_[i] *= shape_.query_scale;
  round(query_.data(), sequences * attended);
  append(layer.key, sequences, position, layer.keys);
  append(layer.value, sequences, position, layer.values);

  AttentionShape shape;
  shape.heads = shape_.heads;
  shape.kv_heads = shape_.kv_heads;
  shape.head_dim = shape_.head_dim;
  shape.length = position + 1;
  shape.row_stride = cache_offset(0, 0, 1);
  shape.head_stride = cache_offset(0, 1, 0);
  shape.dtype = shape_.dtype;
  for (std::size_t s = 0; s < sequences; ++s) {
    const std::size_t start = cache_offset(s, 0, 0);
    attend_one(shape, query_.data() + s * attended, layer.keys + start, layer.values + start, scores_.data(),
               mixed_.data() + s * attended, pool_, level_);
  }
  round(mixed_.data(), sequences * attended);
  linear(layer.out, mixed_.data(), sequences, projected_.data(), pool_, level_);
}

// Keys or values of the new tokens, to their place in the cache.
void Decoder::append(const LinearWeights& projection, std::size_t sequences, std::size_t position,
                     std::byte* cache) {
  linear(projection, normed_.data(), sequences, projected_.data(), pool_, level_);
  for (std::size_t s = 0; s < sequences; ++s)
    for (std::size_t h = 0; h < shape_.kv_heads; ++h)
      kernels_.from_f32(projected_.data() + s * projection.rows + h * shape_.head_dim, shape_.head_dim,
                        cache + cache_offset(s, h, position));
}

// hidden_ -> normed_
void Decoder::normalize(const LayerNorm& norm, std::size_t sequences) {
  for (std::size_t s = 0; s < sequences; ++s)
    layer_norm(norm, hidden_.data() + s * shape_.d_model, normed_.data() + s * shape_.d_model);
  round(normed_.data(), sequences * shape_.d_model);
}

// hidden_ += projected_
void Decoder::add_projected(std::size_t sequences) {
  const std::size_t n = sequences * shape_.d_model;
  round(projected_.data(), n);
  for (std::size_t i = 0; i < n; ++i) hidden_[i] += projected_[i];
  round(hidden_.data(), n);
}

void Decoder::round(float* values, std::size_t n) {
  if (shape_.dtype == Dtype::f32) return;
  kernels_.from_f32(values, n, narrow_.data());
  kernels_.to_f32(narrow_.data(), n, values);
}

std::size_t Decoder::cache_offset(std::size_t sequence, std::size_t kv_head, std::size_t position) const {
  return (((sequence * shape_.kv_heads + kv_head) * shape_.context + position) * shape_.head_dim) *
         dtype_nbytes(shape_.dtype);
}

}  // namespace flashllm
