// A batch's attention over packed blocks, in exactly as much memory as it may touch: the same bits at every
// level and for any number of threads.
#include <cstring>
#include <random>
#include <vector>

#include "attention_fixture.h"
#include "check.h"
#include "io/error.h"
#include "offload/batch_attention.h"

namespace {

using namespace attention_tests;

std::vector<std::byte> narrowed(const std::vector<float>& values, Dtype dtype) {
  std::vector<std::byte> narrow(values.size() * dtype_nbytes(dtype));
  kernel_table(SimdLevel::scalar, dtype).from_f32(values.data(), values.size(), narrow.data());
  return narrow;
}

void test_blocks(KvLayout layout, int bits, Dtype dtype) {
  constexpr std::size_t kHeads = 4, kKvHeads = 2, kDim = 20, kSequences = 3, kSlots = 4;
  constexpr std::size_t kLengths[kSequences] = {1, 64, 150};
  const std::size_t item = dtype_nbytes(dtype);
  for (const double share : {1.0, 0.1}) {
    for (const SimdLevel level : simd_levels()) {
      const KvBlockFormat format(kKvHeads, kDim, dtype, layout, bits);
      std::vector<std::byte> plain(kSlots * format.block_nbytes(), std::byte{0xFF});
      std::vector<std::byte> sealed(2 * format.sealed_nbytes());
      const std::vector<std::byte> rows = narrowed(random_floats(2 * 256 * kKvHeads * kDim, 1), dtype);
      for (std::size_t position = 0; position < 256; ++position)
        format.write(rows.data() + 2 * position * kKvHeads * kDim * item,
                     rows.data() + (2 * position + 1) * kKvHeads * kDim * item, position,
                     plain.data() + position / kKvBlock * format.block_nbytes());
      for (std::size_t block = 0; block < 2; ++block)
        CHECK(format.seal(plain.data() + block * format.block_nbytes(),
                          sealed.data() + block * format.sealed_nbytes(), level));
      const std::vector<KvPlace> places = {{1, 0}, {1, 1}, {0, 2}};
      const std::vector<KvArena> arenas = {{plain.data(), false}, {sealed.data(), true}};
      const std::vector<std::byte> q = narrowed(random_floats(kSequences * kHeads * kDim, 4), dtype);
      std::vector<std::byte> first;
      for (const int threads : {1, 4}) {
        ThreadPool pool(threads);
        const BatchAttention attention(kHeads, format, {0.2F}, pool, level);
        std::vector<std::byte> out(q.size());
        std::vector<DecodingToken> tokens;
        for (std::size_t i = 0; i < kSequences; ++i)
          tokens.push_back({q.data() + i * kHeads * kDim * item, places.data(), kLengths[i],
                            out.data() + i * kHeads * kDim * item});
        CHECK(attention.decode(arenas, tokens.data(), tokens.size(), share, {}) > 0);
        if (first.empty()) first = out;
        CHECK(out == first);
      }
    }
  }
}

}  // namespace

void test_offload(int) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    for (const int bits : {2, 3, 4, 8}) {
      for (const KvLayout layout : {KvLayout::plain, KvLayout::hidden, KvLayout::kivi})
        test_blocks(layout, bits, dtype);
    }
  }
}
