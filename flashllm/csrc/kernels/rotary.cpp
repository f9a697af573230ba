#include "kernels/rotary.h"

#include <cmath>

namespace flashllm {

void RotaryTable::set_positions(const std::size_t* positions, std::size_t n) {
  const std::size_t pairs = rotary_.inverse_frequency.size();
  cosines_.resize(n * pairs);
  sines_.resize(n * pairs);
  for (std::size_t token = 0; token < n; ++token) {
    const auto position = static_cast<float>(positions[token]);
    for (std::size_t i = 0; i < pairs; ++i) {
      const float angle = position * rotary_.inverse_frequency[i];
      cosines_[token * pairs + i] = std::cos(angle) * rotary_.scaling;
      sines_[token * pairs + i] = std::sin(angle) * rotary_.scaling;
    }
  }
}

void RotaryTable::apply(std::size_t index, float* heads, std::size_t count, std::size_t head_dim) const {
  const std::size_t pairs = rotary_.inverse_frequency.size();
  const float* cosine = cosines_.data() + index * pairs;
  const float* sine = sines_.data() + index * pairs;
  const bool is_half = rotary_.style == Rotary::Style::half;
  for (std::size_t h = 0; h < count; ++h) {
    float* head = heads + h * head_dim;
    if (is_half) {
      for (std::size_t i = 0; i < pairs; ++i) {
        const float x = head[i], y = head[i + pairs];
        head[i] = x * cosine[i] - y * sine[i];
        head[i + pairs] = y * cosine[i] + x * sine[i];
      }
    } else {
      for (std::size_t i = 0; i < pairs; ++i) {
        const float x = head[2 * i], y = head[2 * i + 1];
        head[2 * i] = x * cosine[i] - y * sine[i];
        head[2 * i + 1] = y * cosine[i] + x * sine[i];
      }
    }
  }
}

}  // namespace flashllm
