#include "ffn/dense_ffn.h"

#include <algorithm>

#include "io/error.h"
#include "kernels/scratch.h"

namespace flashllm {

void DenseFfn::begin(const RowFormat& format, Activation activation, const NeuronNorm& norm,
                     const ScalePlane* plane, std::size_t first) {
  format_ = format;
  activation_ = activation;
  norm_ = norm;
  plane_ = plane;
  first_ = first;
  // Rows a power of two apart would share few lines of a cache: one line more.
  y_stride_ = round_up(format_.d_model, kColumnPad) + kColumnPad;
  parts_.clear();
}

void DenseFfn::take(const std::byte* x, std::size_t tokens) {
  const TokenForm form = form_of_many(format_.codec, format_.inputs, dtype_, format_.d_model, level_);
  parts_.push_back({PackedTokens(x, tokens, format_.d_model, dtype_, form, pool_, level_),
                    std::vector<float>(tokens * y_stride_),
                    {},
                    {},
                    0,
                    first_});
  Part& part = parts_.back();
  if (norm_) part.h.resize(norm_.neurons * part.x.padded());
  if (norm_.cuts_gates) part.up.resize(part.h.size());
}

float* DenseFfn::activations(std::size_t number, const std::byte* rows, std::size_t count,
                             const float* up_bias, const float* gate_bias, const std::byte* gate) {
  require(number < parts(), "a dense pass adds rows before it began");
  Part& part = parts_[number];
  const std::size_t padded = part.x.padded();
  const bool gated = format_.gated() || gate != nullptr;
  if (!norm_) h_.resize(count * padded);
  float* values = norm_ ? part.h.data() + part.kept * padded : h_.data();
  float* ups = norm_.cuts_gates ? part.up.data() + (values - part.h.data()) : nullptr;
  if (norm_) part.kept += count;
  product_rows(gate != nullptr ? format_.apart(gate, count) : format_.matrix(rows, count, format_.driver()),
               part.x, values, pool_, level_);
  if (gated) {
    if (ups == nullptr) up_.resize(count * padded);
    product_rows(format_.matrix(rows, count, format_.up), part.x, ups == nullptr ? up_.data() : ups, pool_,
                 level_);
  }
  if (ups != nullptr) return values;
  const auto of = [](const float* bias, std::size_t i) { return bias != nullptr ? bias[i] : 0.0F; };
  pool_.parallel_for(count, 16, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      activate(activation_, of(gated ? gate_bias : up_bias, i), values + i * padded, padded, level_);
      if (!gated) continue;
      float *h = values + i * padded, *up = up_.data() + i * padded;
      activate(activation_.of_up(), of(up_bias, i), up, padded, level_);
      for (std::size_t m = 0; m < padded; ++m) h[m] *= up[m];
    }
  });
  return values;
}

void DenseFfn::apply() {
  for (Part& part : parts_) {
    const std::size_t padded = part.x.padded();
    if (norm_.cuts_gates)
      cut_gates(norm_, activation_, part.h.data(), part.up.data(), padded, 1, part.x.tokens(), pool_, level_);
    else
      apply_to_columns(norm_, part.h.data(), padded, part.x.tokens(), pool_);
    part.kept = 0;
  }
}

void DenseFfn::add(std::size_t number, const std::byte* rows, std::size_t count) {
  Part& part = parts_[number];
  const std::size_t first = part.next, padded = part.x.padded();
  part.next += count;
  const float* h = norm_ ? part.h.data() + part.kept * padded : h_.data();
  if (norm_) part.kept += count;
  const RowMatrix columns = format_.matrix(rows, count, format_.down);
  if (plane_ == nullptr)
    return add_rows(columns, h, padded, part.x.tokens(), part.y.data(), y_stride_, pool_, level_);
  const PlaneRows scaled(columns, first, *plane_, level_);
  if (scaled.can_add_codes())
    return scaled.add_codes({h, 1, padded}, part.x.tokens(), part.y.data(), y_stride_, pool_);
  add_rows(scaled, count, format_.d_model, {h, 1, padded}, part.x.tokens(), part.y.data(), y_stride_, pool_,
           level_);
}

void DenseFfn::finish(std::size_t number, const float* down_bias, std::byte* y) {
  const KernelTable& kernels = kernel_table(level_, dtype_);
  Part& part = parts_[number];
  for (std::size_t m = 0; m < part.x.tokens(); ++m) {
    float* row = part.y.data() + m * y_stride_;
    if (down_bias != nullptr)
      for (std::size_t j = 0; j < format_.d_model; ++j) row[j] += down_bias[j];
    kernels.from_f32(row, format_.d_model, y + m * format_.d_model * dtype_nbytes(dtype_));
  }
  for (auto* buffer : {&part.y, &part.h, &part.up}) std::vector<float>().swap(*buffer);
  if (number + 1 == parts()) parts_.clear();
}

void DenseFfn::rest() noexcept {
  for (auto* buffer : {&h_, &up_}) std::vector<float>().swap(*buffer);
}

void DenseFfn::clear() noexcept {
  parts_.clear();
  rest();
}

void DenseFfn::finish_into(std::size_t number, const std::int32_t* at, const float* factors,
                           const float* bias, float* y) {
  const Part& part = parts_[number];
  const std::size_t width = format_.d_model;
  pool_.parallel_for(part.x.tokens(), 4, [&](std::size_t begin, std::size_t end) {
    for (std::size_t m = begin; m < end; ++m) {
      const float* sums = part.y.data() + m * y_stride_;
      float* to = y + static_cast<std::size_t>(at[m]) * width;
      for (std::size_t j = 0; j < width; ++j) to[j] += factors[m] * sums[j];
      if (bias == nullptr) continue;
      for (std::size_t j = 0; j < width; ++j) to[j] += factors[m] * bias[j];
    }
  });
}

}  // namespace flashllm
