// The inputs of products with vectors of weights: fp32 values, and their codes of 8 or 16 bits where products
// want them (row_codecs.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/row_codecs.h"

namespace flashllm {

struct Extent {
  float largest = 0.0F;  // magnitude
  bool finite = true;
};
inline Extent extent_of(const float* x, std::size_t n) {
  // Bits of floats without their signs are in the order of the floats, and integers' largest is found in any.
  constexpr std::int32_t kInfinity = 0x7f800000;
  std::int32_t most = 0;
  for (std::size_t i = 0; i < n; ++i) {
    std::int32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= std::numeric_limits<std::int32_t>::max();
    most = bits > most ? bits : most;
  }
  Extent all;
  std::memcpy(&all.largest, &most, sizeof most);
  all.finite = most < kInfinity;
  return all;
}

// n inputs as codes of at most `most`, to the nearest, ties to even, and their scale: of all inputs that have
// this extent. What is not finite has zeros, and a scale that is not a number.
template <typename Code>
float to_codes(const float* x, std::size_t n, const Extent& all, float most, Code* codes) {
  constexpr float kTiny = 1e-30F;           // below it a reciprocal may not be finite
  constexpr float kRounding = 12582912.0F;  // 1.5 * 2^23: adding it leaves no fraction
  const bool none = !all.finite || all.largest < kTiny;
  const float by = none ? 0.0F : most / all.largest;
  for (std::size_t i = 0; i < n; ++i)
    codes[i] = none ? Code{0} : static_cast<Code>(static_cast<int>((x[i] * by + kRounding) - kRounding));
  if (!all.finite) return std::numeric_limits<float>::quiet_NaN();
  return none ? 0.0F : all.largest / most;
}
template <typename Code>
float to_codes(const float* x, std::size_t n, Code* codes) {
  return to_codes(x, n, extent_of(x, n), static_cast<float>(std::numeric_limits<Code>::max()), codes);
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
    codes_.assign(tokens * units_ * unit_nbytes(), 0);
    scales_.assign(tokens * units_, 0.0F);
    totals_.assign(tokens * units_, 0);
    for (auto& half : halves_) half.assign(tokens * units_, 0);
    for (std::size_t t = 0; t < tokens; ++t) {
      const Extent all = form == InputForm::token_int8 ? extent_of(x + t * length, length) : Extent{};
      for (std::size_t first = 0; first < length; first += kCodeUnit) {
        const std::size_t n = length - first < kCodeUnit ? length - first : kCodeUnit,
                          unit = t * units_ + first / kCodeUnit;
        const float* from = x + t * length + first;
        const Extent own = form == InputForm::token_int8 ? all : extent_of(from, n);
        form == InputForm::int16 ? encode<std::int16_t>(from, n, unit, own)
                                 : encode<std::int8_t>(from, n, unit, own);
      }
    }
  }

  const float* floats(std::size_t token) const { return x_ + token * length_; }
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
  static constexpr std::size_t kUnitsTogether = 8;

  std::size_t unit_nbytes() const {
    return kCodeUnit * (form_ == InputForm::int16 ? sizeof(std::int16_t) : sizeof(std::int8_t));
  }

  template <typename Code>
  void encode(const float* x, std::size_t n, std::size_t unit, const Extent& all) {
    Code codes[kCodeUnit] = {};
    scales_[unit] = to_codes(x, n, all, static_cast<float>(std::numeric_limits<Code>::max()), codes);
    std::int8_t bytes[sizeof(Code)][kCodeUnit];  // the lower ones, the upper ones
    for (std::size_t i = 0; i < kCodeUnit; ++i) {
      bytes[0][i] = static_cast<std::int8_t>(codes[i] & 255);
      if constexpr (sizeof(Code) == 2) bytes[1][i] = static_cast<std::int8_t>(codes[i] >> 8);
    }
    constexpr std::size_t kWindow = 4, kWord = 4, kHalf = kCodeUnit / 2;
    std::int8_t* to = codes_.data() + unit / kWindow * kWindow * sizeof codes + unit % kWindow * kWord;
    for (std::size_t b = 0; b < sizeof(Code); ++b, to += kWindow * kCodeUnit)
      for (std::size_t word = 0; word < kCodeUnit; word += kWord)
        std::memcpy(to + word * kWindow, bytes[b] + word, kWord);
    std::int32_t totals[2] = {0, 0};
    for (std::size_t i = 0; i < kHalf; ++i) {
      totals[0] += bytes[sizeof(Code) - 1][i];
      totals[1] += bytes[sizeof(Code) - 1][kHalf + i];
    }
    totals_[unit] = totals[0] + totals[1];
    for (std::size_t half = 0; half < 2; ++half) halves_[half][unit] = totals[half];
  }

  const float* x_ = nullptr;
  InputForm form_ = InputForm::f32;
  std::size_t length_ = 0, units_ = 0;
  std::vector<std::int8_t> codes_;
  std::vector<float> scales_;
  std::vector<std::int32_t> totals_, halves_[2];
};

}  // namespace flashllm
