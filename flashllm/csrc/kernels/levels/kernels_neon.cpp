// NEON of 64-bit ARM: eight floats a vector, in two registers. The same operations in the same order as
// AVX2's (kernels_avx2.cpp), so that both levels give the same bits.
#if defined(__aarch64__)

#include <arm_neon.h>

#include "kernels/half.h"
#include "kernels/levels/levels.h"

namespace flashllm::neon {

namespace {

constexpr std::size_t kUnroll = 4, kRows = 2, kTileRows = 6, kTileVectors = 2;

struct Vec {
  static constexpr std::size_t kWidth = 8;
  float32x4_t low, high;

  static Vec zero() { return set(0.0F); }
  static Vec set(float value) { return {vdupq_n_f32(value), vdupq_n_f32(value)}; }
  static Vec load_f32(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
  static Vec load_f16(const std::uint16_t* p) {
    return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))),
            vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4)))};
  }
  static Vec load_bf16(const std::uint16_t* p) { return from_bf16(vld1q_u16(p)); }
  static float half(std::uint16_t value) {
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(value))), 0);
  }
  static Vec load_i8(const std::int8_t* p) {
    const int16x8_t wide = vmovl_s8(vld1_s8(p));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide)))};
  }
  // N * kWidth bytes: their lower halves into to[0, N), their upper ones into to[N, 2N)
  template <std::size_t N>
  static void unpack_nibbles(const std::uint8_t* p, const Vec& scale, const Vec& offset, Vec* to) {
    for (std::size_t i = 0; i < N; ++i) {
      const uint8x8_t bytes = vld1_u8(p + i * kWidth);
      to[i] = scaled(vand_u8(bytes, vdup_n_u8(15)), scale, offset);
      to[N + i] = scaled(vshr_n_u8(bytes, 4), scale, offset);
    }
  }
  // The same of codes that a table of sixteen has, times a scale.
  template <std::size_t N>
  static void look_up_nibbles(const std::uint8_t* p, const std::int8_t* table, const Vec& scale, Vec* to) {
    const int8x16_t values = vld1q_s8(table);
    const auto widened = [&](uint8x8_t codes) {
      const int16x8_t wide = vmovl_s8(vqtbl1_s8(values, codes));
      return Vec{vmulq_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), scale.low),
                 vmulq_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide))), scale.high)};
    };
    for (std::size_t i = 0; i < N; ++i) {
      const uint8x8_t bytes = vld1_u8(p + i * kWidth);
      to[i] = widened(vand_u8(bytes, vdup_n_u8(15)));
      to[N + i] = widened(vshr_n_u8(bytes, 4));
    }
  }
  // bits_of_half_power of kWidth scales
  static Vec half_powers(const std::uint8_t* p) {
    const uint16x8_t less = vsubq_u16(vmovl_u8(vld1_u8(p)), vdupq_n_u16(1));
    return {vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(less)), 23)),
            vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_high_u16(less)), 23))};
  }
  static constexpr bool kReordersBf12 = false;
  // 32 weights of bf12; whether one of them is an escape
  static bool unpack_bf12(const std::uint8_t* low, const std::uint8_t* indexes, const std::uint8_t* table,
                          Vec* to) {
    const uint8x16_t bytes = vld1q_u8(indexes), high_bytes = vld1q_u8(table);
    const uint8x16_t index[2] = {vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8(bytes, 4)};
    for (std::size_t i = 0; i < 2; ++i) {
      const uint8x16_t high = vqtbl1q_u8(high_bytes, index[i]), lows = vld1q_u8(low + 16 * i);
      to[2 * i] = from_bf16(vreinterpretq_u16_u8(vzip1q_u8(lows, high)));
      to[2 * i + 1] = from_bf16(vreinterpretq_u16_u8(vzip2q_u8(lows, high)));
    }
    return vmaxvq_u8(vmaxq_u8(index[0], index[1])) == 15;
  }
  template <int bits>
  static Vec load_codes(const std::uint8_t* p) {
    if constexpr (bits == 8) return from_u8(vld1_u8(p));
    std::uint32_t word;
    __builtin_memcpy(&word, p, sizeof word);
    const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(word));
    return from_u8(vzip1_u8(vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8(bytes, 4)));
  }
  void store(float* p) const {
    vst1q_f32(p, low);
    vst1q_f32(p + 4, high);
  }
  void store_rounded(std::uint8_t* p) const {
    const uint16x4_t first = vqmovn_u32(vcvtnq_u32_f32(low)), second = vqmovn_u32(vcvtnq_u32_f32(high));
    vst1_u8(p, vqmovn_u16(vcombine_u16(first, second)));
  }
  // this * 2^n, n the integer in the low bits of `shifted`
  Vec times_two_to(const Vec& shifted) const {
    return {times_two_to(low, shifted.low), times_two_to(high, shifted.high)};
  }
  float sum() const {
    const float32x4_t four = vaddq_f32(low, high);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
  }
  // to[i] = v[i].sum(), kWidth of them
  static void sums(const Vec* v, float* to) {
    for (std::size_t i = 0; i < kWidth; ++i) to[i] = v[i].sum();
  }

 private:
  static Vec from_bf16(uint16x8_t values) {
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(values), 16)),
            vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(values), 16))};
  }
  static Vec from_u8(uint8x8_t codes) {
    const uint16x8_t wide = vmovl_u8(codes);
    return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(wide)))};
  }
  static Vec scaled(uint8x8_t codes, const Vec& scale, const Vec& offset) {
    const Vec numbers = from_u8(codes);
    return {vfmaq_f32(offset.low, numbers.low, scale.low), vfmaq_f32(offset.high, numbers.high, scale.high)};
  }
  static float32x4_t times_two_to(float32x4_t value, float32x4_t shifted) {
    const int32x4_t n = vshlq_n_s32(vreinterpretq_s32_f32(shifted), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(value), n));
  }
};

inline Vec fma(const Vec& a, const Vec& b, const Vec& c) {
  return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
inline Vec operator+(const Vec& a, const Vec& b) {
  return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)};
}
inline Vec operator*(const Vec& a, const Vec& b) {
  return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)};
}
inline Vec operator/(const Vec& a, const Vec& b) {
  return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)};
}
inline Vec min(const Vec& a, const Vec& b) { return {vminq_f32(a.low, b.low), vminq_f32(a.high, b.high)}; }
inline Vec max(const Vec& a, const Vec& b) {  // b where either is NaN; vmaxq_f32 would give the NaN
  return {vbslq_f32(vcgtq_f32(a.low, b.low), a.low, b.low),
          vbslq_f32(vcgtq_f32(a.high, b.high), a.high, b.high)};
}

// Of row_codecs_inputs_impl.h, whose sums are those of the other levels.
struct Eight : Vec {
  static Eight zero() { return {Vec::zero()}; }
  static Eight set(float value) { return {Vec::set(value)}; }
  static Eight load(const float* p) { return {Vec::load_f32(p)}; }

  // 8 / kRepeat halves, each for kRepeat lanes
  template <std::size_t kRepeat>
  static Eight load_halves(const std::uint16_t* p) {
    static_assert(kRepeat == 1 || kRepeat == 2);
    if constexpr (kRepeat == 1) return {Vec::load_f16(p)};
    const uint16x4_t four = vld1_u16(p);
    return {Vec{vcvt_f32_f16(vreinterpret_f16_u16(vzip1_u16(four, four))),
                vcvt_f32_f16(vreinterpret_f16_u16(vzip2_u16(four, four)))}};
  }

  static Eight load_i8(const std::int8_t* p) { return {Vec::load_i8(p)}; }
  static Eight half_powers(const std::uint8_t* p) { return {Vec::half_powers(p)}; }
  // Two floats, four lanes each.
  static Eight set_halves(const float* p) { return {Vec{vdupq_n_f32(p[0]), vdupq_n_f32(p[1])}}; }

  // The first n lanes, and zeros.
  Eight first(std::size_t n) const {
    static constexpr std::uint32_t kLanes[] = {0, 1, 2, 3, 4, 5, 6, 7};
    const uint32x4_t count = vdupq_n_u32(static_cast<std::uint32_t>(n));
    const auto kept = [&](float32x4_t values, const std::uint32_t* lanes) {
      return vreinterpretq_f32_u32(
          vandq_u32(vreinterpretq_u32_f32(values), vcltq_u32(vld1q_u32(lanes), count)));
    };
    return {Vec{kept(low, kLanes), kept(high, kLanes + 4)}};
  }

  // The products of 32 codes with 32 bytes, summed by fours.
  template <std::size_t kBits>
  static Eight dot_unit(const std::uint8_t* codes, const std::int8_t* x) {
    if constexpr (kBits < 4) {
      uint8x16x2_t pairs = pairs_of(codes);
      if constexpr (kBits == 3) {
        const uint8x16x2_t third = bits_of(codes + 8);
        for (std::size_t i = 0; i < 2; ++i)
          pairs.val[i] = vsubq_u8(vorrq_u8(pairs.val[i], vshlq_n_u8(third.val[i], 2)), vdupq_n_u8(4));
      }
      return dot_halves(vreinterpretq_s8_u8(pairs.val[0]), vreinterpretq_s8_u8(pairs.val[1]), x);
    }
    const uint8x16_t bytes = vld1q_u8(codes);
    if constexpr (kBits == 8)
      return dot_halves(vreinterpretq_s8_u8(bytes), vreinterpretq_s8_u8(vld1q_u8(codes + 16)), x);
    uint8x16_t low = vandq_u8(bytes, vdupq_n_u8(15)), high = vshrq_n_u8(bytes, 4);
    if constexpr (kBits == 5) {
      const uint8x16x2_t fifth = bits_of(codes + 16);
      low = vorrq_u8(low, vshlq_n_u8(fifth.val[0], 4));
      high = vorrq_u8(high, vshlq_n_u8(fifth.val[1], 4));
    }
    if constexpr (kBits == 6) {
      const uint8x16x2_t upper = pairs_of(codes + 16);
      low = vsubq_u8(vorrq_u8(low, vshlq_n_u8(upper.val[0], 4)), vdupq_n_u8(32));
      high = vsubq_u8(vorrq_u8(high, vshlq_n_u8(upper.val[1], 4)), vdupq_n_u8(32));
    }
    return dot_halves(vreinterpretq_s8_u8(low), vreinterpretq_s8_u8(high), x);
  }
  static Eight dot_fp4_unit(const std::uint8_t* codes, const std::int8_t* x) {
    return dot_looked_up(kFp4FromZero, codes, x);
  }
  static Eight dot_table_unit(const std::int8_t* table, const std::uint8_t* codes, const std::int8_t* x) {
    return dot_looked_up(table, codes, x);
  }
  static Eight unit_sums(const std::int8_t* x) { return dot_halves(vdupq_n_s8(1), vdupq_n_s8(1), x); }
  static Eight dot_pairs(const std::uint8_t* codes, const std::int8_t* x, std::size_t units) {
    Eight sums = zero();  // exact in floats
    for (std::size_t u = 0; u < units; ++u) sums = {sums + dot_unit<2>(codes + 8 * u, x + kCodeUnit * u)};
    return sums;
  }
  // The same with 32 words.
  template <std::size_t kBits>
  static Eight dot_unit(const std::uint8_t* codes, const std::int16_t* x) {
    static_assert(kBits == 8);
    int32x4_t sums[4];
    for (std::size_t i = 0; i < 2; ++i) {
      const int16x8_t first = vmovl_s8(vreinterpret_s8_u8(vld1_u8(codes + 8 * i))),
                      second = vmovl_s8(vreinterpret_s8_u8(vld1_u8(codes + 8 * i + 16)));
      const int16x8_t x_first = vld1q_s16(x + 8 * i), x_second = vld1q_s16(x + 8 * i + 16);
      sums[2 * i] = vmlal_s16(vmull_s16(vget_low_s16(first), vget_low_s16(x_first)), vget_low_s16(second),
                              vget_low_s16(x_second));
      sums[2 * i + 1] = vmlal_high_s16(vmull_high_s16(first, x_first), second, x_second);
    }
    return {Vec{vcvtq_f32_s32(vpaddq_s32(sums[0], sums[1])), vcvtq_f32_s32(vpaddq_s32(sums[2], sums[3]))}};
  }

 private:
  // Bits that lie apart: four codes one of four bytes, eight codes two of eight bytes.
  static uint8x16x2_t bits_of(const std::uint8_t* codes) {
    static constexpr std::int32_t kShifts[] = {0, -1, -2, -3, -4, -5, -6, -7};
    std::uint32_t bits;
    __builtin_memcpy(&bits, codes, sizeof bits);
    const auto some = [&](const std::int32_t* shifts) {
      const uint32x4_t shifted = vshlq_u32(vdupq_n_u32(bits), vld1q_s32(shifts));
      return vandq_u8(vreinterpretq_u8_u32(shifted), vdupq_n_u8(1));
    };
    return {{some(kShifts), some(kShifts + 4)}};
  }
  static uint8x16x2_t pairs_of(const std::uint8_t* codes) {
    static constexpr std::int64_t kShifts[] = {0, -2, -4, -6};
    std::uint64_t bits;
    __builtin_memcpy(&bits, codes, sizeof bits);
    const auto some = [&](const std::int64_t* shifts) {
      const uint64x2_t shifted = vshlq_u64(vdupq_n_u64(bits), vld1q_s64(shifts));
      return vandq_u8(vreinterpretq_u8_u64(shifted), vdupq_n_u8(3));
    };
    return {{some(kShifts), some(kShifts + 2)}};
  }
  static Eight dot_looked_up(const std::int8_t* table, const std::uint8_t* codes, const std::int8_t* x) {
    const int8x16_t values = vld1q_s8(table);
    const uint8x16_t bytes = vld1q_u8(codes);
    return dot_halves(vqtbl1q_s8(values, vandq_u8(bytes, vdupq_n_u8(15))),
                      vqtbl1q_s8(values, vshrq_n_u8(bytes, 4)), x);
  }
  static Eight dot_halves(int8x16_t first, int8x16_t second, const std::int8_t* x) {
    return {Vec{by_fours(first, vld1q_s8(x)), by_fours(second, vld1q_s8(x + 16))}};
  }
  // A sum of two products fits 16 bits: 2 * 128 * 127.
  static float32x4_t by_fours(int8x16_t a, int8x16_t b) {
    const int16x8_t first = vmull_s8(vget_low_s8(a), vget_low_s8(b)), second = vmull_high_s8(a, b);
    return vcvtq_f32_s32(vpaddlq_s16(vpaddq_s16(first, second)));
  }
};
inline Eight fma(const Eight& a, const Eight& b, const Eight& c) {
  return {fma(static_cast<const Vec&>(a), static_cast<const Vec&>(b), static_cast<const Vec&>(c))};
}
inline Eight operator+(const Eight& a, const Eight& b) {
  return {static_cast<const Vec&>(a) + static_cast<const Vec&>(b)};
}
inline Eight operator*(const Eight& a, const Eight& b) {
  return {static_cast<const Vec&>(a) * static_cast<const Vec&>(b)};
}

}  // namespace

#include "kernels/levels/level_impl.h"

}  // namespace flashllm::neon

#endif
