// AVX-512 F/BW/VL/DQ: a unit is one vector.
#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own header starts its intrinsics from a deliberately undefined register and then warns about it.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <type_traits>

#include "attention/group_codec.h"
#include "attention/group_scales.h"

namespace flashllm::avx512 {

namespace {

struct Vec {
  __m512 v;

  static Vec set(float value) { return {_mm512_set1_ps(value)}; }
  static Vec load_f32(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load_f16(const std::uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  template <int bits>
  static Vec load_codes(const std::uint8_t* p) {
    if constexpr (bits == 8) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))};
    } else {
      std::int32_t earlier, later;
      __builtin_memcpy(&earlier, p, 4);
      __builtin_memcpy(&later, p + 4, 4);
      const __m512i words = _mm512_mask_set1_epi32(_mm512_set1_epi32(earlier), 0xFF00, later);
      const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
      return {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srlv_epi32(words, shifts), _mm512_set1_epi32(15)))};
    }
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store_rounded(std::uint8_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
  }
};

inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec where_positive(Vec a, Vec b) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(b.v, _mm512_setzero_ps(), _CMP_GT_OQ), a.v)};
}

#include "attention/group_codec_impl.h"

}  // namespace

extern const GroupKernels kGroups;
const GroupKernels kGroups = kLoops;

}  // namespace flashllm::avx512

#endif
