// The KV cache: what was appended is read back, blocks are counted and given back, wrong calls change
// nothing.
#include "attention_fixture.h"
#include "io/error.h"

namespace {

using namespace attention_tests;

template <typename Call>
void check_usage_error(const Call& call) {
  try {
    call();
  } catch (const CoreError& error) {
    CHECK(error.kind() == ErrorKind::usage);
    return;
  }
  CHECK(false);
}

// Key of one head at a position, and its value: two rows.
std::vector<float> cached_rows(const KvSequence& sequence, std::size_t layer, std::size_t head,
                               std::size_t position) {
  const KvShape& shape = sequence.shape();
  const KernelTable& kernels = kernel_table(SimdLevel::scalar, shape.dtype);
  const KvView view = sequence.view(layer);
  const std::size_t offset = position % kKvBlock * shape.row_nbytes();
  std::vector<float> rows(2 * shape.head_dim);
  kernels.to_f32(view.key_rows(head, position / kKvBlock) + offset, shape.head_dim, rows.data());
  kernels.to_f32(view.value_rows(head, position / kKvBlock) + offset, shape.head_dim,
                 rows.data() + shape.head_dim);
  return rows;
}

// Rows [length, layers, 2, kv_heads, head_dim]
struct Filled {
  Filled(const KvShape& shape, std::size_t length)
      : sequence(shape),
        row(shape.kv_heads * shape.head_dim),
        rows(rounded(random_floats(length * shape.layers * 2 * row, 5), shape.dtype)) {
    sequence.reserve(length);
    for (std::size_t i = 0; i < length; ++i) append(i);
    sequence.commit(length);
  }
  const float* of(std::size_t position, std::size_t layer) const {
    return rows.data() + (position * sequence.shape().layers + layer) * 2 * row;
  }
  void append(std::size_t position) {
    for (std::size_t layer = 0; layer < sequence.shape().layers; ++layer)
      sequence.append(layer, position, of(position, layer), of(position, layer) + row);
  }
  void check(const KvSequence& checked, std::size_t length) const {
    const KvShape& shape = checked.shape();
    CHECK(checked.length() == length);
    for (std::size_t position = 0; position < length; ++position)
      for (std::size_t layer = 0; layer < shape.layers; ++layer)
        for (std::size_t head = 0; head < shape.kv_heads; ++head) {
          const std::vector<float> found = cached_rows(checked, layer, head, position);
          const float* key = of(position, layer) + head * shape.head_dim;
          CHECK(same_bits(found.data(), key, shape.head_dim));
          CHECK(same_bits(found.data() + shape.head_dim, key + row, shape.head_dim));
        }
  }

  KvSequence sequence;
  std::size_t row;
  std::vector<float> rows;
};

void check_cache(Dtype dtype) {
  const KvShape shape{3, 2, 20, 150, dtype};
  CHECK(shape.block_nbytes() % 4096 == 0 &&
        shape.block_nbytes() >= 3 * 2 * 2 * 64 * 20 * dtype_nbytes(dtype));
  Filled filled(shape, 130);
  KvSequence& sequence = filled.sequence;
  const KvView early = sequence.view(2);
  filled.check(sequence, 130);
  CHECK(sequence.blocks() == 3 && sequence.nbytes() == 3 * shape.block_nbytes());
  CHECK(sequence.blocks_to_add(150) == 0 && KvSequence(shape).blocks_to_add(65) == 2);

  // What does not fit changes nothing.
  check_usage_error([&] { sequence.reserve(151); });
  check_usage_error([&] { sequence.commit(129); });
  check_usage_error([&] { sequence.truncate(131); });
  check_usage_error([&] { sequence.view(3); });
  check_usage_error([&] { sequence.append(3, 0, filled.of(0, 0), filled.of(0, 0)); });
  filled.check(sequence, 130);

  // Blocks beyond the kept positions are given back: their memory is zero when it is taken again.
  sequence.truncate(70);
  CHECK(sequence.blocks() == 2);
  filled.check(sequence, 70);
  sequence.truncate(64);
  CHECK(sequence.blocks() == 1);
  check_usage_error([&] { sequence.append(0, 64, filled.of(0, 0), filled.of(0, 0)); });
  check_usage_error([&] { sequence.commit(65); });
  sequence.reserve(150);
  CHECK(sequence.blocks() == 3 && sequence.length() == 64);
  for (const float value : cached_rows(sequence, 2, 1, 100)) CHECK(value == 0.0F);
  // A pass that fails after it reserved leaves what was there.
  sequence.truncate(sequence.length());
  CHECK(sequence.blocks() == 1);

  sequence.reserve(130);
  for (std::size_t i = 64; i < 130; ++i) filled.append(i);
  sequence.commit(130);
  filled.check(sequence, 130);
  CHECK(sequence.view(2).base == early.base && sequence.view(2).block_stride == early.block_stride);

  KvSequence copy(shape);
  copy.copy_from(sequence);
  CHECK(copy.blocks() == 3);
  sequence.truncate(0);
  filled.check(copy, 130);
  Filled shorter(shape, 65);
  copy.copy_from(shorter.sequence);
  CHECK(copy.blocks() == 2);
  shorter.check(copy, 65);
  copy.copy_from(copy);
  shorter.check(copy, 65);
  check_usage_error([&] { KvSequence({2, 2, 20, 150, dtype}).copy_from(copy); });
  check_usage_error([&] { KvSequence({3, 2, 20, 64, dtype}).copy_from(copy); });
}

}  // namespace

void test_kv_cache(int) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) check_cache(dtype);
  check_usage_error([] { KvSequence({0, 1, 1, 1, Dtype::f32}); });
  check_usage_error([] { KvSequence({1, 1, 1, 0, Dtype::f32}); });
  check_usage_error([] { KvSequence({1, 1, 1, std::size_t{1} << 62, Dtype::f32}); });
  // A context of hundreds of gigabytes costs nothing until it is used.
  KvSequence sequence({32, 32, 128, 1 << 20, Dtype::f16});
  sequence.reserve(1);
  CHECK(sequence.nbytes() == std::size_t{32} << 20);
}
