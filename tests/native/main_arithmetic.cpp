// The core's tests of arithmetic alone, for another machine's emulator. Prints the best level's digest.
#include <cinttypes>
#include <cstdio>

#include "check.h"
#include "digest.h"

int main() {
  std::printf("digest %" PRIu64 "\n", flashllm::digest_of(flashllm::best_simd_level()));
  test_arithmetic(1);
  std::puts("tests of arithmetic passed");
  return 0;
}
