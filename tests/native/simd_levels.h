// The SIMD levels of this processor, the best one last.
#pragma once

#include <vector>

#include "io/error.h"
#include "kernels/kernels.h"

namespace flashllm {

inline std::vector<SimdLevel> simd_levels() {
  std::vector<SimdLevel> levels;
  for (const SimdLevel level :
       {SimdLevel::scalar, SimdLevel::neon, SimdLevel::neon_dot, SimdLevel::avx2, SimdLevel::avx2_vnni,
        SimdLevel::avx512, SimdLevel::avx512_bf16, SimdLevel::avx512_amx}) {
    try {
      require_simd_level(level);
      levels.push_back(level);
    } catch (const CoreError&) {
    }
  }
  return levels;
}

}  // namespace flashllm
