// The inputs of products with vectors of weights: fp32 values, and their codes of 8 or 16 bits where products
// want them (row_codecs.h).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/row_codecs.h"

namespace flashllm {

// n inputs as codes, to the nearest, ties to even, and the scale of all. What is not finite has zeros, and a
// scale that is not a number.
template <typename Code>
float to_codes(const float* x, std::size_t n, Code* codes) {
  constexpr auto kMost = static_cast<float>(std::numeric_limits<Code>::max());
  constexpr float kTiny = 1e-30F;           // below it a reciprocal may not be finite
  constexpr float kRounding = 12582912.0F;  // 1.5 * 2^23: adding it leaves no fraction
  float largest = 0.0F, finite = 0.0F;
  for (std::size_t i = 0; i < n; ++i) {
    const float magnitude = std::fabs(x[i]);
    largest = magnitude > largest ? magnitude : largest;
    finite += x[i] * 0.0F;  // 0, or not a number
  }
  const bool none = !(finite == 0.0F) || largest < kTiny;
  const float by = none ? 0.0F : kMost / largest;
  for (std::size_t i = 0; i < n; ++i)
    codes[i] = none ? Code{0} : static_cast<Code>(static_cast<int>((x[i] * by + kRounding) - kRounding));
  if (!(finite == 0.0F)) return std::numeric_limits<float>::quiet_NaN();
  return none ? 0.0F : largest / kMost;
}

class RowInputs {
 public:
  RowInputs() = default;
  // x [tokens, length]; keeps the pointer.
  RowInputs(const float* x, std::size_t tokens, std::size_t length, InputForm form) {
    set(x, tokens, length, form);
  }

  void set(const float* x, std::size_t tokens, std::size_t length, InputForm form) {
    x_ = x;
    length_ = length;
    form_ = form;
    if (form == InputForm::f32) return;
    units_ = (length + kCodeUnit - 1) / kCodeUnit;
    units_ = (units_ + kUnitsTogether - 1) / kUnitsTogether * kUnitsTogether;
    const std::size_t codes = tokens * units_ * kCodeUnit;
    form == InputForm::int8 ? bytes_.assign(codes, 0) : words_.assign(codes, 0);
    scales_.assign(tokens * units_, 0.0F);
    sums_.assign(tokens * units_, 0.0F);
    for (std::size_t t = 0; t < tokens; ++t)
      for (std::size_t first = 0; first < length; first += kCodeUnit) {
        const std::size_t n = length - first < kCodeUnit ? length - first : kCodeUnit,
                          unit = t * units_ + first / kCodeUnit;
        const float* from = x + t * length + first;
        form == InputForm::int8 ? encode(from, n, unit, bytes_) : encode(from, n, unit, words_);
      }
  }

  const float* floats(std::size_t token) const { return x_ + token * length_; }
  InputForm form() const { return form_; }
  bool has_codes() const { return form_ != InputForm::f32; }
  CodedInputs codes(std::size_t token) const {
    const std::size_t first = token * units_;
    const void* codes = form_ == InputForm::int8 ? static_cast<const void*>(bytes_.data() + first * kCodeUnit)
                                                 : words_.data() + first * kCodeUnit;
    return {codes, scales_.data() + first, sums_.data() + first};
  }

 private:
  static constexpr std::size_t kUnitsTogether = 8;

  template <typename Code>
  void encode(const float* x, std::size_t n, std::size_t unit, std::vector<Code>& to) {
    Code* codes = to.data() + unit * kCodeUnit;
    scales_[unit] = to_codes(x, n, codes);
    int total = 0;
    for (std::size_t i = 0; i < n; ++i) total += codes[i];
    sums_[unit] = scales_[unit] * static_cast<float>(total);
  }

  const float* x_ = nullptr;
  InputForm form_ = InputForm::f32;
  std::size_t length_ = 0, units_ = 0;
  std::vector<std::int8_t> bytes_;
  std::vector<std::int16_t> words_;
  std::vector<float> scales_, sums_;
};

}  // namespace flashllm
