#include "ffn/token_ffn.h"

#include <algorithm>

#include "kernels/levels/levels.h"

namespace flashllm {

namespace {

constexpr std::size_t kTogether = 16;  // neurons that all tokens use while they are in the processor's cache
constexpr std::size_t kSummed = 128;   // down columns handed to a kernel at a time, at most

}  // namespace

void TokenFfn::begin(const RowFormat& format, const float* x, std::size_t tokens, Activation activation,
                     float* y, const ScalePlane* plane) {
  format_ = format;
  plane_ = plane;
  next_ = 0;
  norm_ = {};
  first_ = 0;
  x_.set(x, tokens, format_.d_model, format_.inputs, level_);
  y_ = y;
  tokens_ = tokens;
  activation_ = activation;
  std::fill(y, y + tokens * format_.d_model, 0.0F);
}

void TokenFfn::keep_values(const NeuronNorm& norm) {
  norm_ = norm;
  stride_ = norm.neurons;
  h_.resize(tokens_ * stride_);
  up_.resize(norm.cuts_gates ? h_.size() : 0);
}

void TokenFfn::apply() {
  first_ = 0;
  if (norm_.cuts_gates)
    return cut_gates(norm_, activation_, h_.data(), up_.data(), 1, stride_, tokens_, pool_, level_);
  for (std::size_t t = 0; t < tokens_; ++t)
    flashllm::apply(norm_, nullptr, norm_.neurons, h_.data() + t * stride_);
}

void TokenFfn::multiply(const std::byte* rows, std::size_t count, const float* up_bias,
                        const float* gate_bias, const std::byte* gate) {
  const bool gated = format_.gated() || gate != nullptr;
  RowMatrix up = format_.matrix(rows, count, format_.up);
  up.bias = up_bias;
  RowMatrix driver = up;
  if (gated) {
    driver = gate == nullptr ? format_.matrix(rows, count, format_.driver()) : format_.apart(gate, count);
    driver.bias = gate_bias;
  }
  if (!norm_) {
    stride_ = count;
    h_.resize(tokens_ * count);
  }
  pool_.parallel_for(count, kTogether, [&](std::size_t begin, std::size_t end) {
    activations(driver, gated ? &up : nullptr, begin, end);
  });
  if (norm_) first_ += count;
}

void TokenFfn::add(const std::byte* rows, std::size_t count) {
  add_columns(format_.matrix(rows, count, format_.down), next_, plane_, {h_.data() + first_, stride_, 1},
              tokens_, y_, pool_, level_);
  if (norm_) first_ += count;
  next_ += static_cast<std::int32_t>(count);
}

void add_columns(const RowMatrix& columns, std::int32_t first, const ScalePlane* plane, TileRows h,
                 std::size_t tokens, float* y, ThreadPool& pool, SimdLevel level) {
  const std::size_t width = columns.columns;
  level_kernels(level);  // throws here, not in a thread
  if (plane != nullptr) {
    const PlaneRows rows(columns, static_cast<std::size_t>(first), *plane, level);
    if (rows.can_add_codes()) return rows.add_codes(h, tokens, y, width, pool);
  }
  pool.parallel_for(width, column_share(width, pool), [&](std::size_t begin, std::size_t end) {
    add_columns(columns, first, plane, h, tokens, begin, end, y, level);
  });
}

void add_columns(const RowMatrix& columns, std::int32_t first, const ScalePlane* plane, TileRows h,
                 std::size_t tokens, std::size_t begin, std::size_t end, float* y, SimdLevel level) {
  const std::size_t width = columns.columns, count = columns.rows;
  // Columns that are not multiplied as codes are widened for all tokens, where those are enough to pay for
  // it. Whole vectors; the scalar level rounds a vector's end once.
  const bool is_whole = width % kColumnPad == 0 && level != SimdLevel::scalar;
  if (plane != nullptr) {
    const PlaneRows rows(columns, static_cast<std::size_t>(first), *plane, level);
    if (rows.can_add_codes()) return rows.add_codes(h, tokens, begin, end, y, width);
    if (tokens >= 2 && is_whole) return add_rows(rows, count, h, tokens, begin, end, y, width, level);
  } else if (tokens >= 3 && is_whole) {
    return add_rows_few(columns, h, tokens, begin, end, y, width, level);
  }
  for (std::size_t t = 0; t < tokens; ++t) {
    const void* vectors[kSummed];
    std::int32_t ids[kSummed];
    float values[kSummed];
    for (std::size_t i = 0; i < count;) {
      std::size_t some = 0;
      for (; some < kSummed && i < count; ++i) {
        const float value = h.data[t * h.row + i * h.step];
        if (value == 0.0F) continue;  // its column is not read
        vectors[some] = columns.data + i * columns.stride;
        ids[some] = first + static_cast<std::int32_t>(i);
        values[some++] = value;
      }
      if (plane == nullptr)
        sum_block({vectors, some, width, columns.codec}, values, begin, end, y + t * width, level);
      else
        sum_block(PlaneColumns{vectors, ids, some, width, columns.codec, plane}, values, begin, end,
                  y + t * width, level);
    }
  }
}

void TokenFfn::activations(const RowMatrix& driver, const RowMatrix* up, std::size_t begin, std::size_t end) {
  constexpr std::size_t kTokens = 8;  // which use a weight while it is unpacked
  float gathered[kTokens * kTogether];
  for (std::size_t r = begin; r < end; r += kTogether) {
    const std::size_t n = std::min(kTogether, end - r);
    for (std::size_t first = 0; first < tokens_; first += kTokens) {
      const std::size_t tokens = std::min(kTokens, tokens_ - first);
      float* values = h_.data() + first * stride_ + first_ + r;
      dot_block(driver, r, n, x_, first, tokens, values, stride_, level_);
      if (norm_.cuts_gates) {
        dot_block(*up, r, n, x_, first, tokens, up_.data() + (values - h_.data()), stride_, level_);
        continue;
      }
      if (up != nullptr) dot_block(*up, r, n, x_, first, tokens, gathered, kTogether, level_);
      for (std::size_t t = 0; t < tokens; ++t) {
        float *h = values + t * stride_, *by = gathered + t * kTogether;
        activate(activation_, 0.0F, h, n, level_);
        if (up == nullptr) continue;
        activate(activation_.of_up(), 0.0F, by, n, level_);
        for (std::size_t i = 0; i < n; ++i) h[i] *= by[i];
      }
    }
  }
}

}  // namespace flashllm
