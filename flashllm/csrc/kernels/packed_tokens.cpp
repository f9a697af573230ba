#include "kernels/packed_tokens.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "kernels/levels/levels.h"
#include "kernels/row_codecs.h"
#include "kernels/scratch.h"

namespace flashllm {

namespace {

constexpr std::size_t kTogether = 64;  // columns a thread packs at a time
constexpr std::size_t kNarrowPad = 8;  // floats of the widest vector below AVX-512
static_assert(kTogether % 2 == 0, "pairs must be whole");

// Tokens of a strip: a tile of sums of the widest kernels of a level.
std::size_t strip_tokens(SimdLevel level, bool in_tiles) {
  return level < SimdLevel::avx512 || in_tiles ? kColumnPad : 4 * kColumnPad;
}

// What a number of tokens is padded to: a vector of sums. Batches of 8 need no sums of 16.
std::size_t padded_tokens(std::size_t tokens, SimdLevel level) {
  return round_up(tokens, level < SimdLevel::avx512 ? kNarrowPad : kColumnPad);
}

}  // namespace

PackedTokens::PackedTokens(const std::byte* x, std::size_t tokens, std::size_t columns, Dtype dtype,
                           TokenForm form, ThreadPool& pool, SimdLevel level)
    : tokens_(tokens),
      columns_(columns),
      padded_(padded_tokens(tokens, level)),
      form_(form),
      tiles_(form == TokenForm::floats ? nullptr : level_kernels(level).tiles),
      halves_(has_codes() && tiles_ != nullptr ? 2 : 1) {
  strip_ = strip_tokens(level, tiles_ != nullptr);
  if (form == TokenForm::pairs) {
    pack_pairs(x, pool);
  } else if (has_codes()) {
    pack_codes(x, dtype, pool, level);
  } else if (has_bytes()) {
    pack_bytes(x, dtype, pool, level);
  } else {
    pack_floats(x, dtype, pool, level);
  }
}

// A row for kColumns columns; load(m, j, n, to): n of token m's values, from column j on.
template <std::size_t kColumns, typename T, typename Load>
void PackedTokens::pack(std::unique_ptr<T[]>& packed, const Load& load, ThreadPool& pool) {
  const std::size_t rows = columns_ / kColumns;
  packed.reset(new T[rows * padded_]);
  pool.parallel_for(columns_, kTogether, [&](std::size_t begin, std::size_t end) {
    T values[kTogether];
    for (std::size_t j = begin; j < end; j += kTogether) {
      const std::size_t n = std::min(kTogether, end - j) / kColumns;
      for (std::size_t m = 0; m < padded_; ++m) {
        const std::size_t in_strip = m % strip_, first = m - in_strip, step = strip(first);
        T* to = packed.get() + first * rows + j / kColumns * step + in_strip;
        if (m < tokens_) {
          load(m, j, n, values);
        } else {
          std::fill(values, values + n, T{});
        }
        for (std::size_t i = 0; i < n; ++i) to[i * step] = values[i];
      }
    }
  });
}

void PackedTokens::pack_pairs(const std::byte* x, ThreadPool& pool) {
  pack<2>(
      pairs_,
      [=](std::size_t m, std::size_t j, std::size_t n, std::uint32_t* to) {
        std::memcpy(to, x + (m * columns_ + j) * dtype_nbytes(Dtype::bf16), n * sizeof *to);
      },
      pool);
}

void PackedTokens::pack_floats(const std::byte* x, Dtype dtype, ThreadPool& pool, SimdLevel level) {
  const auto to_f32 = kernel_table(level, dtype).to_f32;
  pack<1>(
      values_,
      [=](std::size_t m, std::size_t j, std::size_t n, float* to) {
        to_f32(x + (m * columns_ + j) * dtype_nbytes(dtype), n, to);
      },
      pool);
}

void PackedTokens::pack_codes(const std::byte* x, Dtype dtype, ThreadPool& pool, SimdLevel level) {
  const InputKernels& inputs = input_kernels(level);
  const auto to_f32 = kernel_table(level, dtype).to_f32;
  const std::size_t element = dtype_nbytes(dtype);
  pairs_.reset(new std::uint32_t[pairs() * padded_]);
  scales_.reset(new float[scales() * padded_]);
  pool.parallel_for(columns_, kCodeTerms, [&](std::size_t begin, std::size_t end) {
    float wide[kCodeTerms];
    std::int16_t codes[kCodeTerms];
    for (std::size_t j = begin; j < end; j += kCodeTerms) {
      const std::size_t n = std::min(kCodeTerms, end - j);
      for (std::size_t m = 0; m < padded_; ++m) {
        const std::size_t in_strip = m % strip_, first = m - in_strip, step = strip(first);
        std::memset(codes, 0, sizeof codes);
        float scale = 0.0F;
        if (m < tokens_) {
          to_f32(x + (m * columns_ + j) * element, n, wide);
          scale = inputs.to_int16(wide, n, codes);
        }
        scales_[first * scales() + j / kCodeTerms * step + in_strip] = scale;
        std::uint32_t* to = pairs_.get() + first * pairs() + j / 2 * halves_ * step + in_strip;
        const std::size_t words = round_up(n, kUnit) / 2;
        if (tiles_ == nullptr) {
          for (std::size_t i = 0; i < words; ++i) std::memcpy(to + i * step, codes + 2 * i, sizeof *to);
          continue;
        }
        std::uint32_t high[kCodeTerms / 2], low[kCodeTerms / 2];
        tiles_->split(codes, round_up(n, kUnit), high, low);
        for (std::size_t i = 0; i < words; ++i) {
          to[2 * i * step] = high[i];
          to[(2 * i + 1) * step] = low[i];
        }
      }
    }
  });
}

// As RowInputs has a token's.
void PackedTokens::pack_bytes(const std::byte* x, Dtype dtype, ThreadPool& pool, SimdLevel level) {
  const InputKernels& inputs = input_kernels(level);
  const auto to_f32 = kernel_table(level, dtype).to_f32;
  const std::size_t element = dtype_nbytes(dtype);
  pairs_.reset(new std::uint32_t[pairs() * padded_]);
  scales_.reset(new float[scales() * padded_]);
  totals_.reset(new std::int32_t[units() * padded_]);
  firsts_.reset(new std::int32_t[units() * padded_]);
  std::vector<float> largest(form_ == TokenForm::token_bytes ? tokens_ : 0);
  pool.parallel_for(largest.size(), 1, [&](std::size_t begin, std::size_t end) {
    std::vector<float> wide(columns_);
    for (std::size_t m = begin; m < end; ++m) {
      to_f32(x + m * columns_ * element, columns_, wide.data());
      largest[m] = inputs.largest(wide.data(), columns_);
    }
  });
  pool.parallel_for(columns_, kCodeTerms, [&](std::size_t begin, std::size_t end) {
    float wide[kCodeTerms];
    for (std::size_t m = 0; m < padded_; ++m) {
      const std::size_t in_strip = m % strip_, first = m - in_strip, step = strip(first);
      for (std::size_t j = begin; j < end; j += kCodeTerms) {
        const std::size_t n = std::min(kCodeTerms, end - j);
        if (m < tokens_) to_f32(x + (m * columns_ + j) * element, n, wide);
        std::fill(wide + (m < tokens_ ? n : 0), wide + kCodeTerms, 0.0F);
        for (std::size_t i = 0; i < n; i += kUnit) {
          const std::size_t unit = (j + i) / kUnit, at = first * units() + unit * step + in_strip;
          std::int8_t codes[kUnit];
          scales_[at] =
              inputs.unit_to_int8(wide + i, m < largest.size() ? &largest[m] : nullptr, codes, &totals_[at]);
          firsts_[at] = std::accumulate(codes, codes + kUnit / 2, std::int32_t{0});
          std::uint32_t* to = pairs_.get() + first * pairs() + unit * (kUnit / 4) * step + in_strip;
          for (std::size_t word = 0; word < kUnit / 4; ++word)
            std::memcpy(to + word * step, codes + 4 * word, sizeof *to);
        }
      }
    }
  });
}

}  // namespace flashllm
