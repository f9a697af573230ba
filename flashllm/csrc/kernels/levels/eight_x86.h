// Eight floats in half a register of AVX-512 or a whole one of AVX2, for row_codecs_inputs_impl.h. Included
// by each kernels_<level>.cpp of x86, in its namespace.

struct Eight {
  __m256 v;

  static Eight set(float value) { return {_mm256_set1_ps(value)}; }
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

  // The first n lanes, and zeros.
  Eight first(std::size_t n) const {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lanes);
    return {_mm256_and_ps(v, _mm256_castsi256_ps(below))};
  }

  // A unit's codes, from 0 on but for those of 8 bits.
  using Codes = __m256i;
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
  // What a unit's codes have in a table of sixteen.
  template <std::size_t kBits>
  static __m256i looked_up(const std::int8_t* table, const std::uint8_t* codes) {
    const __m256i values =
        _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
    return _mm256_shuffle_epi8(values, codes_of<kBits>(codes));
  }
  // Codes of 2 bits times factors of four bits, one for each half of a unit.
  static __m256i times(__m256i codes, int first, int second) {
    const __m128i products = _mm_set1_epi32(0x03020100);  // by 1; by a factor, no byte of it overflows
    const __m128i by[] = {_mm_mullo_epi32(products, _mm_set1_epi32(first)),
                          _mm_mullo_epi32(products, _mm_set1_epi32(second))};
    return _mm256_shuffle_epi8(_mm256_inserti128_si256(_mm256_castsi128_si256(by[0]), by[1], 1), codes);
  }
  static __m256i less(__m256i codes, int zero) {
    return _mm256_sub_epi8(codes, _mm256_set1_epi8(static_cast<char>(zero)));
  }
  static void put(__m256i codes, void* to) { _mm256_storeu_si256(static_cast<__m256i*>(to), codes); }
  static void put_wide(__m256i codes, std::int16_t* to) {
    put(_mm256_cvtepi8_epi16(_mm256_castsi256_si128(codes)), to);
    put(_mm256_cvtepi8_epi16(_mm256_extracti128_si256(codes, 1)), to + kCodeUnit / 2);
  }
  // Words whose halves are low's and high's.
  static void put_pairs(__m256i low, __m256i high, std::uint32_t* to) {
    const __m256i even = _mm256_unpacklo_epi8(low, high), odd = _mm256_unpackhi_epi8(low, high);
    put(_mm256_cvtepi8_epi16(_mm256_castsi256_si128(even)), to);
    put(_mm256_cvtepi8_epi16(_mm256_castsi256_si128(odd)), to + 8);
    put(_mm256_cvtepi8_epi16(_mm256_extracti128_si256(even, 1)), to + 16);
    put(_mm256_cvtepi8_epi16(_mm256_extracti128_si256(odd, 1)), to + 24);
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
};

inline Eight operator*(Eight a, Eight b) { return {_mm256_mul_ps(a.v, b.v)}; }

#if defined(__AVX512VNNI__)
// The same of two units.
struct Sixteen {
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
  template <std::size_t kBits>
  static __m512i looked_up(const std::int8_t* table, const std::uint8_t* p, const std::uint8_t* q) {
    const __m128i values = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), codes_of<kBits>(p, q));
  }

 private:
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
#endif
