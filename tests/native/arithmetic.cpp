// The tests that need no file: they run under an emulator too, which has neither direct reads nor io_uring.
#include "check.h"
#include "digest.h"
#include "simd_levels.h"

void test_arithmetic(int scale) {
  test_thread_pool(scale);
  test_kernels(scale);
  test_norm(scale);
  test_rotary(scale);
  test_sequence_state(scale);
  test_attention(scale);
  test_predictor(scale);
  test_experts(scale);
  test_many_tokens(scale);
  test_offload(scale);
  test_pack(scale);
  test_recurrence(scale);
  // Every kernel of every level, for the sanitizers; the same twice.
  for (const flashllm::SimdLevel level : flashllm::simd_levels())
    CHECK(flashllm::digest_of(level) == flashllm::digest_of(level));
}
