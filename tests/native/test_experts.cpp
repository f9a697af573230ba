// Routers choose what a plain sort would and weigh it as a plain softmax; experts over many tokens are the
// sum over each token's own.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "ffn/expert_ffn.h"
#include "ffn/experts.h"

namespace {

using namespace flashllm;

constexpr std::size_t kWidth = 16;

std::vector<float> normals(std::size_t n, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& value : values) value = normal(random);
  return values;
}

RowMatrix matrix(const std::vector<float>& values, std::size_t rows) {
  RowMatrix result;
  result.data = reinterpret_cast<const std::byte*>(values.data());
  result.rows = rows;
  result.columns = kWidth;
  result.stride = kWidth * sizeof(float);
  return result;
}

double dot(const float* a, const float* b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < kWidth; ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

bool is_close(double a, double b) { return std::fabs(a - b) < 1e-4 * (1.0 + std::fabs(b)); }

void check_weights(const ExpertsSpec& spec, std::mt19937& random) {
  ThreadPool pool(2);
  std::vector<float> weights = normals(spec.count * kWidth, random);
  const std::vector<float> shared = normals(kWidth, random), x = normals(kWidth, random);
  // The last two experts are as good as each other: the first of them is chosen where there is room for one.
  std::copy_n(weights.end() - kWidth, kWidth, weights.end() - 2 * kWidth);
  Router router(spec, matrix(weights, spec.count), spec.shared != 0 ? matrix(shared, 1) : RowMatrix{},
                Dtype::f32, best_simd_level());
  std::vector<float> found;
  router.route(x.data(), pool, found);
  CHECK(found.size() == spec.runs());

  std::vector<double> products;
  for (std::size_t e = 0; e < spec.count; ++e) products.push_back(dot(weights.data() + e * kWidth, x.data()));
  double of_all = 0.0, of_chosen = 0.0;
  std::size_t chosen = 0;
  for (std::size_t e = 0; e < spec.count; ++e) {
    of_all += std::exp(products[e]);
    if (found[e] == 0.0F) continue;
    ++chosen;
    of_chosen += std::exp(products[e]);
    for (std::size_t other = 0; other < spec.count; ++other)
      if (found[other] == 0.0F) CHECK(products[e] > products[other] - 1e-6);
  }
  CHECK(chosen == spec.chosen);
  if (found[spec.count - 1] != 0.0F) CHECK(found[spec.count - 2] != 0.0F);
  const double sum = spec.softmax_of_all && !spec.normalized ? of_all : of_chosen;
  for (std::size_t e = 0; e < spec.count; ++e)
    if (found[e] != 0.0F) CHECK(is_close(found[e], std::exp(products[e]) / sum));
  if (spec.shared != 0)
    CHECK(is_close(found[spec.count], 1.0 / (1.0 + std::exp(-dot(shared.data(), x.data())))));

  const auto neurons = static_cast<std::int32_t>(spec.first(spec.count) + spec.shared);
  RouterPredictor predictor(router, {neurons, 1}, nullptr);
  std::vector<std::int32_t> active, units;
  predictor.predict(x.data(), 3, pool, best_simd_level(), active);
  CHECK(active.size() == spec.chosen * spec.size + spec.shared);
  std::vector<float> values(active.size(), 1.0F);
  predictor.weigh(3, active.data(), active.data() + active.size(), values.data());
  for (std::size_t i = 0; i < active.size(); ++i)
    CHECK(values[i] == found[std::min(static_cast<std::size_t>(active[i]) / spec.size, spec.count)]);
  // The same experts as units.
  const RowUnits by_experts{neurons, static_cast<std::int32_t>(spec.size)};
  RouterPredictor whole(router, by_experts, nullptr);
  whole.predict(x.data(), 0, pool, best_simd_level(), units);
  CHECK(units.size() == spec.chosen + (spec.shared != 0 ? 1 : 0) &&
        by_experts.rows_of(units) == active.size());
  for (const std::int32_t unit : units)
    CHECK(std::binary_search(active.begin(), active.end(), by_experts.first(unit)));
}

void check_many_tokens(const ExpertsSpec& spec, std::mt19937& random) {
  constexpr std::size_t kTokens = 21, kBlock = 5;
  ThreadPool pool(2);
  const std::vector<float> weights = normals(spec.count * kWidth, random);
  const std::vector<float> x = normals(kTokens * kWidth, random);
  Router router(spec, matrix(weights, spec.count), RowMatrix{}, Dtype::f32, best_simd_level());
  RowFormat format;
  format.d_model = kWidth;
  format.stride = 512;
  format.gate = kWidth * sizeof(float);
  format.down = 2 * kWidth * sizeof(float);
  const std::size_t neurons = spec.first(spec.count) + spec.shared, row_floats = 512 / sizeof(float);
  const std::vector<float> rows = normals(neurons * row_floats, random);
  const auto by_parts = [&](std::size_t part, std::size_t rows_a_block) {
    ExpertFfn ffn(format, Dtype::f32, part, pool, best_simd_level());
    ffn.begin(router, Activation::relu);
    for (std::size_t t = 0; t < kTokens; t += part)
      ffn.take(x.data() + t * kWidth, std::min(part, kTokens - t));
    ffn.end();
    for (const RowRun& run : ffn.runs())
      for (std::size_t first = 0; first < run.count; first += rows_a_block) {
        RowBlock block;
        block.first_row = run.first_row + first;
        block.count = std::min(rows_a_block, run.count - first);
        block.rows = reinterpret_cast<const std::byte*>(rows.data() + block.first_row * row_floats);
        ffn.add(block, nullptr, nullptr);
      }
    std::vector<float> sums(kTokens * kWidth);
    for (std::size_t t = 0; t < kTokens; t += part)
      ffn.give(t, std::min(part, kTokens - t), sums.data() + t * kWidth);
    return sums;
  };

  // In parts, however they are cut, and an expert's tokens in turn where its rows come in one block.
  std::vector<float> y, before;
  for (const std::size_t rows_a_block : {kBlock, neurons})
    for (const std::size_t part : {kTokens, std::size_t{8}, std::size_t{1}}) {
      y = by_parts(part, rows_a_block);
      CHECK(before.empty() || before == y);
      before = y;
    }

  std::vector<float> found;
  for (std::size_t t = 0; t < kTokens; ++t) {
    const float* input = x.data() + t * kWidth;
    router.route(input, pool, found);
    std::vector<double> expected(kWidth, 0.0);
    for (std::size_t run = 0; run < spec.runs(); ++run)
      for (std::size_t i = 0; i < spec.neurons(run); ++i) {
        const float* row = rows.data() + (spec.first(run) + i) * row_floats;
        const double value = std::max(0.0, dot(row + kWidth, input)) * dot(row, input) * found[run];
        for (std::size_t j = 0; j < kWidth; ++j) expected[j] += value * row[2 * kWidth + j];
      }
    for (std::size_t j = 0; j < kWidth; ++j) CHECK(is_close(y[t * kWidth + j], expected[j]));
  }
}

}  // namespace

void test_experts(int scale) {
  std::mt19937 random(11);
  for (int round = 0; round < scale; ++round)
    for (const std::size_t count : {2, 5, 64})
      for (const std::size_t chosen : {std::size_t{1}, std::size_t{2}})
        for (const std::size_t shared : {0, 3})
          for (const int kind : {0, 1, 2}) {
            ExpertsSpec spec;
            spec.count = count;
            spec.chosen = chosen;
            spec.size = 7;
            spec.shared = shared;
            spec.softmax_of_all = kind != 2;
            spec.normalized = kind == 1;
            check_weights(spec, random);
            check_many_tokens(spec, random);
          }
}
