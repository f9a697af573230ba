#include "ffn/neuron_norm.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/norm.h"

namespace flashllm {

namespace {

constexpr std::size_t kColumns = 16;  // tokens whose values are handled side by side

// Of the sum of a token's squares. In double, where a product of two floats is exact.
float scale_of(const NeuronNorm& norm, double squares) {
  const auto mean = static_cast<float>(squares / static_cast<double>(norm.neurons));
  return 1.0F / std::sqrt(mean + norm.epsilon);
}

}  // namespace

void apply(const NeuronNorm& norm, const std::int32_t* ids, std::size_t count, float* values) {
  double squares = 0.0;
  for (std::size_t i = 0; i < count; ++i) squares += static_cast<double>(values[i]) * values[i];
  const float scale = scale_of(norm, squares);
  float largest = 0.0F;
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = values[i] * scale * norm.weight[ids != nullptr ? static_cast<std::size_t>(ids[i]) : i];
    largest = std::max(largest, std::fabs(values[i]));
  }
  if (!norm.rounds) return;
  const Rounding rounded(largest);
  for (std::size_t i = 0; i < count; ++i) values[i] = rounded(values[i]);
}

void apply_to_columns(const NeuronNorm& norm, float* h, std::size_t padded, std::size_t tokens,
                      ThreadPool& pool) {
  pool.parallel_for(tokens, kColumns, [&](std::size_t begin, std::size_t end) {
    for (std::size_t first = begin; first < end; first += kColumns) {
      const std::size_t count = std::min(kColumns, end - first);
      std::array<double, kColumns> squares{};
      std::array<float, kColumns> scales{}, largest{};
      for (std::size_t i = 0; i < norm.neurons; ++i) {
        const float* row = h + i * padded + first;
        for (std::size_t m = 0; m < count; ++m) squares[m] += static_cast<double>(row[m]) * row[m];
      }
      for (std::size_t m = 0; m < count; ++m) scales[m] = scale_of(norm, squares[m]);
      for (std::size_t i = 0; i < norm.neurons; ++i) {
        float* row = h + i * padded + first;
        for (std::size_t m = 0; m < count; ++m) {
          row[m] = row[m] * scales[m] * norm.weight[i];
          largest[m] = std::max(largest[m], std::fabs(row[m]));
        }
      }
      if (!norm.rounds) continue;
      for (std::size_t m = 0; m < count; ++m) {
        const Rounding rounded(largest[m]);
        for (std::size_t i = 0; i < norm.neurons; ++i) {
          float& value = h[i * padded + first + m];
          value = rounded(value);
        }
      }
    }
  });
}

void cut_gates(const NeuronNorm& norm, Activation activation, float* gates, const float* up,
               std::size_t by_neuron, std::size_t by_token, std::size_t tokens, ThreadPool& pool,
               SimdLevel level) {
  const auto neurons = static_cast<double>(norm.neurons);
  pool.parallel_for(tokens, by_token == 1 ? kColumns : 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t first = begin; first < end; first += kColumns) {
      const std::size_t count = std::min(kColumns, end - first);
      std::array<double, kColumns> sums{}, squares{};
      std::array<float, kColumns> cuts{};
      for (std::size_t i = 0; i < norm.neurons; ++i)
        for (std::size_t m = 0; m < count; ++m) sums[m] += gates[i * by_neuron + (first + m) * by_token];
      for (std::size_t i = 0; i < norm.neurons; ++i)
        for (std::size_t m = 0; m < count; ++m) {
          const double away = gates[i * by_neuron + (first + m) * by_token] - sums[m] / neurons;
          squares[m] += away * away;
        }
      for (std::size_t m = 0; m < count; ++m)
        cuts[m] = static_cast<float>(sums[m] / neurons + norm.deviations * std::sqrt(squares[m] / neurons));
      const auto each = [&](const auto& change) {
        for (std::size_t i = 0; i < norm.neurons; ++i)
          for (std::size_t m = 0; m < count; ++m) change(i * by_neuron + (first + m) * by_token, m);
      };
      each([&](std::size_t at, std::size_t m) {
        gates[at] = gates[at] > cuts[m] ? gates[at] - cuts[m] : 0.0F;
      });
      // Where they lie together: a token's, or a neuron's.
      for (std::size_t m = 0; by_neuron == 1 && m < count; ++m)
        activate(activation, 0.0F, gates + (first + m) * by_token, norm.neurons, level);
      for (std::size_t i = 0; by_neuron != 1 && i < norm.neurons; ++i)
        activate(activation, 0.0F, gates + i * by_neuron + first, count, level);
      each([&](std::size_t at, std::size_t /*m*/) { gates[at] *= up[at]; });
    }
  });
}

}  // namespace flashllm
