// Codecs of vectors of weights, and their inner loops where the weights are coded: in groups, or losslessly.
//
// A grouped vector of k weights: an fp16 scale a group; where the codec has minimums, an fp16 minimum a
// group; then the codes of whole groups. Of 8 bits a code is an int8, and the weight is code * scale. Of 4
// bits, 32 weights take 16 bytes: weight i of them is the lower half of byte i, weight i + 16 its upper half;
// the weight is (code - 8) * scale, or code * scale + minimum. Products of a code and an fp16 scale are exact
// in fp32, so every level has the same weights. flashllm/base/group_codes.py writes them.
//
// A bf12 vector is bf16 without loss: a table of 15 high bytes (sign and seven bits of the exponent) and a 0;
// a low byte a weight; 4-bit indexes into the table, 32 to 16 bytes as above, 15 for a weight whose high byte
// is not in it; then bf12_escapes(k) places for those: their positions (uint16, ascending, 0xFFFF where there
// is none), and behind all positions their high bytes. Weights and indexes fill whole units.
// flashllm/base/bf12.py writes them.
//
// Others are what quantised checkpoints have (flashllm/base/codes/carried.py writes them), so that nothing is
// rounded again. Of 5 bits: as above, a unit of 20 bytes. Of q4_k, q5_k and q6_k a group's scale is an fp16
// that 256 weights share times the group's factor: first the shared scales, the shared minimums (q4_k, q5_k),
// then int8 factors of groups (32 weights; q6_k 16), those of minimums, and the codes. planes/scale_planes.h
// says how codes of 5 and 6 bits lie in their units, and what the codecs without scales are. q3_k is as q6_k
// and q2_k as that with minimums: of 2 and 3 bits a unit has 8 bytes, bits 2 q and 2 q + 1 of byte i those of
// code 8 q + i, and behind them 4 bytes with the third bits, which lie as the fifth ones of 5 bits do.
// iq4_nl and iq4_xs are as int4_32 and, with factors, as q4_k without minimums, but that a code is a number
// of ggml's own (kIq4). iq3_s to iq1_m are as iq4_xs, of 4 bits or of 3, which lie as q3_k's do, with a
// factor for 32 weights or, of iq2_s and iq1_m, for 16: what a code stands for are the levels of ggml's
// codebooks (kIq3S to kIq1). ternary: first an fp32 scale for each 256 weights, then codes of 2 bits as
// q2_k's, of -1, 0 and 1 and, of other files than those of ternary models, 2; their 0 is 1.
//
// mxfp4 is MXFP4 (Open Compute Project, Microscaling Formats 1.0, 2023): 32 weights share a byte e, which
// stands for 2^(e - 127), 2 <= e <= 252; a code is a number of one sign, two exponent bits and one of
// mantissa (kFp4), and codes lie as other codes of 4 bits. First the bytes e, then the codes. nvfp4 is
// NVIDIA's NVFP4: the same codes, an fp32 scale for all of a vector, and for 16 weights a byte in E4M3, whose
// sign is 0: four bits of exponent, three of mantissa. First the fp32 scale, then the bytes, then the codes.
// The scale of a group is the product of both, rounded to fp32.
//
// Coded weights, but those of bf12 and those whose scales lie apart, are multiplied by inputs in fp32, or
// in 8 bits, those of int8_32 and int8_64 in 16 too: 32 inputs together are int8 (int16) codes and an fp32
// scale, the largest of them 127 (32767) times the scale. Such a product is the same bits at every level and
// for any number of tokens: the products of the codes that share a scale, of a unit of 32 or of half of it,
// are summed exactly; the sum, rounded to fp32, times the inputs' scale, is added times the weights' scale to
// one of four sums, unit u's to u modulo 4, behind the sum of the inputs' codes, times their scale, times the
// minimum where there are minimums. Codes count from what stands for 0. Inputs of ternary weights, whose
// models are trained so (BitNet b1.58: Ma et al., 2024), have one scale a token.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace flashllm {

constexpr std::size_t kSharedFactors =
    256;  // weights, or neurons of a plane, whose groups have factors of one scale
constexpr std::size_t kCodeUnit = 32;  // weights decoded together; groups are whole units
constexpr int kSignedCodes = 128;      // the largest magnitude of codes of 8 bits

// What codes of a table stand for: `values`, times `unit`. `from_zero`: values and `zero`, which makes them
// positive, as products of 8-bit inputs take them; where that does not fit, `zero` is 0, and they take
// `values`.
struct CodeTable {
  alignas(16) std::int8_t values[16], from_zero[16];
  int zero;
  float unit;
};
inline constexpr CodeTable kIntegers{};  // of codes that are what they stand for
constexpr CodeTable positive(CodeTable table, int zero) {
  for (int i = 0; i < 16; ++i) table.from_zero[i] = static_cast<std::int8_t>(table.values[i] + zero);
  table.zero = zero;
  return table;
}
// Of mxfp4 and nvfp4.
inline constexpr CodeTable kFp4 =
    positive({{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}, {}, 0, 0.5F}, 12);
// Of iq4_nl and iq4_xs.
inline constexpr CodeTable kIq4 = {
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}, {}, 0, 1.0F};
// Of codebooks: levels, then the same with a minus; of iq1_s and iq1_m -1, 0 and 1, and an eighth more or
// less.
inline constexpr CodeTable kIq3S =
    positive({{1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15}, {}, 0, 1.0F}, 15);
inline constexpr CodeTable kIq3Xxs =
    positive({{2, 6, 10, 14, 18, 22, 26, 31, -2, -6, -10, -14, -18, -22, -26, -31}, {}, 0, 0.5F}, 31);
inline constexpr CodeTable kIq2 = positive({{8, 25, 43, 0, -8, -25, -43, 0}, {}, 0, 0.125F}, 43);
inline constexpr CodeTable kIq1 = positive({{-7, 1, 9, 0, -9, -1, 7, 0}, {}, 0, 0.125F}, 9);

// The coded ones: bits of a code, weights that share a scale, whether they share a minimum, how scales lie
// (Scales), and what codes stand for.
#define FLASHLLM_CODECS(CODEC)                                            \
  CODEC(int8_32, 8, 32, false, halves, kIntegers)                         \
  CODEC(int8_64, 8, 64, false, halves, kIntegers)                         \
  CODEC(int4_32, 4, 32, false, halves, kIntegers)                         \
  CODEC(int4_64, 4, 64, false, halves, kIntegers)                         \
  CODEC(int4_32_min, 4, 32, true, halves, kIntegers)                      \
  CODEC(int4_64_min, 4, 64, true, halves, kIntegers)                      \
  CODEC(bf12, 12, 0, false, none, kIntegers)                              \
  /* Of quantised checkpoints. */                                         \
  CODEC(int5_32, 5, 32, false, halves, kIntegers)                         \
  CODEC(int5_32_min, 5, 32, true, halves, kIntegers)                      \
  CODEC(q4_k, 4, 32, true, factors, kIntegers)                            \
  CODEC(q5_k, 5, 32, true, factors, kIntegers)                            \
  CODEC(q6_k, 6, 16, false, factors, kIntegers)                           \
  CODEC(mxfp4, 4, 32, false, powers, kFp4)                                \
  CODEC(q2_k, 2, 16, true, factors, kIntegers)                            \
  CODEC(q3_k, 3, 16, false, factors, kIntegers)                           \
  CODEC(iq4_nl, 4, 32, false, halves, kIq4)                               \
  CODEC(iq4_xs, 4, 32, false, factors, kIq4)                              \
  CODEC(ternary, 2, kSharedFactors, false, floats, kIntegers)             \
  CODEC(nvfp4, 4, 16, false, quarters, kFp4)                              \
  CODEC(iq3_s, 4, 32, false, factors, kIq3S)                              \
  CODEC(iq3_xxs, 4, 32, false, factors, kIq3Xxs)                          \
  CODEC(iq2_xxs, 3, 32, false, factors, kIq2)                             \
  CODEC(iq2_s, 3, 16, false, factors, kIq2)                               \
  CODEC(iq1_s, 3, 32, false, factors, kIq1)                               \
  CODEC(iq1_m, 3, 16, false, factors, kIq1)                               \
  /* Down columns whose scales are in a plane (planes/scale_planes.h). */ \
  CODEC(codes2, 2, 0, false, none, kIntegers)                             \
  CODEC(codes4, 4, 0, false, none, kIntegers)                             \
  CODEC(codes5, 5, 0, false, none, kIntegers)                             \
  CODEC(codes6, 6, 0, false, none, kIntegers)                             \
  CODEC(codes8, 8, 0, false, none, kIntegers)                             \
  CODEC(codes_fp4, 4, 0, false, none, kFp4)                               \
  CODEC(codes_iq4, 4, 0, false, none, kIq4)                               \
  CODEC(codes_iq3_s, 4, 0, false, none, kIq3S)                            \
  CODEC(codes_iq3_xxs, 4, 0, false, none, kIq3Xxs)                        \
  CODEC(codes_iq2, 3, 0, false, none, kIq2)                               \
  CODEC(codes_iq1, 3, 0, false, none, kIq1)
#define FLASHLLM_NAME(name, ...) name,
enum class RowCodec { f32, f16, bf16, FLASHLLM_CODECS(FLASHLLM_NAME) };
#undef FLASHLLM_NAME

constexpr std::size_t kFirstCoded = static_cast<std::size_t>(RowCodec::int8_32);
constexpr std::size_t kFirstPlane = static_cast<std::size_t>(RowCodec::codes2);
constexpr std::size_t kCodedCodecs = kFirstPlane - kFirstCoded, kPlaneCodecs = 11, kPlaneForms = 4;
constexpr bool is_coded(RowCodec codec) { return static_cast<std::size_t>(codec) >= kFirstCoded; }
constexpr bool has_plane(RowCodec codec) { return static_cast<std::size_t>(codec) >= kFirstPlane; }

// An fp16 a group; an int8 factor a group, of an fp16 that kSharedFactors weights share; a power of two a
// group; a factor in E4M3 a group, of an fp32 that a vector has; an fp32 for kSharedFactors weights.
enum class Scales { none, halves, factors, powers, quarters, floats };
// What coded vectors are made of.
struct CodecShape {
  std::size_t bits;   // of a code
  std::size_t group;  // weights that share a scale
  bool has_minimum;
  Scales scales;
  CodeTable table;

  constexpr bool of_table() const { return table.unit != 0.0F; }
};
#define FLASHLLM_SHAPE(name, bits, group, has_minimum, scales, table) \
  {bits, group, has_minimum, Scales::scales, table},
inline constexpr CodecShape kShapes[] = {FLASHLLM_CODECS(FLASHLLM_SHAPE)};
#undef FLASHLLM_SHAPE
constexpr const CodecShape& shape_of(RowCodec codec) {
  return kShapes[static_cast<std::size_t>(codec) - kFirstCoded];
}
// Throws CoreError (usage) for a codec that is none of int8_32 to int4_64_min.
const CodecShape& group_shape(RowCodec codec);
// What codes of integers, of so many bits and without minimums, begin at.
constexpr int zero_of(std::size_t bits) { return bits == 8 ? 0 : bits == 2 ? 1 : 1 << (bits - 1); }

// Half of what a scale of mxfp4 stands for, as the bits of a float.
constexpr std::uint32_t bits_of_half_power(std::uint8_t e) { return (std::uint32_t{e} - 1) << 23; }

// A number in E4M3 as fp16: this is 2^-8 of it. Times kOfCodes it is half of it, as kFp4 wants it.
constexpr std::uint16_t half_of_e4m3(std::uint8_t byte) { return static_cast<std::uint16_t>(byte << 7); }
constexpr float kOfCodes = 128.0F;

// Places for escapes in a bf12 vector.
constexpr std::size_t bf12_escapes(std::size_t k) { return k / 128 < 4 ? 4 : k / 128; }

// Vectors of k weights of one codec. Sums and their order are those of KernelTable over the widened weights.
struct CodecKernels {
  // out[r] = sum_j rows[r][j] * x[j]
  void (*dot_rows)(const void* const* rows, std::size_t n, const float* x, std::size_t k, float* out);
  // the same over rows `stride` bytes apart
  void (*dot_matrix)(const void* data, std::size_t stride, std::size_t n, const float* x, std::size_t k,
                     float* out);
  // y[j] += sum_i scales[i] * rows[i][j], the terms added in the order of i; j in [begin, end), `begin` a
  // multiple of 64
  void (*add_scaled_rows)(const void* const* rows, const float* scales, std::size_t n, std::size_t k,
                          std::size_t begin, std::size_t end, float* y);
  // weights [first, first + n), `first` a multiple of kCodeUnit
  void (*widen)(const void* row, std::size_t k, std::size_t first, std::size_t n, float* to);
};
// Throws CoreError for a codec that is none of these, and where the processor lacks the level.
const CodecKernels& codec_kernels(SimdLevel level, RowCodec codec);

// A vector's weights from `first`, a multiple of kCodeTerms, on, as WeightBytes has them, or CodeRows where
// they are not multiplied_as_bytes: `units` of kCodeUnit codes, their scales, and their offsets where the
// codec has minimums.
using UnpackCodes = void (*)(const void* vector, std::size_t k, std::size_t first, std::size_t units,
                             void* codes, float* scales, float* offsets);
// nullptr: weights of the codec are widened for products of many tokens at this level.
UnpackCodes unpack_kernel(SimdLevel level, RowCodec codec);
// Terms whose products are summed before they are scaled.
constexpr std::size_t code_unit(RowCodec codec) {
  return shape_of(codec).group < kCodeUnit ? shape_of(codec).group : kCodeUnit;
}
// The largest magnitude of what codes without minimums stand for.
constexpr int largest_code(const CodecShape& shape) {
  const int zero = shape.of_table() ? shape.table.zero : zero_of(shape.bits);
  return zero != 0 ? zero : kSignedCodes;
}
// What such codes are more than that, where they are multiplied as bytes.
constexpr int zero_of_bytes(const CodecShape& shape) {
  return shape.of_table() ? shape.table.zero : shape.has_minimum ? 0 : zero_of(shape.bits);
}
// Whether a prompt's codes are multiplied by their groups' factors beforehand: of 2 bits they are bytes then,
// as those factors have four (Q2_K), and a unit has one scale.
constexpr bool takes_factors_along(RowCodec codec) {
  return shape_of(codec).bits == 2 && shape_of(codec).scales == Scales::factors;
}
// Whether a prompt's inputs are of 8 bits, as a token's are: where the numbers that codes stand for are of at
// most five, and 32 of them share a scale. Elsewhere a prompt's are of 16.
constexpr bool multiplied_as_bytes(RowCodec codec) {
  const CodecShape& shape = shape_of(codec);
  if (takes_factors_along(codec)) return true;
  return shape.group >= kCodeUnit && shape.bits <= 5 &&
         (!shape.of_table() || (shape.table.zero != 0 && 2 * shape.table.zero <= kLargestByte));
}
// The largest of such bytes, or more.
constexpr std::uint8_t largest_byte(RowCodec codec) {
  const CodecShape& shape = shape_of(codec);
  if (takes_factors_along(codec)) return kLargestProduct;
  return !shape.of_table() && shape.bits <= 4 ? kLargestNibble : kLargestByte;
}
// Minimums of a unit.
constexpr std::size_t offsets_of(RowCodec codec) {
  return !shape_of(codec).has_minimum ? 0 : kCodeUnit / code_unit(codec);
}
// Whether a unit's products by codes of 16 bits may sum to more than 2^24, up to which fp32 has all integers.
constexpr bool has_wide_codes(RowCodec codec) {
  return code_unit(codec) * static_cast<std::size_t>(largest_code(shape_of(codec))) * 32767 > 1 << 24;
}

// What vectors are multiplied by.
enum class InputForm { f32, int8, int16, token_int8 };  // the last: a scale a token
constexpr std::size_t kInt16Codecs = 2;                 // those of 8 bits, the first of the coded ones
constexpr bool takes_inputs(RowCodec codec, InputForm inputs) {
  if (inputs == InputForm::f32) return true;
  if (!is_coded(codec) || has_plane(codec) || codec == RowCodec::bf12) return false;
  if (codec == RowCodec::ternary || inputs == InputForm::token_int8)
    return codec == RowCodec::ternary && inputs == InputForm::token_int8;
  return inputs == InputForm::int8 || static_cast<std::size_t>(codec) < kFirstCoded + kInt16Codecs;
}
// The widest form, up to the one that is wanted, that the codec's vectors are multiplied by.
constexpr InputForm inputs_of(RowCodec codec, InputForm wanted) {
  if (takes_inputs(codec, wanted)) return wanted;
  if (codec == RowCodec::ternary) return InputForm::token_int8;
  return takes_inputs(codec, InputForm::int8) ? InputForm::int8 : InputForm::f32;
}

// Units of kCodeUnit that so many inputs take: a multiple of 8.
constexpr std::size_t padded_units(std::size_t length) {
  return (length + 8 * kCodeUnit - 1) / (8 * kCodeUnit) * 8;
}
// Inputs in padded_units, whose last ones have zeros; four units are a window, in which the first four codes
// of each come first, then the next four.
struct CodedInputs {
  const void* codes;           // int8, in windows; or int16, of a window all lower bytes, then the upper ones
  const float* scales;         // [units]
  const std::int32_t* totals;  // [units], of the codes, or of upper bytes
  const std::int32_t* halves[2];  // the same of the first and of the last 16 codes of a unit
};
// Where codes of inputs are written, as CodedInputs has them.
struct InputCodes {
  std::int8_t* codes;
  float* scales;
  std::int32_t* totals;
  std::int32_t* halves[2];
};
// How inputs become codes, to the nearest, ties to even. What is not finite has zeros, and a scale that is
// not a number.
struct InputKernels {
  float (*largest)(const float* x, std::size_t n);  // magnitude; not finite where one is not
  // n inputs that share a scale, which is returned.
  float (*to_int16)(const float* x, std::size_t n, std::int16_t* codes);
  // A unit of inputs, whose scale is returned, and the codes' total. `largest`: a magnitude that the scale is
  // for; nullptr: the unit's own.
  float (*unit_to_int8)(const float* x, const float* largest, std::int8_t* codes, std::int32_t* total);
  // All inputs of a token. `together`: they share a scale; else each unit has its own.
  void (*code_int8)(const float* x, std::size_t length, bool together, const InputCodes& to);
  void (*code_int16)(const float* x, std::size_t length, bool together, const InputCodes& to);
};
const InputKernels& input_kernels(SimdLevel level);
constexpr std::size_t kTokensOfDot = 8;  // that use codes while they are unpacked
struct CodedInputKernels {
  // As CodecKernels's. Rows [n, fetched), which come next, are fetched meanwhile, as far as they are near.
  void (*dot_rows)(const void* const* rows, std::size_t n, std::size_t fetched, const CodedInputs& x,
                   std::size_t k, float* out);
  // Of rows `stride` bytes apart and at most kTokensOfDot tokens, out[t * out_stride + r], each with the bits
  // it has alone.
  void (*dot_tokens)(const void* data, std::size_t stride, std::size_t n, const CodedInputs* x,
                     std::size_t tokens, std::size_t k, float* out, std::size_t out_stride);
};
// Throws CoreError (usage) for a codec that is not multiplied by such inputs, and for inputs in fp32.
const CodedInputKernels& coded_input_kernels(SimdLevel level, RowCodec codec, InputForm inputs);

}  // namespace flashllm
