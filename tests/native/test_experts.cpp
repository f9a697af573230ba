// Routers choose what a plain sort would and weigh it as a plain softmax; experts over many tokens are the
// sum over each token's own.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "ffn/expert_ffn.h"
#include "ffn/expert_products.h"
#include "ffn/experts.h"
#include "fixture.h"

namespace {

using namespace flashllm;

constexpr std::size_t kWidth = 16;

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

// What `RouterSpec` says, in double precision and in the order of the sentence.
std::vector<double> plain_weights(const ExpertsSpec& spec, const std::vector<float>& weights,
                                  const std::vector<float>& choice, const std::vector<float>& x) {
  const RouterSpec& router = spec.router;
  std::vector<double> scores, keys, of_groups;
  double sum = 0.0;
  for (std::size_t e = 0; e < spec.count; ++e) {
    const double product = dot(weights.data() + e * kWidth, x.data());
    const bool is_sigmoid = router.score == RouterSpec::Score::sigmoid;
    scores.push_back(is_sigmoid ? 1.0 / (1.0 + std::exp(-product)) : std::exp(product));
    sum += scores.back();
  }
  if (router.score == RouterSpec::Score::softmax)
    for (double& score : scores) score /= sum;
  for (std::size_t e = 0; e < spec.count; ++e)
    keys.push_back(scores[e] + (choice.empty() ? 0.0F : choice[e]));
  const auto size = static_cast<std::ptrdiff_t>(spec.count / router.groups);
  for (auto group = keys.begin(); group != keys.end(); group += size) {
    std::vector<double> sorted(group, group + size);
    std::sort(sorted.rbegin(), sorted.rend());
    of_groups.push_back(sorted[0] + (router.groups_by_two && size > 1 ? sorted[1] : 0.0));
  }
  std::vector<double> sorted = of_groups;
  std::sort(sorted.rbegin(), sorted.rend());
  for (std::size_t g = 0; g < router.groups; ++g)
    if (of_groups[g] < sorted[router.chosen_groups - 1])
      std::fill_n(keys.begin() + static_cast<std::ptrdiff_t>(g) * size, size, -1e30);
  std::vector<double> found(spec.count, 0.0);
  double of_chosen = 0.0;
  for (std::size_t i = 0; i < spec.chosen; ++i) {
    const auto best = static_cast<std::size_t>(std::max_element(keys.begin(), keys.end()) - keys.begin());
    found[best] = scores[best];
    of_chosen += scores[best];
    keys[best] = -1e31;
  }
  const bool divides = router.normalized || router.score == RouterSpec::Score::softmax_of_chosen;
  for (double& weight : found)
    weight *= router.factor /
              (divides ? std::max(of_chosen + router.epsilon, static_cast<double>(router.least_sum)) : 1.0);
  return found;
}

void check_weights(const ExpertsSpec& spec, const std::vector<float>& choice, std::mt19937& random) {
  ThreadPool pool(2);
  std::vector<float> weights = random_floats(spec.count * kWidth, random);
  const std::vector<float> shared = random_floats(kWidth, random), x = random_floats(kWidth, random);
  // The last two experts are as good as each other: the first of them is chosen where there is room for one.
  std::copy_n(weights.end() - kWidth, kWidth, weights.end() - 2 * kWidth);
  Router router(spec, matrix(weights, spec.count), spec.shared != 0 ? matrix(shared, 1) : RowMatrix{},
                Dtype::f32, best_simd_level());
  std::vector<float> found;
  if (!choice.empty()) router.set_choice_bias(choice.data());
  router.route(x.data(), pool, found);
  CHECK(found.size() == spec.runs());

  const std::vector<double> expected = plain_weights(spec, weights, choice, x);
  for (std::size_t e = 0; e < spec.count; ++e) {
    CHECK((found[e] != 0.0F) == (expected[e] != 0.0));
    CHECK(is_close(found[e], expected[e]));
  }
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
  // And as a guess, the likeliest first.
  std::vector<std::int32_t> probable;
  RouterGuess(router).predict(x.data(), 0, pool, best_simd_level(), probable);
  const auto weight = [&](std::int32_t unit) { return found[static_cast<std::size_t>(unit)]; };
  CHECK(std::is_sorted(probable.begin(), probable.end(),
                       [&](std::int32_t a, std::int32_t b) { return weight(a) > weight(b); }));
  std::sort(probable.begin(), probable.end());
  CHECK(probable.size() == spec.chosen &&
        std::includes(units.begin(), units.end(), probable.begin(), probable.end()));
}

// Experts of several chunks, the layer's last one shorter: each token has its sum, and the bits that it has
// alone.
void check_products(std::size_t size, std::mt19937& random) {
  constexpr std::size_t kTokens = 3, kShorter = 130, kVector = kWidth * sizeof(float);
  const std::vector<std::int32_t> active[kTokens] = {{0, 2}, {1}, {0, 1, 2}};
  const std::size_t neurons = 2 * size + kShorter;
  FfnLayerOptions options;
  options.format.d_model = kWidth;
  options.format.gate = 0;
  options.format.up = kVector;
  options.format.down = 2 * kVector;
  options.format.stride = 3 * kVector;
  options.num_neurons = static_cast<std::int32_t>(neurons);
  options.unit_rows = static_cast<std::int32_t>(size);
  options.simd = best_simd_level();
  const std::vector<float> rows = random_floats(neurons * 3 * kWidth, random),
                           x = random_floats(kTokens * kWidth, random), bias = random_floats(neurons, random);
  options.up_bias = bias.data();
  const auto sums_of = [&](std::size_t first, std::size_t count, int threads) {
    ThreadPool pool(threads);
    ExpertProducts products(options, pool);
    FfnGroup group(options.units(), products.num_sums());
    FfnTokens tokens;
    tokens.x = x.data() + first * kWidth;
    tokens.active = active + first;
    tokens.count = count;
    group.begin(tokens, kWidth);
    group.next_part(group.wanted().size());
    group.sort([](std::int32_t) { return RowPlace::cached; });
    std::vector<ExpertRun> runs;
    group.each_unit(&FfnMember::Positions::hits, [&](const FfnShare* shares, std::size_t wanting) {
      const std::size_t row = static_cast<std::size_t>(shares[0].unit) * size * 3 * kWidth;
      runs.push_back({reinterpret_cast<const std::byte*>(rows.data() + row), shares, wanting});
    });
    products.multiply(runs, group, RowInputs(tokens.x, count, kWidth, InputForm::f32, options.simd));
    std::vector<float> y(count * kWidth);
    for (std::size_t t = 0; t < count; ++t) products.add(group[t], y.data() + t * kWidth);
    return y;
  };
  const std::vector<float> together = sums_of(0, kTokens, 3);
  for (std::size_t t = 0; t < kTokens; ++t) {
    const std::vector<float> alone = sums_of(t, 1, 1);
    std::vector<double> expected(kWidth);
    for (const std::int32_t unit : active[t])
      for (std::size_t n = static_cast<std::size_t>(unit) * size;
           n < std::min(neurons, static_cast<std::size_t>(unit + 1) * size); ++n) {
        const float *row = rows.data() + n * 3 * kWidth, *input = x.data() + t * kWidth;
        const double value = std::max(0.0, dot(row, input)) * (dot(row + kWidth, input) + bias[n]);
        for (std::size_t j = 0; j < kWidth; ++j) expected[j] += value * row[2 * kWidth + j];
      }
    for (std::size_t j = 0; j < kWidth; ++j) {
      CHECK(alone[j] == together[t * kWidth + j]);
      CHECK(std::fabs(alone[j] - expected[j]) < 1e-3 * (1.0 + std::fabs(expected[j])));
    }
  }
}

void check_many_tokens(const ExpertsSpec& spec, std::mt19937& random) {
  constexpr std::size_t kTokens = 21, kBlock = 5;
  ThreadPool pool(2);
  const std::vector<float> weights = random_floats(spec.count * kWidth, random);
  const std::vector<float> x = random_floats(kTokens * kWidth, random);
  Router router(spec, matrix(weights, spec.count), RowMatrix{}, Dtype::f32, best_simd_level());
  RowFormat format;
  format.d_model = kWidth;
  format.stride = 512;
  format.gate = kWidth * sizeof(float);
  format.down = 2 * kWidth * sizeof(float);
  const std::size_t neurons = spec.first(spec.count) + spec.shared, row_floats = 512 / sizeof(float);
  const std::vector<float> rows = random_floats(neurons * row_floats, random);
  const auto by_parts = [&](std::size_t part, std::size_t rows_a_block) {
    ExpertFfn ffn(Dtype::f32, part, pool, best_simd_level());
    ffn.begin(format, format, router, Activation::relu);
    for (std::size_t t = 0; t < kTokens; t += part)
      ffn.take(x.data() + t * kWidth, x.data() + t * kWidth, std::min(part, kTokens - t));
    ffn.end();
    for (const RowRun& run : ffn.runs())
      for (std::size_t first = 0; first < run.count; first += rows_a_block) {
        RowRun block;
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
  for (const std::size_t size : {100, 256, 700, 2900}) check_products(size, random);
  for (int round = 0; round < scale; ++round)
    for (const std::size_t count : {2, 5, 64})
      for (const std::size_t chosen : {std::size_t{1}, std::size_t{2}})
        for (const std::size_t shared : {0, 3})
          for (const int kind : {0, 1, 2, 3, 4, 5}) {
            ExpertsSpec spec;
            spec.count = count;
            spec.chosen = chosen;
            spec.size = 7;
            spec.shared = shared;
            RouterSpec& router = spec.router;
            std::vector<float> choice;
            router.normalized = kind != 0 && kind != 2;
            if (kind == 2) router.score = RouterSpec::Score::softmax_of_chosen;
            if (kind >= 3) {
              choice = random_floats(count, random);
              for (float& bias : choice) bias -= kind == 4 ? 5.0F : 0.0F;  // all keys are below zero
              router.score = kind == 5 ? RouterSpec::Score::softmax : RouterSpec::Score::sigmoid;
              router.epsilon = 0.2F;
              router.least_sum = kind == 5 ? 0.9F : 0.0F;
              router.factor = 2.5F;
              router.groups = count == 64 ? 8 : 1;
              router.chosen_groups = count == 64 ? 2 : 1;
              router.groups_by_two = kind == 4;
            }
            check_weights(spec, choice, random);
            check_many_tokens(spec, random);
          }
}
