#include "kernels/levels/kernels_int8.h"

#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// As in kernels_avx512.cpp: GCC 12 warns about its own header.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

#include <algorithm>

#include "io/error.h"

namespace flashllm {

namespace {

constexpr std::size_t kRowGrain =
    64;  // rows a thread takes at a time: half the bytes of a 16-bit grain of 32
constexpr std::size_t kRowsTogether = 4;  // rows that share the loads of x, and whose sums overlap
static_assert(kRowGrain % kRowsTogether == 0, "splits must fall between groups");

// out[r] = sum_j codes[r][j] * x[j] for R rows of k; a row's order of additions is the same for every R.
template <std::size_t R>
void dots_scalar(const std::int8_t* codes, const float* x, std::size_t k, float* out) {
  constexpr std::size_t kLanes = 8;  // so that a compiler may vectorise what the target has
  for (std::size_t r = 0; r < R; ++r) {
    const std::int8_t* row = codes + r * k;
    float lane[kLanes] = {};
    std::size_t j = 0;
    for (; j + kLanes <= k; j += kLanes)
      for (std::size_t i = 0; i < kLanes; ++i) lane[i] += static_cast<float>(row[j + i]) * x[j + i];
    float total = ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
    for (; j < k; ++j) total += static_cast<float>(row[j]) * x[j];
    out[r] = total;
  }
}

#if defined(__x86_64__)

template <std::size_t R>
__attribute__((target("avx2,fma"))) void dots_avx2(const std::int8_t* codes, const float* x, std::size_t k,
                                                   float* out) {
  constexpr std::size_t kWidth = 8;
  __m256 sum[R];
  for (std::size_t r = 0; r < R; ++r) sum[r] = _mm256_setzero_ps();
  std::size_t j = 0;
  for (; j + kWidth <= k; j += kWidth) {
    const __m256 xv = _mm256_loadu_ps(x + j);
    for (std::size_t r = 0; r < R; ++r) {
      const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + r * k + j));
      sum[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)), xv, sum[r]);
    }
  }
  for (std::size_t r = 0; r < R; ++r) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(sum[r]), _mm256_extractf128_ps(sum[r], 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    float total = _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    for (std::size_t t = j; t < k; ++t)
      total = __builtin_fmaf(static_cast<float>(codes[r * k + t]), x[t], total);
    out[r] = total;
  }
}

template <std::size_t R>
__attribute__((target("avx512f,avx512bw,avx512vl"))) void dots_avx512(const std::int8_t* codes,
                                                                      const float* x, std::size_t k,
                                                                      float* out) {
  constexpr std::size_t kWidth = 16;
  __m512 sum[R];
  for (std::size_t r = 0; r < R; ++r) sum[r] = _mm512_setzero_ps();
  std::size_t j = 0;
  for (; j + kWidth <= k; j += kWidth) {
    const __m512 xv = _mm512_loadu_ps(x + j);
    for (std::size_t r = 0; r < R; ++r) {
      const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + r * k + j));
      sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen)), xv, sum[r]);
    }
  }
  if (j < k) {  // ranks are seldom multiples of 16: the rest in one masked step
    const auto rest = static_cast<__mmask16>((1U << (k - j)) - 1U);
    const __m512 xv = _mm512_maskz_loadu_ps(rest, x + j);
    for (std::size_t r = 0; r < R; ++r) {
      const __m128i some = _mm_maskz_loadu_epi8(rest, codes + r * k + j);
      sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(some)), xv, sum[r]);
    }
  }
  for (std::size_t r = 0; r < R; ++r) out[r] = _mm512_reduce_add_ps(sum[r]);
}

#endif

using Dots = void (*)(const std::int8_t* codes, const float* x, std::size_t k, float* out);
struct DotsOfLevel {
  Dots together;  // kRowsTogether rows
  Dots one;
};

DotsOfLevel dots_of(SimdLevel level) {
  require_simd_level(level);
#if defined(__x86_64__)
  if (level >= SimdLevel::avx512) return {dots_avx512<kRowsTogether>, dots_avx512<1>};
  if (level >= SimdLevel::avx2) return {dots_avx2<kRowsTogether>, dots_avx2<1>};
#endif
  return {dots_scalar<kRowsTogether>, dots_scalar<1>};
}

}  // namespace

void linear_int8(const Int8Weights& weights, const float* x, float* out, ThreadPool& pool, SimdLevel level) {
  const DotsOfLevel dots = dots_of(level);
  const KernelTable& halves = kernel_table(level, Dtype::f16);
  const std::size_t k = weights.columns;
  pool.parallel_for(weights.rows, kRowGrain, [&](std::size_t begin, std::size_t end) {
    float scales[kRowGrain];
    for (std::size_t first = begin; first < end; first += kRowGrain) {
      const std::size_t last = std::min(first + kRowGrain, end);
      std::size_t r = first;
      for (; r + kRowsTogether <= last; r += kRowsTogether)
        dots.together(weights.codes + r * k, x, k, out + r);
      for (; r < last; ++r) dots.one(weights.codes + r * k, x, k, out + r);
      halves.to_f32(weights.scales + first, last - first, scales);
      for (r = first; r < last; ++r) out[r] *= scales[r - first];
      if (weights.bias != nullptr)
        for (r = first; r < last; ++r) out[r] += weights.bias[r];
    }
  });
}

}  // namespace flashllm
