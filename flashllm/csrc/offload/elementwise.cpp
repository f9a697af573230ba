#include "offload/elementwise.h"

#include <algorithm>
#include <string>
#include <vector>

#include "io/error.h"
#include "kernels/scratch.h"

namespace flashllm {

namespace {

constexpr std::size_t kTogether = 1024;         // values widened at a time
constexpr std::size_t kGrain = 16 * kTogether;  // values a thread takes at a time
constexpr std::size_t kTokenGrain = 8;          // tokens a thread turns at a time

}  // namespace

Elementwise::Elementwise(Dtype dtype, ThreadPool& pool, SimdLevel level)
    : dtype_(dtype),
      item_(dtype_nbytes(dtype)),
      pool_(pool),
      level_(level),
      kernels_(kernel_table(level, dtype)) {}

template <typename Body>
void Elementwise::each_piece(std::size_t n, const Body& body) const {
  pool_.parallel_for(n, kGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; i += kTogether) body(i, std::min(kTogether, end - i));
  });
}

void Elementwise::normalize(const Norm& norm, const std::byte* x, std::size_t rows, std::byte* out) const {
  normalize_rows(norm, x, rows, dtype_, out, pool_, level_);
}

void Elementwise::rotate(const Rotary& rotary, const std::int64_t* positions, std::size_t tokens,
                         std::size_t heads, std::size_t head_dim, float factor, std::byte* x) const {
  RotaryTable checked(rotary);
  if (rotary.dims > head_dim)
    throw CoreError(ErrorKind::usage, "rotary dimensions (" + std::to_string(rotary.dims) +
                                          ") beyond the head's " + std::to_string(head_dim));
  const std::size_t row = heads * head_dim;
  pool_.parallel_for(tokens, kTokenGrain, [&](std::size_t begin, std::size_t end) {
    RotaryTable table(rotary);
    const Scratch<float> values(row);
    for (std::size_t t = begin; t < end; ++t) {
      const auto position = static_cast<std::size_t>(positions[t]);
      std::byte* token = x + t * row * item_;
      table.set_positions(&position, 1);
      kernels_.to_f32(token, row, values.get());
      table.apply(0, values.get(), heads, head_dim);
      if (factor != 1.0F)
        for (std::size_t i = 0; i < row; ++i) values.get()[i] *= factor;
      kernels_.from_f32(values.get(), row, token);
    }
  });
}

void Elementwise::activate(Activation activation, const std::byte* gate, std::size_t n, std::byte* x) const {
  each_piece(n, [&](std::size_t i, std::size_t count) {
    alignas(64) float values[kTogether], factors[kTogether];
    std::byte* at = x + i * item_;
    kernels_.to_f32(gate != nullptr ? gate + i * item_ : at, count, values);
    flashllm::activate(activation, 0.0F, values, count);
    if (gate != nullptr) {
      std::byte rounded[kTogether * sizeof(float)];
      kernels_.from_f32(values, count, rounded);
      kernels_.to_f32(rounded, count, values);
      kernels_.to_f32(at, count, factors);
      flashllm::activate(activation.of_up(), 0.0F, factors, count);
      for (std::size_t j = 0; j < count; ++j) values[j] *= factors[j];
    }
    kernels_.from_f32(values, count, at);
  });
}

void Elementwise::add(const std::byte* y, std::size_t n, std::byte* x) const {
  each_piece(n, [&](std::size_t i, std::size_t count) {
    alignas(64) float values[kTogether], terms[kTogether];
    kernels_.to_f32(x + i * item_, count, values);
    kernels_.to_f32(y + i * item_, count, terms);
    for (std::size_t j = 0; j < count; ++j) values[j] += terms[j];
    kernels_.from_f32(values, count, x + i * item_);
  });
}

void Elementwise::scale(float factor, std::size_t n, std::byte* x) const {
  each_piece(n, [&](std::size_t i, std::size_t count) {
    alignas(64) float values[kTogether];
    kernels_.to_f32(x + i * item_, count, values);
    for (std::size_t j = 0; j < count; ++j) values[j] *= factor;
    kernels_.from_f32(values, count, x + i * item_);
  });
}

void Elementwise::widen(const std::byte* x, std::size_t n, float* out) const {
  each_piece(n, [&](std::size_t i, std::size_t count) { kernels_.to_f32(x + i * item_, count, out + i); });
}

void Elementwise::narrow(const float* x, std::size_t n, std::byte* out) const {
  each_piece(n, [&](std::size_t i, std::size_t count) { kernels_.from_f32(x + i, count, out + i * item_); });
}

}  // namespace flashllm
