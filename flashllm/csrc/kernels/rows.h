// Row codecs: how a vector of weights lies in memory, and what is done with it: dot products, sums of scaled
// rows, widening to fp32, for a token and for many. All offsets are in bytes. A new codec is an entry of
// RowCodec and its kernels (row_codecs.h); no other code looks inside a vector.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"
#include "kernels/matmul.h"
#include "kernels/row_codecs.h"
#include "kernels/row_inputs.h"
#include "kernels/thread_pool.h"

namespace flashllm {

RowCodec codec_of(Dtype dtype);
// Throws CoreError for a codec that is none.
Dtype dtype_of(RowCodec codec);
// Bytes of a vector of `length` weights.
std::size_t vector_nbytes(RowCodec codec, std::size_t length);

// out[m][r] = rows[r] . x[m] (+ bias[r]), token by token. Every output is one sum in one order: its bits do
// not depend on the number of threads. Throws CoreError where the processor lacks the level.
void linear(const RowMatrix& matrix, const float* x, std::size_t tokens, float* out, ThreadPool& pool,
            SimdLevel level);
// The same of inputs in the form that the matrix takes.
InputForm form_of_few(const RowMatrix& matrix);
void linear(const RowMatrix& matrix, const RowInputs& inputs, std::size_t tokens, float* out,
            ThreadPool& pool, SimdLevel level);
inline void dot_all(const RowMatrix& matrix, const float* x, float* out, ThreadPool& pool, SimdLevel level) {
  linear(matrix, x, 1, out, pool, level);
}

// The same of rows [first, first + count) and `tokens` tokens of x from `token` on, whose outputs lie
// `out_stride` apart, by the calling thread.
void dot_block(const RowMatrix& matrix, std::size_t first, std::size_t count, const RowInputs& x,
               std::size_t token, std::size_t tokens, float* out, std::size_t out_stride, SimdLevel level);
// The same of the tokens `which`, `tokens` of them.
void dot_listed(const RowMatrix& matrix, std::size_t first, std::size_t count, const RowInputs& x,
                const std::size_t* which, std::size_t tokens, float* out, std::size_t out_stride,
                SimdLevel level);

// Row `row`, widened to fp32.
void widen_row(const RowMatrix& matrix, std::size_t row, float* to, SimdLevel level);

// The products of matmul.h. `form_of_many`: the inputs' form [tokens, terms] of a dtype; coded
// weights take codes, where single tokens' products do not take fp32, or floats; bf12 what bf16 does, or
// floats.
TokenForm form_of_many(RowCodec codec, InputForm inputs, Dtype dtype, std::size_t terms, SimdLevel level);
void linear_many(const RowMatrix& matrix, const PackedTokens& x, Dtype dtype, std::byte* out,
                 ThreadPool& pool, SimdLevel level);
void product_rows(const RowMatrix& matrix, const PackedTokens& x, float* products, ThreadPool& pool,
                  SimdLevel level);
void add_rows(const RowMatrix& matrix, const float* scales, std::size_t padded, std::size_t tokens, float* y,
              std::size_t y_stride, ThreadPool& pool, SimdLevel level);
// Never in pairs, so that every token has the bits of sum_scattered, but at the scalar level.
// Of columns [begin, end), `begin` a multiple of 64, by the calling thread.
void add_rows_few(const RowMatrix& matrix, TileRows scales, std::size_t tokens, std::size_t begin,
                  std::size_t end, float* y, std::size_t y_stride, SimdLevel level);

// out[m][j] = sum_i x[m][i] * rows[i][j] (+ bias[j]), in the order of i whatever the tokens, rounded to
// `out_dtype`: products with a matrix that lies by its inputs, as down columns do. x: [tokens, rows], of
// `dtype`; out: [tokens, columns]; bias: [columns]. Never in pairs. Not of bf12, whose products of few
// tokens and of many may differ.
void linear_by_columns(const RowMatrix& matrix, const std::byte* x, std::size_t tokens, Dtype dtype,
                       Dtype out_dtype, std::byte* out, ThreadPool& pool, SimdLevel level);

// Where a neuron's vectors lie in its row (paper A, section 3.2: bundling); flashllm/format/rows.py has the
// same numbers.
struct RowFormat {
  RowCodec codec = RowCodec::f32;       // of up and gate
  RowCodec down_codec = RowCodec::f32;  // of down
  std::uint32_t stride = 0;             // bytes
  std::uint32_t d_model = 0;
  std::uint32_t up = 0, down = 0;     // first byte in the row
  std::int32_t gate = -1;             // -1: no gate
  InputForm inputs = InputForm::f32;  // of up's and gate's products
  // Neurons whose vectors lie matrix by matrix, without gaps: products are faster then. 1: each in its row.
  std::uint32_t unit = 1;

  bool gated() const { return gate >= 0; }
  // What the activation is applied to: the gate where there is one.
  std::uint32_t driver() const { return gated() ? static_cast<std::uint32_t>(gate) : up; }
  // Throws CoreError, saying why, for a format that cannot be.
  void check() const;
  // [count, d_model] without gaps, in the codec of up and gate.
  RowMatrix apart(const std::byte* data, std::size_t count) const;
  // Where the vectors at byte `offset` of rows begin in a unit, and the bytes from one to the next.
  std::size_t start(std::uint32_t offset) const { return std::size_t{offset} * unit; }
  std::size_t step(std::uint32_t offset) const;
  // These of the first `count` rows of a unit, as a matrix.
  RowMatrix matrix(const std::byte* rows, std::size_t count, std::uint32_t offset) const;
};

// Rows scattered in memory: `vectors` points to one vector of `length` weights a row, and behind those to
// `next` that are wanted soon.
struct ScatteredRows {
  const void* const* vectors;
  std::size_t count;
  std::size_t length;
  RowCodec codec;
  InputForm inputs = InputForm::f32;
  std::size_t next = 0;
};

// values[i] = activation(vectors[i] . x + bias[ids[i]]), bias: nullptr for none; by the calling thread, of
// the first token of x
void dot_block(const ScatteredRows& rows, const RowInputs& x, const std::int32_t* ids, const float* bias,
               Activation activation, float* values, SimdLevel level);
// The same by all threads.
void dot_scattered(const ScatteredRows& rows, const float* x, const std::int32_t* ids, const float* bias,
                   Activation activation, float* values, ThreadPool& pool, SimdLevel level);

// y[j] += sum_i scales[i] * vectors[i][j], in the order of i; j in [begin, end), by the calling thread
void sum_block(const ScatteredRows& rows, const float* scales, std::size_t begin, std::size_t end, float* y,
               SimdLevel level);
// The columns a thread takes at a time: a piece of a row is read from memory in one go, the longer the
// better. Whole groups, cache lines of fp16, vectors of every level.
std::size_t column_share(std::size_t columns, const ThreadPool& pool);
// All columns, by all threads.
void sum_scattered(const ScatteredRows& rows, const float* scales, float* y, ThreadPool& pool,
                   SimdLevel level);
// The same of many tokens: y[m][j] += sum_i scales[m * scales_stride + i] * vectors[i][j]. Each token has the
// bits it has alone; all use a few vectors while they are in the processor's cache.
void sum_scattered(const ScatteredRows& rows, const float* scales, std::size_t scales_stride,
                   std::size_t tokens, float* y, ThreadPool& pool, SimdLevel level);

}  // namespace flashllm
