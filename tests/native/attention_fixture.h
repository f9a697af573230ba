// What the tests of attention and of the KV cache share: random sequences, and attention in fp64.
#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "fixture.h"
#include "sequence/sequence_state.h"

namespace attention_tests {

using namespace flashllm;

inline std::vector<float> random_floats(std::size_t n, unsigned seed, float scale = 1.0F) {
  std::mt19937 random(seed);
  return flashllm::random_floats(n, random, scale);
}

// `values` as the cache holds them.
inline std::vector<float> rounded(const std::vector<float>& values, Dtype dtype) {
  const KernelTable& kernels = kernel_table(SimdLevel::scalar, dtype);
  std::vector<std::byte> narrow(values.size() * dtype_nbytes(dtype));
  std::vector<float> result(values.size());
  kernels.from_f32(values.data(), values.size(), narrow.data());
  kernels.to_f32(narrow.data(), values.size(), result.data());
  return result;
}

// A sequence of two layers, of which the second is used. Everything else in its pages is NaN.
struct Cached {
  Cached(std::size_t kv_heads, std::size_t head_dim, std::size_t length, Dtype dtype)
      : row(kv_heads * head_dim),
        sequence(std::make_shared<StatePool>(
            StateShape({{kv_heads, head_dim, 0}, {kv_heads, head_dim, 0}}, length, length, dtype))),
        keys(rounded(random_floats(length * row, 1), dtype)),
        values(rounded(random_floats(length * row, 2), dtype)) {
    const SequenceState::Spans spans = sequence.restore(length, {(length + kPageTokens - 1) / kPageTokens});
    for (const SequenceState::Span& page : spans[0]) std::memset(page.data, 0xFF, page.nbytes);
    for (std::size_t i = 0; i < length; ++i) append(i);
  }
  void append(std::size_t i) { sequence.append(1, i, keys.data() + i * row, values.data() + i * row); }

  std::size_t row;
  SequenceState sequence;
  std::vector<float> keys, values;  // [length, kv_heads, head_dim], rounded
};

}  // namespace attention_tests
