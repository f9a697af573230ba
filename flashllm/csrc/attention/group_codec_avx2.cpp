// AVX2 + F16C: a unit is two vectors.
#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>

#include "attention/group_codec.h"
#include "attention/group_scales.h"

namespace flashllm::avx2 {

namespace {

struct Vec {
  __m256 low, high;

  static Vec set(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static Vec load_f32(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static Vec load_f16(const std::uint16_t* p) {
    const auto* at = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
  }
  template <int bits>
  static Vec load_codes(const std::uint8_t* p) {
    if constexpr (bits == 8) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
              _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
    } else {
      return {halves(p), halves(p + 4)};
    }
  }
  void store(float* p) const {
    _mm256_storeu_ps(p, low);
    _mm256_storeu_ps(p + 8, high);
  }
  void store_rounded(std::uint8_t* p) const {
    const __m256i words =
        _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high)), 0xD8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  }

 private:
  static __m256 halves(const std::uint8_t* p) {  // of four bytes
    std::int32_t word;
    __builtin_memcpy(&word, p, 4);
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    const __m256i codes = _mm256_srlv_epi32(_mm256_set1_epi32(word), shifts);
    return _mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(15)));
  }
};

inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Vec where_positive(Vec a, Vec b) {
  const __m256 zero = _mm256_setzero_ps();
  return {_mm256_and_ps(a.low, _mm256_cmp_ps(b.low, zero, _CMP_GT_OQ)),
          _mm256_and_ps(a.high, _mm256_cmp_ps(b.high, zero, _CMP_GT_OQ))};
}

#include "attention/group_codec_impl.h"

}  // namespace

extern const GroupKernels kGroups;
const GroupKernels kGroups = kLoops;

}  // namespace flashllm::avx2

#endif
