#include "ffn/token_ffn.h"

#include <algorithm>

namespace flashllm {

namespace {

constexpr std::size_t kTogether = 16;  // neurons that all tokens use while they are in the processor's cache

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
  add_columns(format_, rows, count, next_, plane_, {h_.data() + first_, stride_, 1}, tokens_, y_, pool_,
              level_);
  if (norm_) first_ += count;
  next_ += static_cast<std::int32_t>(count);
}

void add_columns(const RowFormat& format, const std::byte* rows, std::size_t count, std::int32_t first,
                 const ScalePlane* plane, TileRows h, std::size_t tokens, float* y, ThreadPool& pool,
                 SimdLevel level) {
  const std::size_t width = format.d_model;
  // Columns that are not multiplied as codes are widened for all tokens, where those are enough to pay for
  // it. Whole vectors; the scalar level rounds a vector's end once.
  const bool is_whole = width % kColumnPad == 0 && level != SimdLevel::scalar;
  if (plane != nullptr) {
    const PlaneRows columns(rows + format.down, format.stride, static_cast<std::size_t>(first), width,
                            format.down_codec, *plane, level);
    if (columns.can_add_codes(format.inputs)) return columns.add_codes(count, h, tokens, y, width, pool);
    if (tokens >= 2 && is_whole) return add_rows(columns, count, width, h, tokens, y, width, pool, level);
  } else if (tokens >= 3 && is_whole) {
    return add_rows_few(format.matrix(rows, count, format.down), h, tokens, y, width, pool, level);
  }
  // A lone token's columns of value zero are not read.
  const bool is_alone = tokens == 1;
  std::vector<const void*> columns;
  std::vector<std::int32_t> ids;
  std::vector<float> values;
  columns.reserve(count);
  ids.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (is_alone && h.data[i * h.step] == 0.0F) continue;
    columns.push_back(rows + i * format.stride + format.down);
    ids.push_back(first + static_cast<std::int32_t>(i));
    if (is_alone) values.push_back(h.data[i * h.step]);
  }
  const float* scales = is_alone ? values.data() : h.data;
  if (plane == nullptr)
    return sum_scattered({columns.data(), columns.size(), width, format.down_codec}, scales, h.row, tokens, y,
                         pool, level);
  const PlaneColumns of_plane{columns.data(), ids.data(), columns.size(), width, format.down_codec, plane};
  for (std::size_t t = 0; t < tokens; ++t)
    sum_scattered(of_plane, scales + t * h.row, y + t * width, pool, level);
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
