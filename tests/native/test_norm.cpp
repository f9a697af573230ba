// RMS norms and rotary embeddings against fp64, and what they leave alone.
#include "attention_fixture.h"
#include "ffn/neuron_norm.h"
#include "io/error.h"
#include "kernels/norm.h"
#include "kernels/rotary.h"

namespace {

using namespace attention_tests;

void check_rms(std::size_t width) {
  const std::vector<float> x = random_floats(width, 1), weight = random_floats(width, 2),
                           bias = random_floats(width, 3);
  double squares = 0.0;
  for (const float value : x) squares += static_cast<double>(value) * value;
  const double scale = 1.0 / std::sqrt(squares / static_cast<double>(width) + 1e-5);
  for (const bool has_weight : {false, true}) {
    for (const bool has_bias : {false, true}) {
      const Norm norm{Norm::Kind::rms, width, 1e-5F, has_weight ? weight.data() : nullptr,
                      has_bias ? bias.data() : nullptr};
      std::vector<float> y(width);
      normalize(norm, x.data(), y.data());
      for (std::size_t i = 0; i < width; ++i) {
        const double scaled = x[i] * scale * (has_weight ? weight[i] : 1.0);
        CHECK(std::fabs(y[i] - scaled - (has_bias ? bias[i] : 0.0)) <= 1e-6 * (1.0 + std::fabs(scaled)));
      }
      std::vector<float> in_place = x;
      normalize(norm, in_place.data(), in_place.data());
      CHECK(same_bits(in_place.data(), y.data(), width));
    }
  }
}

// A layer norm without weight and bias is one with ones and zeros.
void check_layer(std::size_t width) {
  const std::vector<float> x = random_floats(width, 1), ones(width, 1.0F), zeros(width, 0.0F);
  std::vector<float> plain(width), given(width);
  normalize({Norm::Kind::layer, width, 1e-5F, nullptr, nullptr}, x.data(), plain.data());
  normalize({Norm::Kind::layer, width, 1e-5F, ones.data(), zeros.data()}, x.data(), given.data());
  for (std::size_t i = 0; i < width; ++i) CHECK(plain[i] == given[i]);
}

void check_rotary(Rotary::Style style, std::size_t head_dim, std::size_t dims) {
  constexpr std::size_t kHeads = 3;
  const std::size_t positions[] = {0, 1, 63, 2047}, pairs = dims / 2;
  std::vector<float> frequency(pairs);
  for (std::size_t i = 0; i < pairs; ++i)
    frequency[i] =
        static_cast<float>(std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(dims)));
  RotaryTable table({frequency, style, 1.5F});
  table.set_positions(positions, 4);
  for (std::size_t token = 0; token < 4; ++token) {
    const std::vector<float> before = random_floats(kHeads * head_dim, 4);
    std::vector<float> after = before;
    table.apply(token, after.data(), kHeads, head_dim);
    for (std::size_t h = 0; h < kHeads; ++h) {
      const float *from = before.data() + h * head_dim, *to = after.data() + h * head_dim;
      for (std::size_t i = 0; i < pairs; ++i) {
        const bool is_half = style == Rotary::Style::half;
        const std::size_t a = is_half ? i : 2 * i, b = is_half ? i + pairs : 2 * i + 1;
        const double angle = static_cast<float>(positions[token]) * frequency[i];
        const double cosine = 1.5 * std::cos(angle), sine = 1.5 * std::sin(angle);
        CHECK(std::fabs(to[a] - (from[a] * cosine - from[b] * sine)) <= 2e-6);
        CHECK(std::fabs(to[b] - (from[b] * cosine + from[a] * sine)) <= 2e-6);
      }
      CHECK(same_bits(to + dims, from + dims, head_dim - dims));
    }
  }
}

// To the nearest of 255 steps of the largest magnitude / 127, ties to even.
void check_rounding() {
  std::vector<float> x = {127.0F, -126.4F, 0.5F, 1.5F, 2.5F, -0.5F, -3.6F, 0.0F};
  round_to_8_bits(x.data(), x.size());
  const std::vector<float> expected = {127.0F, -126.0F, 0.0F, 2.0F, 2.0F, 0.0F, -4.0F, 0.0F};
  CHECK(x == expected);
  std::vector<float> random = random_floats(700, 9), same = random;
  round_to_8_bits(random.data(), random.size());
  float largest = 0.0F;
  for (const float value : same) largest = std::fmax(largest, std::fabs(value));
  for (std::size_t i = 0; i < same.size(); ++i) {
    const double steps = static_cast<double>(random[i]) * 127.0 / largest;
    CHECK(std::fabs(steps - std::nearbyint(steps)) < 1e-4 && std::fabs(steps) < 127.001);
    CHECK(std::fabs(random[i] - same[i]) <= largest / 254.0F * 1.0001F);
  }
  std::vector<float> tiny = {3e-8F, -3e-6F, 9e-6F};  // below 1e-5 the step shrinks no more
  round_to_8_bits(tiny.data(), tiny.size());
  CHECK(tiny[0] == 0.0F && std::fabs(tiny[1] + 38.0F * 1e-5F / 127.0F) < 1e-11F);
}

// A token has the same bits among others, as columns, and whether its zeros are there or not.
void check_neuron_norm(std::size_t neurons, std::size_t tokens) {
  ThreadPool pool(2);
  const std::size_t padded = (tokens + 15) / 16 * 16;
  const std::vector<float> weight = random_floats(neurons, 5);
  for (const bool rounds : {false, true}) {
    const NeuronNorm norm{weight.data(), neurons, 1e-5F, rounds};
    std::vector<float> columns = random_floats(neurons * padded, 6);
    for (float& value : columns) value = value < 0.4F ? 0.0F : value;
    const std::vector<float> before = columns;
    apply_to_columns(norm, columns.data(), padded, tokens, pool);
    for (std::size_t m = 0; m < tokens; ++m) {
      std::vector<float> all(neurons), active;
      std::vector<std::int32_t> ids;
      for (std::size_t i = 0; i < neurons; ++i) {
        all[i] = before[i * padded + m];
        if (all[i] == 0.0F) continue;
        ids.push_back(static_cast<std::int32_t>(i));
        active.push_back(all[i]);
      }
      apply(norm, nullptr, neurons, all.data());
      apply(norm, ids.data(), ids.size(), active.data());
      for (std::size_t i = 0; i < neurons; ++i) CHECK(all[i] == columns[i * padded + m]);
      for (std::size_t i = 0; i < ids.size(); ++i) CHECK(active[i] == all[static_cast<std::size_t>(ids[i])]);
    }
  }
}

// Gates of a token have the same bits as a row and as a column.
void check_cut_gates(std::size_t neurons, std::size_t tokens, float deviations) {
  ThreadPool pool(2);
  NeuronNorm norm;
  norm.neurons = neurons;
  norm.cuts_gates = true;
  norm.deviations = deviations;
  std::vector<float> rows = random_floats(neurons * tokens, 7), columns(rows.size());
  const std::vector<float> before = rows, up = random_floats(rows.size(), 8);
  std::vector<float> turned(up.size());
  for (std::size_t m = 0; m < tokens; ++m)
    for (std::size_t i = 0; i < neurons; ++i) {
      columns[i * tokens + m] = rows[m * neurons + i];
      turned[i * tokens + m] = up[m * neurons + i];
    }
  cut_gates(norm, Activation::relu, rows.data(), up.data(), 1, neurons, tokens, pool, best_simd_level());
  cut_gates(norm, Activation::relu, columns.data(), turned.data(), tokens, 1, tokens, pool,
            best_simd_level());
  for (std::size_t m = 0; m < tokens; ++m) {
    double sum = 0.0, squares = 0.0;
    for (std::size_t i = 0; i < neurons; ++i) sum += before[m * neurons + i];
    const double mean = sum / static_cast<double>(neurons);
    for (std::size_t i = 0; i < neurons; ++i)
      squares += (before[m * neurons + i] - mean) * (before[m * neurons + i] - mean);
    const double cut = mean + deviations * std::sqrt(squares / static_cast<double>(neurons));
    for (std::size_t i = 0; i < neurons; ++i) {
      const std::size_t at = m * neurons + i;
      CHECK(rows[at] == columns[i * tokens + m]);
      CHECK(std::fabs(rows[at] - std::max(0.0, before[at] - cut) * up[at]) < 1e-5);
    }
  }
}

}  // namespace

void test_norm(int) {
  check_rounding();
  check_cut_gates(70, 19, 1.6448536F);
  check_cut_gates(5, 1, -0.5F);
  check_neuron_norm(70, 19);
  check_neuron_norm(5, 1);
  for (const std::size_t width : {1, 15, 16, 70, 4096}) {
    check_rms(width);
    check_layer(width);
  }
}

void test_rotary(int) {
  for (const Rotary::Style style : {Rotary::Style::half, Rotary::Style::interleaved}) {
    check_rotary(style, 128, 128);
    check_rotary(style, 80, 32);
    check_rotary(style, 6, 2);
  }
}
