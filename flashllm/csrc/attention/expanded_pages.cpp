#include "attention/expanded_pages.h"

#include <algorithm>

#include "attention/page_format.h"
#include "kernels/levels/levels.h"

namespace flashllm {

ExpandedPages::ExpandedPages(std::size_t heads, std::size_t key_dim, std::size_t value_dim, Dtype dtype)
    : heads_(heads),
      key_nbytes_(key_dim * dtype_nbytes(dtype)),
      value_nbytes_(value_dim * dtype_nbytes(dtype)) {}

void ExpandedPages::hold(std::size_t first, std::size_t end) {
  const std::size_t pages = (end + kPageTokens - 1) / kPageTokens;
  pages_.resize(std::max(pages_.size(), pages));
  addresses_.resize(pages_.size());
  for (std::size_t i = 0; i < pages_.size(); ++i) {
    const bool wanted = i >= first / kPageTokens && i < pages;
    if (wanted == pages_[i].has_value()) continue;
    if (wanted)
      pages_[i].emplace(heads_ * head_nbytes());
    else
      pages_[i].reset();
    addresses_[i] = wanted ? pages_[i]->get() : nullptr;
  }
}

std::byte* ExpandedPages::key(std::size_t head, std::size_t position) const {
  return this->head(head, position) + position % kPageTokens * key_nbytes_;
}

std::byte* ExpandedPages::value(std::size_t head, std::size_t position) const {
  return this->head(head, position) + kPageTokens * key_nbytes_ + position % kPageTokens * value_nbytes_;
}

KvView ExpandedPages::view(const ExpandedPages* earlier) const {
  KvView view{addresses_.data(), 0, head_nbytes(), kPageTokens * key_nbytes_};
  if (earlier != nullptr) view.packed_pages = earlier->addresses_.data();
  return view;
}

void latent_rows(const KvView& view, std::size_t head_dim, Dtype dtype, bool packed, std::size_t first,
                 std::size_t n, SimdLevel level, float* to) {
  const KernelTable& kernels = kernel_table(level, dtype);
  const std::size_t row = packed ? view.format->unpacked_row() : 0;
  const Scratch<float> unpacked(kPageTokens * row);
  for (std::size_t end = first + n, few = 0; first < end; first += few, to += few * head_dim) {
    const std::size_t page = first / kPageTokens, at = first % kPageTokens;
    few = std::min(kPageTokens - at, end - first);
    if (!packed) {
      kernels.to_f32(view.key_rows(0, page) + at * head_dim * dtype_nbytes(dtype), few * head_dim, to);
      continue;
    }
    view.format->unpack(PageFormat::Side::keys, view.packed(page), 0, at, few, unpacked.get(),
                        level_kernels(level).groups);
    for (std::size_t i = 0; i < few; ++i) std::copy_n(unpacked.get() + i * row, head_dim, to + i * head_dim);
  }
}

}  // namespace flashllm
