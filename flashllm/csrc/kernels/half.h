// fp16 and bf16 to fp32 and back in integer arithmetic: the last elements of a row, and the scalar level.
// Everything is `static`: each kernel file compiles its own copy with its own flags.
#pragma once

#include <cstdint>

namespace flashllm {

static inline float float_from_bits(std::uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}
static inline std::uint32_t bits_of_float(float value) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

static inline float bfloat_to_float(std::uint16_t v) {
  return float_from_bits(static_cast<std::uint32_t>(v) << 16);
}

static inline std::uint16_t float_to_bfloat(float value) {
  const std::uint32_t bits = bits_of_float(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U)
    return static_cast<std::uint16_t>((bits >> 16) | 0x40U);  // NaN stays NaN
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

static inline float half_to_float(std::uint16_t v) {
  const std::uint32_t sign = static_cast<std::uint32_t>(v & 0x8000U) << 16;
  const std::uint32_t magnitude = v & 0x7FFFU;
  if (magnitude >= 0x7C00U) return float_from_bits(sign | 0x7F800000U | ((magnitude & 0x3FFU) << 13));
  if (magnitude < 0x400U) {  // zero and subnormals: an exact product
    const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8F;  // 2^-24
    return sign != 0 ? -value : value;
  }
  return float_from_bits(sign | ((magnitude + 0x1C000U) << 13));
}

static inline std::uint16_t float_to_half(float value) {
  const std::uint32_t bits = bits_of_float(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return sign | 0x7E00U;
  if (magnitude >= 0x477FF000U) return sign | 0x7C00U;  // rounds past the largest half
  if (magnitude < 0x38800000U) {                        // a subnormal half: let fp32 addition do the rounding
    const std::uint32_t rounded = bits_of_float(float_from_bits(magnitude) + 0.5F) - 0x3F000000U;
    return static_cast<std::uint16_t>(sign | rounded);
  }
  const std::uint32_t rounded = magnitude + 0xFFFU + ((magnitude >> 13) & 1U);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000U) >> 13));
}

}  // namespace flashllm
