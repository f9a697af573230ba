#include "kernels/packed_tokens.h"

#include <algorithm>
#include <cstring>
#include <vector>

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
      tiles_(form == TokenForm::floats ? nullptr : tile_kernels(level)),
      halves_(has_codes() && tiles_ != nullptr ? 2 : 1) {
  strip_ = strip_tokens(level, tiles_ != nullptr);
  if (form == TokenForm::pairs) {
    pack_pairs(x, pool);
  } else if (has_codes()) {
    pack_codes(x, dtype, pool, level);
  } else if (has_bytes()) {
    pack_bytes(x, dtype, pool, level);
  } else {
    pack_floats(x, kernel_table(level, dtype), dtype_nbytes(dtype), pool);
  }
}

void PackedTokens::pack_pairs(const std::byte* x, ThreadPool& pool) {
  pairs_.reset(new std::uint32_t[pairs() * padded_]);
  pool.parallel_for(columns_, kTogether, [&](std::size_t begin, std::size_t end) {
    std::uint32_t words[kTogether / 2];
    for (std::size_t j = begin; j < end; j += kTogether) {
      const std::size_t n = std::min(kTogether, end - j) / 2;
      for (std::size_t m = 0; m < padded_; ++m) {
        const std::size_t in_strip = m % strip_, first = m - in_strip, step = strip(first);
        std::uint32_t* to = pairs_.get() + first * pairs() + j / 2 * step + in_strip;
        if (m < tokens_) {
          std::memcpy(words, x + (m * columns_ + j) * dtype_nbytes(Dtype::bf16), n * sizeof *words);
        } else {
          std::fill(words, words + n, 0U);
        }
        for (std::size_t i = 0; i < n; ++i) to[i * step] = words[i];
      }
    }
  });
}

void PackedTokens::pack_floats(const std::byte* x, const KernelTable& kernels, std::size_t element,
                               ThreadPool& pool) {
  values_.reset(new float[columns_ * padded_]);
  pool.parallel_for(columns_, kTogether, [&](std::size_t begin, std::size_t end) {
    float wide[kTogether];
    for (std::size_t j = begin; j < end; j += kTogether) {
      const std::size_t n = std::min(kTogether, end - j);
      for (std::size_t m = 0; m < padded_; ++m) {
        const std::size_t in_strip = m % strip_, first = m - in_strip, step = strip(first);
        float* to = values_.get() + first * columns_ + j * step + in_strip;
        if (m < tokens_) {
          kernels.to_f32(x + (m * columns_ + j) * element, n, wide);
        } else {
          std::fill(wide, wide + n, 0.0F);
        }
        for (std::size_t i = 0; i < n; ++i) to[i * step] = wide[i];
      }
    }
  });
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
          std::uint32_t* to = pairs_.get() + first * pairs() + unit * (kUnit / 4) * step + in_strip;
          for (std::size_t word = 0; word < kUnit / 4; ++word)
            std::memcpy(to + word * step, codes + 4 * word, sizeof *to);
        }
      }
    }
  });
}

}  // namespace flashllm
