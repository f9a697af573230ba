#include "kernels/group_codec.h"

#include <algorithm>
#include <string>

#include "io/error.h"
#include "kernels/levels/levels.h"

namespace flashllm {

void check_bits(int bits) {
  require(bits == 4 || bits == 8, "bits of a packed value must be 4 or 8, got " + std::to_string(bits));
}

const GroupKernels& group_kernels(SimdLevel level) { return *level_kernels(level).groups; }

bool widen_rows(const std::byte* rows, std::size_t row_stride, std::size_t n, std::size_t columns,
                const KernelTable& kernels, const AttentionKernels& attention, float* to,
                std::size_t stride) {
  bool is_finite = true;
  for (std::size_t r = 0; r < n; ++r, to += stride) {
    kernels.to_f32(rows + r * row_stride, columns, to);
    std::fill(to + columns, to + in_units(columns), to[columns - 1]);
    is_finite &= attention.all_finite(to, in_units(columns));
  }
  return is_finite;
}

}  // namespace flashllm
