// AVX2 + FMA + F16C: eight floats a vector; or avx2_vnni, of kernels_avx2_vnni.cpp.
#if defined(__x86_64__)

#include <immintrin.h>

#include <utility>

#include "kernels/half.h"
#include "kernels/levels/levels.h"

#if defined(__AVXVNNI__)
#define FLASHLLM_AVX2 avx2_vnni
#else
#define FLASHLLM_AVX2 avx2
#endif

namespace flashllm::FLASHLLM_AVX2 {

namespace {

constexpr std::size_t kUnroll = 4, kRows = 2, kTileRows = 6, kTileVectors = 2;

struct Vec {
  static constexpr std::size_t kWidth = 8;
  __m256 v;

  static Vec zero() { return {_mm256_setzero_ps()}; }
  static Vec set(float value) { return {_mm256_set1_ps(value)}; }
  static Vec load_f32(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec load_f16(const std::uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  static Vec load_bf16(const std::uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
  }
  static float half(std::uint16_t value) { return _cvtsh_ss(value); }
  static Vec load_i8(const std::int8_t* p) {
    const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight))};
  }
  // N * kWidth bytes: their lower halves into to[0, N), their upper ones into to[N, 2N)
  template <std::size_t N>
  static void unpack_nibbles(const std::uint8_t* p, Vec scale, Vec offset, Vec* to) {
    for (std::size_t i = 0; i < N; ++i) {
      const __m256i bytes =
          _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + i * kWidth)));
      const __m256i low = _mm256_and_si256(bytes, _mm256_set1_epi32(15)), high = _mm256_srli_epi32(bytes, 4);
      to[i] = {_mm256_fmadd_ps(_mm256_cvtepi32_ps(low), scale.v, offset.v)};
      to[N + i] = {_mm256_fmadd_ps(_mm256_cvtepi32_ps(high), scale.v, offset.v)};
    }
  }
  // The same of codes that a table of sixteen has, times a scale.
  template <std::size_t N>
  static void look_up_nibbles(const std::uint8_t* p, const std::int8_t* table, Vec scale, Vec* to) {
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table)), mask = _mm_set1_epi8(15);
    const auto widened = [scale](__m128i codes) {
      return Vec{_mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)), scale.v)};
    };
    for (std::size_t i = 0; i < N; ++i) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + i * kWidth));
      to[i] = widened(_mm_shuffle_epi8(values, _mm_and_si128(bytes, mask)));
      to[N + i] = widened(_mm_shuffle_epi8(values, _mm_and_si128(_mm_srli_epi16(bytes, 4), mask)));
    }
  }
  // A unit's codes of two bits, less `zero`: a register has the four numbers in each of its halves.
  static void unpack_pairs(const std::uint8_t* unit, float zero, Vec* to) {
    const __m256 numbers = _mm256_sub_ps(_mm256_setr_ps(0, 1, 2, 3, 0, 1, 2, 3), _mm256_set1_ps(zero));
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(unit)));
    to[0] = {_mm256_permutevar_ps(numbers, bytes)};
    to[1] = {_mm256_permutevar_ps(numbers, _mm256_srli_epi32(bytes, 2))};
    to[2] = {_mm256_permutevar_ps(numbers, _mm256_srli_epi32(bytes, 4))};
    to[3] = {_mm256_permutevar_ps(numbers, _mm256_srli_epi32(bytes, 6))};
  }
  // bits_of_half_power of kWidth scales
  static Vec half_powers(const std::uint8_t* p) {
    const __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23))};
  }
  static constexpr bool kReordersBf12 = false;
  // 32 weights of bf12; whether one of them is an escape
  static bool unpack_bf12(const std::uint8_t* low, const std::uint8_t* indexes, const std::uint8_t* table,
                          Vec* to) {
    const auto load = [](const std::uint8_t* p) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    };
    const __m128i bytes = load(indexes), mask = _mm_set1_epi8(15), high_bytes = load(table);
    const __m128i index[2] = {_mm_and_si128(bytes, mask), _mm_and_si128(_mm_srli_epi16(bytes, 4), mask)};
    for (std::size_t i = 0; i < 2; ++i) {
      const __m128i high = _mm_shuffle_epi8(high_bytes, index[i]), lows = load(low + 16 * i);
      const __m256i first = _mm256_cvtepu16_epi32(_mm_unpacklo_epi8(lows, high));
      const __m256i second = _mm256_cvtepu16_epi32(_mm_unpackhi_epi8(lows, high));
      to[2 * i] = {_mm256_castsi256_ps(_mm256_slli_epi32(first, 16))};
      to[2 * i + 1] = {_mm256_castsi256_ps(_mm256_slli_epi32(second, 16))};
    }
    const __m128i escapes = _mm_max_epu8(index[0], index[1]);
    return _mm_movemask_epi8(_mm_cmpeq_epi8(escapes, mask)) != 0;
  }
  template <int bits>
  static Vec load_codes(const std::uint8_t* p) {
    if constexpr (bits == 8)
      return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
    std::int32_t word;
    __builtin_memcpy(&word, p, sizeof word);
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    const __m256i codes = _mm256_srlv_epi32(_mm256_set1_epi32(word), shifts);
    return {_mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(15)))};
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store_rounded(std::uint8_t* p) const {
    const __m256i codes = _mm256_cvtps_epi32(v);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
  }
  // this * 2^n, n the integer in the low bits of `shifted`
  Vec times_two_to(const Vec& shifted) const {
    const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(shifted.v), 23);
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), n))};
  }
  float sum() const {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  // to[i] = v[i].sum(), kWidth of them
  static void sums(const Vec* v, float* to) {
    __m256 halves[4], pairs[2];
    for (std::size_t i = 0; i < 4; ++i) {
      const __m256 a = v[i].v, b = v[4 + i].v;
      halves[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    for (std::size_t i = 0; i < 2; ++i) {
      const __m256 a = halves[2 * i], b = halves[2 * i + 1];
      pairs[i] = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xEE));
    }
    const __m256 even = _mm256_shuffle_ps(pairs[0], pairs[1], 0x88),
                 odd = _mm256_shuffle_ps(pairs[0], pairs[1], 0xDD);
    _mm256_storeu_ps(to, _mm256_add_ps(even, odd));
  }
};

inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }  // b where either is NaN

struct Ints {
  __m256i v;
#if defined(__AVXVNNI__)
  static constexpr int kSignedZero = 128, kWideZero = 128 * 256;
#else
  static constexpr int kSignedZero = 0, kWideZero = 0;
#endif

  static Ints zero() { return {_mm256_setzero_si256()}; }
  static Ints load(const std::uint32_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
  }
  static Ints everywhere(const void* codes) { return {_mm256_set1_epi32(load_as<std::int32_t>(codes))}; }
  static Ints set(int value) { return {_mm256_set1_epi32(value)}; }
  Vec floats() const { return {_mm256_cvtepi32_ps(v)}; }

  template <typename At>
  static Ints pieces(const At& at) {
    return {both(sixteen(at(0)), sixteen(at(1)))};
  }
  static void transpose(Ints* words) {
    const __m256i a = words[0].v, b = words[1].v, c = words[2].v, d = words[3].v;
    const __m256i ab = _mm256_unpacklo_epi32(a, b), cd = _mm256_unpacklo_epi32(c, d);
    const __m256i later_ab = _mm256_unpackhi_epi32(a, b), later_cd = _mm256_unpackhi_epi32(c, d);
    words[0] = {_mm256_unpacklo_epi64(ab, cd)};
    words[1] = {_mm256_unpackhi_epi64(ab, cd)};
    words[2] = {_mm256_unpacklo_epi64(later_ab, later_cd)};
    words[3] = {_mm256_unpackhi_epi64(later_ab, later_cd)};
  }
  template <typename At>
  static Ints fours(const At& at) {
    const auto of_row = [&](std::size_t r) {
      __m128i words = _mm_cvtsi32_si128(load_as<int>(at(r, 0)));
      words = _mm_insert_epi32(words, load_as<int>(at(r, 1)), 1);
      words = _mm_insert_epi32(words, load_as<int>(at(r, 2)), 2);
      return _mm_insert_epi32(words, load_as<int>(at(r, 3)), 3);
    };
    return {both(of_row(0), of_row(1))};
  }
  template <typename At>
  static void eights(const At& at, Ints* to) {
    const auto pair = [&](std::size_t r, std::size_t i) {
      const auto load = [&](std::size_t unit) {
        return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at(r, unit)));
      };
      return _mm_unpacklo_epi64(load(i), load(i + 1));
    };
    const __m256 first = _mm256_castsi256_ps(both(pair(0, 0), pair(1, 0)));
    const __m256 second = _mm256_castsi256_ps(both(pair(0, 2), pair(1, 2)));
    to[0] = {_mm256_castps_si256(_mm256_shuffle_ps(first, second, 0x88))};
    to[1] = {_mm256_castps_si256(_mm256_shuffle_ps(first, second, 0xDD))};
  }
  template <int kShift, int kMask>
  Ints part() const {
    return {_mm256_and_si256(_mm256_srli_epi32(v, kShift), _mm256_set1_epi8(kMask))};
  }
  template <int kShift, int kMask, int kPlace>
  Ints with(Ints other) const {
    const __m256i turned = kShift < kPlace ? _mm256_slli_epi32(other.v, kPlace - kShift)
                                           : _mm256_srli_epi32(other.v, kShift - kPlace);
    return {_mm256_or_si256(v, _mm256_and_si256(turned, _mm256_set1_epi8(kMask << kPlace)))};
  }
  Ints looked_up(const std::int8_t* table) const {
    return {_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(sixteen(table)), v)};
  }
#if defined(__AVXVNNI__)
  Ints to_words() const { return {_mm256_xor_si256(v, _mm256_set1_epi8(-128))}; }
  template <int kMost>
  static Ints sum_four(const Ints* codes, const std::int8_t* x) {
    Ints sum = set(0);
    for (std::size_t j = 0; j < 4; ++j)
      sum.v = _mm256_dpbusd_avx_epi32(sum.v, codes[j].v, each_sixteen(x + 16 * j));
    return sum;
  }
  // Lower bytes have no sign; what multiplies the upper ones is more by kSignedZero.
  static Ints sum_wide(const Ints* codes, const std::int8_t* x) {
    __m256i lower = _mm256_setzero_si256(), upper = lower;
    for (std::size_t j = 0; j < 8; ++j, x += 16) {
      lower = _mm256_dpbusd_avx_epi32(lower, each_sixteen(x), codes[j].v);
      upper = _mm256_dpbusd_avx_epi32(upper, codes[j].to_words().v, each_sixteen(x + 128));
    }
    return {_mm256_add_epi32(lower, _mm256_slli_epi32(upper, 8))};
  }
#else
  Ints to_words() const { return *this; }
  // As many products as fit are summed in 16 bits.
  template <int kMost>
  static Ints sum_four(const Ints* codes, const std::int8_t* x) {
    Ints sum = set(0);
    constexpr std::size_t kTogether = kMost <= 32 ? 4 : kMost <= 64 ? 2 : 1;
    static_assert(2 * kTogether * kMost * 127 < 1 << 15, "sums must fit 16 bits");
    for (std::size_t first = 0; first < 4; first += kTogether) {
      __m256i some = _mm256_setzero_si256();
      for (std::size_t j = first; j < first + kTogether; ++j) {
        const __m256i inputs = each_sixteen(x + 16 * j), code = codes[j].v;
        some = _mm256_add_epi16(
            some, kMost == kSignedCodes
                      ? _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(inputs, code))
                      : _mm256_maddubs_epi16(code, inputs));
      }
      sum.v = _mm256_add_epi32(sum.v, _mm256_madd_epi16(some, _mm256_set1_epi16(1)));
    }
    return sum;
  }
  static Ints sum_wide(const Ints* codes, const std::int8_t* x) {
    __m256i sum = _mm256_setzero_si256();
    const auto wide = [none = sum](__m256i a) { return _mm256_srai_epi16(_mm256_unpacklo_epi8(none, a), 8); };
    const auto later = [none = sum](__m256i a) {
      return _mm256_srai_epi16(_mm256_unpackhi_epi8(none, a), 8);
    };
    __m256i apart[2] = {sum, sum};  // of a word's first two codes, and its others, of two units each
    for (std::size_t j = 0; j < 8; ++j, x += 16) {
      const __m256i lower = each_sixteen(x), upper = each_sixteen(x + 128);
      apart[0] =
          _mm256_add_epi32(apart[0], _mm256_madd_epi16(wide(codes[j].v), _mm256_unpacklo_epi8(lower, upper)));
      apart[1] = _mm256_add_epi32(apart[1],
                                  _mm256_madd_epi16(later(codes[j].v), _mm256_unpackhi_epi8(lower, upper)));
    }
    return {_mm256_hadd_epi32(apart[0], apart[1])};
  }
#endif
  static Ints each_row(const std::int32_t* p) { return {each_sixteen(p)}; }

 private:
  static __m128i sixteen(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static __m256i each_sixteen(const void* p) { return _mm256_broadcastsi128_si256(sixteen(p)); }
  static __m256i both(__m128i low, __m128i high) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  }
};
inline Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline Ints operator-(Ints a, Ints b) { return {_mm256_sub_epi32(a.v, b.v)}; }
inline Ints operator*(Ints a, Ints b) { return {_mm256_mullo_epi32(a.v, b.v)}; }

struct AllInWords {  // nothing is left to do
  explicit AllInWords(Ints) {}
  Ints operator()(Ints, Ints sum) const { return sum; }
};
#if defined(__AVXVNNI__)
struct Words {
  using End = AllInWords;
  using Code = std::int16_t;
  using Column = Ints;
  static constexpr std::size_t kStep = 2;
  static Ints first(Ints a, Ints b, Ints to) { return add(a, b, to); }
  static Ints add(Ints a, Ints b, Ints sum) {
    sum.v = _mm256_dpwssd_avx_epi32(sum.v, a.v, b.v);
    asm("" : "+x"(sum.v));  // before what follows
    return sum;
  }
};
struct Bytes : Words {
  using Code = std::uint8_t;
  static constexpr std::size_t kStep = 4, kTogether = 8, kNibblesTogether = 8, kProductsTogether = 8;
  static Ints first(Ints a, Ints b, Ints to) { return add(a, b, to); }
  static Ints add(Ints a, Ints b, Ints sum) { return {_mm256_dpbusd_avx_epi32(sum.v, a.v, b.v)}; }
};
#else
// The additions are instructions of our own: GCC would turn sums of integers around, and have too few
// registers, or copy each.
struct Words {
  using End = AllInWords;
  using Code = std::int16_t;
  using Column = Ints;
  static constexpr std::size_t kStep = 2;
  static Ints first(Ints a, Ints b, Ints to) { return {_mm256_add_epi32(to.v, _mm256_madd_epi16(a.v, b.v))}; }
  static Ints add(Ints a, Ints b, Ints sum) {
    asm("vpaddd %1, %0, %0" : "+x"(sum.v) : "x"(_mm256_madd_epi16(a.v, b.v)));
    return sum;
  }
};
// Sums of 16 bits: of a word's first two products, and of the others.
struct Bytes {
  using Code = std::uint8_t;
  using Column = Ints;
  static constexpr std::size_t kStep = 4, kTogether = 4, kNibblesTogether = 8, kProductsTogether = 2;
  static_assert(2 * kTogether * kLargestByte * 127 < 1 << 15 &&
                    2 * kNibblesTogether * kLargestNibble * 127 < 1 << 15 &&
                    2 * kProductsTogether * kLargestProduct * 127 < 1 << 15,
                "sums must fit 16 bits");
  static Ints first(Ints a, Ints b, Ints) { return {_mm256_maddubs_epi16(a.v, b.v)}; }
  static Ints add(Ints a, Ints b, Ints sum) {
    asm("vpaddw %1, %0, %0" : "+x"(sum.v) : "x"(_mm256_maddubs_epi16(a.v, b.v)));
    return sum;
  }
  struct End {
    __m256i ones;
    // Made when sums are there: kept from the start, it would take the register of one.
    explicit End(Ints sum) { asm("vpcmpeqw %0, %0, %0; vpsrlw $15, %0, %0" : "=x"(ones) : "x"(sum.v)); }
    Ints operator()(Ints all, Ints sum) const {
      return {_mm256_add_epi32(all.v, _mm256_madd_epi16(sum.v, ones))};
    }
  };
};
#endif

#include "kernels/levels/eight_x86.h"

constexpr std::size_t kTileOfDot = 2;
constexpr bool kPairsOfTiles = false;
struct Lanes : Vec {
  static Lanes set(float value) { return {Vec::set(value)}; }
  static Lanes each_row(const float* p) {
    return {{_mm256_broadcast_ps(reinterpret_cast<const __m128*>(p))}};
  }
  static void of_rows(const Eight* row, Lanes* to) {
    to[0] = {{_mm256_permute2f128_ps(row[0].v, row[1].v, 0x20)}};
    to[1] = {{_mm256_permute2f128_ps(row[0].v, row[1].v, 0x31)}};
  }
  static void evens_and_odds(Lanes* of) {
    const __m256 first = of[0].v, second = of[1].v;
    of[0] = {{_mm256_shuffle_ps(first, second, 0x88)}};
    of[1] = {{_mm256_shuffle_ps(first, second, 0xDD)}};
  }
  void put_sums(std::size_t rows, float* to) const {
    __m256 s = _mm256_add_ps(v, _mm256_permute_ps(v, 0xEE));
    s = _mm256_add_ps(s, _mm256_movehdup_ps(s));
    to[0] = _mm256_cvtss_f32(s);
    if (rows > 1) to[1] = _mm_cvtss_f32(_mm256_extractf128_ps(s, 1));
  }
};
inline Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
  return {{_mm256_fmadd_ps(a.v, b.v, c.v)}};
}
inline Lanes operator*(const Vec& a, const Lanes& b) { return {{_mm256_mul_ps(a.v, b.v)}}; }

}  // namespace

#include "kernels/levels/level_impl.h"

}  // namespace flashllm::FLASHLLM_AVX2

#endif
