// AVX2's products of codes with AVX-VNNI, which processors without AVX-512 have had since 2021: one
// instruction in place of three, and AVX2's bits, as sums of codes are exact.
#if defined(__AVXVNNI__)
#include "kernels/levels/kernels_avx2.cpp"
#elif defined(__x86_64__)
#include "kernels/levels/levels.h"

namespace flashllm::avx2_vnni {
extern const LevelKernels kLevel;
const LevelKernels kLevel = {};
}  // namespace flashllm::avx2_vnni
#endif
