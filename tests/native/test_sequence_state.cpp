// What sequences leave behind: what was appended is read back, pages are counted, shared and given back,
// wrong calls change nothing.
#include <algorithm>

#include "attention_fixture.h"
#include "io/error.h"
#include "kernels/levels/levels.h"

namespace {

using namespace attention_tests;

constexpr std::size_t kLayers = 3, kKvHeads = 2, kHeadDim = 4, kRow = kKvHeads * kHeadDim, kContext = 1500,
                      kPart = 100;

// Keys and values of any position, [layers, 2, kv_heads, head_dim] each; `seed` says whose.
struct Rows {
  Rows(Dtype dtype, unsigned seed)
      : rows(rounded(random_floats(kContext * kLayers * 2 * kRow, seed), dtype)) {}
  const float* of(std::size_t position, std::size_t layer) const {
    return rows.data() + (position * kLayers + layer) * 2 * kRow;
  }
  // A pass up to `length`, or what it has done before it fails. What its queries see is there.
  void append(SequenceState& sequence, std::size_t length, bool fails = false,
              std::size_t together = kPart) const {
    for (std::size_t begin = sequence.length(), end = 0; begin < length; begin = end) {
      end = std::min(length, begin + together);
      sequence.reserve(end, begin);
      for (std::size_t i = begin; i < end; ++i)
        for (std::size_t layer = 0; layer < kLayers; ++layer)
          sequence.append(layer, i, of(i, layer), of(i, layer) + kRow);
      for (std::size_t layer = 0; layer < kLayers; ++layer) {
        for (std::size_t page = begin / kPageTokens; sequence.shape().is_packed() && page < end / kPageTokens;
             ++page)
          CHECK(sequence.seal(layer, page));
        check_seen(sequence, layer, begin, end);
        check_seen(sequence, layer, end - 1, end);
      }
    }
    fails ? static_cast<void>(sequence.keep(sequence.length())) : sequence.commit(length);
  }
  // What queries from `first` on see of the positions before `end`.
  void check_seen(const SequenceState& sequence, std::size_t layer, std::size_t first,
                  std::size_t end) const {
    const StateShape& shape = sequence.shape();
    const std::size_t window = shape.kinds()[shape.layers()[layer].kind].layer.window;
    const std::size_t begin = std::max(begins, window == 0 || first < window ? 0 : first + 1 - window);
    for (std::size_t position = begin; position < end; ++position)
      check_row(sequence, layer, position, first);
  }
  // Positions [first, last) are in the sequence.
  void check(const SequenceState& sequence, std::size_t first, std::size_t last) const {
    CHECK(sequence.length() >= last);
    for (std::size_t position = first; position < last; ++position)
      for (std::size_t layer = 0; layer < kLayers; ++layer) check_row(sequence, layer, position, 0);
  }
  // As the query at `from` sees it.
  void check_row(const SequenceState& sequence, std::size_t layer, std::size_t position,
                 std::size_t from) const {
    const Dtype dtype = sequence.shape().dtype();
    const KernelTable& kernels = kernel_table(SimdLevel::scalar, dtype);
    const KvView view = sequence.view(layer);
    const std::size_t offset = position % kPageTokens * kHeadDim * dtype_nbytes(dtype);
    if (view.format != nullptr && position / kPageTokens < from / kPageTokens)
      return check_packed(view, layer, position);
    float row[kHeadDim];
    for (std::size_t head = 0; head < kKvHeads; ++head) {
      const float* expected = of(position, layer) + head * kHeadDim;
      kernels.to_f32(view.key_rows(head, position / kPageTokens) + offset, kHeadDim, row);
      CHECK(same_bits(row, expected, kHeadDim));
      kernels.to_f32(view.value_rows(head, position / kPageTokens) + offset, kHeadDim, row);
      CHECK(same_bits(row, expected + kRow, kHeadDim));
    }
  }

  void check_packed(const KvView& view, std::size_t layer, std::size_t position) const {
    float row[2][16];
    for (std::size_t head = 0; head < kKvHeads; ++head) {
      const std::byte* page = view.packed(position / kPageTokens);
      for (const auto side : {PageFormat::Side::keys, PageFormat::Side::values})
        view.format->unpack(side, page, head, position % kPageTokens, 1, row[static_cast<std::size_t>(side)],
                            level_kernels(SimdLevel::scalar).groups);
      for (std::size_t i = 0; i < kHeadDim; ++i)
        for (std::size_t side = 0; side < 2; ++side)
          CHECK(std::fabs(row[side][i] - of(position, layer)[side * kRow + head * kHeadDim + i]) < 0.03F);
    }
  }

  std::vector<float> rows;
  std::size_t begins = 0;  // positions before are somebody else's
};

std::shared_ptr<StatePool> pool_of(const std::vector<std::size_t>& windows, Dtype dtype, int bits = 0) {
  std::vector<LayerKv> layers;
  for (const std::size_t window : windows) layers.push_back({kKvHeads, kHeadDim, window});
  return std::make_shared<StatePool>(StateShape(layers, kContext, kPart, dtype, bits));
}

void take_up(SequenceState& to, const SequenceState& from) {
  to.keep(0);
  const SequenceState::Spans saved = from.save();
  std::vector<std::size_t> pages;
  for (const auto& kind : saved) pages.push_back(kind.size());
  const SequenceState::Spans taken = to.restore(from.length(), pages);
  for (std::size_t kind = 0; kind < saved.size(); ++kind)
    for (std::size_t i = 0; i < saved[kind].size(); ++i)
      std::memcpy(taken[kind][i].data, saved[kind][i].data, saved[kind][i].nbytes);
  to.commit(from.length());
}

void check_pages(Dtype dtype) {
  const auto pool = pool_of({0, 0, 0}, dtype);
  const std::size_t page = pool->shape().page_nbytes();
  CHECK(page % 4096 == 0 && page >= kLayers * 2 * kPageTokens * kRow * dtype_nbytes(dtype));
  const Rows rows(dtype, 5);
  SequenceState sequence(pool);
  CHECK(pool->nbytes() == 0 && sequence.nbytes_to_add(65) == static_cast<std::ptrdiff_t>(2 * page));
  rows.append(sequence, 130);
  rows.check(sequence, 0, 130);
  CHECK(pool->nbytes() == 3 * page && sequence.nbytes_to_add(192) == 0);

  // What does not fit changes nothing.
  CHECK(is_refused([&] { sequence.reserve(kContext + 1); }));
  CHECK(is_refused([&] { sequence.commit(129); }));
  CHECK(is_refused([&] { sequence.keep(131); }));
  CHECK(is_refused([&] { sequence.view(3); }));
  CHECK(is_refused([&] { sequence.append(3, 130, rows.of(0, 0), rows.of(0, 0)); }));
  CHECK(is_refused([&] { sequence.append(0, 129, rows.of(0, 0), rows.of(0, 0)); }));
  rows.check(sequence, 0, 130);

  // Pages beyond the kept positions are given back: their memory is zero when it is taken again.
  CHECK(sequence.keep(70) == 70 && pool->nbytes() == 2 * page);
  rows.check(sequence, 0, 70);
  CHECK(sequence.keep(64) == 64 && pool->nbytes() == page);
  CHECK(is_refused([&] { sequence.append(0, 64, rows.of(0, 0), rows.of(0, 0)); }));
  CHECK(is_refused([&] { sequence.commit(65); }));
  sequence.reserve(192);
  CHECK(pool->nbytes() == 3 * page && sequence.length() == 64);
  for (std::size_t i = 0; i < kHeadDim * dtype_nbytes(dtype); ++i)
    CHECK(sequence.view(2).key_rows(1, 2)[i] == std::byte{0});
  // A pass that fails after it reserved leaves what was there.
  CHECK(sequence.keep(64) == 64 && pool->nbytes() == page);
  rows.append(sequence, 130);
  rows.check(sequence, 0, 130);

  // What is kept elsewhere comes back.
  SequenceState again(pool);
  take_up(again, sequence);
  rows.check(again, 0, 130);
  CHECK(is_refused([&] { again.restore(1, {1}); }));
  again.keep(0);
  for (const std::size_t pages : {0, 2, 4}) CHECK(is_refused([&] { again.restore(130, {pages}); }));
  CHECK(is_refused([&] { again.restore(130, {3, 3}); }));
}

// Sequences share pages until one writes.
void check_copies(Dtype dtype) {
  const auto pool = pool_of({0, 1000, 0}, dtype);
  const std::size_t page = pool->shape().page_nbytes();
  const Rows rows(dtype, 5);
  Rows others(dtype, 6);
  others.begins = 100;
  auto sequence = std::make_unique<SequenceState>(pool);
  rows.append(*sequence, 100);
  SequenceState copy(pool), shorter(pool);
  copy.copy_from(*sequence);
  shorter.copy_from(*sequence);
  CHECK(shorter.keep(70) == 70 && pool->nbytes() == 2 * page &&
        copy.nbytes_to_add(101) == static_cast<std::ptrdiff_t>(page));
  others.append(copy, 120);
  CHECK(pool->nbytes() == 3 * page && copy.nbytes_to_add(121) == 0);
  rows.check(copy, 0, 100);
  others.check(copy, 100, 120);
  others.append(shorter, 101);
  CHECK(pool->nbytes() == 4 * page);
  rows.check(*sequence, 0, 100);
  rows.check(shorter, 0, 70);
  others.check(shorter, 70, 101);
  // A whole page is never written again: what goes on after it takes a new one.
  copy.copy_from(shorter);
  CHECK(copy.keep(64) == 64 && copy.nbytes_to_add(65) == static_cast<std::ptrdiff_t>(page));
  copy.copy_from(copy);
  CHECK(copy.length() == 64);
  sequence.reset();
  CHECK(pool->nbytes() == 2 * page);
  // The last holder writes where the others are gone.
  CHECK(shorter.nbytes_to_add(128) == 0);
  others.append(shorter, 128);
  rows.check(copy, 0, 64);
  CHECK(shorter.keep(0) == 0 && copy.keep(0) == 0 && pool->nbytes() == 0);
  CHECK(is_refused([&] { SequenceState(pool_of({0, 1000, 0}, dtype)).copy_from(copy); }));
}

// Sequences that go on, go back, fail, are copied and taken up again: what the next query sees is there, they
// hold no more than was said, and the last pass can be undone.
void check_windows(const std::vector<std::size_t>& windows, int bits, int scale) {
  const auto pool = pool_of(windows, Dtype::bf16, bits);
  const StateShape& shape = pool->shape();
  const Rows rows(Dtype::bf16, 7);  // of every sequence: they share what they like
  const bool has_windows = *std::max_element(windows.begin(), windows.end()) != 0;
  std::mt19937 random(11);
  std::vector<std::unique_ptr<SequenceState>> sequences;
  for (int i = 0; i < 3; ++i) sequences.push_back(std::make_unique<SequenceState>(pool));
  std::size_t exact = 0, shorter = 0;
  for (int step = 0; step < 300 * scale; ++step) {
    SequenceState &sequence = *sequences[random() % 3], &other = *sequences[random() % 3];
    const std::size_t length = sequence.length(), room = kContext - length;
    const std::size_t many = std::min<std::size_t>(room, 1 + random() % 400);
    const std::size_t few = std::min<std::size_t>(room, 1 + random() % 8);
    const auto before = static_cast<std::ptrdiff_t>(pool->nbytes());
    const std::size_t together = kPart * (1 + random() % 4);
    const std::size_t mark = length + random() % (many + 1);
    sequence.mark({mark});
    const std::ptrdiff_t most = before + sequence.nbytes_to_add(length + many, together);
    switch (room == 0 ? 5 : random() % 8) {
      case 0:
      case 1:
        rows.append(sequence, length + many, false, together);
        CHECK(static_cast<std::ptrdiff_t>(pool->nbytes()) <= most);
        CHECK(sequence.can_keep(length) == length);
        CHECK(sequence.can_keep(mark) >= mark / kPageTokens * kPageTokens);
        break;
      case 2:
      case 3: {
        sequence.mark({});
        const std::ptrdiff_t added = sequence.nbytes_to_add(length + few);
        rows.append(sequence, length + few);
        CHECK(static_cast<std::ptrdiff_t>(pool->nbytes()) == before + added);
        for (std::size_t n = length; n <= length + few; ++n) CHECK(sequence.can_keep(n) == n);
        break;
      }
      case 4:
        rows.append(sequence, length + many, true, together);
        CHECK(sequence.length() == length && static_cast<std::ptrdiff_t>(pool->nbytes()) <= most);
        break;
      case 5: {
        const std::size_t asked = random() % (length + 1), can = sequence.can_keep(asked);
        CHECK(can <= asked &&
              (has_windows || can == asked || (bits != 0 && can == asked / kPageTokens * kPageTokens)));
        CHECK(sequence.keep(asked) == can && sequence.length() == can);
        exact += can == asked ? 1 : 0;
        shorter += can != asked && can != 0 ? 1 : 0;
        break;
      }
      case 6:
        sequence.copy_from(other);
        break;
      default:
        if (&sequence != &other) take_up(sequence, other);
    }
    std::size_t most_held = 0;
    if (random() % 8 == 0) {  // what it holds alone goes back with it
      const std::size_t alone = sequence.nbytes_alone(), held = pool->nbytes();
      CHECK(sequence.keep(0) == 0 && pool->nbytes() == held - alone);
    }
    for (const auto& each : sequences) {
      for (std::size_t layer = 0; layer < kLayers; ++layer)
        rows.check_seen(*each, layer, each->length(), each->length());
      // And what the last pass left of stretches that are longer than a part.
      most_held += shape.nbytes(each->length()) + (3 * kPart / kPageTokens + 1) * shape.page_nbytes();
    }
    CHECK(pool->nbytes() <= most_held);
  }
  CHECK(exact > 1 && (shorter > 0) == (has_windows || bits != 0));
  sequences.clear();
  CHECK(pool->nbytes() == 0);
}

}  // namespace

void test_sequence_state(int scale) {
  for (const auto& windows : {std::vector<std::size_t>{0, 0, 0}, {37, 37, 37}, {64, 0, 200}, {1, 130, 130}})
    for (const int bits : {0, 8}) check_windows(windows, bits, scale);
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    check_pages(dtype);
    check_copies(dtype);
  }
  CHECK(pool_of({0, 17, 0, 17, 5}, Dtype::f32)->shape().kinds().size() == 3);
  CHECK(is_refused([] { StateShape({}, 1, 1, Dtype::f32); }));
  CHECK(is_refused([] { StateShape({{0, 1, 0}}, 1, 1, Dtype::f32); }));
  CHECK(is_refused([] { StateShape({{1, 1, 0}}, 0, 1, Dtype::f32); }));
  CHECK(is_refused([] { StateShape({{1, 1, 0}}, std::size_t{1} << 62, 1, Dtype::f32); }));
  // A context of hundreds of gigabytes costs nothing until it is used.
  const auto pool = std::make_shared<StatePool>(
      StateShape(std::vector<LayerKv>(32, {32, 128, 0}), std::size_t{1} << 20, 256, Dtype::f16));
  SequenceState sequence(pool);
  sequence.reserve(1);
  CHECK(pool->nbytes() == std::size_t{32} << 20);
}
