// A layer's FFN over every neuron for many tokens, in parts; the neurons are handed in block by block as they
// stream by, each block for every part. A token's bits depend on neither.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffn/neuron_norm.h"
#include "kernels/matmul.h"
#include "kernels/rows.h"
#include "planes/scale_planes.h"

namespace flashllm {

// Of the neurons from `first` on.
inline const float* part_of(const float* bias, std::size_t first) {
  return bias == nullptr ? nullptr : bias + first;
}

class DenseFfn {
 public:
  // `dtype`: of what goes in and comes out.
  DenseFfn(Dtype dtype, ThreadPool& pool, SimdLevel level) : dtype_(dtype), pool_(pool), level_(level) {}

  // No parts yet. `format`: of the layer's rows. `plane`: the layer's, of down columns whose scales lie
  // apart, and then blocks are of neurons from `first` on. `norm`: see `apply`.
  void begin(const RowFormat& format, Activation activation, const NeuronNorm& norm = {},
             const ScalePlane* plane = nullptr, std::size_t first = 0);
  // Part number parts(): x [tokens, d_model].
  void take(const std::byte* x, std::size_t tokens);
  std::size_t parts() const { return parts_.size(); }
  std::size_t padded(std::size_t part) const { return parts_[part].x.padded(); }
  // A part's activations of `count` rows of neurons, h [count, padded(part)], until the next call; those of
  // its tokens may be changed before they are added. up_bias, gate_bias: the neurons', or nullptr; gate:
  // their gate [count, d_model] without gaps in the rows' codec, where rows of a gated FFN hold none.
  float* activations(std::size_t part, const std::byte* rows, std::size_t count, const float* up_bias,
                     const float* gate_bias = nullptr, const std::byte* gate = nullptr);
  // Adds what these neurons contribute to the part, `count` rows. Blocks come in the order of ids.
  void add(std::size_t part, const std::byte* rows, std::size_t count);
  // Of a layer with a norm before its down columns: the activations of all its neurons, block after block,
  // then `apply`, and then all are added. Where gates are cut, these are what `activations` gives, and the
  // next block's values are there behind `apply`.
  void apply();
  float* values(std::size_t part) { return parts_[part].h.data() + parts_[part].kept * padded(part); }
  // y: [tokens, d_model] of a part; down_bias: [d_model] or nullptr. Its buffers go; a block's stay for the
  // next layer.
  void finish(std::size_t part, const float* down_bias, std::byte* y);
  // The same as a part of a larger sum: y[at[m]] += factors[m] * (token m's + bias); y: rows of d_model;
  // bias: [d_model] or nullptr.
  void finish_into(std::size_t part, const std::int32_t* at, const float* factors, const float* bias,
                   float* y);
  // Between two blocks, or layers: lets go of what only one of them needs.
  void rest() noexcept;
  // Lets go of all parts, and of that.
  void clear() noexcept;

 private:
  struct Part {
    PackedTokens x;
    std::vector<float> y;
    std::vector<float> h;   // the layer's values, where a norm waits for all of them
    std::vector<float> up;  // and its up products, where gates are cut
    std::size_t kept = 0;   // of their neurons, those before the block
    std::size_t next;       // the first neuron of the next block
  };

  RowFormat format_;  // of the layer, as what follows
  const Dtype dtype_;
  Activation activation_;
  ThreadPool& pool_;
  const SimdLevel level_;
  NeuronNorm norm_;
  const ScalePlane* plane_ = nullptr;
  std::size_t first_ = 0, y_stride_ = 0;
  std::vector<Part> parts_;
  std::vector<float> h_, up_;  // of a block
};

}  // namespace flashllm
