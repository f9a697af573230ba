// The inputs of products with vectors of weights: fp32 values, and their codes of 8 or 16 bits where products
// want them (row_codecs.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/row_codecs.h"

namespace flashllm {

class RowInputs {
 public:
  RowInputs() = default;
  // x [tokens, length]; keeps the pointer.
  RowInputs(const float* x, std::size_t tokens, std::size_t length, InputForm form, SimdLevel level) {
    set(x, tokens, length, form, level);
  }

  void set(const float* x, std::size_t tokens, std::size_t length, InputForm form, SimdLevel level) {
    x_ = x;
    tokens_ = tokens;
    length_ = length;
    form_ = form;
    if (form == InputForm::f32) return;
    units_ = padded_units(length);
    codes_.resize(tokens * units_ * unit_nbytes());
    scales_.resize(tokens * units_);
    for (auto* totals : {&totals_, &halves_[0], &halves_[1]}) totals->resize(tokens * units_);
    const InputKernels& kernels = input_kernels(level);
    const auto code = form == InputForm::int16 ? kernels.code_int16 : kernels.code_int8;
    for (std::size_t t = 0; t < tokens; ++t) {
      const std::size_t first = t * units_;
      code(x + t * length, length, form == InputForm::token_int8,
           {codes_.data() + first * unit_nbytes(),
            scales_.data() + first,
            totals_.data() + first,
            {halves_[0].data() + first, halves_[1].data() + first}});
    }
  }

  const float* floats(std::size_t token) const { return x_ + token * length_; }
  std::size_t tokens() const { return tokens_; }
  InputForm form() const { return form_; }
  bool has_codes() const { return form_ != InputForm::f32; }
  CodedInputs codes(std::size_t token) const {
    const std::size_t first = token * units_;
    return {codes_.data() + first * unit_nbytes(),
            scales_.data() + first,
            totals_.data() + first,
            {halves_[0].data() + first, halves_[1].data() + first}};
  }

 private:
  std::size_t unit_nbytes() const {
    return kCodeUnit * (form_ == InputForm::int16 ? sizeof(std::int16_t) : sizeof(std::int8_t));
  }

  const float* x_ = nullptr;
  InputForm form_ = InputForm::f32;
  std::size_t tokens_ = 0, length_ = 0, units_ = 0;
  std::vector<std::int8_t> codes_;
  std::vector<float> scales_;
  std::vector<std::int32_t> totals_, halves_[2];
};

}  // namespace flashllm
