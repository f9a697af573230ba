#include "matmul.h"

#include <algorithm>
#include <cstring>

#include "half.h"

namespace flashllm {

namespace {

constexpr std::size_t kTokensTogether =
    256;                                   // with kTerms of them a slab of inputs fits a core's second cache
constexpr std::size_t kTerms = 256;        // of a dot product before the next rows take their turn
constexpr std::size_t kRowsTogether = 48;  // rows a thread takes at a time: whole tiles
constexpr std::size_t kWidened = 12;       // rows widened together
constexpr std::size_t kColumns = 64;       // columns widened together, with kSummed rows of them
constexpr std::size_t kSummed = 128;
constexpr std::size_t kPairNbytes = 4;
constexpr std::size_t kLineColumns = 32;   // bf16 ones in a cache line
constexpr std::size_t kFetchedAhead = 16;  // rows between one that is paired and the one fetched beside it
static_assert(kRowsTogether % kWidened == 0 && kColumns % kColumnPad == 0, "blocks must be whole");
static_assert(kTerms % 2 == 0 && kSummed % 2 == 0 && kColumns % 2 == 0, "pairs must be whole");

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

// The scales of two rows of weights at a time: [tokens, pairs], the sums' way through them.
std::vector<std::uint32_t> paired_scales(const float* scales, std::size_t rows, std::size_t padded,
                                         std::size_t tokens, ThreadPool& pool) {
  constexpr std::size_t kTogether = 16;  // pairs: a cache line of the result
  const std::size_t pairs = (rows + 1) / 2;
  std::vector<std::uint32_t> paired(tokens * pairs);
  pool.parallel_for(pairs, kTogether, [&](std::size_t begin, std::size_t end) {
    for (std::size_t first = begin; first < end; first += kTogether) {
      for (std::size_t m = 0; m < tokens; ++m) {
        for (std::size_t i = first; i < std::min(first + kTogether, end); ++i) {
          const float* low = scales + 2 * i * padded + m;
          const std::uint32_t high = 2 * i + 1 < rows ? float_to_bfloat(low[padded]) : 0U;
          paired[m * pairs + i] = float_to_bfloat(*low) | high << 16;
        }
      }
    }
  });
  return paired;
}

void add_rows_in_pairs(const LinearWeights& weights, const float* scales, std::size_t padded,
                       std::size_t tokens, float* y, std::size_t y_stride, ThreadPool& pool,
                       const PairKernels& kernels) {
  const std::vector<std::uint32_t> paired = paired_scales(scales, weights.rows, padded, tokens, pool);
  const std::size_t token_nbytes = (weights.rows + 1) / 2 * kPairNbytes;
  const auto row = [&](std::size_t r, std::size_t j) {
    return reinterpret_cast<const std::uint16_t*>(weights.data + r * weights.stride) + j;
  };
  pool.parallel_for(weights.columns, kColumns, [&](std::size_t begin, std::size_t end) {
    alignas(64) std::uint32_t pairs[kSummed / 2 * kColumns];
    alignas(64) const std::uint16_t nothing[kColumns] = {};
    for (std::size_t j = begin; j < end; j += kColumns) {
      const std::size_t columns = std::min(kColumns, end - j);
      const std::size_t width = round_up(columns, kColumnPad);
      for (std::size_t i = 0; i < weights.rows; i += kSummed) {
        const std::size_t rows = std::min(kSummed, weights.rows - i);
        for (std::size_t s = 0; s < rows; s += 2) {
          for (std::size_t r = i + s + kFetchedAhead; r < std::min(i + s + kFetchedAhead + 2, weights.rows);
               ++r)
            for (std::size_t line = 0; line < columns; line += kLineColumns)
              __builtin_prefetch(row(r, j + line));
          std::uint32_t* to = pairs + s / 2 * kColumns;
          kernels.pair_rows(row(i + s, j), s + 1 < rows ? row(i + s + 1, j) : nothing, columns, to);
          std::fill(to + columns, to + width, 0U);
        }
        const auto* first = reinterpret_cast<const std::byte*>(paired.data() + i / 2);
        kernels.multiply_add({first, token_nbytes, kPairNbytes}, tokens, {pairs, kColumns}, width,
                             (rows + 1) / 2, y + j, y_stride);
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
