// Which neurons of a layer will fire, by a low-rank map (paper A, section 3.1): active where
// b (a x) + bias > threshold. The factors hold 16- or 32-bit floats, or 8-bit codes with a scale a row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/kernels_int8.h"
#include "kernels/thread_pool.h"

namespace flashllm {

class Predictor {
 public:
  using Factor = std::variant<LinearWeights, Int8Weights>;

  // a [rank, d_model]; b [d_ff, rank] with the bias in it. Keeps the pointers.
  Predictor(const Factor& a, const Factor& b, float threshold);

  // The active neurons for x [d_model], ascending. The same bits for any number of threads.
  void predict(const float* x, ThreadPool& pool, SimdLevel level, std::vector<std::int32_t>& active);

 private:
  Factor a_, b_;
  float threshold_;
  std::vector<float> projected_, logits_;
};

}  // namespace flashllm
