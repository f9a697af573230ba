// Inputs of many tokens, laid out for the products of matmul.h.
#pragma once

#include <memory>

#include "kernels/kernels.h"

namespace flashllm {

constexpr std::size_t kColumnPad = 16;

enum class TokenForm { floats, pairs, codes, bytes, token_bytes };  // the last: with one scale a token

// Inputs [tokens, columns] as the kernels want them, `padded` tokens long (the rest zeros; whole vectors): in
// strips of as many tokens as a tile of sums is wide, the last one of what is left, each a run of memory that
// fits the first cache a few hundred terms at a time. A strip has one row a column, in fp32, or one a pair
// of columns, which are bf16 or codes, or one for four, which are bytes.
class PackedTokens {
 public:
  // x: [tokens, columns], of the given dtype; that is bf16 where they are to be in pairs
  PackedTokens(const std::byte* x, std::size_t tokens, std::size_t columns, Dtype dtype, TokenForm form,
               ThreadPool& pool, SimdLevel level);

  std::size_t tokens() const { return tokens_; }
  std::size_t columns() const { return columns_; }
  std::size_t padded() const { return padded_; }
  TokenForm form() const { return form_; }
  bool has_codes() const { return form_ == TokenForm::codes; }
  bool has_bytes() const { return form_ == TokenForm::bytes || form_ == TokenForm::token_bytes; }
  bool in_pairs() const { return form_ == TokenForm::pairs; }
  // Tokens of the strip that begins with token `first`.
  std::size_t strip(std::size_t first) const { return first + strip_ < padded_ ? strip_ : padded_ - first; }
  // From column (or pair) on, the rows of the strip that begins with token `first`; strip(first) apart.
  const float* row(std::size_t first, std::size_t column) const {
    return values_.get() + first * columns_ + column * strip(first);
  }
  const std::uint32_t* row_of_pairs(std::size_t first, std::size_t pair) const {
    return pairs_.get() + first * pairs() + pair * strip(first);
  }
  // Codes of at most kCodeTerms columns from `column`, a multiple of that, on.
  CodeColumns codes(std::size_t first, std::size_t column) const {
    return {row_of_pairs(first, column / 2 * halves_), strip(first), scales_at(first, column)};
  }
  InputBytes bytes(std::size_t first, std::size_t column) const {
    const std::size_t at = first * units() + column / kUnit * strip(first);
    return {row_of_pairs(first, column / 4), totals_.get() + at, firsts_.get() + at, scales_at(first, column),
            strip(first)};
  }

 private:
  static constexpr std::size_t kUnit = 32;
  std::size_t units() const { return (columns_ + kUnit - 1) / kUnit; }
  std::size_t scaled() const { return has_codes() ? kCodeTerms : kUnit; }  // columns that share a scale
  std::size_t scales() const { return (columns_ + scaled() - 1) / scaled(); }
  const float* scales_at(std::size_t first, std::size_t column) const {
    return scales_.get() + first * scales() + column / scaled() * strip(first);
  }
  std::size_t pairs() const {  // words
    return has_bytes() ? units() * (kUnit / 4) : has_codes() ? units() * (kUnit / 2) * halves_ : columns_ / 2;
  }
  template <std::size_t kColumns, typename T, typename Load>
  void pack(std::unique_ptr<T[]>& packed, const Load& load, ThreadPool& pool);
  void pack_pairs(const std::byte* x, ThreadPool& pool);
  void pack_floats(const std::byte* x, Dtype dtype, ThreadPool& pool, SimdLevel level);
  void pack_codes(const std::byte* x, Dtype dtype, ThreadPool& pool, SimdLevel level);
  void pack_bytes(const std::byte* x, Dtype dtype, ThreadPool& pool, SimdLevel level);

  std::size_t tokens_, columns_, padded_, strip_;
  TokenForm form_;
  const TileKernels* tiles_;         // that multiply them, or nullptr
  std::size_t halves_;               // rows of a pair
  std::unique_ptr<float[]> values_;  // one of these two
  std::unique_ptr<std::uint32_t[]> pairs_;
  std::unique_ptr<float[]> scales_;  // of codes and of bytes
  std::unique_ptr<std::int32_t[]> totals_, firsts_;
};

}  // namespace flashllm
