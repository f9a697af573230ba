// Weights in blocks as a GGUF file has them (ggml's kinds, and plain numbers), made codes: those of a stored
// row a vector with its scales, as a conversion would have written it (flashllm/convert/kept/blocks.py), or
// those of rows side by side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "kernels/rows.h"

namespace flashllm {

constexpr std::size_t kBlockWeights = 256;  // at most
using BlockCodes = std::uint8_t[kBlockWeights];

struct BlockScales;

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
};

// Of ggml's name, plain ones are also safetensors'. Throws CoreError (usage) for a kind that is not read so.
const BlockKind& block_kind(const std::string& name);

// Of a kind that is not plain.
struct Unpackers {
  // A stored row of `count` blocks as a vector. Throws CoreError (format) for scales that no weights have.
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
