// Each head's keys and values of latent attention, made from the one row that the cache keeps of a position,
// for `attend_many`: pages of kPageTokens positions, of each of some heads keys [kPageTokens, key_dim], then
// values [kPageTokens, value_dim]. Knows neither the matrices that make them, nor sequences.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "attention/attention.h"
#include "kernels/scratch.h"

namespace flashllm {

class ExpandedPages {
 public:
  ExpandedPages() = default;
  ExpandedPages(std::size_t heads, std::size_t key_dim, std::size_t value_dim, Dtype dtype);

  // The pages of positions [first, end) are there from now on, those before `first` no longer.
  void hold(std::size_t first, std::size_t end);
  std::byte* key(std::size_t head, std::size_t position) const;
  std::byte* value(std::size_t head, std::size_t position) const;
  // Valid until the next `hold`. `earlier`: what queries see of pages before their own, where it is not this.
  KvView view(const ExpandedPages* earlier = nullptr) const;

 private:
  std::byte* head(std::size_t head, std::size_t position) const {
    return pages_[position / kPageTokens]->get() + head * head_nbytes();
  }
  std::size_t head_nbytes() const { return kPageTokens * (key_nbytes_ + value_nbytes_); }

  std::size_t heads_ = 0, key_nbytes_ = 0, value_nbytes_ = 0;
  std::vector<std::optional<Scratch<std::byte>>> pages_;  // by number
  std::vector<const std::byte*> addresses_;
};

// Of a layer's latent rows of one sequence, [head_dim] each: positions [first, first + n) in fp32, packed
// pages unpacked where `packed`.
void latent_rows(const KvView& view, std::size_t head_dim, Dtype dtype, bool packed, std::size_t first,
                 std::size_t n, SimdLevel level, float* to);

}  // namespace flashllm
