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

// Of row_codecs_inputs_impl.h.
constexpr std::size_t kTileOfDot = 2;
constexpr bool kPairsOfTiles = false;
struct Ints {
  std::uint32_t lane[4 * kTileOfDot];  // of a row four
  static constexpr int kSignedZero = 0, kWideZero = 0;

  template <typename F>
  static Ints each(const F& f) {
    Ints v;
    for (std::size_t i = 0; i < 4 * kTileOfDot; ++i) v.lane[i] = static_cast<std::uint32_t>(f(i));
    return v;
  }
  static Ints set(int value) {
    return each([=](std::size_t) { return value; });
  }
  Vec floats() const {
    return Vec::each([&](std::size_t i) { return static_cast<float>(static_cast<std::int32_t>(lane[i])); });
  }

  template <typename At>
  static Ints pieces(const At& at) {
    return each([&](std::size_t i) { return load_as<std::uint32_t>(at(i / 4) + 4 * (i % 4)); });
  }
  static void transpose(Ints* words) {
    const Ints all[4] = {words[0], words[1], words[2], words[3]};
    for (std::size_t j = 0; j < 4; ++j)
      words[j] = each([&](std::size_t i) { return all[i % 4].lane[i / 4 * 4 + j]; });
  }
  template <typename At>
  static Ints fours(const At& at) {
    return each([&](std::size_t i) { return load_as<std::uint32_t>(at(i / 4, i % 4)); });
  }
  template <typename At>
  static void eights(const At& at, Ints* to) {
    for (std::size_t j = 0; j < 2; ++j)
      to[j] = each([&](std::size_t i) { return load_as<std::uint32_t>(at(i / 4, i % 4) + 4 * j); });
  }
  template <int kShift, int kMask>
  Ints part() const {
    return each([&](std::size_t i) { return lane[i] >> kShift & 0x01010101U * kMask; });
  }
  template <int kShift, int kMask, int kPlace>
  Ints with(const Ints& other) const {
    return each(
        [&](std::size_t i) { return lane[i] | (other.lane[i] >> kShift & 0x01010101U * kMask) << kPlace; });
  }
  Ints looked_up(const std::int8_t* table) const {
    return each([&](std::size_t i) {
      std::uint32_t found = 0;
      for (int b = 0; b < 32; b += 8)
        found |= std::uint32_t{static_cast<std::uint8_t>(table[lane[i] >> b & 15])} << b;
      return found;
    });
  }
  Ints to_words() const { return *this; }

  template <int kMost>
  static Ints sum_four(const Ints* codes, const std::int8_t* x) {
    return each([&](std::size_t i) {
      int total = 0;
      for (std::size_t j = 0; j < 16; ++j)
        total += code(codes[j / 4].lane[i], j % 4) * x[j / 4 * 16 + i % 4 * 4 + j % 4];
      return total;
    });
  }
  static Ints sum_wide(const Ints* codes, const std::int8_t* x) {
    return each([&](std::size_t i) {
      int total = 0;
      for (std::size_t j = 0; j < kCodeUnit; ++j) {
        const std::int8_t* at = x + j / 4 * 16 + i % 4 * 4 + j % 4;
        total += code(codes[j / 4].lane[i], j % 4) * (at[128] * 256 + static_cast<std::uint8_t>(at[0]));
      }
      return total;
    });
  }
  static Ints each_row(const std::int32_t* p) {
    return each([=](std::size_t i) { return p[i % 4]; });
  }

 private:
  static int code(std::uint32_t word, std::size_t i) { return static_cast<std::int8_t>(word >> 8 * i); }
};
Ints operator+(const Ints& a, const Ints& b) {
  return Ints::each([&](std::size_t i) { return a.lane[i] + b.lane[i]; });
}
Ints operator-(const Ints& a, const Ints& b) {
  return Ints::each([&](std::size_t i) { return a.lane[i] - b.lane[i]; });
}
Ints operator*(const Ints& a, const Ints& b) {
  return Ints::each([&](std::size_t i) { return a.lane[i] * b.lane[i]; });
}

struct Eight : Vec {
  static Eight set(float value) { return {Vec::set(value)}; }

  // 8 / kRepeat halves, each for kRepeat lanes
  template <std::size_t kRepeat>
  static Eight load_halves(const std::uint16_t* p) {
    return {each([=](std::size_t i) { return half_to_float(p[i / kRepeat]); })};
  }

  static Eight load_i8(const std::int8_t* p) { return {Vec::load_i8(p)}; }
  static Eight half_powers(const std::uint8_t* p) { return {Vec::half_powers(p)}; }

  // The first n lanes, and zeros.
  Eight first(std::size_t n) const {
    return {each([&](std::size_t i) { return i < n ? lane[i] : 0.0F; })};
  }
};
Eight operator*(const Eight& a, const Eight& b) {
  return {static_cast<const Vec&>(a) * static_cast<const Vec&>(b)};
}

struct Lanes : Vec {
  static Lanes set(float value) { return {Vec::set(value)}; }
  static Lanes each_row(const float* p) {
    return {each([=](std::size_t i) { return p[i % 4]; })};
  }
  static void of_rows(const Eight* row, Lanes* to) {
    for (std::size_t half = 0; half < 2; ++half)
      to[half] = {each([=](std::size_t i) { return row[i / 4].lane[4 * half + i % 4]; })};
  }
  static void evens_and_odds(Lanes* of) {
    const Lanes all[2] = {of[0], of[1]};
    for (std::size_t odd = 0; odd < 2; ++odd)
      of[odd] = {each([&](std::size_t i) { return all[i % 4 / 2].lane[i / 4 * 4 + i % 2 * 2 + odd]; })};
  }
  void put_sums(std::size_t rows, float* to) const {
    for (std::size_t r = 0; r < rows; ++r) {
      const float* of_row = lane + 4 * r;
      to[r] = (of_row[0] + of_row[2]) + (of_row[1] + of_row[3]);
    }
  }
};
Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
  return {Vec::each([&](std::size_t i) { return __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]); })};
}
Lanes operator*(const Vec& a, const Lanes& b) { return {a * static_cast<const Vec&>(b)}; }

}  // namespace

#include "kernels/levels/level_impl.h"

}  // namespace flashllm::scalar
