// Weights in blocks as a GGUF file has them, and plain numbers. The layouts are ggml's (ggml-common.h,
// block_q4_0 to block_q6_K, block_mxfp4, block_nvfp4, block_iq1_s to block_iq4_xs, block_tq1_0, block_tq2_0);
// or those of gpt-oss's safetensors: E2M1, codes of MXFP4 of which neighbours share a byte, and E8M0, scales.
// Blocks become codes and scales; those of a stored row a vector, as a conversion writes it
// (flashllm/convert/kept/blocks.py), or those of rows codes side by side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "kernels/rows.h"

namespace flashllm {

constexpr std::size_t kBlockWeights = 256;  // at most
using BlockCodes = std::uint8_t[kBlockWeights];

// What a block has beside its codes. Halves are the bits of fp16 numbers.
struct BlockScales {
  std::uint16_t scale = 0, minimum = 0;
  std::uint8_t power = 0;
  std::uint8_t factors[16] = {}, minimum_factors[16] = {};
};

// How 32 or 256 weights lie in a block; or a weight that is a number.
struct BlockKind {
  const char* name;
  RowCodec codec;  // of vectors
  std::size_t bits, weights, nbytes;
  std::size_t factor_weights;  // that share a factor of the block's scale; 0: there are none
  bool has_minimum, is_power;
  RowCodec table;  // what down columns' codes are, where they are no integers; else f32
  void (*decode)(const std::uint8_t* block, BlockCodes& codes, BlockScales& scales);

  bool is_plain() const { return decode == nullptr; }
  bool of_table() const { return table != RowCodec::f32; }
  bool is_unsigned() const { return has_minimum || of_table(); }
  // Codes, or scales, of MXFP4 in tensors of their own.
  bool is_apart() const { return codec == RowCodec::mxfp4 && nbytes <= 16; }
};

// Scales of MXFP4 whose weights are normal fp32 numbers. Those of zeros may be any others, and become this.
constexpr std::uint8_t kPowerOfZeros = 127;
constexpr bool is_usual_power(std::uint8_t power) { return power >= 2 && power <= 252; }

// Of ggml's name, plain ones are also safetensors'. Throws CoreError (usage) for another.
const BlockKind& block_kind(const std::string& name);

// `count` blocks of a kind that is not plain: codes [count, weights], and what each has beside them.
void take_apart(const BlockKind& kind, const std::uint8_t* blocks, std::size_t count, std::uint8_t* codes,
                BlockScales* scales);

// Of a kind that is neither plain nor NVFP4.
struct Unpackers {
  // A stored row of `count` blocks, which have all of its scales, as a vector. Throws CoreError (format) for
  // scales that no weights have.
  void (*vector)(const std::uint8_t* blocks, std::size_t count, std::uint8_t* vector);
  // The codes of kCodeUnit stored rows, `row_nbytes` apart, of `count` blocks each, at most kBlockWeights
  // weights.
  void (*codes)(const std::uint8_t* blocks, std::size_t row_nbytes, std::size_t count, BlockCodes* codes);
};

const Unpackers& unpackers_of(const BlockKind& kind);

// Eight bytes at once; what is shifted out of one is masked.
constexpr std::uint64_t in_each(std::uint64_t byte) { return byte * 0x0101010101010101; }
inline std::uint64_t eight(const std::uint8_t* bytes) {
  std::uint64_t word;
  std::memcpy(&word, bytes, 8);
  return word;
}
}  // namespace flashllm
