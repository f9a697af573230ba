// The layers of a decoder at one new token a sequence, each whole in one call:
//
//   x -> norm -> q, k, v -> KV cache -> attention -> output projection -> + x -> norm -> FFN -> + -> out
//
// Whatever leaves a step is rounded to the model's dtype, as where the steps are modules of their own: the
// bits are theirs. Knows layer norms, queries scaled before their products, and no rotation.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/attention.h"
#include "kernels/layer_norm.h"
#include "model/ffn_layer.h"

namespace flashllm {

struct DecoderShape {
  std::size_t d_model = 0;
  std::size_t heads = 0;
  std::size_t kv_heads = 0;  // divides heads
  std::size_t head_dim = 0;
  std::size_t context = 0;  // positions of the KV cache
  std::size_t batch = 0;    // sequences of the KV cache
  Dtype dtype = Dtype::f32;
  float query_scale = 1.0F;
};

// One layer's parts, which must live as long as the decoder.
struct DecoderLayer {
  LayerNorm norm, ffn_norm;
  LinearWeights query, key, value, out;
  std::byte* keys = nullptr;  // [batch, kv_heads, context, head_dim]
  std::byte* values = nullptr;
  FfnLayer* ffn = nullptr;
};

class Decoder {
 public:
  // Throws CoreError for a shape that cannot be.
  Decoder(const DecoderShape& shape, ThreadPool& pool, FfnCounters& counters, SimdLevel level);

  // Throws CoreError where the layer's parts do not fit the shape.
  void add_layer(const DecoderLayer& layer);
  std::size_t num_layers() const { return layers_.size(); }

  // x, out: [sequences, d_model] of the model's dtype. The new token of each of the first `sequences` cached
  // ones has the given position; its keys and values go there. Throws CoreError as FfnLayer::forward.
  void forward(std::size_t layer, const std::byte* x, std::size_t sequences, std::size_t position,
               std::byte* out);

 private:
  void attend(const DecoderLayer& layer, std::size_t sequences, std::size_t position);
  void append(const LinearWeights& projection, std::size_t sequences, std::size_t position, std::byte* cache);
  void normalize(const LayerNorm& norm, std::size_t sequences);
  void add_projected(std::size_t sequences);
  void round(float* values, std::size_t n);
  std::size_t cache_offset(std::size_t sequence, std::size_t kv_head, std::size_t position) const;

  const DecoderShape shape_;
  ThreadPool& pool_;
  FfnCounters& counters_;
  const SimdLevel level_;
  const KernelTable& kernels_;
  std::vector<DecoderLayer> layers_;

  // Scratch, sized once and shared by the layers. [sequences, d_model]: hidden_, normed_; [sequences, heads *
  // head_dim]: query_, mixed_; [sequences, outputs]: projected_.
  std::vector<float> hidden_, normed_, query_, mixed_, projected_, scores_;
  std::vector<std::byte> narrow_;
};

}  // namespace flashllm
