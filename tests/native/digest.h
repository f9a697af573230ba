// The bits that a level computes, in short.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace flashllm {

// Of products, sums, conversions and weights of attention of fixed numbers: equal where two levels give the
// same bits, on whatever machine.
std::uint64_t digest_of(SimdLevel level);

}  // namespace flashllm
