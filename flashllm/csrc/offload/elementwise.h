// What lies between a layer's products, on arrays of the model's dtype: norms, rotary embedding, activation,
// sums. Every step is computed in fp32 and its result rounded once, as the pass of a prompt rounds
// (model/arithmetic.h), so that both engines find the same tokens. A value's bits depend neither on the
// threads nor on what else is in the array. Arrays are dense; what is in place may be given as its own
// output.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"
#include "kernels/norm.h"
#include "kernels/rotary.h"

namespace flashllm {

class Elementwise {
 public:
  // Throws CoreError where the processor lacks the level.
  Elementwise(Dtype dtype, ThreadPool& pool, SimdLevel level);

  Dtype dtype() const { return dtype_; }

  // Each row of x and out [rows, norm.width].
  void normalize(const Norm& norm, const std::byte* x, std::size_t rows, std::byte* out) const;

  // x [tokens, heads, head_dim], in place: each head's first `rotary.dims` elements are turned by the token's
  // position; everything is then multiplied by `factor` (of queries), and rounded. Throws CoreError (usage)
  // where dims is odd or larger than head_dim.
  void rotate(const Rotary& rotary, const std::int64_t* positions, std::size_t tokens, std::size_t heads,
              std::size_t head_dim, float factor, std::byte* x) const;

  // x = activation(x), or with a gate x = activation(gate) * x, where the activation is rounded before the
  // product (as in transformers).
  void activate(Activation activation, const std::byte* gate, std::size_t n, std::byte* x) const;

  void add(const std::byte* y, std::size_t n, std::byte* x) const;  // x += y
  void scale(float factor, std::size_t n, std::byte* x) const;      // x *= factor
  void widen(const std::byte* x, std::size_t n, float* out) const;
  void narrow(const float* x, std::size_t n, std::byte* out) const;

 private:
  // body(i, n) for pieces of at most kTogether values.
  template <typename Body>
  void each_piece(std::size_t n, const Body& body) const;

  Dtype dtype_;
  std::size_t item_;  // bytes of a value
  ThreadPool& pool_;
  SimdLevel level_;
  const KernelTable& kernels_;
};

}  // namespace flashllm
