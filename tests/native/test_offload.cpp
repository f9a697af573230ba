// A batch's attention over packed pages, in exactly as much memory as it may touch: the same bits at every
// level and for any number of threads.
#include <random>
#include <vector>

#include "attention/page_format.h"
#include "attention_fixture.h"
#include "check.h"
#include "simd_levels.h"

namespace {

using namespace attention_tests;

void test_pages(int bits, Dtype dtype) {
  constexpr std::size_t kHeads = 4, kKvHeads = 2, kDim = 20, kWidth = kKvHeads * kDim, kSequences = 3;
  constexpr std::size_t kLengths[kSequences] = {1, 64, 150};
  const PageFormat format(kKvHeads, kDim, dtype, bits);
  const std::vector<float> rows = random_floats(2 * 192 * kWidth, 1);
  const std::vector<float> q = random_floats(kSequences * kHeads * kDim, 4, 0.2F);
  for (const double share : {1.0, 0.1}) {
    for (const SimdLevel level : simd_levels()) {
      std::vector<std::byte> plain(3 * format.plain_nbytes(), std::byte{0xFF});
      std::vector<std::byte> sealed(3 * format.sealed_nbytes());
      std::vector<const std::byte*> pages, packed;
      for (std::size_t position = 0; position < 192; ++position)
        format.write(rows.data() + 2 * position * kWidth, rows.data() + (2 * position + 1) * kWidth, position,
                     plain.data() + position / kPageTokens * format.plain_nbytes());
      for (std::size_t page = 0; page < 3; ++page) {
        pages.push_back(plain.data() + page * format.plain_nbytes());
        packed.push_back(sealed.data() + page * format.sealed_nbytes());
        if (format.is_packed())
          CHECK(format.pack(format.view(pages.data()), page, sealed.data() + page * format.sealed_nbytes(),
                            level));
      }
      KvView view = format.view(pages.data());
      view.format = format.is_packed() ? &format : nullptr;
      view.packed_pages = packed.data();
      AttentionShape shape;
      shape.heads = kHeads;
      shape.kv_heads = kKvHeads;
      shape.head_dim = kDim;
      shape.dtype = dtype;
      shape.share = share;
      std::vector<float> first;
      for (const int threads : {1, 4}) {
        ThreadPool pool(threads);
        std::vector<float> out(q.size());
        std::vector<AttendingToken> tokens;
        for (std::size_t i = 0; i < kSequences; ++i)
          tokens.push_back({q.data() + i * kHeads * kDim, view, kLengths[i], out.data() + i * kHeads * kDim});
        attend_each(shape, tokens.data(), tokens.size(), pool, level);
        if (first.empty()) first = out;
        CHECK(out == first);
      }
    }
  }
}

}  // namespace

void test_offload(int) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16})
    for (const int bits : {0, 4, 8}) test_pages(bits, dtype);
}
