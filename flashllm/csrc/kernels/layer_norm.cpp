#include "kernels/layer_norm.h"

#include <cmath>
#include <memory>

namespace flashllm {

namespace {

constexpr std::size_t kLanes = 16;  // partial sums side by side; part of the order

// The sum of term(x[i]) over i.
template <typename Term>
float sum(const float* x, std::size_t n, Term term) {
  float lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(x[i + lane]);
  for (std::size_t lane = 0; i + lane < n; ++lane) lanes[lane] += term(x[i + lane]);
  float total = 0.0F;
  for (const float lane : lanes) total += lane;
  return total;
}

}  // namespace

void layer_norm(const LayerNorm& norm, const float* x, float* y) {
  const auto n = static_cast<float>(norm.width);
  const float mean = sum(x, norm.width, [](float value) { return value; }) / n;
  const float variance =
      sum(x, norm.width, [mean](float value) { return (value - mean) * (value - mean); }) / n;
  const float scale = 1.0F / std::sqrt(variance + norm.epsilon);
  for (std::size_t i = 0; i < norm.width; ++i) y[i] = (x[i] - mean) * scale * norm.weight[i] + norm.bias[i];
}

void layer_norm_rows(const LayerNorm& norm, const std::byte* x, std::size_t rows, Dtype dtype, std::byte* y,
                     ThreadPool& pool, SimdLevel level) {
  const KernelTable& kernels = kernel_table(level, dtype);
  const std::size_t row_nbytes = norm.width * dtype_nbytes(dtype);
  pool.parallel_for(rows, 1, [&](std::size_t begin, std::size_t end) {
    const std::unique_ptr<float[]> row(new float[norm.width]);
    for (std::size_t r = begin; r < end; ++r) {
      kernels.to_f32(x + r * row_nbytes, norm.width, row.get());
      layer_norm(norm, row.get(), row.get());
      kernels.from_f32(row.get(), norm.width, y + r * row_nbytes);
    }
  });
}

}  // namespace flashllm
