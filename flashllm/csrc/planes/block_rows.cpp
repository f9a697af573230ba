#include "planes/block_rows.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "io/error.h"
#include "kernels/half.h"

namespace flashllm {

namespace {

constexpr std::size_t kMost = 256;  // weights of a block
using Codes = std::uint8_t[kMost];

// What a block has beside its codes. Halves are the bits of fp16 numbers.
struct BlockScales {
  std::uint16_t scale = 0, minimum = 0;
  std::uint8_t power = 0;
  std::uint8_t factors[16] = {}, minimum_factors[16] = {};
};

std::uint16_t half_at(const std::uint8_t* p) {
  return static_cast<std::uint16_t>(p[0] | static_cast<unsigned>(p[1]) << 8);
}

// `n` bytes: their lower halves, then their upper ones.
template <std::size_t n>
void nibbles(const std::uint8_t* packed, std::uint8_t* codes) {
  for (std::size_t i = 0; i < n; ++i) {
    codes[i] = packed[i] & 15;
    codes[i + n] = packed[i] >> 4;
  }
}

// Eight bytes at once; what is shifted out of one is masked.
constexpr std::uint64_t in_each(std::uint64_t byte) { return byte * 0x0101010101010101; }
std::uint64_t eight(const std::uint8_t* bytes) {
  std::uint64_t word;
  std::memcpy(&word, bytes, 8);
  return word;
}

// Bit k of a byte is the fifth one of code k of eight: by itself in byte k, it carries into that one's top.
void fifth_bits(const std::uint8_t* packed, std::uint8_t* codes) {
  for (std::size_t i = 0; i < 4; ++i, codes += 8) {
    const std::uint64_t apart = packed[i] * in_each(1) & 0x8040201008040201;
    const std::uint64_t word = eight(codes) | ((apart + in_each(0x7F)) & in_each(0x80)) >> 3;
    std::memcpy(codes, &word, 8);
  }
}

// The upper bits of 32 codes: those from `shift` on, of `mask`, of a byte each.
template <unsigned shift, unsigned mask>
void add_upper(const std::uint8_t* packed, std::uint8_t* codes) {
  for (std::size_t i = 0; i < 32; ++i)
    codes[i] = static_cast<std::uint8_t>(codes[i] | (packed[i] >> shift & mask) << 4);
}

std::uint32_t four(const std::uint8_t* bytes) {
  std::uint32_t word;
  std::memcpy(&word, bytes, 4);
  return word;
}

// A scale, a minimum that is subtracted, and 12 bytes of eight factors of 6 bits for each.
void shared_scales(const std::uint8_t* block, BlockScales& scales) {
  constexpr std::uint32_t pairs = 0x03030303, halves = 0x0F0F0F0F, sixes = 0x3F3F3F3F;
  scales.scale = half_at(block);
  scales.minimum = half_at(block + 2) ^ 0x8000;
  const std::uint32_t first = four(block + 4), second = four(block + 8), third = four(block + 12);
  const std::uint32_t factors[] = {first & sixes, (third & halves) | (first >> 6 & pairs) << 4};
  const std::uint32_t minimums[] = {second & sixes, (third >> 4 & halves) | (second >> 6 & pairs) << 4};
  std::memcpy(scales.factors, factors, 8);
  std::memcpy(scales.minimum_factors, minimums, 8);
}

void q4_0(const std::uint8_t* block, Codes& codes, BlockScales& scales) {
  scales.scale = half_at(block);
  nibbles<16>(block + 2, codes);
}

void q4_1(const std::uint8_t* block, Codes& codes, BlockScales& scales) {
  scales.scale = half_at(block);
  scales.minimum = half_at(block + 2);
  nibbles<16>(block + 4, codes);
}

void q5_0(const std::uint8_t* block, Codes& codes, BlockScales& scales) {
  scales.scale = half_at(block);
  nibbles<16>(block + 6, codes);
  fifth_bits(block + 2, codes);
}

void q5_1(const std::uint8_t* block, Codes& codes, BlockScales& scales) {
  scales.scale = half_at(block);
  scales.minimum = half_at(block + 2);
  nibbles<16>(block + 8, codes);
  fifth_bits(block + 4, codes);
}

void q8_0(const std::uint8_t* block, Codes& codes, BlockScales& scales) {
  scales.scale = half_at(block);
  std::memcpy(codes, block + 2, 32);
}

void q4_k(const std::uint8_t* block, Codes& codes, BlockScales& scales) {
  shared_scales(block, scales);
  for (std::size_t i = 0; i < 4; ++i) nibbles<32>(block + 16 + 32 * i, codes + 64 * i);
}

template <unsigned... groups>
void add_fifth(const std::uint8_t* packed, std::uint8_t* codes, std::integer_sequence<unsigned, groups...>) {
  (add_upper<groups, 1>(packed, codes + 32 * groups), ...);
}

void q5_k(const std::uint8_t* block, Codes& codes, BlockScales& scales) {
  shared_scales(block, scales);
  for (std::size_t i = 0; i < 4; ++i) nibbles<32>(block + 48 + 32 * i, codes + 64 * i);
  add_fifth(block + 16, codes, std::make_integer_sequence<unsigned, 8>());
}

void q6_k(const std::uint8_t* block, Codes& codes, BlockScales& scales) {
  scales.scale = half_at(block + 208);
  std::memcpy(scales.factors, block + 192, 16);
  for (std::size_t half = 0; half < 2; ++half) {
    std::uint8_t* to = codes + 128 * half;
    const std::uint8_t* upper = block + 128 + 32 * half;
    nibbles<64>(block + 64 * half, to);
    add_upper<0, 3>(upper, to);
    add_upper<2, 3>(upper, to + 32);
    add_upper<4, 3>(upper, to + 64);
    add_upper<6, 3>(upper, to + 96);
  }
}

// 256 codes' lowest two bits: 128 to 32 bytes.
void pairs_of_bits(const std::uint8_t* packed, Codes& codes) {
  for (std::size_t i = 0; i < kMost; ++i) codes[i] = packed[i / 128 * 32 + i % 32] >> 2 * (i / 32 % 4) & 3;
}

void q2_k(const std::uint8_t* block, Codes& codes, BlockScales& scales) {
  scales.scale = half_at(block + 80);
  scales.minimum = half_at(block + 82) ^ 0x8000;
  for (std::size_t i = 0; i < 16; ++i) {
    scales.factors[i] = block[i] & 15;
    scales.minimum_factors[i] = block[i] >> 4;
  }
  pairs_of_bits(block + 16, codes);
}

void q3_k(const std::uint8_t* block, Codes& codes, BlockScales& scales) {
  scales.scale = half_at(block + 108);
  for (std::size_t i = 0; i < 16; ++i) {
    const int lower = i < 8 ? block[96 + i] & 15 : block[88 + i] >> 4,
              upper = block[104 + i % 4] >> 2 * (i / 4) & 3;
    scales.factors[i] = static_cast<std::uint8_t>((lower | upper << 4) - 32);
  }
  pairs_of_bits(block + 32, codes);
  for (std::size_t i = 0; i < kMost; ++i)
    codes[i] = static_cast<std::uint8_t>(codes[i] | (block[i % 32] >> i / 32 & 1) << 2);
}

void iq4_xs(const std::uint8_t* block, Codes& codes, BlockScales& scales) {
  scales.scale = half_at(block);
  for (std::size_t i = 0; i < 8; ++i) {
    const int lower = block[4 + i / 2] >> 4 * (i % 2) & 15, upper = block[2 + i / 4] >> 2 * (i % 4) & 3;
    scales.factors[i] = static_cast<std::uint8_t>((lower | upper << 4) - 32);
    nibbles<16>(block + 8 + 16 * i, codes + 32 * i);
  }
}

void mxfp4(const std::uint8_t* block, Codes& codes, BlockScales& scales) {
  scales.power = block[0];
  nibbles<16>(block + 1, codes);
}

void tq2_0(const std::uint8_t* block, Codes& codes, BlockScales& scales) {
  scales.scale = half_at(block + 64);
  pairs_of_bits(block, codes);
}

// A byte is a fraction of 256, rounded up: its digits to the base 3, the first ones first, are five codes; of
// the last four bytes four.
void tq1_0(const std::uint8_t* block, Codes& codes, BlockScales& scales) {
  scales.scale = half_at(block + 52);
  std::uint8_t* to = codes;
  const auto digits = [&](std::size_t first, std::size_t count, std::size_t each) {
    std::uint8_t left[32];
    std::memcpy(left, block + first, count);
    for (std::size_t n = 0; n < each; ++n)
      for (std::size_t i = 0; i < count; ++i) {
        const unsigned three = 3U * left[i];
        *to++ = static_cast<std::uint8_t>(three >> 8);
        left[i] = static_cast<std::uint8_t>(three);
      }
  };
  digits(0, 32, 5);
  digits(32, 16, 5);
  digits(48, 4, 4);
}

}  // namespace

struct BlockKind {
  const char* name;
  RowCodec codec;  // of vectors
  std::size_t bits, weights, nbytes;
  std::size_t factor_weights;  // that share a factor of the block's scale; 0: there are none
  bool has_minimum, is_power;
  RowCodec table;  // what down columns' codes are, where they are no integers; else f32
  void (*decode)(const std::uint8_t* block, Codes& codes, BlockScales& scales);

  bool is_plain() const { return decode == nullptr; }
  bool of_table() const { return table != RowCodec::f32; }
  bool is_unsigned() const { return has_minimum || of_table(); }
};

namespace {

constexpr RowCodec kIntegers = RowCodec::f32;

constexpr BlockKind kKinds[] = {
    {"Q4_0", RowCodec::int4_32, 4, 32, 18, 0, false, false, kIntegers, q4_0},
    {"Q4_1", RowCodec::int4_32_min, 4, 32, 20, 0, true, false, kIntegers, q4_1},
    {"Q5_0", RowCodec::int5_32, 5, 32, 22, 0, false, false, kIntegers, q5_0},
    {"Q5_1", RowCodec::int5_32_min, 5, 32, 24, 0, true, false, kIntegers, q5_1},
    {"Q8_0", RowCodec::int8_32, 8, 32, 34, 0, false, false, kIntegers, q8_0},
    {"Q2_K", RowCodec::q2_k, 2, 256, 84, 16, true, false, kIntegers, q2_k},
    {"Q3_K", RowCodec::q3_k, 3, 256, 110, 16, false, false, kIntegers, q3_k},
    {"Q4_K", RowCodec::q4_k, 4, 256, 144, 32, true, false, kIntegers, q4_k},
    {"Q5_K", RowCodec::q5_k, 5, 256, 176, 32, true, false, kIntegers, q5_k},
    {"Q6_K", RowCodec::q6_k, 6, 256, 210, 16, false, false, kIntegers, q6_k},
    {"IQ4_NL", RowCodec::iq4_nl, 4, 32, 18, 0, false, false, RowCodec::codes_iq4, q4_0},
    {"IQ4_XS", RowCodec::iq4_xs, 4, 256, 136, 32, false, false, RowCodec::codes_iq4, iq4_xs},
    {"TQ1_0", RowCodec::ternary, 2, 256, 54, 0, false, false, kIntegers, tq1_0},
    {"TQ2_0", RowCodec::ternary, 2, 256, 66, 0, false, false, kIntegers, tq2_0},
    {"MXFP4", RowCodec::mxfp4, 4, 32, 17, 0, false, true, RowCodec::codes_fp4, mxfp4},
    {"BF16", RowCodec::bf16, 16, 1, 2, 0, false, false, kIntegers, nullptr},
    {"F16", RowCodec::f16, 16, 1, 2, 0, false, false, kIntegers, nullptr},
    {"F32", RowCodec::f32, 32, 1, 4, 0, false, false, kIntegers, nullptr},
};
constexpr std::size_t kCodedKinds = std::size(kKinds) - 3;

const BlockKind& kind_of(const std::string& name) {
  for (const BlockKind& kind : kKinds)
    if (name == kind.name) return kind;
  throw CoreError(ErrorKind::usage, "a tensor of " + name + " is not read where it lies");
}

std::size_t plane_bits(RowCodec codec) {
  switch (codec) {
    case RowCodec::codes2:
      return 2;
    case RowCodec::codes4:
    case RowCodec::codes_fp4:
    case RowCodec::codes_iq4:
      return 4;
    case RowCodec::codes5:
      return 5;
    case RowCodec::codes6:
      return 6;
    case RowCodec::codes8:
      return 8;
    default:
      return 0;
  }
}

bool is_table(RowCodec codec) { return codec == RowCodec::codes_fp4 || codec == RowCodec::codes_iq4; }

// What signed codes of so many bits begin at, as they are stored.
std::size_t zero_of(std::size_t bits) { return bits == 8 ? 0 : bits == 2 ? 1 : std::size_t{1} << (bits - 1); }

// The upper bits of 32 codes, of `mask` from `shift` on, four to a byte: those of code 8 i + k are in byte k.
std::uint64_t apart(const std::uint8_t* codes, std::size_t shift, std::uint64_t mask) {
  std::uint64_t all = 0;
  for (std::size_t i = 0; i < 4; ++i) all |= (eight(codes + 8 * i) >> shift & in_each(mask)) << 2 * i;
  return all;
}

// Single bits: codes 4 to 7 of each eight are a place above those of 0 to 3.
std::uint64_t single(const std::uint8_t* codes, std::size_t shift) {
  const std::uint64_t all = apart(codes, shift, 1);
  return (all | all >> 31) & 0xFFFFFFFF;
}

// A unit of codes as `pack_codes` of flashllm/base/codes/carried.py has it.
template <std::size_t bits>
void pack_unit(const std::uint8_t* codes, std::uint8_t* to) {
  constexpr std::size_t half = kCodeUnit / 2;
  if constexpr (bits == 8) {
    std::memcpy(to, codes, kCodeUnit);
  } else if constexpr (bits < 4) {
    const std::uint64_t pairs = apart(codes, 0, 3), third = single(codes, 2);
    std::memcpy(to, &pairs, 8);
    if constexpr (bits == 3) std::memcpy(to + 8, &third, 4);
  } else {
    for (std::size_t i = 0; i < half; ++i)
      to[i] = static_cast<std::uint8_t>((codes[i] & 15) | codes[i + half] << 4);
    const std::uint64_t upper = bits == 5 ? single(codes, 4) : bits == 6 ? apart(codes, 4, 3) : 0;
    std::memcpy(to + half, &upper, 4 * (bits - 4));
  }
}

// Units of codes of down for kMost neurons: byte by byte, each of all of them.
constexpr std::size_t kMostBytes = kCodeUnit;  // of a unit
using Rows = std::uint8_t[kMost];

// Bits of codes `first`, `first` + 8 and so on, `mask` from `from` on, into every second place of a byte.
template <unsigned from, unsigned mask>
void gather_bits(const Codes* codes, std::size_t first, Rows& to) {
  constexpr std::uint64_t bits = in_each(mask << from);
  for (std::size_t n = 0; n < kMost; n += 8) {
    std::uint64_t all = 0;
    for (unsigned i = 0; i < 4; ++i) {
      const std::uint64_t word = eight(codes[first + 8 * i] + n) & bits;
      all |= 2 * i < from ? word >> (from - 2 * i) : word << (2 * i - from);
    }
    std::memcpy(to + n, &all, 8);
  }
}

// As pack_unit, of kCodeUnit outputs' codes. `nibbles`: no code has more bits than four.
template <std::size_t bits>
void pack_across(const Codes* codes, bool nibbles, Rows* to) {
  constexpr std::size_t half = kCodeUnit / 2;
  if constexpr (bits == 8) {
    std::memcpy(to, codes, sizeof(Codes) * kCodeUnit);
  } else if constexpr (bits == 2) {
    for (std::size_t k = 0; k < 8; ++k) gather_bits<0, 3>(codes, k, to[k]);
  } else {
    for (std::size_t j = 0; j < half; ++j)
      for (std::size_t n = 0; n < kMost; ++n)
        to[j][n] = static_cast<std::uint8_t>((codes[j][n] & 15) | codes[j + half][n] << 4);
    if (bits == 4) return;
    if (nibbles) {
      std::memset(to + half, 0, sizeof(Rows) * (bits == 5 ? 4 : 8));
    } else if (bits == 6) {
      for (std::size_t k = 0; k < 8; ++k) gather_bits<4, 3>(codes, k, to[half + k]);
    } else {
      Rows upper;
      for (std::size_t k = 0; k < 4; ++k) {
        gather_bits<4, 1>(codes, k, to[half + k]);
        gather_bits<4, 1>(codes, k + 4, upper);
        for (std::size_t n = 0; n < kMost; ++n)
          to[half + k][n] = static_cast<std::uint8_t>(to[half + k][n] | upper[n] << 1);
      }
    }
  }
}

// `count` rows of `length` items, a power of two, across: each perfect shuffle takes a bit of a place's
// number from its top to its end.
template <std::size_t count, std::size_t length, typename Item>
void turn(Item* rows) {
  Item other[count * length];
  const auto shuffle = [](const Item* __restrict from, Item* __restrict to) {
    constexpr std::size_t half = count * length / 2;
    for (std::size_t i = 0; i < half; ++i) {
      to[2 * i] = from[i];
      to[2 * i + 1] = from[half + i];
    }
  };
  Item *from = rows, *to = other;
  for (std::size_t left = count; left > 1; left /= 2, std::swap(from, to)) shuffle(from, to);
  if (from != rows) std::memcpy(rows, from, sizeof other);
}

void check_half(std::uint16_t half) {
  if ((half & 0x7C00) == 0x7C00)
    throw CoreError(ErrorKind::format, "a scale is not finite: damaged; get the file again");
}

// All zero: the scale does not matter. Others are normal fp32 numbers (flashllm/convert/kept/blocks.py).
std::uint8_t checked_power(std::uint8_t power, const Codes& codes) {
  std::uint8_t any = 0;
  for (std::size_t i = 0; i < kCodeUnit; ++i) any |= codes[i] & 7;
  if (any == 0) return 127;
  if (power < 2 || power > 252)
    throw CoreError(ErrorKind::format,
                    "a scale is no number, or as small or large as none of a model is: damaged; get the file "
                    "again");
  return power;
}

}  // namespace

BlockRows::BlockRows(const std::string& kind, std::size_t length, const RowFormat& format,
                     RowMatrixName matrix)
    : kind_(kind_of(kind)),
      length_(length),
      stride_(format.stride),
      outputs_(format.d_model),
      is_down_(matrix == RowMatrixName::down) {
  format.check();
  bool fits = length % kind_.weights == 0 && length != 0;
  row_nbytes_ = length / kind_.weights * kind_.nbytes;
  if (is_down_ && kind_.is_plain()) {
    at_ = format.down;
    fits = fits && kind_.codec == format.down_codec;
  } else if (is_down_) {
    bits_ = plane_bits(format.down_codec);
    at_ = format.down;
    fits = fits && bits_ >= kind_.bits &&
           (kind_.of_table() ? format.down_codec == kind_.table : !is_table(format.down_codec));
    if (!kind_.is_unsigned()) shift_ = static_cast<std::uint8_t>(zero_of(bits_) - zero_of(kind_.bits));
  } else {
    bits_ = kind_.bits;
    at_ = matrix == RowMatrixName::up ? format.up : static_cast<std::size_t>(format.gate);
    fits = fits && kind_.codec == format.codec && length == format.d_model &&
           (matrix == RowMatrixName::up || format.gated());
  }
  if (!fits)
    throw CoreError(ErrorKind::usage, "rows of " + std::to_string(length) + " weights of " + kind +
                                          " do not fit the neurons' rows");
}

namespace {

// A stored row as a vector. The kind is known where this is compiled, so that it is one loop.
template <std::size_t index>
void to_vector(const std::uint8_t* blocks, std::size_t count, std::uint8_t* vector) {
  constexpr BlockKind kind = kKinds[index];
  constexpr std::size_t factors = kind.factor_weights == 0 ? 0 : kind.weights / kind.factor_weights;
  constexpr bool wide = kind.codec == RowCodec::ternary;  // scales are fp32
  std::uint8_t* minimums = vector + (wide ? sizeof(float) : 2) * count;
  std::uint8_t* factor = kind.has_minimum ? minimums + 2 * count : minimums;
  std::uint8_t* minimum_factor = factor + factors * count;
  std::uint8_t* codes_to = kind.has_minimum ? minimum_factor + factors * count : minimum_factor;
  if (kind.is_power) codes_to = vector + count;
  Codes codes;
  BlockScales scales;
  for (std::size_t b = 0; b < count; ++b) {
    kind.decode(blocks + b * kind.nbytes, codes, scales);
    if (kind.is_power) {
      vector[b] = checked_power(scales.power, codes);
    } else {
      check_half(scales.scale);
      if (const float scale = half_to_float(scales.scale); wide)
        std::memcpy(vector + sizeof scale * b, &scale, sizeof scale);
      else
        std::memcpy(vector + 2 * b, &scales.scale, 2);
      if (kind.has_minimum) {
        check_half(scales.minimum);
        std::memcpy(minimums + 2 * b, &scales.minimum, 2);
        std::memcpy(minimum_factor + factors * b, scales.minimum_factors, factors);
      }
      std::memcpy(factor + factors * b, scales.factors, factors);
    }
    for (std::size_t i = 0; i < kind.weights; i += kCodeUnit, codes_to += 4 * kind.bits)
      pack_unit<kind.bits>(codes + i, codes_to);
  }
}

// The codes of kCodeUnit stored rows, `row_nbytes` apart, of `count` blocks each, at most kMost weights.
template <std::size_t index>
void to_codes(const std::uint8_t* blocks, std::size_t row_nbytes, std::size_t count, Codes* codes) {
  constexpr BlockKind kind = kKinds[index];
  BlockScales scales;
  for (std::size_t j = 0; j < kCodeUnit; ++j, blocks += row_nbytes)
    for (std::size_t b = 0; b < count; ++b) {
      if constexpr (kind.weights == kMost) {
        kind.decode(blocks, codes[j], scales);
      } else {
        Codes of_block;
        kind.decode(blocks + b * kind.nbytes, of_block, scales);
        std::memcpy(codes[j] + b * kind.weights, of_block, kind.weights);
      }
    }
}

struct Unpackers {
  void (*vector)(const std::uint8_t* blocks, std::size_t count, std::uint8_t* vector);
  void (*codes)(const std::uint8_t* blocks, std::size_t row_nbytes, std::size_t count, Codes* codes);
};

template <std::size_t... indices>
const Unpackers& unpackers_of(const BlockKind& kind, std::index_sequence<indices...>) {
  static constexpr Unpackers all[] = {{to_vector<indices>, to_codes<indices>}...};
  return all[&kind - kKinds];
}

const Unpackers& unpackers_of(const BlockKind& kind) {
  return unpackers_of(kind, std::make_index_sequence<kCodedKinds>());
}

// `count` stored rows of `length` numbers as columns, of which whole cache lines are written together.
template <typename Item>
void put_across(const std::uint8_t* stored, std::size_t count, std::size_t length, std::uint8_t* to,
                std::size_t stride) {
  constexpr std::size_t kSide = 16, kTogether = 128;  // neurons; outputs
  Item tile[kTogether * kSide] = {};
  for (std::size_t first = 0; first < length; first += kSide)
    for (std::size_t r = 0; r < count; r += kTogether) {
      const std::size_t neurons = std::min(kSide, length - first), outputs = std::min(kTogether, count - r);
      const std::uint8_t* from = stored + (r * length + first) * sizeof(Item);
      for (std::size_t j = 0; j < outputs; ++j)
        std::memcpy(tile + j * kSide, from + j * length * sizeof(Item), neurons * sizeof(Item));
      turn<kTogether, kSide>(tile);
      for (std::size_t n = 0; n < neurons; ++n)
        std::memcpy(to + (first + n) * stride + r * sizeof(Item), tile + n * kTogether,
                    outputs * sizeof(Item));
    }
}

}  // namespace

void BlockRows::unpack(const std::byte* stored, std::uint64_t first, std::uint64_t nbytes,
                       std::byte* rows) const {
  const auto* from = reinterpret_cast<const std::uint8_t*>(stored);
  auto* to = reinterpret_cast<std::uint8_t*>(rows) + at_;
  const std::size_t row = first / row_nbytes_, count = nbytes / row_nbytes_;
  if (kind_.is_plain()) {
    if (!is_down_) {
      for (std::size_t r = 0; r < count; ++r)
        std::memcpy(to + (row + r) * stride_, from + r * row_nbytes_, row_nbytes_);
      return;
    }
    to += row * kind_.nbytes;
    if (kind_.nbytes == 2) return put_across<std::uint16_t>(from, count, length_, to, stride_);
    return put_across<std::uint32_t>(from, count, length_, to, stride_);
  }
  if (is_down_) {
    to += row / kCodeUnit * 4 * bits_;
    if (bits_ == 2) return unpack_outputs<2>(from, count, to);
    if (bits_ == 4) return unpack_outputs<4>(from, count, to);
    if (bits_ == 5) return unpack_outputs<5>(from, count, to);
    if (bits_ == 6) return unpack_outputs<6>(from, count, to);
    return unpack_outputs<8>(from, count, to);
  }
  const auto to_vector = unpackers_of(kind_).vector;
  for (std::size_t r = 0; r < count; ++r)
    to_vector(from + r * row_nbytes_, length_ / kind_.weights, to + (row + r) * stride_);
}

// Each kCodeUnit stored rows' codes for a neuron are a unit of its column. All rows of some neurons go first,
// as their columns then stay in the processor's cache.
template <std::size_t bits>
void BlockRows::unpack_outputs(const std::uint8_t* stored, std::size_t count, std::uint8_t* to) const {
  constexpr std::size_t kTogether = 4;  // units that are written to a column together: whole cache lines
  constexpr std::size_t unit = 4 * bits, whole = bits == 5 || bits == 6 ? 16 : unit, upper = unit - whole;
  const auto to_codes = unpackers_of(kind_).codes;
  Codes codes[kCodeUnit] = {};
  Rows across[kTogether][kMostBytes];
  for (std::size_t first = 0; first < length_; first += kMost) {
    const std::size_t neurons = std::min(kMost, length_ - first), blocks = neurons / kind_.weights;
    const std::uint8_t* from = stored + first / kind_.weights * kind_.nbytes;
    for (std::size_t r = 0; r < count;) {
      std::uint8_t* column = to + first * stride_ + r / kCodeUnit * unit;
      std::size_t units = 0;
      for (; units < kTogether && r < count; ++units, r += kCodeUnit) {
        to_codes(from + r * row_nbytes_, row_nbytes_, blocks, codes);
        if (shift_ != 0)
          for (Codes& each : codes)
            for (std::uint8_t& code : each) code = static_cast<std::uint8_t>(code + shift_);
        pack_across<bits>(codes, kind_.bits <= 4 && shift_ == 0, across[units]);
        turn<whole, kMost>(across[units][0]);
        if constexpr (upper != 0) turn<upper, kMost>(across[units][whole]);
      }
      for (std::size_t n = 0; n < neurons; ++n, column += stride_)
        for (std::size_t u = 0; u < units; ++u) {
          std::memcpy(column + u * unit, across[u][0] + n * whole, whole);
          if constexpr (upper != 0)
            std::memcpy(column + u * unit + whole, across[u][whole] + n * upper, upper);
        }
    }
  }
}

}  // namespace flashllm
