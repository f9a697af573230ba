// The portable level: no intrinsics. Eight lanes, so that a compiler may vectorise what the target has.
#include "kernels/half.h"
#include "kernels/levels/levels.h"

namespace flashllm::scalar {

namespace {

constexpr std::size_t kUnroll = 2, kRows = 1, kTileRows = 4, kTileVectors = 1;

struct Vec {
  static constexpr std::size_t kWidth = 8;
  float lane[kWidth];

  // Of the number of each lane.
  template <typename F>
  static Vec each(const F& f) {
    Vec v;
    for (std::size_t i = 0; i < kWidth; ++i) v.lane[i] = f(i);
    return v;
  }
  static Vec zero() { return set(0.0F); }
  static Vec set(float value) {
    return each([=](std::size_t) { return value; });
  }
  static Vec load_f32(const float* p) {
    return each([=](std::size_t i) { return p[i]; });
  }
  static Vec load_f16(const std::uint16_t* p) {
    return each([=](std::size_t i) { return half_to_float(p[i]); });
  }
  static Vec load_bf16(const std::uint16_t* p) {
    return each([=](std::size_t i) { return bfloat_to_float(p[i]); });
  }
  static float half(std::uint16_t value) { return half_to_float(value); }
  static Vec load_i8(const std::int8_t* p) {
    return each([=](std::size_t i) { return static_cast<float>(p[i]); });
  }
  // N * kWidth bytes: their lower halves into to[0, N), their upper ones into to[N, 2N)
  template <std::size_t N>
  static void unpack_nibbles(const std::uint8_t* p, const Vec& scale, const Vec& offset, Vec* to) {
    for (std::size_t i = 0; i < N * kWidth; ++i) {
      const std::size_t v = i / kWidth, lane = i % kWidth;
      to[v].lane[lane] = static_cast<float>(p[i] & 15) * scale.lane[lane] + offset.lane[lane];
      to[N + v].lane[lane] = static_cast<float>(p[i] >> 4) * scale.lane[lane] + offset.lane[lane];
    }
  }
  // The same of codes that a table of sixteen has, times a scale.
  template <std::size_t N>
  static void look_up_nibbles(const std::uint8_t* p, const std::int8_t* table, const Vec& scale, Vec* to) {
    for (std::size_t i = 0; i < N * kWidth; ++i) {
      const std::size_t v = i / kWidth, lane = i % kWidth;
      to[v].lane[lane] = static_cast<float>(table[p[i] & 15]) * scale.lane[lane];
      to[N + v].lane[lane] = static_cast<float>(table[p[i] >> 4]) * scale.lane[lane];
    }
  }
  // bits_of_half_power of kWidth scales
  static Vec half_powers(const std::uint8_t* p) {
    return each([=](std::size_t i) { return float_from_bits(bits_of_half_power(p[i])); });
  }
  static constexpr bool kReordersBf12 = false;
  // 32 weights of bf12; whether one of them is an escape
  static bool unpack_bf12(const std::uint8_t* low, const std::uint8_t* indexes, const std::uint8_t* table,
                          Vec* to) {
    bool escapes = false;
    for (std::size_t i = 0; i < 32; ++i) {
      const int index = i < 16 ? indexes[i] & 15 : indexes[i - 16] >> 4;
      const auto bits = static_cast<std::uint16_t>(table[index] << 8 | low[i]);
      to[i / kWidth].lane[i % kWidth] = bfloat_to_float(bits);
      escapes = escapes || index == 15;
    }
    return escapes;
  }
  template <int bits>
  static Vec load_codes(const std::uint8_t* p) {
    if constexpr (bits == 8) return each([=](std::size_t i) { return static_cast<float>(p[i]); });
    return each([=](std::size_t i) { return static_cast<float>(p[i / 2] >> i % 2 * 4 & 15); });
  }
  void store(float* p) const {
    for (std::size_t i = 0; i < kWidth; ++i) p[i] = lane[i];
  }
  void store_rounded(std::uint8_t* p) const {
    constexpr float kShift = 12582912.0F;  // 1.5 * 2^23: its sums are whole numbers, rounded half to even
    for (std::size_t i = 0; i < kWidth; ++i) p[i] = static_cast<std::uint8_t>(lane[i] + kShift - kShift);
  }
  // this * 2^n, n the integer in the low bits of `shifted`
  Vec times_two_to(const Vec& shifted) const {
    return each([&](std::size_t i) {
      return float_from_bits(bits_of_float(lane[i]) + (bits_of_float(shifted.lane[i]) << 23));
    });
  }
  float sum() const {
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
  }
  // to[i] = v[i].sum(), kWidth of them
  static void sums(const Vec* v, float* to) {
    for (std::size_t i = 0; i < kWidth; ++i) to[i] = v[i].sum();
  }
};

// Multiply, then add: without the instruction, a fused one would be a library call for each element.
Vec fma(const Vec& a, const Vec& b, const Vec& c) {
  return Vec::each([&](std::size_t i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
}
Vec operator+(const Vec& a, const Vec& b) {
  return Vec::each([&](std::size_t i) { return a.lane[i] + b.lane[i]; });
}

Vec operator*(const Vec& a, const Vec& b) {
  return Vec::each([&](std::size_t i) { return a.lane[i] * b.lane[i]; });
}
Vec operator/(const Vec& a, const Vec& b) {
  return Vec::each([&](std::size_t i) { return a.lane[i] / b.lane[i]; });
}
Vec min(const Vec& a, const Vec& b) {
  return Vec::each([&](std::size_t i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
Vec max(const Vec& a, const Vec& b) {  // b where either is NaN, as the processors' instruction
  return Vec::each([&](std::size_t i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}

// Of row_codecs_inputs_impl.h, whose sums are those of the other levels.
// Code i of a unit, as the products of 8-bit inputs take it.
template <std::size_t kBits>
int code_of_unit(const std::uint8_t* codes, std::size_t i) {
  if constexpr (kBits == 8) return static_cast<std::int8_t>(codes[i]);
  if constexpr (kBits < 4) {
    const int pair = codes[i % 8] >> 2 * (i / 8) & 3;
    return kBits == 2 ? pair : (pair | (codes[8 + i % 4] >> i / 4 & 1) << 2) - 4;
  }
  const int nibble = i < 16 ? codes[i % 16] & 15 : codes[i % 16] >> 4;
  if constexpr (kBits == 4) return nibble;
  if constexpr (kBits == 5) return nibble | (codes[16 + i % 4] >> i / 4 & 1) << 4;
  return (nibble | (codes[16 + i % 8] >> 2 * (i / 8) & 3) << 4) - 32;
}

struct Eight : Vec {
  static Eight zero() { return {Vec::zero()}; }
  static Eight set(float value) { return {Vec::set(value)}; }
  static Eight load(const float* p) { return {Vec::load_f32(p)}; }

  // 8 / kRepeat halves, each for kRepeat lanes
  template <std::size_t kRepeat>
  static Eight load_halves(const std::uint16_t* p) {
    return {each([=](std::size_t i) { return half_to_float(p[i / kRepeat]); })};
  }

  static Eight load_i8(const std::int8_t* p) { return {Vec::load_i8(p)}; }
  static Eight half_powers(const std::uint8_t* p) { return {Vec::half_powers(p)}; }
  // Two floats, four lanes each.
  static Eight set_halves(const float* p) {
    return {each([=](std::size_t i) { return p[i / 4]; })};
  }

  // The first n lanes, and zeros.
  Eight first(std::size_t n) const {
    return {each([&](std::size_t i) { return i < n ? lane[i] : 0.0F; })};
  }

  // The products of 32 codes with 32 bytes, summed by fours.
  template <std::size_t kBits>
  static Eight dot_unit(const std::uint8_t* codes, const std::int8_t* x) {
    return sums_by_fours([&](std::size_t i) { return code_of_unit<kBits>(codes, i) * x[i]; });
  }
  static Eight dot_fp4_unit(const std::uint8_t* codes, const std::int8_t* x) {
    return sums_by_fours([&](std::size_t i) { return kFp4FromZero[code_of_unit<4>(codes, i)] * x[i]; });
  }
  static Eight dot_table_unit(const std::int8_t* table, const std::uint8_t* codes, const std::int8_t* x) {
    return sums_by_fours([&](std::size_t i) { return table[code_of_unit<4>(codes, i)] * x[i]; });
  }
  static Eight unit_sums(const std::int8_t* x) {
    return sums_by_fours([&](std::size_t i) { return x[i]; });
  }
  static Eight dot_pairs(const std::uint8_t* codes, const std::int8_t* x, std::size_t units) {
    Eight sums = zero();  // exact in floats
    for (std::size_t u = 0; u < units; ++u) sums = {sums + dot_unit<2>(codes + 8 * u, x + kCodeUnit * u)};
    return sums;
  }
  // The same with 32 words.
  template <std::size_t kBits>
  static Eight dot_unit(const std::uint8_t* codes, const std::int16_t* x) {
    static_assert(kBits == 8);
    return {each([=](std::size_t lane_of) {
      int total = 0;
      for (const std::size_t i : {2 * lane_of, 2 * lane_of + 1, 2 * lane_of + 16, 2 * lane_of + 17})
        total += static_cast<std::int8_t>(codes[i]) * x[i];
      return static_cast<float>(total);
    })};
  }

 private:
  template <typename Term>
  static Eight sums_by_fours(const Term& term) {
    return {each([&](std::size_t i) {
      return static_cast<float>(term(4 * i) + term(4 * i + 1) + term(4 * i + 2) + term(4 * i + 3));
    })};
  }
};
Eight fma(const Eight& a, const Eight& b, const Eight& c) {
  return {Vec::each([&](std::size_t i) { return __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]); })};
}
Eight operator+(const Eight& a, const Eight& b) {
  return {static_cast<const Vec&>(a) + static_cast<const Vec&>(b)};
}
Eight operator*(const Eight& a, const Eight& b) {
  return {static_cast<const Vec&>(a) * static_cast<const Vec&>(b)};
}

}  // namespace

#include "kernels/levels/level_impl.h"

}  // namespace flashllm::scalar
