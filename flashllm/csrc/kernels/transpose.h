// Four rows of floats as four columns.
#pragma once

#include <cstddef>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace flashllm {

// to[j][i] = from[i][first + j] for i, j < 4; rows of `to` are `row` floats apart.
inline void transpose(const float* const* from, std::size_t first, float* to, std::size_t row) {
#if defined(__x86_64__)
  __m128 a = _mm_loadu_ps(from[0] + first), b = _mm_loadu_ps(from[1] + first);
  __m128 c = _mm_loadu_ps(from[2] + first), d = _mm_loadu_ps(from[3] + first);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  _mm_storeu_ps(to, a);
  _mm_storeu_ps(to + row, b);
  _mm_storeu_ps(to + 2 * row, c);
  _mm_storeu_ps(to + 3 * row, d);
#else
  for (std::size_t i = 0; i < 4; ++i)
    for (std::size_t j = 0; j < 4; ++j) to[j * row + i] = from[i][first + j];
#endif
}

}  // namespace flashllm
