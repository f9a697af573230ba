#include "ffn/token_ffn.h"

#include <algorithm>

namespace flashllm {

namespace {

constexpr std::size_t kTogether = 16;  // neurons that all tokens use while they are in the processor's cache

}  // namespace

void TokenFfn::begin(const float* x, std::size_t tokens, Activation activation, float* y,
                     const ScalePlane* plane) {
  plane_ = plane;
  next_ = 0;
  norm_ = {};
  first_ = 0;
  x_.set(x, tokens, format_.d_model, format_.inputs);
  y_ = y;
  tokens_ = tokens;
  activation_ = activation;
  std::fill(y, y + tokens * format_.d_model, 0.0F);
}

void TokenFfn::keep_values(const NeuronNorm& norm) {
  norm_ = norm;
  stride_ = norm.neurons;
  h_.resize(tokens_ * stride_);
}

void TokenFfn::apply() {
  for (std::size_t t = 0; t < tokens_; ++t)
    flashllm::apply(norm_, nullptr, norm_.neurons, h_.data() + t * stride_);
  first_ = 0;
}

void TokenFfn::multiply(const std::byte* rows, std::size_t count, const float* up_bias,
                        const float* gate_bias, const std::byte* gate) {
  const bool gated = format_.gated() || gate != nullptr;
  RowMatrix up = format_.matrix(rows, count, format_.up);
  up.bias = up_bias;
  RowMatrix driver = up;
  if (gated) {
    driver = gate == nullptr
                 ? format_.matrix(rows, count, format_.driver())
                 : RowMatrix{
                       gate,          count,   format_.d_model, vector_nbytes(format_.codec, format_.d_model),
                       format_.codec, nullptr, nullptr,         format_.inputs};
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

// Columns in the order of ids.
void TokenFfn::add(const std::byte* rows, std::size_t count) {
  const float* h = h_.data() + first_;
  const std::int32_t first = next_;
  if (norm_) first_ += count;
  next_ += static_cast<std::int32_t>(count);
  // Columns are widened for all tokens, where those are enough to pay for it. Whole vectors; the scalar level
  // rounds a vector's end once.
  const std::size_t pays = plane_ != nullptr ? 2 : 3;
  if (tokens_ >= pays && format_.d_model % kColumnPad == 0 && level_ != SimdLevel::scalar) {
    if (plane_ != nullptr)
      add_rows(PlaneRows(rows + format_.down, format_.stride, static_cast<std::size_t>(first),
                         format_.d_model, format_.down_codec, *plane_, level_),
               count, format_.d_model, {h, stride_, 1}, tokens_, y_, format_.d_model, pool_, level_);
    else
      add_rows_few(format_.matrix(rows, count, format_.down), {h, stride_, 1}, tokens_, y_, format_.d_model,
                   pool_, level_);
    return;
  }
  // A lone token's columns of value zero are not read.
  const bool is_alone = tokens_ == 1;
  columns_.clear();
  ids_.clear();
  values_.clear();
  for (std::size_t i = 0; i < count; ++i) {
    if (is_alone && h[i] == 0.0F) continue;
    columns_.push_back(rows + i * format_.stride + format_.down);
    ids_.push_back(first + static_cast<std::int32_t>(i));
    if (is_alone) values_.push_back(h[i]);
  }
  const float* values = is_alone ? values_.data() : h;
  if (plane_ == nullptr) {
    sum_scattered({columns_.data(), columns_.size(), format_.d_model, format_.down_codec}, values, stride_,
                  tokens_, y_, pool_, level_);
    return;
  }
  const PlaneColumns columns{columns_.data(), ids_.data(),        columns_.size(),
                             format_.d_model, format_.down_codec, plane_};
  for (std::size_t t = 0; t < tokens_; ++t)
    sum_scattered(columns, values + t * stride_, y_ + t * format_.d_model, pool_, level_);
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
      if (up != nullptr) dot_block(*up, r, n, x_, first, tokens, gathered, kTogether, level_);
      for (std::size_t t = 0; t < tokens; ++t) {
        float *h = values + t * stride_, *by = gathered + t * kTogether;
        activate(activation_, 0.0F, h, n);
        if (up == nullptr) continue;
        activate(activation_.of_up(), 0.0F, by, n);
        for (std::size_t i = 0; i < n; ++i) h[i] *= by[i];
      }
    }
  }
}

}  // namespace flashllm
