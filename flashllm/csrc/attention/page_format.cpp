#include "attention/page_format.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "io/error.h"
#include "kernels/levels/levels.h"
#include "kernels/scratch.h"

namespace flashllm {

namespace {

// A head's scales, minimums and codes, one after another.
template <typename Rows, typename Byte>
Rows grouped(Byte* data, std::size_t scales, std::size_t code_stride) {
  using Half = std::conditional_t<std::is_const_v<Byte>, const std::uint16_t, std::uint16_t>;
  using Code = std::conditional_t<std::is_const_v<Byte>, const std::uint8_t, std::uint8_t>;
  auto* first = reinterpret_cast<Half*>(data);
  return {first, first + scales, reinterpret_cast<Code*>(first + 2 * scales), code_stride};
}

// kPageTokens rows of `columns` values widened to fp32, each padded to whole units with its last value.
// Returns whether all are finite.
bool widen_rows(const std::byte* rows, std::size_t row_stride, std::size_t columns,
                const KernelTable& kernels, const AttentionKernels& attention, float* to) {
  const std::size_t padded = in_units(columns);
  bool is_finite = true;
  for (std::size_t r = 0; r < kPageTokens; ++r, to += padded) {
    kernels.to_f32(rows + r * row_stride, columns, to);
    std::fill(to + columns, to + padded, to[columns - 1]);
    is_finite &= attention.all_finite(to, padded);
  }
  return is_finite;
}

}  // namespace

PageFormat::PageFormat(std::size_t kv_heads, std::size_t head_dim, Dtype dtype, int bits, bool keys_alone)
    : kv_heads_(kv_heads),
      head_dim_(head_dim),
      dtype_(dtype),
      kernels_(&kernel_table(best_simd_level(), dtype)),
      bits_(bits),
      keys_alone_(keys_alone) {
  require(kv_heads != 0 && head_dim != 0,
          "a page of a KV cache needs at least one head of at least one element");
  require(bits == 0 || bits == 4 || bits == 8,
          "bits of a packed value must be 4 or 8, got " + std::to_string(bits));
  keys_ = groups(true);
  values_ = keys_alone ? keys_ : groups(false);
  page_nbytes_ = round_up(plain_nbytes(), kMemoryPage);
  sealed_nbytes_ = is_packed() ? round_up(packed_nbytes(), kMemoryPage) : page_nbytes_;
}

PageFormat::Groups PageFormat::groups(bool by_channel) const {
  const std::size_t scales = by_channel ? in_units(head_dim_) : kPageTokens * groups_of(head_dim_);
  return {by_channel, scales,
          2 * scales * sizeof(std::uint16_t) + kPageTokens * codes_nbytes(head_dim_, bits_)};
}

KvView PageFormat::view(const std::byte* const* pages, std::size_t offset) const {
  return {pages, offset, head_nbytes(), keys_alone_ ? 0 : kv_heads_ * head_nbytes()};
}

void PageFormat::write(const float* key, const float* value, std::size_t position, std::byte* page) const {
  std::byte* to = page + position % kPageTokens * row_nbytes();
  for (std::size_t h = 0; h < kv_heads_; ++h, to += head_nbytes()) {
    kernels_->from_f32(key + h * head_dim_, head_dim_, to);
    if (!keys_alone_) kernels_->from_f32(value + h * head_dim_, head_dim_, to + kv_heads_ * head_nbytes());
  }
}

bool PageFormat::seal(const std::byte* plain, std::byte* sealed, SimdLevel level) const {
  if (!is_packed()) {
    std::memcpy(sealed, plain, page_nbytes_);
    return true;
  }
  std::memset(sealed + packed_nbytes(), 0, sealed_nbytes_ - packed_nbytes());
  return pack(view(&plain), 0, sealed, level);
}

bool PageFormat::pack(const KvView& plain, std::size_t page, std::byte* packed, SimdLevel level) const {
  const KernelTable& kernels = kernel_table(level, dtype_);
  const AttentionKernels& attention = *level_kernels(level).attention;
  const GroupKernels& pack = of_bits(level_kernels(level).groups);
  const Scratch<float> rows(kPageTokens * unpacked_row());
  const std::size_t code_stride = codes_nbytes(head_dim_, bits_);
  std::byte* to = packed;
  for (std::size_t h = 0; h < kv_heads_; ++h) {
    for (const Groups* groups : {&keys_, &values_}) {
      if (groups == &values_ && keys_alone_) continue;
      const std::byte* from = groups == &keys_ ? plain.key_rows(h, page) : plain.value_rows(h, page);
      if (!widen_rows(from, row_nbytes(), head_dim_, kernels, attention, rows.get())) return false;
      (groups->by_channel ? pack.pack_columns : pack.pack_rows)(
          rows.get(), unpacked_row(), kPageTokens, unpacked_row(),
          grouped<GroupedRows>(to, groups->scales, code_stride));
      to += groups->nbytes;
    }
  }
  return true;
}

void PageFormat::unpack(Side side, const std::byte* sealed, std::size_t kv_head, std::size_t first,
                        std::size_t n, float* to, const GroupKernels* kernels) const {
  const Groups& groups = side == Side::keys ? keys_ : values_;
  const std::size_t before = side == Side::keys || keys_alone_ ? 0 : keys_.nbytes;
  const std::byte* from = sealed + kv_head * packed_head_nbytes() + before;
  auto rows = grouped<ConstGroupedRows>(from, groups.scales, codes_nbytes(head_dim_, bits_));
  rows.codes += first * rows.code_stride;
  if (groups.by_channel) {
    of_bits(kernels).unpack_columns(rows, n, unpacked_row(), to, unpacked_row());
    return;
  }
  rows.scales += first * groups_of(head_dim_);
  rows.minimums += first * groups_of(head_dim_);
  of_bits(kernels).unpack_rows(rows, n, unpacked_row(), to, unpacked_row());
}

}  // namespace flashllm
