#include "ffn/dense_ffn.h"

#include <algorithm>

#include "io/error.h"

namespace flashllm {

void DenseFfn::begin(const std::byte* x, std::size_t tokens, Activation activation, const ScalePlane* plane,
                     std::size_t first) {
  plane_ = plane;
  next_ = first;
  norm_ = {};
  kept_ = 0;
  activation_ = activation;
  x_.emplace(x, tokens, format_.d_model, dtype_, pool_, level_);
  // Rows a power of two apart would share few lines of a cache: one line more.
  y_stride_ = (format_.d_model + kColumnPad - 1) / kColumnPad * kColumnPad + kColumnPad;
  y_.assign(tokens * y_stride_, 0.0F);
}

float* DenseFfn::activations(const std::byte* rows, std::size_t count, const float* up_bias,
                             const float* gate_bias, const std::byte* gate) {
  if (!x_.has_value()) throw CoreError(ErrorKind::usage, "a dense pass adds rows before it began");
  const std::size_t padded = x_->padded();
  const bool gated = format_.gated() || gate != nullptr;
  if (!norm_) h_.resize(count * padded);
  float* values = h_.data() + kept_ * padded;
  if (norm_) kept_ += count;
  const RowMatrix resident{
      gate,          count,   format_.d_model, vector_nbytes(format_.codec, format_.d_model),
      format_.codec, nullptr, nullptr};
  product_rows(gate != nullptr ? resident : format_.matrix(rows, count, format_.driver()), *x_, values, pool_,
               level_);
  if (gated) {
    up_.resize(count * padded);
    product_rows(format_.matrix(rows, count, format_.up), *x_, up_.data(), pool_, level_);
  }
  const auto of = [](const float* bias, std::size_t i) { return bias != nullptr ? bias[i] : 0.0F; };
  pool_.parallel_for(count, 16, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      activate(activation_, of(gated ? gate_bias : up_bias, i), values + i * padded, padded);
      if (!gated) continue;
      float *h = values + i * padded, *up = up_.data() + i * padded;
      activate(activation_.of_up(), of(up_bias, i), up, padded);
      for (std::size_t m = 0; m < padded; ++m) h[m] *= up[m];
    }
  });
  return values;
}

void DenseFfn::keep_values(const NeuronNorm& norm) {
  norm_ = norm;
  h_.resize(norm.neurons * x_->padded());
}

void DenseFfn::apply() {
  apply_to_columns(norm_, h_.data(), x_->padded(), x_->tokens(), pool_);
  kept_ = 0;
}

void DenseFfn::add(const std::byte* rows, std::size_t count) {
  const std::size_t first = next_;
  next_ += count;
  const float* h = h_.data() + kept_ * x_->padded();
  if (norm_) kept_ += count;
  if (plane_ != nullptr)
    return add_rows(PlaneRows(rows + format_.down, format_.stride, first, format_.d_model, format_.down_codec,
                              *plane_, level_),
                    count, format_.d_model, h, x_->padded(), x_->tokens(), y_.data(), y_stride_, pool_,
                    level_);
  add_rows(format_.matrix(rows, count, format_.down), h, x_->padded(), x_->tokens(), y_.data(), y_stride_,
           pool_, level_);
}

void DenseFfn::finish(const float* down_bias, std::byte* y) {
  const KernelTable& kernels = kernel_table(level_, dtype_);
  for (std::size_t m = 0; m < tokens(); ++m) {
    float* row = y_.data() + m * y_stride_;
    if (down_bias != nullptr)
      for (std::size_t j = 0; j < format_.d_model; ++j) row[j] += down_bias[j];
    kernels.from_f32(row, format_.d_model, y + m * format_.d_model * dtype_nbytes(dtype_));
  }
  x_.reset();
  for (auto* buffer : {&y_, &h_, &up_}) std::vector<float>().swap(*buffer);
}

void DenseFfn::finish_into(const std::int32_t* at, const float* factors, const float* bias, float* y) {
  const std::size_t width = format_.d_model;
  pool_.parallel_for(tokens(), 4, [&](std::size_t begin, std::size_t end) {
    for (std::size_t m = begin; m < end; ++m) {
      const float* sums = y_.data() + m * y_stride_;
      float* to = y + static_cast<std::size_t>(at[m]) * width;
      for (std::size_t j = 0; j < width; ++j) to[j] += factors[m] * sums[j];
      if (bias == nullptr) continue;
      for (std::size_t j = 0; j < width; ++j) to[j] += factors[m] * bias[j];
    }
  });
  x_.reset();
}

}  // namespace flashllm
