// AVX-512 F/BW/VL/DQ/VNNI: sixteen floats a vector.
#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own header starts its intrinsics from a deliberately undefined register and then warns about it.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <utility>

#include "kernels/half.h"
#include "kernels/levels/levels.h"

namespace flashllm::avx512 {

namespace {

constexpr std::size_t kUnroll = 4, kRows = 4, kTileRows = 6, kTileVectors = 4;

struct Vec {
  static constexpr std::size_t kWidth = 16;
  __m512 v;

  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec set(float value) { return {_mm512_set1_ps(value)}; }
  static Vec load_f32(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load_f16(const std::uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  static Vec load_bf16(const std::uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  static float half(std::uint16_t value) { return _cvtsh_ss(value); }
  static Vec load_i8(const std::int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
  }
  // N * kWidth bytes: their lower halves into to[0, N), their upper ones into to[N, 2N). What a code stands
  // for is looked up by the lower four bits of each element.
  template <std::size_t N>
  static void unpack_nibbles(const std::uint8_t* p, Vec scale, Vec offset, Vec* to) {
    const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 weights = _mm512_fmadd_ps(codes, scale.v, offset.v);
    for (std::size_t i = 0; i < N; ++i) {
      const __m512i bytes =
          _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * kWidth)));
      to[i] = {_mm512_permutexvar_ps(bytes, weights)};
      to[N + i] = {_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), weights)};
    }
  }
  // The same of codes that a table of sixteen has, times a scale.
  template <std::size_t N>
  static void look_up_nibbles(const std::uint8_t* p, const std::int8_t* table, Vec scale, Vec* to) {
    const Vec weights = {_mm512_mul_ps(load_i8(table).v, scale.v)};
    for (std::size_t i = 0; i < N; ++i) {
      const __m512i bytes =
          _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * kWidth)));
      to[i] = {_mm512_permutexvar_ps(bytes, weights.v)};
      to[N + i] = {_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), weights.v)};
    }
  }
  // A unit's codes of two bits, less `zero`: a register has the four numbers in each of its quarters.
  static void unpack_pairs(const std::uint8_t* unit, float zero, Vec* to) {
    std::int64_t word;
    __builtin_memcpy(&word, unit, sizeof word);
    const __m512 numbers =
        _mm512_sub_ps(_mm512_broadcast_f32x4(_mm_setr_ps(0, 1, 2, 3)), _mm512_set1_ps(zero));
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_set1_epi64x(word));
    const __m512i first = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2);
    to[0] = {_mm512_permutevar_ps(numbers, _mm512_srlv_epi32(bytes, first))};
    to[1] = {_mm512_permutevar_ps(numbers,
                                  _mm512_srlv_epi32(bytes, _mm512_add_epi32(first, _mm512_set1_epi32(4))))};
  }
  // bits_of_half_power of kWidth scales
  static Vec half_powers(const std::uint8_t* p) {
    const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23))};
  }
  // 32 weights of bf12; whether one of them is an escape
  static bool unpack_bf12(const std::uint8_t* low, const std::uint8_t* indexes, const std::uint8_t* table,
                          Vec* to) {
    const auto load = [](const std::uint8_t* p) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    };
    const __m128i bytes = load(indexes), mask = _mm_set1_epi8(15), high_bytes = load(table);
    const __m128i index[2] = {_mm_and_si128(bytes, mask), _mm_and_si128(_mm_srli_epi16(bytes, 4), mask)};
    for (std::size_t i = 0; i < 2; ++i) {
      const __m512i high = _mm512_cvtepu8_epi32(_mm_shuffle_epi8(high_bytes, index[i]));
      const __m512i lows = _mm512_cvtepu8_epi32(load(low + 16 * i));
      const __m512i bits = _mm512_or_si512(_mm512_slli_epi32(high, 24), _mm512_slli_epi32(lows, 16));
      to[i] = {_mm512_castsi512_ps(bits)};
    }
    const __m128i escapes = _mm_max_epu8(index[0], index[1]);
    return _mm_movemask_epi8(_mm_cmpeq_epi8(escapes, mask)) != 0;
  }
  // 64 weights of bf12, none of them an escape, in an order of their own, which takes half the instructions.
  // Of sixteen weights that follow each other, a lane of to[0] has the even ones of the first eight, to[1]
  // the odd ones, to[2] and to[3] those of the other eight.
  static constexpr bool kReordersBf12 = true;
  static void unpack_bf12_reordered(const std::uint8_t* low, const std::uint8_t* indexes,
                                    const std::uint8_t* table, Vec* to) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(indexes));
    const __m512i twice =
        _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), _mm512_castsi256_si512(bytes));
    const __m512i down = _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4), mask = _mm512_set1_epi8(15);
    const __m512i index = _mm512_and_si512(_mm512_srlv_epi64(twice, down), mask);
    const __m512i high_bytes =
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    const __m512i high = _mm512_shuffle_epi8(high_bytes, index), lows = _mm512_loadu_si512(low);
    const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    for (std::size_t i = 0; i < 2; ++i) {
      const __m512i pairs = i == 0 ? _mm512_unpacklo_epi8(lows, high) : _mm512_unpackhi_epi8(lows, high);
      to[2 * i] = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
      to[2 * i + 1] = {_mm512_castsi512_ps(_mm512_and_si512(pairs, odd))};
    }
  }
  static constexpr std::size_t place_of_bf12(std::size_t weight) {
    return (weight % 16 / 8 * 2 + weight % 2) * kWidth + weight / 16 * 4 + weight % 8 / 2;
  }
  // 64 values into that order, and back.
  static void reorder_as_bf12(Vec* v) {
    transpose_lanes(v);
    for (std::size_t i = 0; i < 4; i += 2) {
      const __m512 a = v[i].v, b = v[i + 1].v;
      v[i] = {_mm512_shuffle_ps(a, b, 0x88)};
      v[i + 1] = {_mm512_shuffle_ps(a, b, 0xdd)};
    }
  }
  static void restore_from_bf12(Vec* v) {
    for (std::size_t i = 0; i < 4; i += 2) {
      const __m512 a = v[i].v, b = v[i + 1].v;
      v[i] = {_mm512_unpacklo_ps(a, b)};
      v[i + 1] = {_mm512_unpackhi_ps(a, b)};
    }
    transpose_lanes(v);
  }
  // Lane i of v[j] to lane j of v[i].
  static void transpose_lanes(Vec* v) {
    const __m512 a = _mm512_shuffle_f32x4(v[0].v, v[1].v, 0x88),
                 b = _mm512_shuffle_f32x4(v[0].v, v[1].v, 0xdd);
    const __m512 c = _mm512_shuffle_f32x4(v[2].v, v[3].v, 0x88),
                 d = _mm512_shuffle_f32x4(v[2].v, v[3].v, 0xdd);
    v[0] = {_mm512_shuffle_f32x4(a, c, 0x88)};
    v[1] = {_mm512_shuffle_f32x4(b, d, 0x88)};
    v[2] = {_mm512_shuffle_f32x4(a, c, 0xdd)};
    v[3] = {_mm512_shuffle_f32x4(b, d, 0xdd)};
  }
  template <int bits>
  static Vec load_codes(const std::uint8_t* p) {
    if constexpr (bits == 8)
      return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
    std::int32_t earlier, later;
    __builtin_memcpy(&earlier, p, 4);
    __builtin_memcpy(&later, p + 4, 4);
    const __m512i words = _mm512_mask_set1_epi32(_mm512_set1_epi32(earlier), 0xFF00, later);
    const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    return {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srlv_epi32(words, shifts), _mm512_set1_epi32(15)))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store_rounded(std::uint8_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
  }
  // this * 2^n, n the integer in the low bits of `shifted`
  Vec times_two_to(const Vec& shifted) const {
    const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), n))};
  }
  float sum() const {
    const __m256 high = _mm256_castsi256_ps(_mm512_extracti64x4_epi64(_mm512_castps_si512(v), 1));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), high);
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  // to[i] = v[i].sum(), kWidth of them
  static void sums(const Vec* v, float* to) {
    __m512 quarters[4], pairs[2];
    for (std::size_t i = 0; i < 4; ++i) {
      const __m512 a = v[i].v, b = v[4 + i].v, c = v[8 + i].v, d = v[12 + i].v;
      const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
      const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
      quarters[i] = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
    }
    for (std::size_t i = 0; i < 2; ++i) {
      const __m512 a = quarters[2 * i], b = quarters[2 * i + 1];
      pairs[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
    }
    const __m512 even = _mm512_shuffle_ps(pairs[0], pairs[1], 0x88),
                 odd = _mm512_shuffle_ps(pairs[0], pairs[1], 0xDD);
    _mm512_storeu_ps(to, _mm512_add_ps(even, odd));
  }
};

inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where either is NaN

struct Pairs {
  __m512i v;

  static Pairs zero() { return {_mm512_setzero_si512()}; }
  static Pairs load(const std::uint32_t* p) { return {_mm512_loadu_si512(p)}; }
  static Pairs everywhere(const void* codes) {
    std::int32_t word;
    __builtin_memcpy(&word, codes, sizeof word);
    return {_mm512_set1_epi32(word)};
  }
  static Pairs set(int value) { return {_mm512_set1_epi32(value)}; }
  Vec floats() const { return {_mm512_cvtepi32_ps(v)}; }
};
inline Pairs operator*(Pairs a, Pairs b) { return {_mm512_mullo_epi32(a.v, b.v)}; }

struct Words {
  using Code = std::int16_t;
  static constexpr std::size_t kStep = 2;
  static constexpr bool kApart = false;
  static Pairs begin(Pairs sum) { return sum; }
  static Pairs add(Pairs a, Pairs b, Pairs sum) { return {_mm512_dpwssd_epi32(sum.v, a.v, b.v)}; }
  static Pairs end(Pairs, Pairs sum) { return sum; }
};
struct Bytes : Words {
  using Code = std::uint8_t;
  static constexpr std::size_t kStep = 4, kTogether = 8;
  static Pairs add(Pairs a, Pairs b, Pairs sum) { return {_mm512_dpbusd_epi32(sum.v, a.v, b.v)}; }
};

#include "kernels/levels/eight_x86.h"

}  // namespace

#include "kernels/levels/level_impl.h"

}  // namespace flashllm::avx512

#endif
