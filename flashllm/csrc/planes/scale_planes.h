// Down columns in codes whose scales lie apart, in resident planes.
//
// Checkpoints that are quantised along their inputs give a neuron's down column a scale of each output's own,
// which it shares with the neurons beside it. The codes of a column lie in the neuron's row (RowCodec::codes4
// and so on), the scales of a group of neurons in a plane [groups, k], where k is the width of a column.
//
// Codes of 4 bits: 32 in 16 bytes, code i in the lower half of byte i, code i + 16 in its upper half. Of 5
// and 6 bits, 4 and 8 bytes with the upper bits follow: bit q of byte i is that of code 4 q + i; bits 2 q and
// 2 q + 1 of byte i are those of code 8 q + i, and so are codes of 2 bits. Of 3 bits
// 4 bytes follow those of 2. Of 8 bits: int8. A column is whole
// units of 32 codes.
//
// A weight is (code - zero) * scale, or code * scale + minimum; zero is half the number of codes, of 2 bits
// it is 1, of int8 0. Of codes_fp4 it is what mxfp4 has (kernels/row_codecs.h), whose scales are bytes; or
// what nvfp4 has, whose factors are E4M3 with an fp32 scale for a group of neurons; of codes_iq4 what iq4_nl
// and iq4_xs have, and of codes_iq3_s to codes_iq1 what iq3_s to iq1_m have, without minimums. Every product
// is exact in fp32, but that of nvfp4's scales rounded to it, so that all levels have the same weights, those
// of the checkpoint.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/matmul.h"
#include "kernels/row_codecs.h"
#include "kernels/thread_pool.h"

namespace flashllm {

struct ScalePlane {
  const std::uint16_t* scales =
      nullptr;  // fp16 [neurons / group, k]; with factors [neurons / kSharedFactors, k]
  const std::uint16_t* minimums = nullptr;       // the same, or nullptr
  const std::int8_t* factors = nullptr;          // [neurons / group, k]: of the scales; or nullptr
  const std::int8_t* minimum_factors = nullptr;  // the same of the minimums
  const std::uint8_t* powers = nullptr;          // [neurons / group, k]: of codes_fp4, without others; or
  const std::uint8_t* quarters = nullptr;        // the same in E4M3, and
  const float* whole = nullptr;                  // [neurons / group]: what they are factors of
  std::size_t group = 32;                        // neurons

  bool has_minimums() const { return minimums != nullptr; }
  bool is_there() const { return scales != nullptr || of_fp4(); }
  bool of_fp4() const { return powers != nullptr || quarters != nullptr; }
};

// Columns of `count` neurons from `id` on, `stride` bytes apart.
struct PlaneRun {
  const void* rows;
  std::size_t stride, id, count;
};

// The inner loops of one level, codec and form of plane.
struct PlaneKernels {
  // y[j] += sum_i values[i] * weight j of the column rows[i] of neuron ids[i], in the order of i; j in
  // [begin, end), both multiples of kCodeUnit
  void (*add_scaled_rows)(const void* const* rows, const std::int32_t* ids, const float* values,
                          std::size_t n, const ScalePlane& plane, std::size_t k, std::size_t begin,
                          std::size_t end, float* y);
  // weights [first, first + n) of neurons [id, id + count), whose columns are `stride` bytes apart, into rows
  // `to_stride` floats apart; `first` is a multiple of kCodeUnit
  void (*widen)(const void* rows, std::size_t stride, std::size_t id, std::size_t count,
                const ScalePlane& plane, std::size_t k, std::size_t first, std::size_t n, float* to,
                std::size_t to_stride);
  // Codes [first, first + kCodeColumns) of the same, in windows of 32 ids from a multiple of 32 on, at most
  // kCodeTerms; or nullptr where the level has no AddCodes. Values of ids beyond these neurons must be zeros.
  void (*pair)(const void* rows, std::size_t stride, std::size_t id, std::size_t count,
               const ScalePlane& plane, std::size_t k, std::size_t first, CodeWeights& to);
  // y[t * y_stride + j] += what AddCodes has for each of some tokens, whose values are codes in windows of 32
  // ids from a multiple of 32 on; j in [begin, end), both multiples of kCodeUnit; or nullptr
  void (*add_run)(const PlaneRun& run, const CodeTokens* tokens, std::size_t count, const ScalePlane& plane,
                  std::size_t k, std::size_t begin, std::size_t end, float* y, std::size_t y_stride);
};
// Throws CoreError for a codec without a plane, one of other scales, and where the processor lacks the level.
const PlaneKernels& plane_kernels(SimdLevel level, RowCodec codec, const ScalePlane& plane);

// Columns of neurons, scattered in memory; k weights each.
struct PlaneColumns {
  const void* const* vectors;
  const std::int32_t* ids;
  std::size_t count;
  std::size_t k;
  RowCodec codec;
  const ScalePlane* plane;
};
// y[j] += sum_i values[i] * columns[i][j], in the order of i; j in [begin, end), by the calling thread
void sum_block(const PlaneColumns& columns, const float* values, std::size_t begin, std::size_t end, float* y,
               SimdLevel level);

// Values of some neurons as codes of 16 bits, for each of some tokens: 32 ids from a multiple of 32 on share
// a scale. Beside the neurons, values are zeros.
class TokenCodes {
 public:
  // Room for `terms` values of each token, whole windows of them: those before the first neuron count.
  void begin(std::size_t tokens, std::size_t terms, SimdLevel level);
  // values[i * step] of neuron id + i
  void set(std::size_t token, std::size_t id, std::size_t count, const float* values, std::size_t step);
  CodeTokens of(std::size_t token) const {
    const std::size_t window = token * (terms_ / 32);
    return {codes_.data() + token * terms_, scales_.data() + window, sums_.data() + window};
  }

 private:
  std::size_t terms_ = 0;
  const InputKernels* kernels_ = nullptr;
  std::vector<std::int16_t> codes_;
  std::vector<float> scales_, sums_;
};

// The columns of neurons `first` on, for products of many tokens.
class PlaneRows : public WideRows {
 public:
  PlaneRows(const RowMatrix& columns, std::size_t first, const ScalePlane& plane, SimdLevel level)
      : columns_(columns),
        first_(first),
        plane_(plane),
        level_(level),
        kernels_(plane_kernels(level, columns.codec, plane)) {}
  void widen(std::size_t begin, std::size_t count, std::size_t first, std::size_t width, float* to,
             std::size_t stride) const override {
    kernels_.widen(columns_.data + begin * columns_.stride, columns_.stride, first_ + begin, count, plane_,
                   columns_.columns, first, width, to, stride);
  }
  // Whether a token's values are codes, as the inputs of its neurons' other vectors are.
  bool can_add_codes() const {
    return columns_.inputs != InputForm::f32 && kernels_.pair != nullptr &&
           (plane_.group % 32 == 0 || (plane_.group == 16 && !plane_.has_minimums()));
  }
  // y[m] += the sum of the columns times values [m * row + i * step] of token m and neuron i, as codes.
  // Wants can_add_codes(). A token's bits do not depend on how many there are.
  void add_codes(TileRows values, std::size_t tokens, float* y, std::size_t y_stride, ThreadPool& pool) const;
  // The same of a few tokens and outputs [begin, end), by the calling thread.
  void add_codes(TileRows values, std::size_t tokens, std::size_t begin, std::size_t end, float* y,
                 std::size_t y_stride) const;

 private:
  template <typename Use>
  void with_codes(TileRows values, std::size_t tokens, float* y, std::size_t y_stride, const Use& use) const;

  const RowMatrix columns_;
  const std::size_t first_;
  const ScalePlane& plane_;
  const SimdLevel level_;
  const PlaneKernels& kernels_;
};

}  // namespace flashllm
