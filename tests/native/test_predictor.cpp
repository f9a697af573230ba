// Predictors over coded factors and gates: the neurons their products name, the same for any number of
// threads.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "ffn/predictor.h"
#include "fixture.h"
#include "random_rows.h"
#include "simd_levels.h"

namespace {

using namespace flashllm;

// Rows in groups, in exactly as much memory as the kernels may touch: an address sanitizer sees a load beyond
// it.
struct Codes {
  Codes(RowCodec codec, std::size_t count, std::size_t columns, std::mt19937& random)
      : rows(random_rows(codec, count, columns, random)),
        weights{rows.data(), count, columns, vector_nbytes(codec, columns), codec} {}

  std::vector<std::byte> rows;
  RowMatrix weights;
};

// The threshold is a neuron's own logit, which only the rule with `relu` lets fire.
void check_predictor(RowCodec codec, bool relu, SimdLevel level) {
  std::mt19937 random(12);
  constexpr std::size_t d_model = 40, rank = 12, d_ff = 1100, at_threshold = 600;
  Codes a(codec, rank, d_model, random), b(codec, d_ff, rank, random);
  const std::vector<float> x = random_floats(d_model, random), bias = random_floats(d_ff, random);
  a.weights.inputs = b.weights.inputs = inputs_of(codec, InputForm::int16);
  b.weights.bias = bias.data();
  ThreadPool single(1), pool(3);
  std::vector<float> projected(rank), logits(d_ff);
  dot_all(a.weights, x.data(), projected.data(), single, level);
  if (relu)
    for (float& value : projected) value = std::max(value, 0.0F);
  dot_all(b.weights, projected.data(), logits.data(), single, level);
  const float threshold = logits[at_threshold];
  std::vector<std::int32_t> one, many;
  LowRankPredictor predictor(a.weights, b.weights, threshold, relu);
  predictor.predict(x.data(), 0, single, level, one);
  predictor.predict(x.data(), 0, pool, level, many);
  CHECK(one == many);
  CHECK(!one.empty() && one.size() < d_ff);
  std::size_t next = 0;
  for (std::size_t neuron = 0; neuron < d_ff; ++neuron)
    if (logits[neuron] > threshold || (relu && neuron == at_threshold))
      CHECK(next < one.size() && one[next++] == static_cast<std::int32_t>(neuron));
  CHECK(next == one.size());
}

// The gate as a predictor, in 4 bits and itself: the same for any number of threads, and without a load
// beyond the codes and inputs.
void check_gates(std::size_t rows, std::size_t columns, SimdLevel level) {
  std::mt19937 random(13);
  Codes codes(RowCodec::int4_64, rows, columns, random);
  RowMatrix& gate = codes.weights;
  const std::vector<float> x = random_floats(columns, random), bias = random_floats(rows, random);
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
    for (const RowCodec codec : {RowCodec::int8_32, RowCodec::int4_32})
      for (const bool relu : {false, true}) check_predictor(codec, relu, level);
    for (const std::size_t columns : {1, 31, 32, 33, 63, 64, 65, 130, 192})
      for (const std::size_t rows : {1, 65, 130 * scale}) check_gates(rows, columns, level);
  }
}
