// NEON's products of codes by the dot products of Armv8.2, which most processors have had since 2018: one
// instruction in place of four or more, and NEON's bits, as sums of codes are exact.
#if defined(__ARM_FEATURE_DOTPROD)
#define FLASHLLM_NEON neon_dot
#define FLASHLLM_NEON_DOT
#include "kernels/levels/kernels_neon.cpp"
#elif defined(__aarch64__)
#include "kernels/levels/levels.h"

namespace flashllm::neon_dot {
extern const LevelKernels kLevel;
const LevelKernels kLevel = {};
}  // namespace flashllm::neon_dot
#endif
