// The core's tests of arithmetic alone, for another machine's emulator. Prints the digest of every level but
// the scalar one; with an argument, nothing else is done.
#include <cinttypes>
#include <cstdio>

#include "check.h"
#include "digest.h"
#include "simd_levels.h"

int main(int argc, char**) {
  for (const flashllm::SimdLevel level : flashllm::simd_levels())
    if (level != flashllm::SimdLevel::scalar) std::printf("digest %" PRIu64 "\n", flashllm::digest_of(level));
  if (argc > 1) return 0;
  test_arithmetic(1);
  std::puts("tests of arithmetic passed");
  return 0;
}
