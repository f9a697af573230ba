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
  static Eight set_units(const float* p) { return set(*p); }
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
  // With VNNI lanes 2 q and 2 q + 1 are of codes where they lie, 4^q times what they are, until the end.
  static Eight dot_pairs(const std::uint8_t* p, const std::int8_t* x, std::size_t units) {
    __m256i sums = _mm256_setzero_si256();
#if defined(__AVX512VNNI__)
    constexpr std::int64_t kEach = 0x0303030303030303;
    const __m256i places = _mm256_setr_epi64x(
        kEach, kEach << 2, kEach << 4, static_cast<std::int64_t>(static_cast<std::uint64_t>(kEach) << 6));
    if (units == 8) {  // two at a time
      const __m512i all = _mm512_loadu_si512(p), both = _mm512_broadcast_i64x4(places);
      __m512i some = _mm512_setzero_si512(), others = some;
      const auto add = [&](__m512i to, long long u) {
        const __m512i pair =
            _mm512_permutexvar_epi64(_mm512_setr_epi64(u, u, u, u, u + 1, u + 1, u + 1, u + 1), all);
        return _mm512_dpbusd_epi32(to, _mm512_and_si512(pair, both), _mm512_loadu_si512(x + 32 * u));
      };
      some = add(add(some, 0), 4), others = add(add(others, 2), 6);
      some = _mm512_add_epi32(some, others);
      sums = _mm256_add_epi32(_mm512_castsi512_si256(some), _mm512_extracti64x4_epi64(some, 1));
    } else {
      for (std::size_t u = 0; u < units; ++u)
        sums = _mm256_dpbusd_epi32(
            sums, _mm256_and_si256(_mm256_set1_epi64x(load_as<std::int64_t>(p + 8 * u)), places),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 32 * u)));
    }
    const __m256 by = _mm256_setr_ps(1, 1, 0.25F, 0.25F, 0.0625F, 0.0625F, 0.015625F, 0.015625F);
    return {_mm256_mul_ps(_mm256_cvtepi32_ps(sums), by)};
#else
    for (std::size_t u = 0; u < units; ++u) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 32 * u));
      sums = _mm256_add_epi32(sums, sum_by_fours(codes_of<2>(p + 8 * u), bytes));
    }
    return {_mm256_cvtepi32_ps(sums)};
#endif
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
#if defined(__AVX512VNNI__)
    const __m256i some = _mm256_dpwssd_epi32(_mm256_setzero_si256(), low, first);
    return {_mm256_cvtepi32_ps(_mm256_dpwssd_epi32(some, high, second))};
#else
    return {
        _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_madd_epi16(low, first), _mm256_madd_epi16(high, second)))};
#endif
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
#if defined(__AVX512VNNI__)
    return _mm256_dpbusd_epi32(_mm256_setzero_si256(), magnitudes, bytes);
#else
    return _mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes, bytes), _mm256_set1_epi16(1));
#endif
  }
};

inline Eight fma(Eight a, Eight b, Eight c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Eight operator+(Eight a, Eight b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Eight operator*(Eight a, Eight b) { return {_mm256_mul_ps(a.v, b.v)}; }

#if defined(__AVX512VNNI__)
// The same of two units that follow each other.
struct Sixteen {
  __m512 v;

  static Sixteen zero() { return {_mm512_setzero_ps()}; }
  // A float for each unit, and two.
  static Sixteen set_units(const float* p) {
    const __m512 both =
        _mm512_castpd_ps(_mm512_set1_pd(load_as<double>(reinterpret_cast<const std::uint8_t*>(p))));
    return {_mm512_permutevar_ps(both, _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1))};
  }
  static Sixteen set_halves(const float* p) {
    const __m512 four = _mm512_broadcast_f32x4(_mm_loadu_ps(p));
    return {_mm512_permutevar_ps(four, _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3))};
  }
  Eight lower() const { return {_mm512_castps512_ps256(v)}; }
  Eight upper() const { return {_mm512_extractf32x8_ps(v, 1)}; }
  void set_lower(Eight half) { v = _mm512_insertf32x8(v, half.v, 0); }

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
    const __m512i bytes = _mm512_loadu_si512(x), none = _mm512_setzero_si512();
    if constexpr (kZero == 0) return {_mm512_cvtepi32_ps(_mm512_dpbusd_epi32(none, codes, bytes))};
    const __m512i too_many = _mm512_dpbusd_epi32(none, _mm512_set1_epi8(static_cast<char>(kZero)), bytes);
    return {_mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_sub_epi32(none, too_many), codes, bytes))};
  }
  template <std::size_t kBits>
  static Sixteen dot_unit(const std::uint8_t* p, const std::int8_t* x) {
    constexpr int kZero = kBits == 8 ? 128 : kBits == 3 || kBits == 6 ? 1 << (kBits - 1) : 0;
    return dot<kZero>(codes_of<kBits>(p, p + kCodeUnit * kBits / 8), x);
  }
  static Sixteen dot_fp4_unit(const std::uint8_t* codes, const std::int8_t* x) {
    return dot<0>(looked_up(kFp4FromZero, codes, codes + kCodeUnit / 2), x);
  }
  static Sixteen dot_table_unit(const std::int8_t* table, const std::uint8_t* codes, const std::int8_t* x) {
    return dot<128>(_mm512_xor_si512(looked_up(table, codes, codes + kCodeUnit / 2), _mm512_set1_epi8(-128)),
                    x);
  }
  static Sixteen unit_sums(const std::int8_t* x) { return dot<0>(_mm512_set1_epi8(1), x); }
  template <std::size_t kBits>
  static Sixteen dot_unit(const std::uint8_t* codes, const std::int16_t* x) {
    const Eight first = Eight::dot_unit<kBits>(codes, x),
                second = Eight::dot_unit<kBits>(codes + kCodeUnit, x + kCodeUnit);
    return {_mm512_insertf32x8(_mm512_castps256_ps512(first.v), second.v, 1)};
  }

 private:
  static __m512i both(__m256i low, __m256i high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
  static __m512i nibbles(const std::uint8_t* p, const std::uint8_t* q) {
    const auto twice = [](const std::uint8_t* at) {
      return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    };
    const __m512i down = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0, 4, 4, 4, 4);
    return _mm512_and_si512(_mm512_srlv_epi32(both(twice(p), twice(q)), down), _mm512_set1_epi8(15));
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
#endif
