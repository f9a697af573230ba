#include "planes/blocks.h"

#include <iterator>
#include <utility>

#include "io/error.h"
#include "kernels/half.h"
#include "planes/codebooks.h"

namespace flashllm {

namespace {

using Codes = BlockCodes;

std::uint16_t half_at(const std::uint8_t* p) {
  return static_cast<std::uint16_t>(p[0] | static_cast<unsigned>(p[1]) << 8);
}

// `n` bytes: their lower halves, then their upper ones. In vectors, which not every loop becomes by itself.
template <std::size_t n>
void nibbles(const std::uint8_t* packed, std::uint8_t* codes) {
  using Bytes = std::uint8_t __attribute__((vector_size(16)));
  std::size_t i = 0;
  for (; i + sizeof(Bytes) <= n; i += sizeof(Bytes)) {
    Bytes bytes;
    std::memcpy(&bytes, packed + i, sizeof bytes);
    const Bytes lower = bytes & 15, upper = bytes >> 4;
    std::memcpy(codes + i, &lower, sizeof lower);
    std::memcpy(codes + i + n, &upper, sizeof upper);
  }
  for (; i < n; ++i) {
    codes[i] = packed[i] & 15;
    codes[i + n] = packed[i] >> 4;
  }
}

// Bit k of a byte is the fifth one of code k of eight. By itself in byte k, it carries into that one's top.
void fifth_bits(const std::uint8_t* packed, std::uint8_t* codes) {
  for (std::size_t i = 0; i < 4; ++i, codes += 8) {
    const std::uint64_t apart = packed[i] * in_each(1) & 0x8040201008040201;
    const std::uint64_t word = eight(codes) | ((apart + in_each(0x7F)) & in_each(0x80)) >> 3;
    std::memcpy(codes, &word, 8);
  }
}

// The upper bits of 32 codes, from `place` on: those from `shift` on, of `mask`, of a byte each.
template <unsigned shift, unsigned mask, unsigned place = 4>
void add_upper(const std::uint8_t* packed, std::uint8_t* codes) {
  for (std::size_t i = 0; i < 32; ++i)
    codes[i] = static_cast<std::uint8_t>(codes[i] | (packed[i] >> shift & mask) << place);
}
// Of 256 codes a bit each, from `place` on: group after group of 32 takes the next bit of the same bytes.
template <unsigned place, unsigned... groups>
void add_bits(const std::uint8_t* packed, std::uint8_t* codes, std::integer_sequence<unsigned, groups...>) {
  (add_upper<groups, 1, place>(packed, codes + 32 * groups), ...);
}
constexpr auto kGroups = std::make_integer_sequence<unsigned, 8>();

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

void q5_k(const std::uint8_t* block, Codes& codes, BlockScales& scales) {
  shared_scales(block, scales);
  for (std::size_t i = 0; i < 4; ++i) nibbles<32>(block + 48 + 32 * i, codes + 64 * i);
  add_bits<4>(block + 16, codes, kGroups);
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

// 256 codes' lowest two bits: 128 to 32 bytes. Shifts are constants: with others a compiler makes no vectors.
void pairs_of_bits(const std::uint8_t* packed, Codes& codes) {
  std::uint8_t* to = codes;
  for (std::size_t half = 0; half < 2; ++half, packed += 32, to += 128)
    for (std::size_t i = 0; i < 32; ++i) {
      to[i] = packed[i] & 3;
      to[32 + i] = packed[i] >> 2 & 3;
      to[64 + i] = packed[i] >> 4 & 3;
      to[96 + i] = packed[i] >> 6;
    }
}

// Eight factors of six bits, which are stored as 32 more.
std::uint64_t centred(std::uint64_t factors) {
  return ((factors | in_each(0x80)) - in_each(32)) ^ in_each(0x80);
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
  // Byte i of `lower` has factors i and i + 8; of `pairs`, in fours, the upper bits of i, i + 4, i + 8, i
  // + 12.
  const std::uint64_t lower = eight(block + 96), pairs = four(block + 104), upper = pairs | pairs >> 2 << 32;
  const std::uint64_t factors[] = {centred((lower & in_each(15)) | (upper & in_each(3)) << 4),
                                   centred((lower >> 4 & in_each(15)) | (upper >> 4 & in_each(3)) << 4)};
  std::memcpy(scales.factors, factors, sizeof factors);
  pairs_of_bits(block + 32, codes);
  add_bits<2>(block, codes, kGroups);
}

void iq4_xs(const std::uint8_t* block, Codes& codes, BlockScales& scales) {
  scales.scale = half_at(block);
  std::uint64_t lower = four(block + 4), upper = half_at(block + 2);  // a nibble to a byte, and two bits
  lower = (lower | lower << 16) & 0x0000FFFF0000FFFF;
  lower = (lower | lower << 8) & 0x00FF00FF00FF00FF;
  lower = (lower | lower << 4) & in_each(15);
  upper = (upper | upper << 24) & 0x000000FF000000FF;
  upper = (upper | upper << 12) & 0x000F000F000F000F;
  upper = (upper | upper << 6) & in_each(3);
  const std::uint64_t factors = centred(lower | upper << 4);
  std::memcpy(scales.factors, &factors, sizeof factors);
  for (std::size_t i = 0; i < 8; ++i) nibbles<16>(block + 8 + 16 * i, codes + 32 * i);
}

void mxfp4(const std::uint8_t* block, Codes& codes, BlockScales& scales) {
  scales.power = block[0];
  nibbles<16>(block + 1, codes);
}

void e2m1(const std::uint8_t* block, Codes& codes, BlockScales&) {
  std::uint16_t pairs[16];
  for (std::size_t i = 0; i < 16; ++i)
    pairs[i] = static_cast<std::uint16_t>((block[i] & 15) | (block[i] & 0xF0) << 4);
  std::memcpy(codes, pairs, sizeof pairs);
}

void nvfp4(const std::uint8_t* block, Codes& codes, BlockScales& scales) {
  constexpr std::uint8_t kNaN = 127;  // of E4M3, which ggml takes for 0
  for (std::size_t i = 0; i < 4; ++i) {
    scales.factors[i] = block[i] == kNaN ? 0 : block[i] & 127;
    nibbles<8>(block + 4 + 8 * i, codes + 16 * i);
  }
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
    {"IQ3_S", RowCodec::iq3_s, 4, 256, 110, 32, false, false, RowCodec::codes_iq3_s, iq3_s},
    {"IQ3_XXS", RowCodec::iq3_xxs, 4, 256, 98, 32, false, false, RowCodec::codes_iq3_xxs, iq3_xxs},
    {"IQ2_XXS", RowCodec::iq2_xxs, 3, 256, 66, 32, false, false, RowCodec::codes_iq2, iq2_xxs},
    {"IQ2_XS", RowCodec::iq2_s, 3, 256, 74, 16, false, false, RowCodec::codes_iq2, iq2_xs},
    {"IQ2_S", RowCodec::iq2_s, 3, 256, 82, 16, false, false, RowCodec::codes_iq2, iq2_s},
    {"IQ1_S", RowCodec::iq1_s, 3, 256, 50, 32, false, false, RowCodec::codes_iq1, iq1_s},
    {"IQ1_M", RowCodec::iq1_m, 3, 256, 56, 16, false, false, RowCodec::codes_iq1, iq1_m},
    {"TQ1_0", RowCodec::ternary, 2, 256, 54, 0, false, false, kIntegers, tq1_0},
    {"TQ2_0", RowCodec::ternary, 2, 256, 66, 0, false, false, kIntegers, tq2_0},
    {"MXFP4", RowCodec::mxfp4, 4, 32, 17, 0, false, true, RowCodec::codes_fp4, mxfp4},
    {"E2M1", RowCodec::mxfp4, 4, 32, 16, 0, false, false, RowCodec::codes_fp4, e2m1},
    {"NVFP4", RowCodec::nvfp4, 4, 64, 36, 16, false, false, RowCodec::codes_fp4, nvfp4},
    {"BF16", RowCodec::bf16, 16, 1, 2, 0, false, false, kIntegers, nullptr},
    {"F16", RowCodec::f16, 16, 1, 2, 0, false, false, kIntegers, nullptr},
    {"F32", RowCodec::f32, 32, 1, 4, 0, false, false, kIntegers, nullptr},
    {"E8M0", RowCodec::mxfp4, 8, 32, 1, 0, false, false, kIntegers, nullptr},
};
constexpr std::size_t kUnpacked = std::size(kKinds) - 5;  // the last ones have no Unpackers: NVFP4, and plain
static_assert(kKinds[kUnpacked].codec == RowCodec::nvfp4 && kKinds[kUnpacked + 1].decode == nullptr);

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

void check_half(std::uint16_t half) {
  if ((half & 0x7C00) == 0x7C00)
    throw CoreError(ErrorKind::format, "a scale is not finite: damaged; get the file again");
}

std::uint8_t checked_power(std::uint8_t power, const Codes& codes) {
  if (is_usual_power(power)) return power;
  std::uint8_t any = 0;
  for (std::size_t i = 0; i < kCodeUnit; ++i) any |= codes[i] & 7;
  if (any == 0) return kPowerOfZeros;
  throw CoreError(
      ErrorKind::format,
      "a scale is no number, or as small or large as none of a model is: damaged; get the file again");
}

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

// The codes of kCodeUnit stored rows, `row_nbytes` apart, of `count` blocks each, at most kBlockWeights
// weights.
template <std::size_t index>
void to_codes(const std::uint8_t* blocks, std::size_t row_nbytes, std::size_t count, Codes* codes) {
  constexpr BlockKind kind = kKinds[index];
  BlockScales scales;
  for (std::size_t j = 0; j < kCodeUnit; ++j, blocks += row_nbytes)
    for (std::size_t b = 0; b < count; ++b) {
      if constexpr (kind.weights == kBlockWeights) {
        kind.decode(blocks, codes[j], scales);
      } else {
        Codes of_block;
        kind.decode(blocks + b * kind.nbytes, of_block, scales);
        std::memcpy(codes[j] + b * kind.weights, of_block, kind.weights);
      }
    }
}

template <std::size_t... indices>
const Unpackers& unpackers_of(const BlockKind& kind, std::index_sequence<indices...>) {
  static constexpr Unpackers all[] = {{to_vector<indices>, to_codes<indices>}...};
  return all[&kind - kKinds];
}

}  // namespace

const BlockKind& block_kind(const std::string& name) {
  for (const BlockKind& kind : kKinds)
    if (name == kind.name) return kind;
  throw CoreError(ErrorKind::usage, "there are no blocks of " + name);
}

void take_apart(const BlockKind& kind, const std::uint8_t* blocks, std::size_t count, std::uint8_t* codes,
                BlockScales* scales) {
  Codes of_block;
  for (std::size_t b = 0; b < count; ++b) {
    kind.decode(blocks + b * kind.nbytes, of_block, scales[b]);
    std::memcpy(codes + b * kind.weights, of_block, kind.weights);
  }
}

const Unpackers& unpackers_of(const BlockKind& kind) {
  return unpackers_of(kind, std::make_index_sequence<kUnpacked>());
}

}  // namespace flashllm
