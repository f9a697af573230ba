// Products of many tokens with one matrix: a prompt, where weights are used often enough that arithmetic, not
// memory, is the limit. Sums are fp32. Weights are widened to fp32 block by block, exactly; bf16 ones are
// used as they lie, in pairs of terms, where the processor has such products (`pair_kernels`). Coded ones are
// multiplied as codes, by inputs in 8 bits as a token's are (`multiply_bytes_kernel`), or, of more bits, by
// inputs in 16 (`multiply_codes_kernel`), where kCodeTerms inputs of a token share a scale.
//
// Every output is one chain of additions in the order of its terms, so bits depend neither on the number of
// threads nor on which tokens are computed together. They do differ from the one-token kernels' (kernels.h),
// and between processors with and without pairs, with and without products of codes.
#pragma once

#include <memory>
#include <vector>

#include "kernels/kernels.h"

namespace flashllm {

constexpr std::size_t kColumnPad = 16;

// Whether weights [rows, terms] are multiplied in pairs.
bool in_pairs(Dtype dtype, std::size_t terms, SimdLevel level);

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
    const std::int32_t* totals = totals_.get() + first * units() + column / kUnit * strip(first);
    return {row_of_pairs(first, column / 4), totals, scales_at(first, column), strip(first)};
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
  void pack_pairs(const std::byte* x, ThreadPool& pool);
  void pack_floats(const std::byte* x, const KernelTable& kernels, std::size_t element, ThreadPool& pool);
  void pack_codes(const std::byte* x, const KernelTable& kernels, std::size_t element, ThreadPool& pool);
  void pack_bytes(const std::byte* x, const KernelTable& kernels, std::size_t element, ThreadPool& pool);

  std::size_t tokens_, columns_, padded_, strip_;
  TokenForm form_;
  const TileKernels* tiles_;         // that multiply the codes, or nullptr
  std::size_t halves_;               // rows of a pair
  std::unique_ptr<float[]> values_;  // one of these two
  std::unique_ptr<std::uint32_t[]> pairs_;
  std::unique_ptr<float[]> scales_;  // of codes and of bytes
  std::unique_ptr<std::int32_t[]> totals_;
};

// Rows of coded weights: of `unpack` the first `count`, as WeightBytes or CodeRows has them.
struct UnpackedRows {
  static constexpr std::size_t kRows = 16;
  alignas(64) std::int16_t codes[kRows * 2 * kCodeTerms];
  float scales[kRows * (kCodeTerms / 16)], offsets[kRows * (kCodeTerms / 32)];
  std::size_t unit;
  bool has_offsets, is_wide;
  int zero;
};

// Weights of any form that can be widened to fp32; and, where inputs come as codes, unpacked.
class WideRows {
 public:
  virtual ~WideRows() = default;
  // Columns [first, first + width) of rows [begin, begin + count); rows of `to` are `stride` floats apart.
  // `first` is a multiple of 64, `stride` of kColumnPad, and what pads a row of `to` may be overwritten.
  // Threads may call it together.
  virtual void widen(std::size_t begin, std::size_t count, std::size_t first, std::size_t width, float* to,
                     std::size_t stride) const = 0;
  // Columns [first, first + terms) of as many rows; `first` is a multiple of kCodeTerms, of which `terms` are
  // at most so many.
  virtual void unpack(std::size_t begin, std::size_t count, std::size_t first, std::size_t terms,
                      UnpackedRows& to) const;
};

// out[m][r] = sum_j weights[r][j] * x[m][j] (+ bias[r]), rounded to `dtype`; weights: [rows, x.columns()],
// out: [tokens, rows]. `x` must not be in pairs.
void linear_many(const WideRows& weights, std::size_t rows, const float* bias, const PackedTokens& x,
                 Dtype dtype, std::byte* out, ThreadPool& pool, SimdLevel level);

// The same of weights as they lie.
void linear_many(const LinearWeights& weights, const PackedTokens& x, Dtype dtype, std::byte* out,
                 ThreadPool& pool, SimdLevel level);

// products[r][m] = sum_j weights[r][j] * x[m][j], one row a weight row, x.padded() long
void product_rows(const LinearWeights& weights, const PackedTokens& x, float* products, ThreadPool& pool,
                  SimdLevel level);
// The same of `rows` rows of any form; `x` must not be in pairs.
void product_rows(const WideRows& weights, std::size_t rows, const PackedTokens& x, float* products,
                  ThreadPool& pool, SimdLevel level);

// y[m][j] += sum_i scales[i][m] * weights[i][j] for m < tokens, in the order of i. scales: rows `padded`
// long; y: rows `y_stride` floats long, a multiple of kColumnPad that holds all columns. In pairs, `scales`
// are rounded to bf16 first.
void add_rows(const LinearWeights& weights, const float* scales, std::size_t padded, std::size_t tokens,
              float* y, std::size_t y_stride, ThreadPool& pool, SimdLevel level);
// The same of weights [rows, columns] of any form, never in pairs; the scale of row i and token m is
// scales.data[m * scales.row + i * scales.step].
void add_rows(const WideRows& weights, std::size_t rows, std::size_t columns, TileRows scales,
              std::size_t tokens, float* y, std::size_t y_stride, ThreadPool& pool, SimdLevel level);
void add_rows(const LinearWeights& weights, TileRows scales, std::size_t tokens, float* y,
              std::size_t y_stride, ThreadPool& pool, SimdLevel level);

}  // namespace flashllm
