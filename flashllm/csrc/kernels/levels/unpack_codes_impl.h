// UnpackCodes of row_codecs.h; included behind row_codecs_inputs_impl.h and eight_x86.h. Codes are less what
// they begin at, unless the weights have minimums.

template <typename Units>
inline __m256i signed_codes(const std::uint8_t* p) {
  if constexpr (Units::kTable != nullptr) return Eight::looked_up(Units::kTable, p);
  constexpr int kZero = Units::kMinimums ? 0 : static_cast<int>(zero_code<Units::kBits>());
  const __m256i codes = Eight::codes_of<Units::kBits>(p);
  return kZero == 0 ? codes : _mm256_sub_epi8(codes, _mm256_set1_epi8(kZero));
}

template <typename Units>
void unpack_codes(const void* vector, std::size_t k, std::size_t first, std::size_t units,
                  std::int16_t* codes, float* scales, float* offsets) {
  const auto row = Units::at(vector, k);
  const std::size_t u = first / kCodeUnit;
  const Eight scale = Units::scales(row, u);
  scale.store(scales);
  if constexpr (Units::kScales == 2) Units::later_scales(row, u).store(scales + kScaled);
  if constexpr (Units::kMinimums) Units::offsets(row, u, scale).store(offsets);
  const std::uint8_t* from = row.codes + u * kCodeUnit * Units::kBits / 8;
  for (std::size_t i = 0; i < units; ++i, from += kCodeUnit * Units::kBits / 8, codes += kCodeUnit) {
    const __m256i bytes = signed_codes<Units>(from);
    auto* to = reinterpret_cast<__m256i*>(codes);
    _mm256_storeu_si256(to, _mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes)));
    _mm256_storeu_si256(to + 1, _mm256_cvtepi8_epi16(_mm256_extracti128_si256(bytes, 1)));
  }
}

// In the order of RowCodec.
const UnpackCodes kUnpack[kCodedCodecs] = {
    unpack_codes<GroupedUnits<8, 32, false>>,
    unpack_codes<GroupedUnits<8, 64, false>>,
    unpack_codes<GroupedUnits<4, 32, false>>,
    unpack_codes<GroupedUnits<4, 64, false>>,
    unpack_codes<GroupedUnits<4, 32, true>>,
    unpack_codes<GroupedUnits<4, 64, true>>,
    nullptr,  // bf12
    unpack_codes<CarriedUnits<5, 32, false, false>>,
    unpack_codes<CarriedUnits<5, 32, true, false>>,
    unpack_codes<CarriedUnits<4, 32, true, true>>,
    unpack_codes<CarriedUnits<5, 32, true, true>>,
    unpack_codes<CarriedUnits<6, 16, false, true>>,
    unpack_codes<Mxfp4Units>,
    nullptr,  // q2_k
    unpack_codes<CarriedUnits<3, 16, false, true>>,
    unpack_codes<CarriedUnits<4, 32, false, false, true>>,
    unpack_codes<CarriedUnits<4, 32, false, true, true>>,
    unpack_codes<TernaryUnits>,
    unpack_codes<Nvfp4Units>,
};
