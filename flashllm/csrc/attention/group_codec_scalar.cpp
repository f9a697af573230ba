// The portable level: no intrinsics.
#include <type_traits>

#include "attention/group_codec.h"
#include "attention/group_scales.h"

namespace flashllm::scalar {

namespace {

struct Vec {
  float lane[kUnit];

  template <typename F>
  static Vec each(const F& f) {
    Vec v;
    for (std::size_t i = 0; i < kUnit; ++i) v.lane[i] = f(i);
    return v;
  }
  static Vec set(float value) {
    return each([=](std::size_t) { return value; });
  }
  static Vec load_f32(const float* p) {
    return each([=](std::size_t i) { return p[i]; });
  }
  static Vec load_f16(const std::uint16_t* p) {
    return each([=](std::size_t i) { return half_to_float(p[i]); });
  }
  template <int bits>
  static Vec load_codes(const std::uint8_t* p) {
    if constexpr (bits == 8) return each([=](std::size_t i) { return static_cast<float>(p[i]); });
    return each([=](std::size_t i) { return static_cast<float>(p[i / 2] >> i % 2 * 4 & 15); });
  }
  void store(float* p) const {
    for (std::size_t i = 0; i < kUnit; ++i) p[i] = lane[i];
  }
  void store_rounded(std::uint8_t* p) const {
    constexpr float kShift = 12582912.0F;  // 1.5 * 2^23: its sums are whole numbers, rounded half to even
    for (std::size_t i = 0; i < kUnit; ++i) p[i] = static_cast<std::uint8_t>(lane[i] + kShift - kShift);
  }
};

Vec operator+(const Vec& a, const Vec& b) {
  return Vec::each([&](std::size_t i) { return a.lane[i] + b.lane[i]; });
}
Vec operator-(const Vec& a, const Vec& b) {
  return Vec::each([&](std::size_t i) { return a.lane[i] - b.lane[i]; });
}
Vec operator*(const Vec& a, const Vec& b) {
  return Vec::each([&](std::size_t i) { return a.lane[i] * b.lane[i]; });
}
Vec operator/(const Vec& a, const Vec& b) {
  return Vec::each([&](std::size_t i) { return b.lane[i] == 0.0F ? 0.0F : a.lane[i] / b.lane[i]; });
}
Vec min(const Vec& a, const Vec& b) {
  return Vec::each([&](std::size_t i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
Vec max(const Vec& a, const Vec& b) {
  return Vec::each([&](std::size_t i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
Vec where_positive(const Vec& a, const Vec& b) {
  return Vec::each([&](std::size_t i) { return b.lane[i] > 0.0F ? a.lane[i] : 0.0F; });
}

#include "attention/group_codec_impl.h"

}  // namespace

extern const GroupKernels kGroups;
const GroupKernels kGroups = kLoops;

}  // namespace flashllm::scalar
