// Products of many tokens with one matrix: a prompt, where weights are used often enough that arithmetic, not
// memory, is the limit. Sums are fp32. Weights are widened to fp32 block by block, exactly; bf16 ones are
// used as they lie, in pairs of terms, where the processor has such products (PairKernels). Coded ones are
// multiplied as codes, by inputs in 8 bits as a token's are (MultiplyBytes), or, of more bits, by
// inputs in 16 (MultiplyCodes), where kCodeTerms inputs of a token share a scale.
//
// Every output is one chain of additions in the order of its terms, or, in tiles of pairs, of sums of 32 of
// them, so bits depend neither on the number of threads nor on which tokens are computed together. They do
// differ from the one-token kernels' (kernels.h), and between processors with and without pairs, with and
// without tiles of them, with and without products of codes.
#pragma once

#include "kernels/packed_tokens.h"
#include "kernels/row_codecs.h"

namespace flashllm {

// A matrix by rows, `stride` bytes apart.
struct RowMatrix {
  const std::byte* data = nullptr;
  std::size_t rows = 0;
  std::size_t columns = 0;
  std::size_t stride = 0;
  RowCodec codec = RowCodec::f32;
  const float* bias = nullptr;        // [rows] or nullptr
  InputForm inputs = InputForm::f32;  // what single tokens' products take; int8 with weights in groups
};

// Whether weights [rows, terms] are multiplied in pairs.
bool in_pairs(Dtype dtype, std::size_t terms, SimdLevel level);

// Rows of coded weights: of `unpack` the first `count`, as WeightBytes or CodeRows has them. Of words there
// is room for twice as many, which tiles prepare in their place.
struct UnpackedRows {
  static constexpr std::size_t kOfWords = TileKernels::kRows, kOfBytes = 3 * kOfWords;  // rows at most
  alignas(64) std::int16_t codes[kOfWords * 2 * kCodeTerms];
  float scales[kOfBytes * (kCodeTerms / 16)], offsets[kOfBytes * (kCodeTerms / 16)];
  std::size_t unit, offsets_each;
  bool is_wide;
  int zero;
  std::uint8_t largest;
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

// The same of bf16 weights and inputs in pairs.
void linear_in_pairs(const RowMatrix& weights, const PackedTokens& x, Dtype dtype, std::byte* out,
                     ThreadPool& pool, SimdLevel level);

// products[r][m] = sum_j weights[r][j] * x[m][j], one row a weight row, x.padded() long
void product_rows(const WideRows& weights, std::size_t rows, const PackedTokens& x, float* products,
                  ThreadPool& pool, SimdLevel level);
void product_rows_in_pairs(const RowMatrix& weights, const PackedTokens& x, float* products, ThreadPool& pool,
                           SimdLevel level);

// y[m][j] += sum_i scales[m * scales.row + i * scales.step] * weights[i][j] for m < tokens, in the order of
// i, of weights [rows, columns]. y: rows `y_stride` floats long, a multiple of kColumnPad that holds all
// columns.
void add_rows(const WideRows& weights, std::size_t rows, std::size_t columns, TileRows scales,
              std::size_t tokens, float* y, std::size_t y_stride, ThreadPool& pool, SimdLevel level);
// Of columns [begin, end), `begin` a multiple of 64, by the calling thread.
void add_rows(const WideRows& weights, std::size_t rows, TileRows scales, std::size_t tokens,
              std::size_t begin, std::size_t end, float* y, std::size_t y_stride, SimdLevel level);
// Of bf16 weights, in pairs: scales, rows `padded` long, are rounded to bf16 first.
void add_rows_in_pairs(const RowMatrix& weights, const float* scales, std::size_t padded, std::size_t tokens,
                       float* y, std::size_t y_stride, ThreadPool& pool, SimdLevel level);

}  // namespace flashllm
