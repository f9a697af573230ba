#include "kernels/rows.h"

#include <string>

#include "io/error.h"
#include "io/xxh3.h"
#include "kernels/kernels_int8.h"

namespace flashllm {

namespace {

void require(bool condition, const std::string& message) {
  if (!condition) throw CoreError(ErrorKind::usage, message);
}

}  // namespace

RowCodec codec_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::f16:
      return RowCodec::f16;
    case Dtype::bf16:
      return RowCodec::bf16;
    case Dtype::f32:
      break;
  }
  return RowCodec::f32;
}

Dtype dtype_of(RowCodec codec) {
  switch (codec) {
    case RowCodec::f32:
      return Dtype::f32;
    case RowCodec::f16:
      return Dtype::f16;
    case RowCodec::bf16:
      return Dtype::bf16;
    case RowCodec::int8:
      break;
  }
  throw CoreError(ErrorKind::usage, "rows of 8 bits are not of a floating-point type");
}

std::size_t vector_nbytes(RowCodec codec, std::size_t length) {
  return codec == RowCodec::int8 ? length : length * dtype_nbytes(dtype_of(codec));
}

void dot_all(const RowMatrix& matrix, const float* x, float* out, ThreadPool& pool, SimdLevel level) {
  if (matrix.codec != RowCodec::int8) {
    const LinearWeights weights{
        matrix.data, matrix.rows, matrix.columns, matrix.stride, dtype_of(matrix.codec), matrix.bias};
    return linear(weights, x, 1, out, pool, level);
  }
  require(matrix.stride == matrix.columns && matrix.scales != nullptr,
          "rows of 8 bits must follow one another and have scales");
  const Int8Weights weights{reinterpret_cast<const std::int8_t*>(matrix.data), matrix.rows, matrix.columns,
                            matrix.scales, matrix.bias};
  linear_int8(weights, x, out, pool, level);
}

void RowFormat::check() const {
  require(d_model != 0, "a row needs a width");
  const std::size_t nbytes = dtype_nbytes(dtype_of(codec)) * d_model;
  const auto fits = [&](std::size_t first) { return first + nbytes <= stride; };
  require(fits(up) && fits(down) && (!gated() || fits(driver())),
          "a row's stride is shorter than its weights");
  require(stride >= kMinHashed && stride % kHashedMultiple == 0,
          "a row's stride must be a multiple of 64 bytes and at least 512, got " + std::to_string(stride));
}

LinearWeights RowFormat::matrix(const std::byte* rows, std::size_t count, std::uint32_t offset) const {
  return {rows + offset, count, d_model, stride, dtype_of(codec), nullptr};
}

void dot_scattered(const ScatteredRows& rows, const float* x, const std::int32_t* ids, const float* bias,
                   Activation activation, float* values, ThreadPool& pool, SimdLevel level) {
  gathered_dots(rows.vectors, ids, rows.count, dtype_of(rows.codec), x, rows.length, bias, activation, values,
                pool, level);
}

void sum_scattered(const ScatteredRows& rows, const float* scales, float* y, ThreadPool& pool,
                   SimdLevel level) {
  scaled_row_sum(rows.vectors, scales, rows.count, dtype_of(rows.codec), rows.length, y, pool, level);
}

}  // namespace flashllm
