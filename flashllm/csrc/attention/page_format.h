// How a page of a KV cache lies in memory: keys and values of kPageTokens positions of one sequence in one
// layer, among those of the layers of its kind (sequence/sequence_state.h) or alone in an arena, wherever its
// owner likes; nothing here knows sequences, layers or tiers.
//
// A plain page: keys [kv_heads, kPageTokens, head_dim], then values likewise, of the model's dtype; or keys
// alone, whose first elements are the values (multi-head latent attention, DeepSeek-AI 2024). A sealed
// page is a full one as it leaves the tail of its sequence: plain, or quantised in groups (group_codec.h),
// for each KV head keys, then values, each as scales, minimums, codes. In an arena either is padded to whole
// sectors.
// Groups of values are kGroup elements of a position (FlexGen, section 5: along the hidden dimension), the
// last what is left: scales [kPageTokens, groups]. Groups of keys are one element of all positions (KIVI, Liu
// et al. 2024: keys by channel): scales [head_dim in whole units].
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/attention.h"
#include "kernels/group_codec.h"

namespace flashllm {

static_assert(kPageTokens <= kGroup, "a group by channel holds a page");

class PageFormat {
 public:
  // Bytes of a page of the system's memory: in an arena a page of ours takes whole ones, for direct reads and
  // writes.
  static constexpr std::size_t kMemoryPage = 4096;
  enum class Side { keys, values };

  // `bits` of a packed value; 0: sealed pages are plain ones. Throws CoreError (usage) for sizes of zero and
  // widths there are none of.
  PageFormat(std::size_t kv_heads, std::size_t head_dim, Dtype dtype, int bits, bool keys_alone = false);

  bool is_packed() const { return bits_ != 0; }
  std::size_t row_nbytes() const { return head_dim_ * dtype_nbytes(dtype_); }
  std::size_t head_nbytes() const { return kPageTokens * row_nbytes(); }  // keys, or values, of a plain page
  std::size_t plain_nbytes() const { return (keys_alone_ ? 1 : 2) * kv_heads_ * head_nbytes(); }
  std::size_t packed_nbytes() const { return kv_heads_ * packed_head_nbytes(); }
  std::size_t page_nbytes() const { return page_nbytes_; }      // plain, in an arena
  std::size_t sealed_nbytes() const { return sealed_nbytes_; }  // in an arena

  // Plain pages as one sequence's cache, each `offset` bytes behind its address.
  KvView view(const std::byte* const* pages, std::size_t offset = 0) const;

  // The key and the value [kv_heads, head_dim] of one position go to their place in a plain page, rounded to
  // the dtype.
  void write(const float* key, const float* value, std::size_t position, std::byte* page) const;

  // Returns whether all keys and values are finite; `sealed` is undefined where those to be packed are not.
  bool seal(const std::byte* plain, std::byte* sealed, SimdLevel level) const;
  // The same of a page of a view, where pages are packed: packed_nbytes() are written.
  bool pack(const KvView& plain, std::size_t page, std::byte* packed, SimdLevel level) const;

  // Of a packed page: keys, or values, [first, first + n) of a head, unpacked; rows of `to` are
  // unpacked_row() floats, `kernels` a level's.
  void unpack(Side side, const std::byte* sealed, std::size_t kv_head, std::size_t first, std::size_t n,
              float* to, const GroupKernels* kernels) const;
  std::size_t unpacked_row() const { return in_units(head_dim_); }

 private:
  struct Groups {  // of one head's keys or values
    bool by_channel;
    std::size_t scales;  // and minimums
    std::size_t nbytes;  // with the codes
  };
  Groups groups(bool by_channel) const;
  const GroupKernels& of_bits(const GroupKernels* kernels) const { return kernels[bits_ == 8 ? 1 : 0]; }
  std::size_t packed_head_nbytes() const { return keys_.nbytes + (keys_alone_ ? 0 : values_.nbytes); }

  std::size_t kv_heads_, head_dim_;
  Dtype dtype_;
  const KernelTable* kernels_;  // of the dtype
  int bits_;
  bool keys_alone_;
  Groups keys_, values_;
  std::size_t page_nbytes_, sealed_nbytes_;
};

}  // namespace flashllm
