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

struct Ints {
  __m512i v;
  static constexpr int kSignedZero = 128, kWideZero = 128 * 256;

  static Ints zero() { return {_mm512_setzero_si512()}; }
  static Ints load(const std::uint32_t* p) { return {_mm512_loadu_si512(p)}; }
  static Ints everywhere(const void* codes) { return {_mm512_set1_epi32(load_as<std::int32_t>(codes))}; }
  static Ints set(int value) { return {_mm512_set1_epi32(value)}; }
  Vec floats() const { return {_mm512_cvtepi32_ps(v)}; }

  template <typename At>
  static Ints pieces(const At& at) {  // by masks, which take either port
    __m512i rows = _mm512_castsi128_si512(sixteen(at(0)));
    rows = _mm512_mask_broadcast_i32x4(rows, 0x00F0, sixteen(at(1)));
    rows = _mm512_mask_broadcast_i32x4(rows, 0x0F00, sixteen(at(2)));
    return {_mm512_mask_broadcast_i32x4(rows, 0xF000, sixteen(at(3)))};
  }
  static void transpose(Ints* words) {
    const __m512i a = words[0].v, b = words[1].v, c = words[2].v, d = words[3].v;
    const __m512i ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
    const __m512i later_ab = _mm512_unpackhi_epi32(a, b), later_cd = _mm512_unpackhi_epi32(c, d);
    words[0] = {_mm512_unpacklo_epi64(ab, cd)};
    words[1] = {_mm512_unpackhi_epi64(ab, cd)};
    words[2] = {_mm512_unpacklo_epi64(later_ab, later_cd)};
    words[3] = {_mm512_unpackhi_epi64(later_ab, later_cd)};
  }
  template <typename At>
  static Ints fours(const At& at) {
    __m512i words = _mm512_setzero_si512();
    for (unsigned i = 0; i < 16; ++i)
      words = _mm512_mask_broadcastd_epi32(words, static_cast<__mmask16>(1U << i),
                                           _mm_cvtsi32_si128(load_as<int>(at(i / 4, i % 4))));
    return {words};
  }
  template <typename At>
  static void eights(const At& at, Ints* to) {
    __m512i both[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (unsigned i = 0; i < 16; ++i) {
      __m512i& of = both[i / 2 % 2];
      of = _mm512_mask_broadcastq_epi64(of, static_cast<__mmask8>(1U << (i / 4 * 2 + i % 2)),
                                        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at(i / 4, i % 4))));
    }
    const __m512 first = _mm512_castsi512_ps(both[0]), second = _mm512_castsi512_ps(both[1]);
    to[0] = {_mm512_castps_si512(_mm512_shuffle_ps(first, second, 0x88))};
    to[1] = {_mm512_castps_si512(_mm512_shuffle_ps(first, second, 0xDD))};
  }
  template <int kShift, int kMask>
  Ints part() const {
    return {_mm512_and_si512(_mm512_srli_epi32(v, kShift), _mm512_set1_epi8(kMask))};
  }
  template <int kShift, int kMask, int kPlace>
  Ints with(Ints other) const {
    const __m512i turned = kShift < kPlace ? _mm512_slli_epi32(other.v, kPlace - kShift)
                                           : _mm512_srli_epi32(other.v, kShift - kPlace);
    return {
        _mm512_ternarylogic_epi32(v, turned, _mm512_set1_epi8(kMask << kPlace), 0xF8)};  // v | turned & mask
  }
  Ints looked_up(const std::int8_t* table) const {
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(sixteen(table)), v)};
  }
  Ints to_words() const { return {_mm512_xor_si512(v, _mm512_set1_epi8(-128))}; }

  template <int kMost>
  static Ints sum_four(const Ints* codes, const std::int8_t* x) {
    Ints sum = set(0);
    for (std::size_t j = 0; j < 4; ++j)
      sum.v = _mm512_dpbusd_epi32(sum.v, codes[j].v, each_sixteen(x + 16 * j));
    return sum;
  }
  // Lower bytes have no sign; what multiplies the upper ones is more by kSignedZero.
  static Ints sum_wide(const Ints* codes, const std::int8_t* x) {
    __m512i lower = _mm512_setzero_si512(), upper = lower;
    for (std::size_t j = 0; j < 8; ++j, x += 16) {
      lower = _mm512_dpbusd_epi32(lower, each_sixteen(x), codes[j].v);
      upper = _mm512_dpbusd_epi32(upper, codes[j].to_words().v, each_sixteen(x + 128));
    }
    return {_mm512_add_epi32(lower, _mm512_slli_epi32(upper, 8))};
  }
  static Ints each_row(const std::int32_t* p) { return {each_sixteen(p)}; }

 private:
  static __m128i sixteen(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static __m512i each_sixteen(const void* p) { return _mm512_broadcast_i32x4(sixteen(p)); }
};
inline Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints operator-(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline Ints operator*(Ints a, Ints b) { return {_mm512_mullo_epi32(a.v, b.v)}; }

struct Words {
  using Code = std::int16_t;
  using Column = Ints;
  static constexpr std::size_t kStep = 2;
  static Ints first(Ints a, Ints b, Ints to) { return add(a, b, to); }
  static Ints add(Ints a, Ints b, Ints sum) { return {_mm512_dpwssd_epi32(sum.v, a.v, b.v)}; }
  struct End {
    explicit End(Ints) {}
    Ints operator()(Ints, Ints sum) const { return sum; }
  };
};
struct Bytes : Words {
  using Code = std::uint8_t;
  static constexpr std::size_t kStep = 4, kTogether = 8, kNibblesTogether = 8, kProductsTogether = 8;
  static Ints first(Ints a, Ints b, Ints to) { return add(a, b, to); }
  static Ints add(Ints a, Ints b, Ints sum) { return {_mm512_dpbusd_epi32(sum.v, a.v, b.v)}; }
};

#include "kernels/levels/eight_x86.h"

constexpr std::size_t kTileOfDot = 4;
constexpr bool kPairsOfTiles = true;  // registers have room for two tiles of codes
struct Lanes : Vec {
  static Lanes set(float value) { return {Vec::set(value)}; }
  static Lanes each_row(const float* p) { return {{_mm512_broadcast_f32x4(_mm_loadu_ps(p))}}; }
  static void of_rows(const Eight* row, Lanes* to) {
    const auto both = [](const Eight& a, const Eight& b) {
      return _mm512_insertf32x8(_mm512_castps256_ps512(a.v), b.v, 1);
    };
    const __m512 first = both(row[0], row[1]), second = both(row[2], row[3]);
    to[0] = {{_mm512_shuffle_f32x4(first, second, 0x88)}};
    to[1] = {{_mm512_shuffle_f32x4(first, second, 0xDD)}};
  }
  static void evens_and_odds(Lanes* of) {
    const __m512 first = of[0].v, second = of[1].v;
    of[0] = {{_mm512_shuffle_ps(first, second, 0x88)}};
    of[1] = {{_mm512_shuffle_ps(first, second, 0xDD)}};
  }
  void put_sums(std::size_t rows, float* to) const {
    __m512 s = _mm512_add_ps(v, _mm512_permute_ps(v, 0xEE));
    s = _mm512_add_ps(s, _mm512_movehdup_ps(s));
    const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m128 sums = _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, s));
    if (rows == kTileOfDot) return _mm_storeu_ps(to, sums);  // by a mask, what loads them would wait
    _mm_mask_storeu_ps(to, static_cast<__mmask8>((1U << rows) - 1), sums);
  }
};
inline Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
  return {{_mm512_fmadd_ps(a.v, b.v, c.v)}};
}
inline Lanes operator*(const Vec& a, const Lanes& b) { return {{_mm512_mul_ps(a.v, b.v)}}; }

}  // namespace

#include "kernels/levels/level_impl.h"

}  // namespace flashllm::avx512

#endif
