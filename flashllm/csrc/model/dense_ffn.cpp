#include "model/dense_ffn.h"

#include <algorithm>

namespace flashllm {

void DenseFfn::begin(const std::byte* x, std::size_t tokens) {
  x_.emplace(x, tokens, layout_.d_model, layout_.dtype, pool_, level_);
  // Rows a power of two apart would share few lines of a cache: one line more.
  y_stride_ = (layout_.d_model + kColumnPad - 1) / kColumnPad * kColumnPad + kColumnPad;
  y_.assign(tokens * y_stride_, 0.0F);
}

LinearWeights DenseFfn::part(const std::byte* rows, std::size_t count, std::size_t element) const {
  LinearWeights weights;
  weights.data = rows + element * dtype_nbytes(layout_.dtype);
  weights.rows = count;
  weights.columns = layout_.d_model;
  weights.stride = layout_.stride;
  weights.dtype = layout_.dtype;
  return weights;
}

void DenseFfn::add(const std::byte* rows, std::size_t count, const float* up_bias) {
  if (!x_.has_value()) throw CoreError(ErrorKind::usage, "a dense pass adds rows before it began");
  const std::size_t padded = x_->padded();
  const bool gated = layout_.gate >= 0;
  count_ = count;
  h_.resize(count * padded);
  const std::size_t driver = gated ? static_cast<std::size_t>(layout_.gate) : layout_.up;
  product_rows(part(rows, count, driver), *x_, h_.data(), pool_, level_);
  if (gated) {
    up_.resize(count * padded);
    product_rows(part(rows, count, layout_.up), *x_, up_.data(), pool_, level_);
  }
  pool_.parallel_for(count, 16, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      activate(activation_, up_bias != nullptr ? up_bias[i] : 0.0F, h_.data() + i * padded, padded);
      if (!gated) continue;
      for (std::size_t m = i * padded; m < (i + 1) * padded; ++m) h_[m] *= up_[m];
    }
  });
  add_rows(part(rows, count, layout_.down), h_.data(), padded, x_->tokens(), y_.data(), y_stride_, pool_,
           level_);
}

void DenseFfn::finish(const float* down_bias, std::byte* y) {
  const KernelTable& kernels = kernel_table(level_, layout_.dtype);
  for (std::size_t m = 0; m < tokens(); ++m) {
    float* row = y_.data() + m * y_stride_;
    if (down_bias != nullptr)
      for (std::size_t j = 0; j < layout_.d_model; ++j) row[j] += down_bias[j];
    kernels.from_f32(row, layout_.d_model, y + m * layout_.d_model * dtype_nbytes(layout_.dtype));
  }
  x_.reset();
  for (auto* buffer : {&y_, &h_, &up_}) std::vector<float>().swap(*buffer);
}

void DenseFfn::copy_activations(float* h) const {
  for (std::size_t m = 0; m < tokens(); ++m)
    for (std::size_t i = 0; i < count_; ++i) h[m * count_ + i] = h_[i * x_->padded() + m];
}

}  // namespace flashllm
