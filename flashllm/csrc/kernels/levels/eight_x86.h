// Eight floats in half a register of AVX-512 or a whole one of AVX2, for row_codecs_inputs_impl.h. Included
// by each kernels_<level>.cpp of x86, in its namespace.

template <typename T>
inline T load_as(const std::uint8_t* p) {
  T value;
  __builtin_memcpy(&value, p, sizeof value);
  return value;
}

struct Eight {
  __m256 v;

  static Eight zero() { return {_mm256_setzero_ps()}; }
  static Eight set(float value) { return {_mm256_set1_ps(value)}; }
  static Eight load(const float* p) { return {_mm256_loadu_ps(p)}; }
  void store(float* p) const { _mm256_storeu_ps(p, v); }

  // 8 / kRepeat halves, each for kRepeat lanes
  template <std::size_t kRepeat>
  static Eight load_halves(const std::uint16_t* p) {
    static_assert(kRepeat == 1 || kRepeat == 2);
    if constexpr (kRepeat == 1)
      return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
    const __m128i four = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtph_ps(_mm_unpacklo_epi16(four, four))};
  }

  static Eight load_i8(const std::int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
  }
  // bits_of_half_power of eight scales
  static Eight half_powers(const std::uint8_t* p) {
    const __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23))};
  }
  // Two floats, four lanes each.
  static Eight set_halves(const float* p) {
    const __m256 both = _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(p)));
    return {_mm256_permutevar_ps(both, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1))};
  }

  // The first n lanes, and zeros.
  Eight first(std::size_t n) const {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lanes);
    return {_mm256_and_ps(v, _mm256_castsi256_ps(below))};
  }

  float sum() const {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }

  // A unit's codes, from 0 on but for those of 8 bits.
  template <std::size_t kBits>
  static __m256i codes_of(const std::uint8_t* p) {
    if constexpr (kBits == 8) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    if constexpr (kBits == 2) return masked<3>(pairs_of(p));
    if constexpr (kBits == 3)
      return _mm256_or_si256(masked<3>(pairs_of(p)), _mm256_slli_epi16(masked<1>(bits_of(p + 8)), 2));
    const __m256i low = nibbles(p);
    if constexpr (kBits == 4) return low;
    const __m256i upper = kBits == 5 ? masked<1>(bits_of(p + 16)) : masked<3>(pairs_of(p + 16));
    return _mm256_or_si256(low, _mm256_slli_epi16(upper, 4));
  }
  // What codes of 4 bits have in a table of sixteen.
  static __m256i looked_up(const std::int8_t* table, const std::uint8_t* codes) {
    const __m256i values =
        _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
    return _mm256_shuffle_epi8(values, nibbles(codes));
  }

  // The products of 32 codes with 32 bytes, summed by fours. A sum of two fits 16 bits: 2 * 128 * 127.
  template <std::size_t kBits>
  static Eight dot_unit(const std::uint8_t* p, const std::int8_t* x) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)), codes = codes_of<kBits>(p);
    if constexpr (kBits == 8) return dot_signed(codes, bytes);
    if constexpr (kBits == 3 || kBits == 6)
      return dot_signed(_mm256_sub_epi8(codes, _mm256_set1_epi8(1 << (kBits - 1))), bytes);
    return {_mm256_cvtepi32_ps(sum_by_fours(codes, bytes))};
  }
  static Eight dot_fp4_unit(const std::uint8_t* codes, const std::int8_t* x) {
    return {_mm256_cvtepi32_ps(sum_by_fours(looked_up(kFp4FromZero, codes),
                                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))))};
  }
  static Eight dot_table_unit(const std::int8_t* table, const std::uint8_t* codes, const std::int8_t* x) {
    return dot_signed(looked_up(table, codes), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  }
  static Eight unit_sums(const std::int8_t* x) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return {_mm256_cvtepi32_ps(sum_by_fours(_mm256_set1_epi8(1), bytes))};
  }
  static Eight dot_pairs(const std::uint8_t* p, const std::int8_t* x, std::size_t units) {
    __m256i sums = _mm256_setzero_si256();
    for (std::size_t u = 0; u < units; ++u) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 32 * u));
      sums = _mm256_add_epi32(sums, sum_by_fours(codes_of<2>(p + 8 * u), bytes));
    }
    return {_mm256_cvtepi32_ps(sums)};
  }
  // The same with 32 words.
  template <std::size_t kBits>
  static Eight dot_unit(const std::uint8_t* codes, const std::int16_t* x) {
    static_assert(kBits == 8);
    const auto* words = reinterpret_cast<const __m256i*>(x);
    const auto* bytes = reinterpret_cast<const __m128i*>(codes);
    const __m256i low = _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes));
    const __m256i high = _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes + 1));
    const __m256i first = _mm256_loadu_si256(words), second = _mm256_loadu_si256(words + 1);
    return {
        _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_madd_epi16(low, first), _mm256_madd_epi16(high, second)))};
  }

 private:
  // The lower halves of 16 bytes, then the upper ones.
  static __m256i nibbles(const std::uint8_t* p) {
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i both = _mm256_srlv_epi32(twice, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
    return _mm256_and_si256(both, _mm256_set1_epi8(15));
  }
  // Bits that lie apart, below others: four codes one of four bytes, eight codes two of eight bytes.
  static __m256i bits_of(const std::uint8_t* p) {
    const __m256i all = _mm256_set1_epi32(load_as<std::int32_t>(p));
    return _mm256_srlv_epi32(all, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static __m256i pairs_of(const std::uint8_t* p) {
    const __m256i all = _mm256_set1_epi64x(load_as<std::int64_t>(p));
    return _mm256_srlv_epi64(all, _mm256_setr_epi64x(0, 2, 4, 6));
  }
  template <int kMask>
  static __m256i masked(__m256i bits) {
    return _mm256_and_si256(bits, _mm256_set1_epi8(kMask));
  }
  static Eight dot_signed(__m256i weights, __m256i bytes) {
    return {_mm256_cvtepi32_ps(sum_by_fours(_mm256_abs_epi8(weights), _mm256_sign_epi8(bytes, weights)))};
  }
  static __m256i sum_by_fours(__m256i magnitudes, __m256i bytes) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), magnitudes, bytes);
#else
    return _mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes, bytes), _mm256_set1_epi16(1));
#endif
  }
};

inline Eight fma(Eight a, Eight b, Eight c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Eight operator+(Eight a, Eight b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Eight operator*(Eight a, Eight b) { return {_mm256_mul_ps(a.v, b.v)}; }

#if defined(__AVX512VNNI__)
constexpr std::size_t kLaneRows = 2;

// The same of two rows.
struct Sixteen {
  __m512 v;
  // A unit's in each.
  struct Codes {
    const std::uint8_t *first, *second;
  };

  static Sixteen zero() { return {_mm512_setzero_ps()}; }
  static Sixteen set(float value) { return {_mm512_set1_ps(value)}; }
  // Codes a byte each, from 0 on; those of 8 bits more by 128.
  template <std::size_t kBits>
  static __m512i codes_of(const std::uint8_t* p, const std::uint8_t* q) {
    if constexpr (kBits == 8)
      return _mm512_xor_si512(both(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                                   _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q))),
                              _mm512_set1_epi8(-128));
    if constexpr (kBits < 4) {
      const __m512i pairs =
          both(_mm256_set1_epi64x(load_as<std::int64_t>(p)), _mm256_set1_epi64x(load_as<std::int64_t>(q)));
      const __m512i low = _mm512_and_si512(
          _mm512_srlv_epi64(pairs, _mm512_setr_epi64(0, 2, 4, 6, 0, 2, 4, 6)), _mm512_set1_epi8(3));
      return kBits == 2 ? low : with_bits<2>(low, p + 8, q + 8);
    }
    const __m512i low = nibbles(p, q);
    if constexpr (kBits == 5) return with_bits<4>(low, p + 16, q + 16);
    if constexpr (kBits == 6) {
      const __m512i pairs = both(_mm256_set1_epi64x(load_as<std::int64_t>(p + 16)),
                                 _mm256_set1_epi64x(load_as<std::int64_t>(q + 16)));
      return merged<3 << 4>(low, _mm512_rolv_epi64(pairs, _mm512_setr_epi64(4, 2, 0, 62, 4, 2, 0, 62)));
    }
    return low;
  }
  static __m512i looked_up(const std::int8_t* table, const std::uint8_t* p, const std::uint8_t* q) {
    const __m128i values = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), nibbles(p, q));
  }

  // Codes that are `kZero` more than what they stand for.
  template <int kZero>
  static Sixteen dot(__m512i codes, const std::int8_t* x) {
    const __m512i bytes = twice(x), none = _mm512_setzero_si512();
    if constexpr (kZero == 0) return {_mm512_cvtepi32_ps(_mm512_dpbusd_epi32(none, codes, bytes))};
    const __m512i too_many = _mm512_dpbusd_epi32(none, _mm512_set1_epi8(static_cast<char>(kZero)), bytes);
    return {_mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_sub_epi32(none, too_many), codes, bytes))};
  }
  template <std::size_t kBits>
  static Sixteen dot_unit(const Codes& codes, const std::int8_t* x) {
    constexpr int kZero = kBits == 8 ? 128 : kBits == 3 || kBits == 6 ? 1 << (kBits - 1) : 0;
    return dot<kZero>(codes_of<kBits>(codes.first, codes.second), x);
  }
  static Sixteen dot_fp4_unit(const Codes& codes, const std::int8_t* x) {
    return dot<0>(looked_up(kFp4FromZero, codes.first, codes.second), x);
  }
  static Sixteen dot_table_unit(const std::int8_t* table, const Codes& codes, const std::int8_t* x) {
    const __m512i values = looked_up(table, codes.first, codes.second);
    return dot<128>(_mm512_xor_si512(values, _mm512_set1_epi8(-128)), x);
  }
  static Sixteen unit_sums(const std::int8_t* x) { return dot<0>(_mm512_set1_epi8(1), x); }
  // Lanes 2 q and 2 q + 1 are of codes where they lie, 4^q times what they are, until the end.
  static Sixteen dot_pairs(const Codes& codes, const std::int8_t* x, std::size_t units) {
    const auto load = [units](const std::uint8_t* p) {
      return _mm512_maskz_loadu_epi64(static_cast<__mmask8>((1U << units) - 1), p);
    };
    const __m512i first = load(codes.first), second = load(codes.second);
    constexpr long long kEach = 0x0303030303030303, kLast = static_cast<long long>(0xC0C0C0C0C0C0C0C0);
    const __m512i places =
        _mm512_setr_epi64(kEach, kEach << 2, kEach << 4, kLast, kEach, kEach << 2, kEach << 4, kLast);
    __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
#pragma GCC unroll 8
    for (int u = 0; u < 8; ++u) {
      const __m512i from = _mm512_setr_epi64(u, u, u, u, u + 8, u + 8, u + 8, u + 8);
      const __m512i pairs = _mm512_and_si512(_mm512_permutex2var_epi64(first, from, second), places);
      sums[u % 2] = _mm512_dpbusd_epi32(sums[u % 2], pairs, twice(x + kCodeUnit * u));
    }
    const __m256 by = _mm256_setr_ps(1, 1, 0.25F, 0.25F, 0.0625F, 0.0625F, 0.015625F, 0.015625F);
    return {
        _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(sums[0], sums[1])), _mm512_broadcast_f32x8(by))};
  }
  template <std::size_t kBits>
  static Sixteen dot_unit(const Codes& codes, const std::int16_t* x) {
    static_assert(kBits == 8);
    const auto words = [&](std::size_t at) {
      const auto load = [at](const std::uint8_t* p) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + at));
      };
      return _mm512_cvtepi8_epi16(
          _mm256_inserti128_si256(_mm256_castsi128_si256(load(codes.first)), load(codes.second), 1));
    };
    const __m512i some = _mm512_dpwssd_epi32(_mm512_setzero_si512(), words(0), twice(x));
    return {_mm512_cvtepi32_ps(_mm512_dpwssd_epi32(some, words(16), twice(x + 16)))};
  }

 private:
  // 32 bytes, for both rows.
  template <typename Input>
  static __m512i twice(const Input* x) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  }
  static __m512i both(__m256i low, __m256i high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
  static __m512i nibbles(const std::uint8_t* p, const std::uint8_t* q) {
    const auto nibbles_at = [](const std::uint8_t* at) {
      return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    };
    const __m512i down = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0, 4, 4, 4, 4);
    return _mm512_and_si512(_mm512_srlv_epi32(both(nibbles_at(p), nibbles_at(q)), down),
                            _mm512_set1_epi8(15));
  }
  // Bits that lie apart, turned to `kMask`'s place and put above others.
  template <int kMask>
  static __m512i merged(__m512i low, __m512i turned) {
    return _mm512_ternarylogic_epi32(low, turned, _mm512_set1_epi8(kMask), 0xF8);  // low | (turned & mask)
  }
  template <int kPlace>
  static __m512i with_bits(__m512i low, const std::uint8_t* p, const std::uint8_t* q) {
    const __m512i bits =
        both(_mm256_set1_epi32(load_as<std::int32_t>(p)), _mm256_set1_epi32(load_as<std::int32_t>(q)));
    constexpr int k = kPlace + 32;
    return merged<1 << kPlace>(
        low, _mm512_rolv_epi32(bits, _mm512_setr_epi32(k, k - 1, k - 2, k - 3, k - 4, k - 5, k - 6, k - 7, k,
                                                       k - 1, k - 2, k - 3, k - 4, k - 5, k - 6, k - 7)));
  }
};
inline Sixteen fma(Sixteen a, Sixteen b, Sixteen c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Sixteen operator*(Sixteen a, Sixteen b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Sixteen operator+(Sixteen a, Sixteen b) { return {_mm512_add_ps(a.v, b.v)}; }
using Lanes = Sixteen;

inline Lanes each_row(const float* p) { return {_mm512_broadcast_f32x8(_mm256_loadu_ps(p))}; }
template <typename Row, typename Of>
inline Lanes of_rows(const Row* row, const Of& of) {
  return {_mm512_insertf32x8(_mm512_castps256_ps512(of(row[0]).v), of(row[1]).v, 1)};
}
template <typename Row>
inline Sixteen::Codes codes_of_rows(const Row* row, std::size_t at) {
  return {row[0].codes + at, row[1].codes + at};
}
inline void put_sums(const Lanes& lanes, std::size_t rows, float* to) {
  __m512 s = _mm512_add_ps(lanes.v, _mm512_shuffle_f32x4(lanes.v, lanes.v, 0xB1));
  s = _mm512_add_ps(s, _mm512_permute_ps(s, 0xEE));
  s = _mm512_add_ps(s, _mm512_movehdup_ps(s));
  to[0] = _mm512_cvtss_f32(s);
  if (rows > 1) to[1] = _mm_cvtss_f32(_mm512_extractf32x4_ps(s, 2));
}

// Scales of eight units, times those of their inputs: of the first four in each quarter of a register, the
// quarters two rows', and of the others.
struct TokenScales {
  __m512 units[2];
  TokenScales() = default;
  TokenScales(const Sixteen& of_rows, const float* of_inputs) {
    const auto inputs = [of_inputs](std::size_t u) {
      return _mm512_broadcast_f32x4(_mm_loadu_ps(of_inputs + u));
    };
    units[0] = _mm512_mul_ps(_mm512_shuffle_f32x4(of_rows.v, of_rows.v, 0xA0), inputs(0));
    units[1] = _mm512_mul_ps(_mm512_shuffle_f32x4(of_rows.v, of_rows.v, 0xF5), inputs(4));
  }
  template <std::size_t kUnit>
  Sixteen of() const {
    return {_mm512_permute_ps(units[kUnit / 4], kUnit % 4 * 0x55)};
  }
};
// Two scales of each of eight units, those of the last four in `later`.
struct PairScales {
  __m512 units[4];
  PairScales() = default;
  PairScales(const Sixteen& scales, const Sixteen& later) {
    units[0] = _mm512_shuffle_f32x4(scales.v, scales.v, 0xA0);
    units[1] = _mm512_shuffle_f32x4(scales.v, scales.v, 0xF5);
    units[2] = _mm512_shuffle_f32x4(later.v, later.v, 0xA0);
    units[3] = _mm512_shuffle_f32x4(later.v, later.v, 0xF5);
  }
  template <std::size_t kUnit>
  Sixteen of() const {
    constexpr int i = kUnit % 2 * 2, j = i + 1;
    const __m512i places = _mm512_setr_epi32(i, i, i, i, j, j, j, j, i, i, i, i, j, j, j, j);
    return {_mm512_permutevar_ps(units[kUnit / 2], places)};
  }
};
#endif
