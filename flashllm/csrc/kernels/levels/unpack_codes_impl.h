// UnpackCodes of row_codecs.h; included behind row_codecs_inputs_impl.h and eight_x86.h. Codes of 16 bits are
// less what they begin at, unless the weights have minimums.

template <typename Units>
inline __m256i signed_codes(const std::uint8_t* p) {
  if constexpr (Units::kTable != nullptr) return Eight::looked_up(Units::kTable, p);
  constexpr int kZero = Units::kMinimums ? 0 : static_cast<int>(zero_code<Units::kBits>());
  const __m256i codes = Eight::codes_of<Units::kBits>(p);
  return kZero == 0 ? codes : _mm256_sub_epi8(codes, _mm256_set1_epi8(kZero));
}

// Codes a byte each, from 0 on.
template <typename Units>
inline __m256i byte_codes(const std::uint8_t* p) {
  if constexpr (Units::kTable != nullptr) return Eight::looked_up(kFp4FromZero, p);
  return Eight::codes_of<Units::kBits>(p);
}

template <typename Units, bool kBytes = false>
void unpack_codes(const void* vector, std::size_t k, std::size_t first, std::size_t units, void* codes,
                  float* scales, float* offsets) {
  static_assert(kBytes || !Units::kMinimums, "products of 16 bits take no minimums");
  static_assert(!kBytes || (Units::kScales == 1 && Units::kBits <= 5), "such bytes are too large");
  const auto row = Units::at(vector, k);
  const std::size_t u = first / kCodeUnit;
  const Eight scale = Units::scales(row, u);
  scale.store(scales);
  if constexpr (Units::kScales == 2) Units::later_scales(row, u).store(scales + kScaled);
  if constexpr (Units::kMinimums) Units::offsets(row, u, scale).store(offsets);
  const std::uint8_t* from = row.codes + u * kCodeUnit * Units::kBits / 8;
  auto* to = static_cast<__m256i*>(codes);
  // Of the terms that come next, behind those of other rows.
  for (std::size_t line = 0; line < kCodeTerms * Units::kBits / 8; line += kCacheLine)
    __builtin_prefetch(from + kCodeTerms * Units::kBits / 8 + line, 0, 2);
  for (std::size_t i = 0; i < units; ++i, from += kCodeUnit * Units::kBits / 8) {
    if constexpr (kBytes) {
      _mm256_storeu_si256(to++, byte_codes<Units>(from));
    } else {
      const __m256i bytes = signed_codes<Units>(from);
      _mm256_storeu_si256(to++, _mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes)));
      _mm256_storeu_si256(to++, _mm256_cvtepi8_epi16(_mm256_extracti128_si256(bytes, 1)));
    }
  }
}

// In the order of RowCodec.
const UnpackCodes kUnpack[kCodedCodecs] = {
    unpack_codes<GroupedUnits<8, 32, false>>,
    unpack_codes<GroupedUnits<8, 64, false>>,
    unpack_codes<GroupedUnits<4, 32, false>, true>,
    unpack_codes<GroupedUnits<4, 64, false>, true>,
    unpack_codes<GroupedUnits<4, 32, true>, true>,
    unpack_codes<GroupedUnits<4, 64, true>, true>,
    nullptr,  // bf12
    unpack_codes<CarriedUnits<5, 32, false, false>, true>,
    unpack_codes<CarriedUnits<5, 32, true, false>, true>,
    unpack_codes<CarriedUnits<4, 32, true, true>, true>,
    unpack_codes<CarriedUnits<5, 32, true, true>, true>,
    unpack_codes<CarriedUnits<6, 16, false, true>>,
    unpack_codes<Mxfp4Units, true>,
    nullptr,  // q2_k
    unpack_codes<CarriedUnits<3, 16, false, true>>,
    unpack_codes<CarriedUnits<4, 32, false, false, true>>,
    unpack_codes<CarriedUnits<4, 32, false, true, true>>,
    unpack_codes<TernaryUnits, true>,
    unpack_codes<Nvfp4Units>,
};
