// What a processor and its system offer. An x86-64 one is asked itself: __builtin_cpu_supports asks the
// linked runtime, and Zig's says "nothing", which left a published wheel at the scalar level.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>

namespace flashllm {

struct Processor {
  bool avx2 = false;      // with FMA and F16C
  bool avx_vnni = false;  // with avx2
  bool avx512 = false;    // F, BW, VL and DQ
  bool avx512_vnni = false;
  bool avx512_bf16 = false;  // each of AVX-512 has those above it
};

inline Processor this_processor() {
  Processor found;
  unsigned a, b, c, d;
  constexpr unsigned kFused = bit_FMA | bit_F16C | bit_OSXSAVE;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kFused) != kFused) return found;
  unsigned kept, high;  // the registers that the system keeps for a thread
  __asm__("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return found;
  constexpr unsigned kAvx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
  found.avx2 = (kept & 0x06U) == 0x06U && (b & bit_AVX2) != 0;
  found.avx512 = found.avx2 && (kept & 0xE6U) == 0xE6U && (b & kAvx512) == kAvx512;
  found.avx512_vnni = found.avx512 && (c & bit_AVX512VNNI) != 0;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) == 0) return found;
  constexpr unsigned kAvxVnni = 1U << 4;
  found.avx_vnni = found.avx2 && (a & kAvxVnni) != 0;
  found.avx512_bf16 = found.avx512_vnni && (a & bit_AVX512BF16) != 0;
  return found;
}

}  // namespace flashllm
#elif defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#endif

namespace flashllm {

struct Processor {
  bool dot = false;  // products of four bytes, summed
};

inline Processor this_processor() {
#if defined(__linux__)
  return {(getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0};
#else
  return {true};  // Apple's all have them
#endif
}

}  // namespace flashllm
#endif
