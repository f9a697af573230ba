// Four floats that are worked on together, a register of any processor. Sums of them are added in pairs, so
// they have one order everywhere.
#pragma once

#include <cstddef>
#include <cstring>

namespace flashllm {

constexpr std::size_t kLanes = 4;
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}
inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }
inline Lanes smaller(Lanes a, Lanes b) { return a < b ? a : b; }
inline float sum(Lanes at) { return (at[0] + at[2]) + (at[1] + at[3]); }

// The nearest whole numbers from lowest to highest, ties to even: adding 1.5 * 2^23 leaves no fraction.
inline Lanes nearest(Lanes values, float lowest, float highest) {
  constexpr float kRounder = 12582912.0F;
  return (smaller(larger(values, Lanes{} + lowest), Lanes{} + highest) + kRounder) - kRounder;
}

}  // namespace flashllm
