// Steps of states, and the convolution before them, at every level: near fp64's, in exactly as much memory as
// they may touch.
#include "model/recurrence.h"

#include <cmath>

#include "fixture.h"
#include "kernels/kernels.h"
#include "kernels/levels/levels.h"
#include "simd_levels.h"

namespace {

using namespace flashllm;

bool is_near(float found, double expected) {
  return std::fabs(found - expected) <= 1e-5 * (1.0 + std::fabs(expected));
}

// Three tokens, the first of them from a state that lies elsewhere and stays as it was.
void check_steps(SimdLevel level, Recurrence kind, std::size_t keys, std::size_t values) {
  std::mt19937 random(static_cast<unsigned>(keys * values));
  const float scale = 1.0F / std::sqrt(static_cast<float>(keys));
  const std::vector<float> start = random_floats(keys * values, random), before = start;
  std::vector<float> state(keys * values), out(values);
  std::vector<double> exact(start.begin(), start.end());
  for (int token = 0; token < 3; ++token) {
    const std::vector<float> query = random_floats(keys, random, scale),
                             value = random_floats(values, random), key = random_floats(keys, random, scale);
    std::vector<float> decays = random_floats(keys, random);
    for (float& decay : decays) decay = sigmoid(decay);
    const StateHead head{keys, values, query.data(), key.data(), value.data(), 0.7F, decays.data(), 0.6F};
    level_kernels(level).state_steps[static_cast<std::size_t>(kind)](
        head, (token == 0 ? before : state).data(), state.data(), out.data());
    for (std::size_t j = 0; j < values; ++j) {
      double under_key = 0.0, sum = 0.0;
      for (std::size_t i = 0; i < keys; ++i) {
        exact[i * values + j] *= kind == Recurrence::delta_by_channel ? decays[i] : head.decay;
        under_key += kind == Recurrence::space ? 0.0 : key[i] * exact[i * values + j];
      }
      for (std::size_t i = 0; i < keys; ++i) {
        exact[i * values + j] += key[i] * (head.beta * (value[j] - under_key));
        sum += query[i] * exact[i * values + j];
        CHECK(is_near(state[i * values + j], exact[i * values + j]));
      }
      CHECK(is_near(out[j], sum));
    }
  }
  CHECK(same_bits(before, start));
}

// A sequence's tokens, at once and in pieces, over three matrices.
void check_convolution(SimdLevel level, std::size_t kernel, bool has_bias, bool has_silu) {
  constexpr std::size_t kTokens = 9, kChannels = 287, kWidths[] = {150, 7, 130}, kFirst[] = {0, 150, 157};
  std::mt19937 random(static_cast<unsigned>(kernel));
  const std::size_t held = (kernel - 1) * kChannels;
  const std::vector<float> taps = random_floats(kChannels * kernel, random),
                           bias = random_floats(kChannels, random),
                           inputs = random_floats(held + kTokens * kChannels, random);  // the state's first
  Convolution spec{kernel, {}, {}, has_bias ? bias.data() : nullptr, has_silu};
  for (std::size_t i = 0; i < 3; ++i) {
    spec.widths[i] = kWidths[i];
    spec.taps[i] = taps.data() + kFirst[i] * kernel;
  }
  std::vector<float> first;
  for (const std::vector<std::size_t>& cuts : {std::vector<std::size_t>{0, kTokens}, {0, 1, 5, kTokens}}) {
    ThreadPool pool(static_cast<int>(cuts.size()));
    std::vector<float> state(inputs.data(), inputs.data() + held), all(kTokens * kChannels);
    for (std::size_t piece = 0; piece + 1 < cuts.size(); ++piece) {
      const std::size_t begin = cuts[piece], n = cuts[piece + 1] - begin;
      std::vector<float> x(n * kChannels), out(n * kChannels);
      const auto each = [&](const auto& call) {  // with where it lies, and where in the order of tokens
        for (std::size_t t = 0; t < n; ++t)
          for (std::size_t i = 0; i < 3; ++i)
            for (std::size_t c = 0; c < kWidths[i]; ++c)
              call(n * kFirst[i] + t * kWidths[i] + c, (begin + t) * kChannels + kFirst[i] + c);
      };
      each([&](std::size_t from, std::size_t to) { x[from] = inputs[held + to]; });
      std::vector<Token> tokens(n);
      for (Token& token : tokens) token.state = state.data();
      Part part;
      part.tokens = tokens.data();
      part.count = n;
      convolve(spec, part, 0, x.data(), out.data(), pool, level);
      each([&](std::size_t from, std::size_t to) { all[to] = out[from]; });
    }
    for (std::size_t i = 0; i < all.size(); ++i) {
      const std::size_t c = i % kChannels;
      double sum = has_bias ? bias[c] : 0.0;
      for (std::size_t j = 0; j < kernel; ++j)
        sum += static_cast<double>(taps[c * kernel + j]) * inputs[i + j * kChannels];
      CHECK(is_near(all[i], has_silu ? sum / (1.0 + std::exp(-sum)) : sum));
    }
    CHECK(same_bits(state.data(), inputs.data() + kTokens * kChannels, held));
    if (first.empty()) first = all;
    CHECK(same_bits(all, first));
  }
}

}  // namespace

void test_recurrence(int) {
  for (const SimdLevel level : simd_levels()) {
    for (const Recurrence kind : {Recurrence::space, Recurrence::delta, Recurrence::delta_by_channel})
      for (const std::size_t keys : {1, 12, 64})
        for (const std::size_t values : {1, 7, 20, 37, 133}) check_steps(level, kind, keys, values);
    for (const std::size_t kernel : {2, 4})
      for (const bool has_bias : {false, true})
        for (const bool has_silu : {false, true}) check_convolution(level, kernel, has_bias, has_silu);
  }
}
