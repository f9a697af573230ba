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

struct Pairs {
  __m256i v;

  static Pairs zero() { return {_mm256_setzero_si256()}; }
  static Pairs load(const std::uint32_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
  }
  static Pairs everywhere(const void* codes) {
    std::int32_t word;
    __builtin_memcpy(&word, codes, sizeof word);
    return {_mm256_set1_epi32(word)};
  }
  static Pairs set(int value) { return {_mm256_set1_epi32(value)}; }
  Vec floats() const { return {_mm256_cvtepi32_ps(v)}; }
};
inline Pairs operator*(Pairs a, Pairs b) { return {_mm256_mullo_epi32(a.v, b.v)}; }

struct Words {
  using Code = std::int16_t;
  static constexpr std::size_t kStep = 2;
  static constexpr bool kApart = true;
  static Pairs begin(Pairs sum) { return sum; }
  static Pairs add(Pairs a, Pairs b, Pairs sum) {
#if defined(__AVXVNNI__)
    return {_mm256_dpwssd_avx_epi32(sum.v, a.v, b.v)};
#else
    return {_mm256_add_epi32(sum.v, _mm256_madd_epi16(a.v, b.v))};
#endif
  }
  static Pairs end(Pairs, Pairs sum) { return sum; }
};
#if defined(__AVXVNNI__)
struct Bytes : Words {
  using Code = std::uint8_t;
  static constexpr std::size_t kStep = 4, kTogether = 8;
  static constexpr bool kApart = false;
  static Pairs add(Pairs a, Pairs b, Pairs sum) { return {_mm256_dpbusd_avx_epi32(sum.v, a.v, b.v)}; }
};
#else
// Sums of 16 bits: of a word's first two products, and of the others.
struct Bytes {
  using Code = std::uint8_t;
  static constexpr std::size_t kStep = 4, kTogether = 4;
  static constexpr bool kApart = true;
  static_assert(2 * kTogether * kLargestByte * 127 < 1 << 15, "sums must fit 16 bits");
  static Pairs begin(Pairs) { return Pairs::zero(); }
  static Pairs add(Pairs a, Pairs b, Pairs sum) {
    return {_mm256_add_epi16(sum.v, _mm256_maddubs_epi16(a.v, b.v))};
  }
  static Pairs end(Pairs all, Pairs sum) {
    return {_mm256_add_epi32(all.v, _mm256_madd_epi16(sum.v, _mm256_set1_epi16(1)))};
  }
};
#endif

#include "kernels/levels/eight_x86.h"

}  // namespace

#include "kernels/levels/level_impl.h"

}  // namespace flashllm::FLASHLLM_AVX2

#endif
