#include "kernels/matmul.h"

#include <algorithm>
#include <cstring>

#include "io/error.h"
#include "kernels/levels/levels.h"
#include "kernels/row_codecs.h"
#include "kernels/scratch.h"
#include "kernels/transpose.h"

namespace flashllm {

namespace {

constexpr std::size_t kTokensTogether =
    256;  // with kTerms of them a slab of inputs fits a core's second cache
constexpr std::size_t kFewestTogether = 64;
constexpr std::size_t kInputsTogether = 1 << 21;  // tokens times columns: what all rows of weights pass by
                                                  // fits the last cache
constexpr std::size_t kTerms = 256;               // of a dot product before the next rows take their turn
constexpr std::size_t kRowsTogether = 48;         // rows a thread takes at a time: whole tiles
constexpr std::size_t kWidened = 12;              // rows widened together
constexpr std::size_t kColumns = 64;  // columns widened or paired together, with kSummed rows of them
constexpr std::size_t kSummed = 128;  // or pairs of rows
constexpr std::size_t kPairNbytes = 4;
constexpr std::size_t kLineColumns = 32;  // bf16 ones in a cache line
constexpr std::size_t kFewTokens = 12;    // whole tiles, between which the next rows are fetched
static_assert(kRowsTogether % kWidened == 0 && kColumns % kColumnPad == 0, "blocks must be whole");
static_assert(kTerms % 2 == 0 && kColumns % 2 == 0, "pairs must be whole");
static_assert(kTerms == 2 * TileKernels::kPairs, "terms of a tile are the same from every block on");

// One block of rows by one block of tokens: products[r][m] in fp32, rows `width` floats apart.
struct ProductBlock {
  std::size_t begin, end;
  std::size_t first_token, width;
  float* products;

  void clear() const { std::fill(products, products + (end - begin) * width, 0.0F); }
};

// use(first token of a strip, its tokens, its place in the block's)
template <typename Use>
void for_each_strip(const PackedTokens& x, const ProductBlock& block, const Use& use) {
  for (std::size_t at = 0; at < block.width;) {
    const std::size_t width = x.strip(block.first_token + at);
    use(block.first_token + at, width, at);
    at += width;
  }
}

// Whatever is multiplied in tiles meanwhile, by this thread.
class OpenTiles {
 public:
  explicit OpenTiles(const TileKernels* tiles) : tiles_(tiles) {
    if (tiles_ != nullptr) tiles_->open();
  }
  ~OpenTiles() {
    if (tiles_ != nullptr) tiles_->close();
  }
  OpenTiles(const OpenTiles&) = delete;
  OpenTiles& operator=(const OpenTiles&) = delete;

 private:
  const TileKernels* tiles_;
};

// multiply(rows unpacked, how many, first column, terms, their products), of `together` rows of the block at
// a time
template <typename Multiply>
void multiply_unpacked(const WideRows& weights, const PackedTokens& x, const ProductBlock& block,
                       std::size_t together, const Multiply& multiply) {
  UnpackedRows unpacked;
  block.clear();
  for (std::size_t j = 0; j < x.columns(); j += kCodeTerms) {
    const std::size_t terms = std::min(kCodeTerms, round_up(x.columns() - j, kCodeUnit));
    for (std::size_t r = block.begin; r < block.end; r += together) {
      const std::size_t rows = std::min(together, block.end - r);
      weights.unpack(r, rows, j, terms, unpacked);
      multiply(unpacked, rows, j, terms, block.products + (r - block.begin) * block.width);
    }
  }
}

// products of rows of the block, of inputs in codes
void multiply_codes(const WideRows& weights, const PackedTokens& x, const ProductBlock& block,
                    SimdLevel level) {
  const TileKernels* tiles = level_kernels(level).tiles;
  const MultiplyCodes multiply =
      tiles == nullptr ? level_kernels(level).multiply_codes : tiles->multiply_codes;
  const OpenTiles open(tiles);
  multiply_unpacked(weights, x, block, tiles == nullptr ? kWidened : TileKernels::kRows,
                    [&](UnpackedRows& of, std::size_t rows, std::size_t j, std::size_t terms, float* to) {
                      if (tiles != nullptr)
                        tiles->prepare(of.codes, TileKernels::kRows * kCodeTerms, of.unit);
                      const CodeRows a{of.codes, of.scales, of.unit, of.is_wide};
                      for_each_strip(x, block, [&](std::size_t first, std::size_t width, std::size_t at) {
                        multiply(a, rows, x.codes(first, j), width, terms, to + at, block.width);
                      });
                    });
}

// The same of inputs in bytes.
void multiply_bytes(const WideRows& weights, const PackedTokens& x, const ProductBlock& block,
                    SimdLevel level) {
  const TileKernels* tiles = level_kernels(level).tiles;
  const MultiplyBytes multiply =
      tiles == nullptr ? level_kernels(level).multiply_bytes : tiles->multiply_bytes;
  const OpenTiles open(tiles);
  multiply_unpacked(weights, x, block, tiles == nullptr ? kWidened : UnpackedRows::kOfBytes,
                    [&](UnpackedRows& of, std::size_t rows, std::size_t j, std::size_t terms, float* to) {
                      auto* codes = reinterpret_cast<std::uint8_t*>(of.codes);
                      if (tiles != nullptr) tiles->make_signed(codes, rows * kCodeTerms, of.zero);
                      const WeightBytes a{codes, of.scales, of.offsets, of.offsets_each, of.zero, of.largest};
                      for_each_strip(x, block, [&](std::size_t first, std::size_t width, std::size_t at) {
                        multiply(a, rows, x.bytes(first, j), width, terms, to + at, block.width);
                      });
                    });
}

void multiply_block(const WideRows& weights, const PackedTokens& x, const ProductBlock& block,
                    SimdLevel level) {
  if (x.has_codes()) return multiply_codes(weights, x, block, level);
  if (x.has_bytes()) return multiply_bytes(weights, x, block, level);
  const MultiplyAdd multiply_add = level_kernels(level).multiply_add;
  alignas(64) float wide[kWidened * kTerms];
  block.clear();
  for (std::size_t j = 0; j < x.columns(); j += kTerms) {
    const std::size_t terms = std::min(kTerms, x.columns() - j);
    for (std::size_t r = block.begin; r < block.end; r += kWidened) {
      const std::size_t rows = std::min(kWidened, block.end - r);
      weights.widen(r, rows, j, terms, wide, kTerms);
      float* products = block.products + (r - block.begin) * block.width;
      for_each_strip(x, block, [&](std::size_t first, std::size_t width, std::size_t at) {
        multiply_add({wide, kTerms, 1}, rows, {x.row(first, j), width}, width, terms, products + at,
                     block.width);
      });
    }
  }
}

// The same of bf16 weights in pairs.
void multiply_pairs(const RowMatrix& weights, const PackedTokens& x, const ProductBlock& block,
                    SimdLevel level) {
  const TileKernels* tiles = level_kernels(level).tiles;
  const auto multiply = tiles == nullptr ? level_kernels(level).pairs->multiply_add : tiles->multiply_pairs;
  const OpenTiles open(tiles);
  block.clear();
  for (std::size_t j = 0; j < weights.columns; j += kTerms) {
    const PairRows rows{weights.data + block.begin * weights.stride + j * dtype_nbytes(Dtype::bf16),
                        weights.stride, kPairNbytes};
    const std::size_t pairs = std::min(kTerms, weights.columns - j) / 2;
    for_each_strip(x, block, [&](std::size_t first, std::size_t width, std::size_t at) {
      multiply(rows, block.end - block.begin, {x.row_of_pairs(first, j / 2), width}, width, pairs,
               block.products + at, block.width);
    });
  }
}

// values [kColumnPad, kRowsTogether]: the block's products of tokens from `first` on, token by token.
void take_tokens(const ProductBlock& block, std::size_t first, float* values) {
  constexpr std::size_t kSide = 4;
  const std::size_t count = block.end - block.begin;
  for (std::size_t i = 0; i < count; i += kSide) {
    const float* from[kSide];
    for (std::size_t k = 0; k < kSide; ++k)
      from[k] = block.products + std::min(i + k, count - 1) * block.width + first;
    for (std::size_t m = 0; m < std::min(kColumnPad, block.width - first); m += kSide)
      transpose(from, m, values + m * kRowsTogether + i, kRowsTogether);
  }
}

// out[m][r] = products + bias, rounded, for all rows and tokens; multiply(block) computes the products. Of
// many tokens some go by all rows before the next ones do, as all together would fit no cache.
template <typename Multiply>
void linear_blocks(std::size_t rows, const float* bias, const PackedTokens& x, const KernelTable& kernels,
                   std::size_t element, std::byte* out, ThreadPool& pool, const Multiply& multiply) {
  const std::size_t together = std::clamp(kInputsTogether / x.columns() / kFewestTogether * kFewestTogether,
                                          kFewestTogether, kTokensTogether);
  for (std::size_t first = 0; first < x.tokens(); first += together) {
    const std::size_t width = std::min(together, x.padded() - first);
    const std::size_t tokens = std::min(width, x.tokens() - first);
    pool.parallel_for(rows, kRowsTogether, [&](std::size_t begin, std::size_t end) {
      std::unique_ptr<float[]> products(new float[kRowsTogether * width]);
      for (std::size_t r = begin; r < end; r += kRowsTogether) {
        const std::size_t count = std::min(kRowsTogether, end - r);
        const ProductBlock block{r, r + count, first, width, products.get()};
        multiply(block);
        alignas(64) float values[kColumnPad * kRowsTogether];
        for (std::size_t m = 0; m < tokens; ++m) {
          if (m % kColumnPad == 0) take_tokens(block, m, values);
          float* of_token = values + m % kColumnPad * kRowsTogether;
          for (std::size_t i = 0; bias != nullptr && i < count; ++i) of_token[i] += bias[r + i];
          kernels.from_f32(of_token, count, out + ((first + m) * rows + r) * element);
        }
      }
    });
  }
}

}  // namespace

bool in_pairs(Dtype dtype, std::size_t terms, SimdLevel level) {
  return dtype == Dtype::bf16 && terms % 2 == 0 && level_kernels(level).pairs != nullptr;
}

void WideRows::unpack(std::size_t, std::size_t, std::size_t, std::size_t, UnpackedRows&) const {
  throw CoreError(ErrorKind::usage, "inputs are codes, and the weights are not");
}

void linear_many(const WideRows& weights, std::size_t rows, const float* bias, const PackedTokens& x,
                 Dtype dtype, std::byte* out, ThreadPool& pool, SimdLevel level) {
  if (x.in_pairs()) throw CoreError(ErrorKind::usage, "widened weights need inputs that are not in pairs");
  linear_blocks(rows, bias, x, kernel_table(level, dtype), dtype_nbytes(dtype), out, pool,
                [&](const ProductBlock& block) { multiply_block(weights, x, block, level); });
}

void linear_in_pairs(const RowMatrix& weights, const PackedTokens& x, Dtype dtype, std::byte* out,
                     ThreadPool& pool, SimdLevel level) {
  linear_blocks(weights.rows, weights.bias, x, kernel_table(level, dtype), dtype_nbytes(dtype), out, pool,
                [&](const ProductBlock& block) { multiply_pairs(weights, x, block, level); });
}

namespace {

// multiply(block) computes the products.
template <typename Multiply>
void product_blocks(std::size_t rows, const PackedTokens& x, float* products, ThreadPool& pool,
                    const Multiply& multiply) {
  pool.parallel_for(rows, kWidened, [&](std::size_t begin, std::size_t end) {
    std::unique_ptr<float[]> block(new float[kRowsTogether * std::min(kTokensTogether, x.padded())]);
    for (std::size_t r = begin; r < end; r += kRowsTogether) {
      const std::size_t count = std::min(kRowsTogether, end - r);
      for (std::size_t first = 0; first < x.padded(); first += kTokensTogether) {
        const std::size_t width = std::min(kTokensTogether, x.padded() - first);
        multiply({r, r + count, first, width, block.get()});
        for (std::size_t i = 0; i < count; ++i)
          std::copy_n(block.get() + i * width, width, products + (r + i) * x.padded() + first);
      }
    }
  });
}

}  // namespace

void product_rows_in_pairs(const RowMatrix& weights, const PackedTokens& x, float* products, ThreadPool& pool,
                           SimdLevel level) {
  product_blocks(weights.rows, x, products, pool,
                 [&](const ProductBlock& block) { multiply_pairs(weights, x, block, level); });
}

void product_rows(const WideRows& weights, std::size_t rows, const PackedTokens& x, float* products,
                  ThreadPool& pool, SimdLevel level) {
  if (x.in_pairs()) throw CoreError(ErrorKind::usage, "widened weights need inputs that are not in pairs");
  product_blocks(rows, x, products, pool,
                 [&](const ProductBlock& block) { multiply_block(weights, x, block, level); });
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

  WeightBlock(const RowMatrix& weights, std::size_t first_row, std::size_t first_column)
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

}  // namespace

void add_rows_in_pairs(const RowMatrix& weights, const float* scales, std::size_t padded, std::size_t tokens,
                       float* y, std::size_t y_stride, ThreadPool& pool, SimdLevel level) {
  const PairKernels& kernels = *level_kernels(level).pairs;
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

void add_rows(const WideRows& weights, std::size_t rows, std::size_t columns, TileRows scales,
              std::size_t tokens, float* y, std::size_t y_stride, ThreadPool& pool, SimdLevel level) {
  level_kernels(level);  // throws here, not in a thread
  pool.parallel_for(columns, kColumns, [&](std::size_t begin, std::size_t end) {
    add_rows(weights, rows, scales, tokens, begin, end, y, y_stride, level);
  });
}

void add_rows(const WideRows& weights, std::size_t rows, TileRows scales, std::size_t tokens,
              std::size_t begin, std::size_t end, float* y, std::size_t y_stride, SimdLevel level) {
  const MultiplyAdd multiply_add = level_kernels(level).multiply_add;
  alignas(64) float wide[kSummed * kColumns];
  for (std::size_t j = begin; j < end; j += kColumns) {
    const std::size_t count = std::min(kColumns, end - j);
    const std::size_t width = round_up(count, kColumnPad);
    for (std::size_t i = 0; i < rows; i += kSummed) {
      const std::size_t together = std::min(kSummed, rows - i);
      weights.widen(i, together, j, count, wide, kColumns);
      for (std::size_t s = 0; s < together; ++s)
        std::fill(wide + s * kColumns + count, wide + s * kColumns + width, 0.0F);
      multiply_add({scales.data + i * scales.step, scales.row, scales.step}, tokens, {wide, kColumns}, width,
                   together, y + j, y_stride);
    }
  }
}

}  // namespace flashllm
