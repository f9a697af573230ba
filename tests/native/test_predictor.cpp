// 8-bit products and the predictor over them: right against double, the same bits for any number of threads.
#include <cmath>
#include <cstring>
#include <random>

#include "ffn/predictor.h"
#include "fixture.h"
#include "simd_levels.h"

namespace {

using namespace flashllm;

// Exactly as much memory as the kernels may touch: an address sanitizer sees a load beyond it.
struct Codes {
  std::vector<std::int8_t> codes;
  std::vector<std::uint16_t> scales;
  std::vector<float> wide_scales, bias;
  RowMatrix weights;

  Codes(std::size_t rows, std::size_t columns, std::mt19937& random)
      : codes(rows * columns), scales(rows), wide_scales(rows), bias(rows) {
    std::uniform_int_distribution<int> code(-127, 127);
    std::normal_distribution<float> normal;
    for (std::int8_t& value : codes) value = static_cast<std::int8_t>(code(random));
    const KernelTable& halves = kernel_table(SimdLevel::scalar, Dtype::f16);
    for (float& value : wide_scales) value = 1e-3F + std::fabs(normal(random)) / 64;
    halves.from_f32(wide_scales.data(), rows, scales.data());
    halves.to_f32(scales.data(), rows, wide_scales.data());
    for (float& value : bias) value = normal(random);
    weights.codec = RowCodec::int8;
    weights.data = reinterpret_cast<const std::byte*>(codes.data());
    weights.rows = rows;
    weights.columns = columns;
    weights.stride = columns;
    weights.scales = scales.data();
    weights.bias = bias.data();
  }
};

std::vector<float> product(const Codes& factor, const std::vector<float>& x, int threads, SimdLevel level) {
  ThreadPool pool(threads);
  std::vector<float> out(factor.weights.rows);
  dot_all(factor.weights, x.data(), out.data(), pool, level);
  return out;
}

void check_product(std::size_t rows, std::size_t columns, SimdLevel level) {
  std::mt19937 random(11);
  const Codes factor(rows, columns, random);
  const std::vector<float> x = random_floats(columns, random);
  const std::vector<float> alone = product(factor, x, 1, level);
  for (std::size_t r = 0; r < rows; ++r) {
    double sum = 0.0, magnitude = std::fabs(factor.bias[r]);
    for (std::size_t j = 0; j < columns; ++j) {
      const double term = static_cast<double>(factor.codes[r * columns + j]) * x[j];
      sum += term;
      magnitude += std::fabs(term) * factor.wide_scales[r];
    }
    const double expected = sum * factor.wide_scales[r] + factor.bias[r];
    CHECK(std::fabs(alone[r] - expected) <= static_cast<double>(columns + 3) * 6e-8 * magnitude);
  }
  for (const int threads : {2, 3, 4}) {
    const std::vector<float> out = product(factor, x, threads, level);
    CHECK(std::memcmp(out.data(), alone.data(), 4 * rows) == 0);
  }
  // A row's bits do not depend on the rows beside it.
  Codes last = factor;
  last.weights.data = reinterpret_cast<const std::byte*>(last.codes.data()) + (rows - 1) * columns;
  last.weights.scales = last.scales.data() + rows - 1;
  last.weights.bias = last.bias.data() + rows - 1;
  last.weights.rows = 1;
  CHECK(product(last, x, 1, level)[0] == alone[rows - 1]);
  last.weights.bias = nullptr;
  CHECK(product(last, x, 1, level)[0] + factor.bias[rows - 1] == alone[rows - 1]);
}

void check_predictor(SimdLevel level) {
  std::mt19937 random(12);
  constexpr std::size_t d_model = 40, rank = 12, d_ff = 300;
  const Codes a(rank, d_model, random), b(d_ff, rank, random);
  RowMatrix plain = a.weights;
  plain.bias = nullptr;
  const std::vector<float> x = random_floats(d_model, random);
  std::vector<std::int32_t> one, many;
  ThreadPool single(1), pool(3);
  LowRankPredictor predictor(plain, b.weights, 0.25F);
  predictor.predict(x.data(), 0, single, level, one);
  predictor.predict(x.data(), 0, pool, level, many);
  CHECK(one == many);
  CHECK(!one.empty() && one.size() < d_ff);
  std::vector<float> projected(rank), logits(d_ff);
  dot_all(plain, x.data(), projected.data(), single, level);
  dot_all(b.weights, projected.data(), logits.data(), single, level);
  std::size_t next = 0;
  for (std::size_t neuron = 0; neuron < d_ff; ++neuron)
    if (logits[neuron] > 0.25F) CHECK(next < one.size() && one[next++] == static_cast<std::int32_t>(neuron));
  CHECK(next == one.size());
}

// The gate as a predictor, in 4 bits and itself: the same for any number of threads, and without a load
// beyond the codes and inputs.
void check_gates(std::size_t rows, std::size_t columns, SimdLevel level) {
  std::mt19937 random(13);
  RowMatrix gate;
  gate.codec = RowCodec::int4_64;
  gate.rows = rows;
  gate.columns = columns;
  gate.stride = vector_nbytes(gate.codec, columns);
  std::vector<std::byte> codes(rows * gate.stride);
  std::uniform_int_distribution<int> byte(0, 255);
  for (std::byte& both : codes) both = static_cast<std::byte>(byte(random));
  const std::size_t groups = (columns + 63) / 64;
  const KernelTable& halves = kernel_table(SimdLevel::scalar, Dtype::f16);
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t g = 0; g < groups; ++g) {
      const float scale = 1e-2F + std::fabs(random_floats(1, random)[0]) / 16;
      halves.from_f32(&scale, 1, codes.data() + r * gate.stride + g * sizeof(std::uint16_t));
    }
  const std::vector<float> x = random_floats(columns, random), bias = random_floats(rows, random);
  gate.data = codes.data();
  gate.bias = bias.data();
  ThreadPool single(1), pool(3);
  std::vector<float> one(rows), many(rows);
  dot_all(gate, x.data(), one.data(), single, level);
  dot_all(gate, x.data(), many.data(), pool, level);
  CHECK(std::memcmp(one.data(), many.data(), 4 * rows) == 0);
  std::vector<std::int32_t> named;
  CodedGatePredictor coded(gate, Activation::relu, 0.5F);
  coded.predict(x.data(), 0, pool, level, named);
  CHECK(coded.gate_values(0) == nullptr);
  std::size_t next = 0;
  for (std::size_t r = 0; r < rows; ++r)
    if (one[r] > -0.5F) CHECK(next < named.size() && named[next++] == static_cast<std::int32_t>(r));
  CHECK(next == named.size());
  // The gate itself, here in 4 bits too, names what its activation does not make zero, and keeps the values.
  GatePredictor exact(gate, {Activation::silu, 0.0F, 0.2F});
  exact.predict(x.data(), 0, pool, level, named);
  next = 0;
  for (std::size_t r = 0; r < rows; ++r) {
    float value = one[r];
    activate({Activation::silu, 0.0F, 0.2F}, 0.0F, &value, 1, level);
    CHECK(exact.gate_values(0)[r] == value);
    if (value != 0.0F) CHECK(next < named.size() && named[next++] == static_cast<std::int32_t>(r));
  }
  CHECK(next == named.size());
}

}  // namespace

void test_predictor(int scale) {
  for (const SimdLevel level : simd_levels()) {
    for (const std::size_t columns : {1, 4, 7, 8, 15, 16, 17, 31, 48, 104, 130})
      for (const std::size_t rows : {1, 3, 4, 5, 63, 64, 65, 70 * scale}) check_product(rows, columns, level);
    check_predictor(level);
    for (const std::size_t columns : {1, 31, 32, 33, 63, 64, 65, 130, 192})
      for (const std::size_t rows : {1, 65, 130 * scale}) check_gates(rows, columns, level);
  }
}
