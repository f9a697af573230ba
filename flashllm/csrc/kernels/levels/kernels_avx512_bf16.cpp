// Products of bf16 pairs (AVX512-BF16: Zen 4, Cooper Lake and later): prompts of bf16 models.
#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
// As in kernels_avx512.cpp.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "kernels/kernels.h"

namespace flashllm::avx512_bf16 {

namespace {

constexpr std::size_t kWidth = 16;
constexpr std::size_t kTileRows = 6, kTileVectors = 4;  // sums that fill the registers
constexpr std::size_t kPairsOfLine = 16;                // of consecutive pairs in a cache line

__m512bh load(const std::uint32_t* pairs) { return (__m512bh)_mm512_loadu_si512(pairs); }
__m512bh everywhere(const std::byte* pair) {
  std::int32_t word;
  __builtin_memcpy(&word, pair, sizeof(word));
  return (__m512bh)_mm512_set1_epi32(word);
}

// A tile of R rows by V vectors of c stays in registers for all pairs; meanwhile the next tile's rows are
// fetched.
template <std::size_t R, std::size_t V>
inline void multiply_tile(PairRows a, PairColumns b, std::size_t pairs, float* c, std::size_t c_row) {
  __m512 sum[R][V];
  for (std::size_t r = 0; r < R; ++r)
    for (std::size_t v = 0; v < V; ++v) sum[r][v] = _mm512_loadu_ps(c + r * c_row + v * kWidth);
  for (std::size_t s = 0; s < pairs; ++s) {
    const std::byte* at = a.data + s * a.step;
    if (s % kPairsOfLine == 0)
      for (std::size_t r = 0; r < R; ++r) __builtin_prefetch(at + (R + r) * a.row, 0, 2);
    if (s < R)
      for (std::size_t v = 0; v < V; ++v) __builtin_prefetch(c + (R + s) * c_row + v * kWidth, 1);
    __m512bh column[V];
    for (std::size_t v = 0; v < V; ++v) column[v] = load(b.data + s * b.row + v * kWidth);
    for (std::size_t r = 0; r < R; ++r) {
      const __m512bh factor = everywhere(at + r * a.row);
      for (std::size_t v = 0; v < V; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], factor, column[v]);
    }
  }
  for (std::size_t r = 0; r < R; ++r)
    for (std::size_t v = 0; v < V; ++v) _mm512_storeu_ps(c + r * c_row + v * kWidth, sum[r][v]);
}

template <std::size_t V>
inline void multiply_strip(PairRows a, std::size_t rows, PairColumns b, std::size_t pairs, float* c,
                           std::size_t c_row) {
  std::size_t r = 0;
  const auto from = [&](std::size_t row) { return PairRows{a.data + row * a.row, a.row, a.step}; };
  for (; r + kTileRows <= rows; r += kTileRows)
    multiply_tile<kTileRows, V>(from(r), b, pairs, c + r * c_row, c_row);
  for (; r + 2 <= rows; r += 2) multiply_tile<2, V>(from(r), b, pairs, c + r * c_row, c_row);
  for (; r < rows; ++r) multiply_tile<1, V>(from(r), b, pairs, c + r * c_row, c_row);
}

void multiply_add(PairRows a, std::size_t rows, PairColumns b, std::size_t width, std::size_t pairs, float* c,
                  std::size_t c_row) {
  std::size_t n = 0;
  const auto from = [&](std::size_t column) { return PairColumns{b.data + column, b.row}; };
  for (; n + kTileVectors * kWidth <= width; n += kTileVectors * kWidth)
    multiply_strip<kTileVectors>(a, rows, from(n), pairs, c + n, c_row);
  for (; n + kWidth <= width; n += kWidth) multiply_strip<1>(a, rows, from(n), pairs, c + n, c_row);
}

// Words of alternating halves: of 32 elements, the first 16 in lower halves, the others in upper ones.
__m512i interleave(__m512i halves) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                         22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, halves);
}

void pair_rows(const std::uint16_t* low, const std::uint16_t* high, std::size_t n, std::uint32_t* pairs) {
  std::size_t j = 0;
  for (; j + kWidth <= n; j += kWidth) {
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low + j));
    const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high + j));
    _mm512_storeu_si512(pairs + j, interleave(_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1)));
  }
  for (; j < n; ++j) pairs[j] = low[j] | static_cast<std::uint32_t>(high[j]) << 16;
}

void pair_floats(const float* low, const float* high, std::size_t n, std::uint32_t* pairs) {
  for (std::size_t m = 0; m < n; m += kWidth)
    _mm512_storeu_si512(pairs + m, interleave((__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(high + m),
                                                                           _mm512_loadu_ps(low + m))));
}

}  // namespace

extern const PairKernels kPairs;
const PairKernels kPairs = {multiply_add, pair_rows, pair_floats};

}  // namespace flashllm::avx512_bf16

#endif
