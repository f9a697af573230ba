// NEON of 64-bit ARM: eight floats a vector, in two registers. The same operations in the same order as
// AVX2's (kernels_avx2.cpp), so that both levels give the same bits. Or neon_dot, of kernels_neon_dot.cpp.
#if defined(__aarch64__)

#include <arm_neon.h>

#include <utility>

#include "kernels/half.h"
#include "kernels/levels/levels.h"

#ifndef FLASHLLM_NEON
#define FLASHLLM_NEON neon
#endif

namespace flashllm::FLASHLLM_NEON {

template <std::size_t kBits>  // of scaled_codecs_impl.h
void spread_codes(const std::uint8_t* unit, std::int8_t* to);

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

// Of row_codecs_inputs_impl.h, a row in each register.
constexpr std::size_t kTileOfDot = 2;
constexpr bool kPairsOfTiles = false;
struct Ints {
  uint32x4_t row[kTileOfDot];
  static constexpr int kSignedZero = 0, kWideZero = 0;

  static Ints zero() { return set(0); }
  static Ints load(const std::uint32_t* p) { return {{vld1q_u32(p), vld1q_u32(p + 4)}}; }
  static int8x8_t everywhere(const void* codes) { return vcreate_s8(load_as<std::uint32_t>(codes)); }
  static Ints set(int value) {
    const uint32x4_t all = vreinterpretq_u32_s32(vdupq_n_s32(value));
    return {{all, all}};
  }
  Vec floats() const {
    return {vcvtq_f32_s32(vreinterpretq_s32_u32(row[0])), vcvtq_f32_s32(vreinterpretq_s32_u32(row[1]))};
  }
  // of(a row of each)
  template <typename Of, typename... Others>
  static Ints each(const Of& of, const Others&... others) {
    return {{of(others.row[0]...), of(others.row[1]...)}};
  }

  template <typename At>
  static Ints pieces(const At& at) {
    return {{vreinterpretq_u32_u8(vld1q_u8(at(0))), vreinterpretq_u32_u8(vld1q_u8(at(1)))}};
  }
  static void transpose(Ints* words) {
    for (std::size_t r = 0; r < kTileOfDot; ++r) {
      const uint32x4x2_t ab = vtrnq_u32(words[0].row[r], words[1].row[r]),
                         cd = vtrnq_u32(words[2].row[r], words[3].row[r]);
      for (std::size_t i = 0; i < 2; ++i) {
        words[i].row[r] = vcombine_u32(vget_low_u32(ab.val[i]), vget_low_u32(cd.val[i]));
        words[i + 2].row[r] = vcombine_u32(vget_high_u32(ab.val[i]), vget_high_u32(cd.val[i]));
      }
    }
  }
  template <typename At>
  static Ints fours(const At& at) {
    const auto of_row = [&](std::size_t r) {
      std::uint32_t words[4];
      for (std::size_t i = 0; i < 4; ++i) words[i] = load_as<std::uint32_t>(at(r, i));
      return vld1q_u32(words);
    };
    return {{of_row(0), of_row(1)}};
  }
  template <typename At>
  static void eights(const At& at, Ints* to) {
    for (std::size_t r = 0; r < kTileOfDot; ++r) {
      const auto pair = [&](std::size_t i) {
        return vreinterpretq_u32_u8(vcombine_u8(vld1_u8(at(r, i)), vld1_u8(at(r, i + 1))));
      };
      to[0].row[r] = vuzp1q_u32(pair(0), pair(2));
      to[1].row[r] = vuzp2q_u32(pair(0), pair(2));
    }
  }
  template <int kShift, int kMask>
  Ints part() const {
    return each([](uint32x4_t words) { return masked<kMask>(vshlq_u32(words, vdupq_n_s32(-kShift))); },
                *this);
  }
  template <int kShift, int kMask, int kPlace>
  Ints with(const Ints& other) const {
    return each(
        [](uint32x4_t a, uint32x4_t b) {
          return vorrq_u32(a, masked<kMask << kPlace>(vshlq_u32(b, vdupq_n_s32(kPlace - kShift))));
        },
        *this, other);
  }
  Ints looked_up(const std::int8_t* table) const {
    return each(
        [values = vld1q_s8(table)](uint32x4_t codes) {
          return vreinterpretq_u32_s8(vqtbl1q_s8(values, vreinterpretq_u8_u32(codes)));
        },
        *this);
  }
  Ints to_words() const { return *this; }

#if defined(FLASHLLM_NEON_DOT)
  // Adds the products of a word's four codes.
  static uint32x4_t add_dots(uint32x4_t to, uint32x4_t a, uint32x4_t b) {
    return vreinterpretq_u32_s32(
        vdotq_s32(vreinterpretq_s32_u32(to), vreinterpretq_s8_u32(a), vreinterpretq_s8_u32(b)));
  }
  template <int kMost>
  static Ints sum_four(const Ints* codes, const std::int8_t* x) {
    Ints sum = set(0);
    for (std::size_t j = 0; j < 4; ++j) sum = each(add_dots, sum, codes[j], each_sixteen(x + 16 * j));
    return sum;
  }
  // Lower bytes have no sign: 128 less they have one, and so many times the codes are missing.
  static Ints sum_wide(const Ints* codes, const std::int8_t* x) {
    Ints lower = set(0), upper = lower, missing = lower;
    for (std::size_t j = 0; j < 8; ++j, x += 16) {
      const Ints less =
          each([](uint32x4_t of) { return veorq_u32(of, vdupq_n_u32(0x80808080)); }, each_sixteen(x));
      lower = each(add_dots, lower, codes[j], less);
      upper = each(add_dots, upper, codes[j], each_sixteen(x + 128));
      missing = each(add_dots, missing, codes[j], set(0x01010101));
    }
    return lower + (upper + upper + missing) * set(128);
  }
#else
  // A sum of two products fits 16 bits: 2 * 128 * 127.
  template <int kMost>
  static Ints sum_four(const Ints* codes, const std::int8_t* x) {
    Ints sum = set(0);
    for (std::size_t j = 0; j < 4; ++j) {
      const int8x16_t inputs = vld1q_s8(x + 16 * j);
      sum = each(
          [inputs](uint32x4_t to, uint32x4_t words) {
            const int8x16_t code = vreinterpretq_s8_u32(words);
            const int16x8_t first = vmull_s8(vget_low_s8(code), vget_low_s8(inputs));
            const int16x8_t pairs = vpaddq_s16(first, vmull_high_s8(code, inputs));
            return vreinterpretq_u32_s32(vpadalq_s16(vreinterpretq_s32_u32(to), pairs));
          },
          sum, codes[j]);
    }
    return sum;
  }
  static Ints sum_wide(const Ints* codes, const std::int8_t* x) {
    Ints sum = set(0);
    for (std::size_t j = 0; j < 8; ++j, x += 16) {
      const int8x16_t lower = vld1q_s8(x), upper = vld1q_s8(x + 128);
      const int16x8_t first = vreinterpretq_s16_s8(vzip1q_s8(lower, upper)),
                      second = vreinterpretq_s16_s8(vzip2q_s8(lower, upper));
      sum = each(
          [=](uint32x4_t to, uint32x4_t words) {
            const int8x16_t code = vreinterpretq_s8_u32(words);
            const int16x8_t a = vmovl_s8(vget_low_s8(code)), b = vmovl_high_s8(code);
            const int32x4_t twos =
                vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(first)), vmull_high_s16(a, first));
            const int32x4_t others =
                vpaddq_s32(vmull_s16(vget_low_s16(b), vget_low_s16(second)), vmull_high_s16(b, second));
            return vaddq_u32(to, vreinterpretq_u32_s32(vpaddq_s32(twos, others)));
          },
          sum, codes[j]);
    }
    return sum;
  }
#endif
  static Ints each_row(const std::int32_t* p) {
    const uint32x4_t all = vreinterpretq_u32_s32(vld1q_s32(p));
    return {{all, all}};
  }
  friend Ints operator+(const Ints& a, const Ints& b) {
    return {{vaddq_u32(a.row[0], b.row[0]), vaddq_u32(a.row[1], b.row[1])}};
  }
  friend Ints operator-(const Ints& a, const Ints& b) {
    return {{vsubq_u32(a.row[0], b.row[0]), vsubq_u32(a.row[1], b.row[1])}};
  }
  friend Ints operator*(const Ints& a, const Ints& b) {
    return {{vmulq_u32(a.row[0], b.row[0]), vmulq_u32(a.row[1], b.row[1])}};
  }

 private:
  static Ints each_sixteen(const std::int8_t* p) {
    const uint32x4_t all = vreinterpretq_u32_s8(vld1q_s8(p));
    return {{all, all}};
  }
  template <int kMask>
  static uint32x4_t masked(uint32x4_t words) {
    return vandq_u32(words, vreinterpretq_u32_u8(vdupq_n_u8(kMask)));
  }
};

// The lower halves of eight words, and the upper ones.
struct Halves {
  int16x8_t first, second;
  static Halves load(const std::uint32_t* p) {
    return of(vld2q_s16(reinterpret_cast<const std::int16_t*>(p)));
  }
  static int16x4_t everywhere(const void* codes) { return vcreate_s16(load_as<std::uint32_t>(codes)); }
  static Halves of(const int16x8x2_t& both) { return {both.val[0], both.val[1]}; }
};

struct AllInWords {  // nothing is left to do
  explicit AllInWords(const Ints&) {}
  Ints operator()(const Ints&, const Ints& sum) const { return sum; }
};
struct Words {
  using End = AllInWords;
  using Code = std::int16_t;
  using Column = Halves;
  static constexpr std::size_t kStep = 2;
  static Ints first(int16x4_t a, const Halves& b, const Ints& to) { return add(a, b, to); }
  static Ints add(int16x4_t a, const Halves& b, const Ints& sum) {
    int32x4_t low = vreinterpretq_s32_u32(sum.row[0]), high = vreinterpretq_s32_u32(sum.row[1]);
    low = vmlal_lane_s16(low, vget_low_s16(b.first), a, 0);
    high = vmlal_high_lane_s16(high, b.first, a, 0);
    low = vmlal_lane_s16(low, vget_low_s16(b.second), a, 1);
    high = vmlal_high_lane_s16(high, b.second, a, 1);
    return {{vreinterpretq_u32_s32(low), vreinterpretq_u32_s32(high)}};
  }
};
// No byte of weights is above 127, so that all have a sign.
#if defined(FLASHLLM_NEON_DOT)
struct Bytes {
  using End = AllInWords;
  using Code = std::uint8_t;
  using Column = Ints;
  static constexpr std::size_t kStep = 4, kTogether = 8, kNibblesTogether = 8, kProductsTogether = 8;
  static Ints first(int8x8_t a, const Ints& b, const Ints& to) { return add(a, b, to); }
  static Ints add(int8x8_t a, const Ints& b, const Ints& sum) {
    return Ints::each(
        [a](uint32x4_t to, uint32x4_t words) {
          return vreinterpretq_u32_s32(
              vdotq_lane_s32(vreinterpretq_s32_u32(to), vreinterpretq_s8_u32(words), a, 0));
        },
        sum, b);
  }
};
#else
// Sums of 16 bits: of a word's first and third products, and of the others.
struct Bytes {
  using Code = std::uint8_t;
  struct Column : Halves {
    static Column load(const std::uint32_t* p) { return {Halves::load(p)}; }
    static Halves everywhere(const void* codes) {
      return of(vld2q_dup_s16(static_cast<const std::int16_t*>(codes)));
    }
  };
  static constexpr std::size_t kStep = 4, kTogether = 4, kNibblesTogether = 8, kProductsTogether = 2;
  static_assert(2 * kTogether * kLargestByte * 127 < 1 << 15 &&
                    2 * kNibblesTogether * kLargestNibble * 127 < 1 << 15 &&
                    2 * kProductsTogether * kLargestProduct * 127 < 1 << 15,
                "sums must fit 16 bits");
  static Ints first(const Halves& a, const Halves& b, const Ints&) { return add(a, b, Ints::zero()); }
  static Ints add(const Halves& a, const Halves& b, const Ints& sum) {
    int16x8_t low = vreinterpretq_s16_u32(sum.row[0]), high = vreinterpretq_s16_u32(sum.row[1]);
    const auto more = [&](int16x8_t code, int16x8_t column) {
      const int8x16_t by = vreinterpretq_s8_s16(code), of = vreinterpretq_s8_s16(column);
      low = vmlal_s8(low, vget_low_s8(by), vget_low_s8(of));
      high = vmlal_high_s8(high, by, of);
    };
    more(a.first, b.first);
    more(a.second, b.second);
    return {{vreinterpretq_u32_s16(low), vreinterpretq_u32_s16(high)}};
  }
  struct End {
    explicit End(const Ints&) {}
    Ints operator()(const Ints& all, const Ints& sum) const {
      return Ints::each(
          [](uint32x4_t to, uint32x4_t pairs) {
            return vreinterpretq_u32_s32(
                vpadalq_s16(vreinterpretq_s32_u32(to), vreinterpretq_s16_u32(pairs)));
          },
          all, sum);
    }
  };
};
#endif

struct Eight : Vec {
  static Eight set(float value) { return {Vec::set(value)}; }

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

  // A unit's codes, as eight_x86.h has them.
  struct Codes {
    int8x16_t of[2];
  };
  template <std::size_t kBits>
  static Codes codes_of(const std::uint8_t* p) {
    std::int8_t codes[kCodeUnit];
    spread_codes<kBits>(p, codes);
    return {{vld1q_s8(codes), vld1q_s8(codes + 16)}};
  }
  template <std::size_t kBits>
  static Codes looked_up(const std::int8_t* table, const std::uint8_t* p) {
    const int8x16_t values = vld1q_s8(table);
    const Codes at = codes_of<kBits>(p);
    return {{vqtbl1q_s8(values, vreinterpretq_u8_s8(at.of[0])),
             vqtbl1q_s8(values, vreinterpretq_u8_s8(at.of[1]))}};
  }
  static Codes times(const Codes& codes, int first, int second) {
    return {{vmulq_s8(codes.of[0], vdupq_n_s8(static_cast<std::int8_t>(first))),
             vmulq_s8(codes.of[1], vdupq_n_s8(static_cast<std::int8_t>(second)))}};
  }
  static Codes less(const Codes& codes, int zero) {
    const int8x16_t all = vdupq_n_s8(static_cast<std::int8_t>(zero));
    return {{vsubq_s8(codes.of[0], all), vsubq_s8(codes.of[1], all)}};
  }
  static void put(const Codes& codes, std::uint8_t* to) {
    for (std::size_t i = 0; i < 2; ++i) vst1q_u8(to + 16 * i, vreinterpretq_u8_s8(codes.of[i]));
  }
  static void put_wide(const Codes& codes, std::int16_t* to) {
    for (std::size_t i = 0; i < 4; ++i) vst1q_s16(to + 8 * i, eight_of(codes, i));
  }
  // Eight words at a time, whose halves are low's and high's.
  static Halves pair_of(const Codes& low, const Codes& high, std::size_t i) {
    return {eight_of(low, i), eight_of(high, i)};
  }
  static void put_pairs(const Codes& low, const Codes& high, std::uint32_t* to) {
    for (std::size_t i = 0; i < 4; ++i) {
      const int16x8x2_t both = {{eight_of(low, i), eight_of(high, i)}};
      vst2q_s16(reinterpret_cast<std::int16_t*>(to + 8 * i), both);
    }
  }

 private:
  static int16x8_t eight_of(const Codes& codes, std::size_t i) {
    const int8x16_t half = codes.of[i / 2];
    return i % 2 == 0 ? vmovl_s8(vget_low_s8(half)) : vmovl_high_s8(half);
  }
};
inline Eight operator*(const Eight& a, const Eight& b) {
  return {static_cast<const Vec&>(a) * static_cast<const Vec&>(b)};
}

struct Lanes : Vec {
  static Lanes set(float value) { return {Vec::set(value)}; }
  static Lanes each_row(const float* p) { return {Vec{vld1q_f32(p), vld1q_f32(p)}}; }
  static void of_rows(const Eight* row, Lanes* to) {
    to[0] = {Vec{row[0].low, row[1].low}};
    to[1] = {Vec{row[0].high, row[1].high}};
  }
  static void evens_and_odds(Lanes* of) {
    const Lanes first = of[0], second = of[1];
    of[0] = {Vec{vuzp1q_f32(first.low, second.low), vuzp1q_f32(first.high, second.high)}};
    of[1] = {Vec{vuzp2q_f32(first.low, second.low), vuzp2q_f32(first.high, second.high)}};
  }
  void put_sums(std::size_t rows, float* to) const {
    const auto sum = [](float32x4_t four) {
      const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
      return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
    };
    to[0] = sum(low);
    if (rows > 1) to[1] = sum(high);
  }
};
inline Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
  return {fma(static_cast<const Vec&>(a), static_cast<const Vec&>(b), static_cast<const Vec&>(c))};
}
inline Lanes operator*(const Vec& a, const Lanes& b) { return {a * static_cast<const Vec&>(b)}; }

}  // namespace

#include "kernels/levels/level_impl.h"

}  // namespace flashllm::FLASHLLM_NEON

#endif
