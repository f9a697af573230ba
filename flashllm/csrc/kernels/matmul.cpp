#include "kernels/matmul.h"

#include <algorithm>
#include <cstring>

namespace flashllm {

namespace {

constexpr std::size_t kTokensTogether =
    256;                                   // with kTerms of them a slab of inputs fits a core's second cache
constexpr std::size_t kTerms = 256;        // of a dot product before the next rows take their turn
constexpr std::size_t kRowsTogether = 48;  // rows a thread takes at a time: whole tiles
constexpr std::size_t kWidened = 12;       // rows widened together
constexpr std::size_t kColumns = 64;       // columns widened or paired together, with kSummed rows of them
constexpr std::size_t kSummed = 128;       // or pairs of rows
constexpr std::size_t kPairNbytes = 4;
constexpr std::size_t kLineColumns = 32;  // bf16 ones in a cache line
constexpr std::size_t kFewTokens = 12;    // whole tiles, between which the next rows are fetched
static_assert(kRowsTogether % kWidened == 0 && kColumns % kColumnPad == 0, "blocks must be whole");
static_assert(kTerms % 2 == 0 && kColumns % 2 == 0, "pairs must be whole");

std::size_t round_up(std::size_t n, std::size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// One block of rows by one block of tokens: products[r][m] in fp32, rows `width` floats apart.
void multiply_block(const LinearWeights& weights, std::size_t begin, std::size_t end, const PackedTokens& x,
                    std::size_t first_token, std::size_t width, float* products, SimdLevel level) {
  const std::size_t element = dtype_nbytes(weights.dtype);
  std::fill(products, products + (end - begin) * width, 0.0F);
  if (x.in_pairs()) {
    for (std::size_t j = 0; j < weights.columns; j += kTerms) {
      const PairRows rows{weights.data + begin * weights.stride + j * element, weights.stride, kPairNbytes};
      const PairColumns columns{x.row_of_pairs(j / 2) + first_token, x.padded()};
      const std::size_t pairs = std::min(kTerms, weights.columns - j) / 2;
      pair_kernels(level)->multiply_add(rows, end - begin, columns, width, pairs, products, width);
    }
    return;
  }
  const KernelTable& kernels = kernel_table(level, weights.dtype);
  const MultiplyAdd multiply_add = multiply_add_kernel(level);
  alignas(64) float wide[kWidened * kTerms];
  for (std::size_t j = 0; j < weights.columns; j += kTerms) {
    const std::size_t terms = std::min(kTerms, weights.columns - j);
    for (std::size_t r = begin; r < end; r += kWidened) {
      const std::size_t rows = std::min(kWidened, end - r);
      for (std::size_t i = 0; i < rows; ++i)
        kernels.to_f32(weights.data + (r + i) * weights.stride + j * element, terms, wide + i * kTerms);
      multiply_add({wide, kTerms, 1}, rows, {x.row(j) + first_token, x.padded()}, width, terms,
                   products + (r - begin) * width, width);
    }
  }
}

}  // namespace

bool in_pairs(Dtype dtype, std::size_t terms, SimdLevel level) {
  return dtype == Dtype::bf16 && terms % 2 == 0 && pair_kernels(level) != nullptr;
}

PackedTokens::PackedTokens(const std::byte* x, std::size_t tokens, std::size_t columns, Dtype dtype,
                           ThreadPool& pool, SimdLevel level)
    : tokens_(tokens), columns_(columns), padded_(round_up(tokens, kColumnPad)) {
  if (flashllm::in_pairs(dtype, columns, level)) {
    pairs_.reset(new std::uint32_t[columns / 2 * padded_]);
    pool.parallel_for(columns, kColumns, [&](std::size_t begin, std::size_t end) {
      std::uint32_t words[kColumns / 2];
      for (std::size_t j = begin; j < end; j += kColumns) {
        const std::size_t n = std::min(kColumns, end - j) / 2;
        std::uint32_t* to = pairs_.get() + j / 2 * padded_;
        for (std::size_t m = 0; m < padded_; ++m) {
          if (m < tokens_) {
            std::memcpy(words, x + (m * columns_ + j) * dtype_nbytes(dtype), n * kPairNbytes);
          } else {
            std::fill(words, words + n, 0U);
          }
          for (std::size_t i = 0; i < n; ++i) to[i * padded_ + m] = words[i];
        }
      }
    });
    return;
  }
  values_.reset(new float[columns * padded_]);
  const KernelTable& kernels = kernel_table(level, dtype);
  pool.parallel_for(columns, kColumns, [&](std::size_t begin, std::size_t end) {
    float wide[kColumns];
    for (std::size_t j = begin; j < end; j += kColumns) {
      const std::size_t n = std::min(kColumns, end - j);
      float* to = values_.get() + j * padded_;
      for (std::size_t m = 0; m < padded_; ++m) {
        if (m < tokens_) {
          kernels.to_f32(x + (m * columns_ + j) * dtype_nbytes(dtype), n, wide);
        } else {
          std::fill(wide, wide + n, 0.0F);
        }
        for (std::size_t i = 0; i < n; ++i) to[i * padded_ + m] = wide[i];
      }
    }
  });
}

void linear_many(const LinearWeights& weights, const PackedTokens& x, std::byte* out, ThreadPool& pool,
                 SimdLevel level) {
  const KernelTable& kernels = kernel_table(level, weights.dtype);
  const std::size_t element = dtype_nbytes(weights.dtype);
  pool.parallel_for(weights.rows, kRowsTogether, [&](std::size_t begin, std::size_t end) {
    std::unique_ptr<float[]> products(new float[kRowsTogether * std::min(kTokensTogether, x.padded())]);
    for (std::size_t r = begin; r < end; r += kRowsTogether) {
      const std::size_t rows = std::min(kRowsTogether, end - r);
      for (std::size_t first = 0; first < x.tokens(); first += kTokensTogether) {
        const std::size_t width = std::min(kTokensTogether, x.padded() - first);
        multiply_block(weights, r, r + rows, x, first, width, products.get(), level);
        for (std::size_t m = 0; m < std::min(width, x.tokens() - first); ++m) {
          float values[kRowsTogether];
          for (std::size_t i = 0; i < rows; ++i) {
            values[i] = products[i * width + m];
            if (weights.bias != nullptr) values[i] += weights.bias[r + i];
          }
          kernels.from_f32(values, rows, out + ((first + m) * weights.rows + r) * element);
        }
      }
    }
  });
}

void product_rows(const LinearWeights& weights, const PackedTokens& x, float* products, ThreadPool& pool,
                  SimdLevel level) {
  pool.parallel_for(weights.rows, kWidened, [&](std::size_t begin, std::size_t end) {
    std::unique_ptr<float[]> block(new float[kRowsTogether * std::min(kTokensTogether, x.padded())]);
    for (std::size_t r = begin; r < end; r += kRowsTogether) {
      const std::size_t rows = std::min(kRowsTogether, end - r);
      for (std::size_t first = 0; first < x.padded(); first += kTokensTogether) {
        const std::size_t width = std::min(kTokensTogether, x.padded() - first);
        multiply_block(weights, r, r + rows, x, first, width, block.get(), level);
        for (std::size_t i = 0; i < rows; ++i)
          std::copy_n(block.get() + i * width, width, products + (r + i) * x.padded() + first);
      }
    }
  });
}

namespace {

// The scales of two rows of weights at a time: [pairs, stride], in the order of the sums.
struct PairedScales {
  std::vector<std::uint32_t> words;
  std::size_t stride;
};

PairedScales paired_scales(const float* scales, std::size_t rows, std::size_t padded, ThreadPool& pool,
                           const PairKernels& kernels) {
  constexpr std::size_t kGrain = 8;  // pairs a thread takes at a time
  // A cache line apart from a power of two, of whose multiples few fit the first cache together.
  PairedScales paired{{}, padded + kColumnPad};
  paired.words.resize((rows + 1) / 2 * paired.stride);
  const std::vector<float> nothing(padded);
  pool.parallel_for((rows + 1) / 2, kGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const float* low = scales + 2 * i * padded;
      const float* high = 2 * i + 1 < rows ? low + padded : nothing.data();
      kernels.pair_floats(low, high, padded, paired.words.data() + i * paired.stride);
    }
  });
  return paired;
}

// Some columns of some rows of bf16 weights.
struct WeightBlock {
  const std::byte* data;
  std::size_t stride;  // bytes from row to row
  std::size_t rows, columns;

  WeightBlock(const LinearWeights& weights, std::size_t first_row, std::size_t first_column)
      : data(weights.data + first_row * weights.stride + first_column * dtype_nbytes(Dtype::bf16)),
        stride(weights.stride),
        rows(std::min(2 * kSummed, weights.rows - first_row)),
        columns(std::min(kColumns, weights.columns - first_column)) {}
  const std::uint16_t* row(std::size_t r) const {
    return reinterpret_cast<const std::uint16_t*>(data + r * stride);
  }
};

// pairs: [pairs of rows, kColumns], zeros up to `width`
void pair_block(const WeightBlock& block, std::size_t width, const PairKernels& kernels,
                std::uint32_t* pairs) {
  alignas(64) static constexpr std::uint16_t kNothing[kColumns] = {};
  for (std::size_t r = 0; r < block.rows; r += 2, pairs += kColumns) {
    kernels.pair_rows(block.row(r), r + 1 < block.rows ? block.row(r + 1) : kNothing, block.columns, pairs);
    std::fill(pairs + block.columns, pairs + width, 0U);
  }
}

// Into the second cache: the first is full of what is being multiplied.
void fetch_rows(const WeightBlock& block, std::size_t begin, std::size_t end) {
  for (std::size_t r = begin; r < end; ++r)
    for (std::size_t line = 0; line < block.columns; line += kLineColumns)
      __builtin_prefetch(block.row(r) + line, 0, 2);
}

void add_rows_in_pairs(const LinearWeights& weights, const float* scales, std::size_t padded,
                       std::size_t tokens, float* y, std::size_t y_stride, ThreadPool& pool,
                       const PairKernels& kernels) {
  const PairedScales paired = paired_scales(scales, weights.rows, padded, pool, kernels);
  pool.parallel_for(weights.columns, kColumns, [&](std::size_t begin, std::size_t end) {
    alignas(64) std::uint32_t pairs[kSummed * kColumns];
    for (std::size_t j = begin; j < end; j += kColumns) {
      for (std::size_t i = 0; i < weights.rows; i += 2 * kSummed) {
        const WeightBlock block(weights, i, j);
        const std::size_t width = round_up(block.columns, kColumnPad);
        pair_block(block, width, kernels, pairs);
        // Of the block that follows, a few rows are fetched for every few tokens of this one.
        const bool goes_on = i + 2 * kSummed < weights.rows;
        const std::size_t next_column = goes_on ? j : j + kColumns;
        const bool is_last = next_column >= end;
        const WeightBlock next(weights, goes_on ? i + 2 * kSummed : 0, is_last ? j : next_column);
        for (std::size_t m = 0; m < tokens; m += kFewTokens) {
          const std::size_t few = std::min(kFewTokens, tokens - m);
          if (!is_last) fetch_rows(next, next.rows * m / tokens, next.rows * (m + few) / tokens);
          const std::uint32_t* from = paired.words.data() + i / 2 * paired.stride + m;
          kernels.multiply_add(
              {reinterpret_cast<const std::byte*>(from), kPairNbytes, paired.stride * kPairNbytes}, few,
              {pairs, kColumns}, width, (block.rows + 1) / 2, y + m * y_stride + j, y_stride);
        }
      }
    }
  });
}

}  // namespace

void add_rows(const LinearWeights& weights, const float* scales, std::size_t padded, std::size_t tokens,
              float* y, std::size_t y_stride, ThreadPool& pool, SimdLevel level) {
  if (in_pairs(weights.dtype, weights.columns, level))
    return add_rows_in_pairs(weights, scales, padded, tokens, y, y_stride, pool, *pair_kernels(level));
  const KernelTable& kernels = kernel_table(level, weights.dtype);
  const MultiplyAdd multiply_add = multiply_add_kernel(level);
  const std::size_t element = dtype_nbytes(weights.dtype);
  pool.parallel_for(weights.columns, kColumns, [&](std::size_t begin, std::size_t end) {
    alignas(64) float wide[kSummed * kColumns];
    for (std::size_t j = begin; j < end; j += kColumns) {
      const std::size_t columns = std::min(kColumns, end - j);
      const std::size_t width = round_up(columns, kColumnPad);
      for (std::size_t i = 0; i < weights.rows; i += kSummed) {
        const std::size_t rows = std::min(kSummed, weights.rows - i);
        for (std::size_t s = 0; s < rows; ++s) {
          kernels.to_f32(weights.data + (i + s) * weights.stride + j * element, columns, wide + s * kColumns);
          std::fill(wide + s * kColumns + columns, wide + s * kColumns + width, 0.0F);
        }
        multiply_add({scales + i * padded, 1, padded}, tokens, {wide, kColumns}, width, rows, y + j,
                     y_stride);
      }
    }
  });
}

}  // namespace flashllm
