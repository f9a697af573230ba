#include "kernels/rows.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "io/error.h"
#include "io/xxh3.h"
#include "kernels/levels/levels.h"
#include "kernels/scratch.h"

namespace flashllm {

namespace {

constexpr std::size_t kRowGrain = 16;       // rows a thread takes at a time
constexpr std::size_t kSummed = 64;         // vectors that many tokens use together
constexpr std::size_t kFewTokens = 7;       // that sum vectors one by one
constexpr std::size_t kExpanded = 1 << 21;  // weights of bf12 expanded together

// Rows as they lie: widened, or their codes unpacked.
class StoredRows : public WideRows {
 public:
  StoredRows(const RowMatrix& matrix, SimdLevel level)
      : matrix_(matrix),
        plain_(is_coded(matrix.codec) ? nullptr : &kernel_table(level, dtype_of(matrix.codec))),
        coded_(plain_ != nullptr ? nullptr : &codec_kernels(level, matrix.codec)),
        unpack_(plain_ != nullptr ? nullptr : unpack_kernel(level, matrix.codec)) {}
  void widen(std::size_t begin, std::size_t count, std::size_t first, std::size_t width, float* to,
             std::size_t stride) const override {
    const std::byte* row = matrix_.data + begin * matrix_.stride;
    for (std::size_t i = 0; i < count; ++i, row += matrix_.stride, to += stride)
      if (plain_ != nullptr)
        plain_->to_f32(row + first * dtype_nbytes(dtype_of(matrix_.codec)), width, to);
      else
        coded_->widen(row, matrix_.columns, first, width, to);
  }
  void unpack(std::size_t begin, std::size_t count, std::size_t first, std::size_t terms,
              UnpackedRows& to) const override {
    if (unpack_ == nullptr) return WideRows::unpack(begin, count, first, terms, to);
    const std::size_t nbytes = multiplied_as_bytes(matrix_.codec) ? 1 : sizeof(std::int16_t);
    to.unit = code_unit(matrix_.codec);
    to.offsets_each = offsets_of(matrix_.codec);
    to.is_wide = has_wide_codes(matrix_.codec);
    to.zero = zero_of_bytes(shape_of(matrix_.codec));
    to.largest = largest_byte(matrix_.codec);
    for (std::size_t i = 0; i < count; ++i)
      unpack_(matrix_.data + (begin + i) * matrix_.stride, matrix_.columns, first, terms / kCodeUnit,
              reinterpret_cast<std::byte*>(to.codes) + i * kCodeTerms * nbytes,
              to.scales + i * (kCodeTerms / 16), to.offsets + i * (kCodeTerms / 16));
  }

 private:
  const RowMatrix& matrix_;
  const KernelTable* plain_;
  const CodecKernels* coded_;
  const UnpackCodes unpack_;
};

}  // namespace

const CodecKernels& codec_kernels(SimdLevel level, RowCodec codec) {
  require(is_coded(codec) && !has_plane(codec), "these weights are not coded, or their scales lie apart");
  return level_kernels(level).codecs[static_cast<std::size_t>(codec) - kFirstCoded];
}

UnpackCodes unpack_kernel(SimdLevel level, RowCodec codec) {
  return level_kernels(level).unpack[static_cast<std::size_t>(codec) - kFirstCoded];
}

const InputKernels& input_kernels(SimdLevel level) { return *level_kernels(level).inputs; }

const CodedInputKernels& coded_input_kernels(SimdLevel level, RowCodec codec, InputForm inputs) {
  require(takes_inputs(codec, inputs), "weights of this codec are not multiplied by inputs in such codes");
  const LevelKernels& kernels = level_kernels(level);
  return (inputs == InputForm::int16 ? kernels.int16
                                     : kernels.int8)[static_cast<std::size_t>(codec) - kFirstCoded];
}

const CodecShape& group_shape(RowCodec codec) {
  require(is_coded(codec) && codec < RowCodec::bf12, "weights of this codec are not in groups of their own");
  return shape_of(codec);
}

RowCodec codec_of(Dtype dtype) {
  static_assert(static_cast<int>(RowCodec::f16) == static_cast<int>(Dtype::f16) &&
                    static_cast<int>(RowCodec::bf16) == static_cast<int>(Dtype::bf16),
                "the first codecs are the dtypes");
  return static_cast<RowCodec>(dtype);
}

Dtype dtype_of(RowCodec codec) {
  require(!is_coded(codec), "weights in codes are not of a floating-point type");
  return static_cast<Dtype>(codec);
}

std::size_t vector_nbytes(RowCodec codec, std::size_t length) {
  if (!is_coded(codec)) return length * dtype_nbytes(dtype_of(codec));
  if (codec == RowCodec::bf12) {
    const std::size_t padded = round_up(length, kCodeUnit), escapes = bf12_escapes(length);
    return (16 + padded + padded / 2 + 3 * escapes + 1) / 2 * 2;
  }
  const CodecShape& shape = shape_of(codec);
  const std::size_t units = (length + kCodeUnit - 1) / kCodeUnit, codes = units * 4 * shape.bits,
                    shared = (length + kSharedFactors - 1) / kSharedFactors,
                    of_each = shape.has_minimum ? 2 : 1;
  switch (shape.scales) {
    case Scales::none:
      return codes;
    case Scales::halves: {
      const std::size_t groups = (length + shape.group - 1) / shape.group;
      return groups * (of_each * sizeof(std::uint16_t) + shape.group * shape.bits / 8);
    }
    case Scales::factors:
      return shared * of_each * (sizeof(std::uint16_t) + kSharedFactors / shape.group) + codes;
    case Scales::powers:
      return units + codes;
    case Scales::quarters:
      return sizeof(float) + units * (kCodeUnit / shape.group) + codes;
    case Scales::floats:
      break;
  }
  return shared * sizeof(float) + codes;
}

InputForm form_of_few(const RowMatrix& matrix) {
  return is_coded(matrix.codec) ? matrix.inputs : InputForm::f32;
}

void linear(const RowMatrix& matrix, const float* x, std::size_t tokens, float* out, ThreadPool& pool,
            SimdLevel level) {
  linear(matrix, RowInputs(x, tokens, matrix.columns, form_of_few(matrix), level), tokens, out, pool, level);
}

void linear(const RowMatrix& matrix, const RowInputs& inputs, std::size_t tokens, float* out,
            ThreadPool& pool, SimdLevel level) {
  pool.parallel_for(matrix.rows, kRowGrain, [&](std::size_t begin, std::size_t end) {
    // All tokens use a small block of rows while it is in the processor's cache.
    const std::size_t block = tokens == 1 ? end - begin : kRowGrain;
    for (std::size_t r = begin; r < end; r += block)
      dot_block(matrix, r, std::min(block, end - r), inputs, 0, tokens, out + r, matrix.rows, level);
  });
}

void dot_listed(const RowMatrix& matrix, std::size_t first, std::size_t count, const RowInputs& x,
                const std::size_t* which, std::size_t tokens, float* out, std::size_t out_stride,
                SimdLevel level) {
  const std::byte* rows = matrix.data + first * matrix.stride;
  if (x.has_codes()) {
    const CodedInputKernels& kernels = coded_input_kernels(level, matrix.codec, x.form());
    for (std::size_t t = 0; t < tokens; t += kTokensOfDot) {
      CodedInputs inputs[kTokensOfDot];
      const std::size_t together = std::min(kTokensOfDot, tokens - t);
      for (std::size_t i = 0; i < together; ++i) inputs[i] = x.codes(which[t + i]);
      kernels.dot_tokens(rows, matrix.stride, count, inputs, together, matrix.columns, out + t * out_stride,
                         out_stride);
    }
  } else {
    const auto dot = is_coded(matrix.codec) ? codec_kernels(level, matrix.codec).dot_matrix
                                            : kernel_table(level, dtype_of(matrix.codec)).dot_matrix;
    for (std::size_t t = 0; t < tokens; ++t)
      dot(rows, matrix.stride, count, x.floats(which[t]), matrix.columns, out + t * out_stride);
  }
  if (matrix.bias == nullptr) return;
  for (std::size_t t = 0; t < tokens; ++t)
    for (std::size_t i = 0; i < count; ++i) out[t * out_stride + i] += matrix.bias[first + i];
}

void dot_block(const RowMatrix& matrix, std::size_t first, std::size_t count, const RowInputs& x,
               std::size_t token, std::size_t tokens, float* out, std::size_t out_stride, SimdLevel level) {
  std::size_t which[kTokensOfDot];
  for (std::size_t t = 0; t < tokens; t += kTokensOfDot) {
    const std::size_t together = std::min(kTokensOfDot, tokens - t);
    std::iota(which, which + together, token + t);
    dot_listed(matrix, first, count, x, which, together, out + t * out_stride, out_stride, level);
  }
}

void widen_row(const RowMatrix& matrix, std::size_t row, float* to, SimdLevel level) {
  const std::byte* from = matrix.data + row * matrix.stride;
  if (is_coded(matrix.codec)) {
    codec_kernels(level, matrix.codec).widen(from, matrix.columns, 0, matrix.columns, to);
  } else {
    kernel_table(level, dtype_of(matrix.codec)).to_f32(from, matrix.columns, to);
  }
}

TokenForm form_of_many(RowCodec codec, InputForm inputs, Dtype dtype, std::size_t terms, SimdLevel level) {
  if (is_coded(codec) && codec != RowCodec::bf12)
    return inputs == InputForm::f32 || unpack_kernel(level, codec) == nullptr ? TokenForm::floats
           : inputs == InputForm::token_int8                                  ? TokenForm::token_bytes
           : multiplied_as_bytes(codec)                                       ? TokenForm::bytes
                                                                              : TokenForm::codes;
  return in_pairs(dtype, terms, level) ? TokenForm::pairs : TokenForm::floats;
}

namespace {

// Rows of bf12 as the bf16 that they are, for products in pairs; others as they lie.
class Expanded {
 public:
  Expanded(const RowMatrix& matrix, ThreadPool& pool, SimdLevel level) : rows_(matrix) {
    if (matrix.codec != RowCodec::bf12) return;
    const std::size_t columns = matrix.columns;
    values_.reset(new std::uint16_t[matrix.rows * columns]);
    const CodecKernels& kernels = codec_kernels(level, matrix.codec);
    const KernelTable& narrow = kernel_table(level, Dtype::bf16);
    pool.parallel_for(matrix.rows, kRowGrain, [&](std::size_t begin, std::size_t end) {
      std::unique_ptr<float[]> wide(new float[columns]);
      for (std::size_t r = begin; r < end; ++r) {
        kernels.widen(matrix.data + r * matrix.stride, columns, 0, columns, wide.get());
        narrow.from_f32(wide.get(), columns, values_.get() + r * columns);
      }
    });
    rows_.data = reinterpret_cast<const std::byte*>(values_.get());
    rows_.stride = columns * sizeof(std::uint16_t);
    rows_.codec = RowCodec::bf16;
  }
  const RowMatrix& rows() const { return rows_; }

 private:
  std::unique_ptr<std::uint16_t[]> values_;
  RowMatrix rows_;
};

// The same products, some rows at a time.
void linear_many_expanded(const RowMatrix& matrix, const PackedTokens& x, Dtype dtype, std::byte* out,
                          ThreadPool& pool, SimdLevel level) {
  const std::size_t element = dtype_nbytes(dtype);
  const std::size_t together = std::max<std::size_t>(1, kExpanded / matrix.columns);
  for (std::size_t first = 0; first < matrix.rows; first += together) {
    const std::size_t count = std::min(together, matrix.rows - first);
    RowMatrix part = matrix;
    part.data += first * matrix.stride;
    part.rows = count;
    if (part.bias != nullptr) part.bias += first;
    std::unique_ptr<std::byte[]> made(new std::byte[x.tokens() * count * element]);
    linear_in_pairs(Expanded(part, pool, level).rows(), x, dtype, made.get(), pool, level);
    for (std::size_t m = 0; m < x.tokens(); ++m)
      std::copy_n(made.get() + m * count * element, count * element,
                  out + (m * matrix.rows + first) * element);
  }
}

}  // namespace

void linear_many(const RowMatrix& matrix, const PackedTokens& x, Dtype dtype, std::byte* out,
                 ThreadPool& pool, SimdLevel level) {
  if (!x.in_pairs())
    return linear_many(StoredRows(matrix, level), matrix.rows, matrix.bias, x, dtype, out, pool, level);
  if (matrix.codec == RowCodec::bf12) return linear_many_expanded(matrix, x, dtype, out, pool, level);
  linear_in_pairs(matrix, x, dtype, out, pool, level);
}

void product_rows(const RowMatrix& matrix, const PackedTokens& x, float* products, ThreadPool& pool,
                  SimdLevel level) {
  if (x.in_pairs())
    return product_rows_in_pairs(Expanded(matrix, pool, level).rows(), x, products, pool, level);
  product_rows(StoredRows(matrix, level), matrix.rows, x, products, pool, level);
}

void add_rows(const RowMatrix& matrix, const float* scales, std::size_t padded, std::size_t tokens, float* y,
              std::size_t y_stride, ThreadPool& pool, SimdLevel level) {
  if ((matrix.codec == RowCodec::bf16 || matrix.codec == RowCodec::bf12) &&
      in_pairs(Dtype::bf16, matrix.columns, level))
    return add_rows_in_pairs(Expanded(matrix, pool, level).rows(), scales, padded, tokens, y, y_stride, pool,
                             level);
  add_rows(StoredRows(matrix, level), matrix.rows, matrix.columns, {scales, 1, padded}, tokens, y, y_stride,
           pool, level);
}

void add_rows_few(const RowMatrix& matrix, TileRows scales, std::size_t tokens, std::size_t begin,
                  std::size_t end, float* y, std::size_t y_stride, SimdLevel level) {
  add_rows(StoredRows(matrix, level), matrix.rows, scales, tokens, begin, end, y, y_stride, level);
}

void linear_by_columns(const RowMatrix& matrix, const std::byte* x, std::size_t tokens, Dtype dtype,
                       Dtype out_dtype, std::byte* out, ThreadPool& pool, SimdLevel level) {
  const std::size_t width = matrix.columns, inputs = matrix.rows, row = inputs * dtype_nbytes(dtype);
  const KernelTable &wide = kernel_table(level, dtype), &narrow = kernel_table(level, out_dtype);
  // A cache line apart from a power of two, of whose multiples few fit a cache together.
  const bool few = tokens <= kFewTokens && level != SimdLevel::scalar;  // which rounds a vector's end once
  const auto apart = [few](std::size_t n) { return few ? n : round_up(n, kColumnPad) + kColumnPad; };
  const std::size_t stride = apart(width), padded = apart(tokens);
  const Scratch<float> scales(inputs * padded);
  std::vector<float> sums(tokens * stride);
  if (few) {
    std::vector<const void*> vectors(inputs);
    for (std::size_t i = 0; i < inputs; ++i) vectors[i] = matrix.data + i * matrix.stride;
    wide.to_f32(x, inputs * tokens, scales.get());
    sum_scattered({vectors.data(), inputs, width, matrix.codec}, scales.get(), inputs, tokens, sums.data(),
                  pool, level);
  } else {
    pool.parallel_for(inputs, kSummed, [&](std::size_t begin, std::size_t end) {
      float values[kSummed];
      for (std::size_t first = begin; first < end; first += kSummed) {
        const std::size_t n = std::min(kSummed, end - first);
        for (std::size_t m = 0; m < tokens; ++m) {
          wide.to_f32(x + m * row + first * dtype_nbytes(dtype), n, values);
          for (std::size_t i = 0; i < n; ++i) scales.get()[(first + i) * padded + m] = values[i];
        }
      }
    });
    add_rows(matrix, scales.get(), padded, tokens, sums.data(), stride, pool, level);
  }
  pool.parallel_for(tokens, 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t m = begin; m < end; ++m) {
      float* sum = sums.data() + m * stride;
      if (matrix.bias != nullptr)
        for (std::size_t j = 0; j < width; ++j) sum[j] += matrix.bias[j];
      narrow.from_f32(sum, width, out + m * width * dtype_nbytes(out_dtype));
    }
  });
}

void RowFormat::check() const {
  require(d_model != 0, "a row needs a width");
  require(unit != 0, "a unit of rows has some");
  require(!has_plane(codec), "only down columns may have their scales apart");
  require(!has_plane(down_codec) || d_model % kCodeUnit == 0,
          "columns whose scales lie apart must be multiples of 32 weights");
  const auto fits = [&](std::size_t first, RowCodec stored) {
    return first + vector_nbytes(stored, d_model) <= stride;
  };
  require(fits(up, codec) && fits(down, down_codec) && (!gated() || fits(driver(), codec)),
          "a row's stride is shorter than its weights");
  require(stride >= kMinHashed && stride % kHashedMultiple == 0,
          "a row's stride must be a multiple of 64 bytes and at least 512, got " + std::to_string(stride));
}

RowMatrix RowFormat::apart(const std::byte* data, std::size_t count) const {
  return {data, count, d_model, vector_nbytes(codec, d_model), codec, nullptr, inputs};
}

std::size_t RowFormat::step(std::uint32_t offset) const {
  return unit == 1 ? stride : vector_nbytes(offset == down ? down_codec : codec, d_model);
}

RowMatrix RowFormat::matrix(const std::byte* rows, std::size_t count, std::uint32_t offset) const {
  const RowCodec stored = offset == down ? down_codec : codec;
  return {rows + start(offset), count, d_model, step(offset), stored, nullptr, inputs};
}

void dot_block(const ScatteredRows& rows, const RowInputs& x, const std::int32_t* ids, const float* bias,
               Activation activation, float* values, SimdLevel level) {
  if (x.has_codes()) {
    coded_input_kernels(level, rows.codec, x.form())
        .dot_rows(rows.vectors, rows.count, rows.count + rows.next, x.codes(0), rows.length, values);
  } else {
    const auto dot = is_coded(rows.codec) ? codec_kernels(level, rows.codec).dot_rows
                                          : kernel_table(level, dtype_of(rows.codec)).dot_rows;
    dot(rows.vectors, rows.count, x.floats(0), rows.length, values);
  }
  for (std::size_t i = 0; bias != nullptr && i < rows.count; ++i) values[i] += bias[ids[i]];
  activate(activation, 0.0F, values, rows.count, level);
}

void dot_scattered(const ScatteredRows& rows, const float* x, const std::int32_t* ids, const float* bias,
                   Activation activation, float* values, ThreadPool& pool, SimdLevel level) {
  level_kernels(level);  // throws here, not in a thread
  const RowInputs inputs(x, 1, rows.length, rows.inputs, level);
  pool.parallel_for(rows.count, kRowGrain, [&](std::size_t begin, std::size_t end) {
    const ScatteredRows part{rows.vectors + begin, end - begin, rows.length, rows.codec, rows.inputs};
    dot_block(part, inputs, ids + begin, bias, activation, values + begin, level);
  });
}

void sum_block(const ScatteredRows& rows, const float* scales, std::size_t begin, std::size_t end, float* y,
               SimdLevel level) {
  if (is_coded(rows.codec))
    codec_kernels(level, rows.codec)
        .add_scaled_rows(rows.vectors, scales, rows.count, rows.length, begin, end, y);
  else
    kernel_table(level, dtype_of(rows.codec))
        .add_scaled_rows(rows.vectors, scales, rows.count, begin, end, y);
}

std::size_t column_share(std::size_t columns, const ThreadPool& pool) {
  constexpr std::size_t kGrain = 64;
  const auto threads = static_cast<std::size_t>(pool.threads());
  return round_up((columns + threads - 1) / threads, kGrain);
}

void sum_scattered(const ScatteredRows& rows, const float* scales, float* y, ThreadPool& pool,
                   SimdLevel level) {
  sum_scattered(rows, scales, rows.count, 1, y, pool, level);
}

void sum_scattered(const ScatteredRows& rows, const float* scales, std::size_t scales_stride,
                   std::size_t tokens, float* y, ThreadPool& pool, SimdLevel level) {
  const std::size_t together = tokens == 1 ? rows.count : kSummed;
  pool.parallel_for(rows.length, column_share(rows.length, pool), [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = 0; i < rows.count; i += together) {
      const ScatteredRows part{rows.vectors + i, std::min(together, rows.count - i), rows.length, rows.codec};
      for (std::size_t m = 0; m < tokens; ++m)
        sum_block(part, scales + m * scales_stride + i, begin, end, y + m * rows.length, level);
    }
  });
}

}  // namespace flashllm
