// Matrix-vector products over 16- and 32-bit weights with fp32 accumulation, at the speed of reading the
// weights.
//
// Every output is one sum in one fixed order: bits do not depend on the number of threads, on how many rows
// are handled together, or on where a row lies. They do depend on the instruction set, which is chosen once
// per process from what the processor has; tests force a level. Vectors (inputs, outputs, products) are fp32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/thread_pool.h"

namespace flashllm {

enum class Dtype { f32, f16, bf16 };
inline std::size_t dtype_nbytes(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// scalar is everywhere; neon and neon_dot are 64-bit ARM's; the others x86-64's, each with all of those
// before it, though processors with AVX-512 may lack the instructions of avx2_vnni.
enum class SimdLevel { scalar, neon, neon_dot, avx2, avx2_vnni, avx512, avx512_bf16, avx512_amx };
SimdLevel best_simd_level();
void require_simd_level(SimdLevel level);  // throws CoreError (usage) where the processor lacks it

struct Activation {
  enum Kind {
    identity,
    relu,
    squared_relu,
    drelu,
    fatrelu,
    silu,
    gelu,
    gelu_tanh,
    quick_gelu,
    clamped_swiglu,
    clamped_up
  };
  Kind kind = identity;
  float threshold = 0.0F;  // of fatrelu: zero up to it, the value itself above
  float cut = 0.0F;        // of any: results of a smaller magnitude become zero
  float scale = 1.0F;      // of any: of its inputs

  Activation() = default;
  Activation(Kind of, float above = 0.0F, float below = 0.0F) : kind(of), threshold(above), cut(below) {}
  // What becomes of the up product of a gated FFN, whose gate this is applied to: nothing, but for two.
  Activation of_up() const { return kind == drelu ? relu : kind == clamped_swiglu ? clamped_up : identity; }
};

constexpr std::size_t kHeadsTogether = 4;  // of heads that share keys: those computed together

// The innermost loops of one level and weight type; `n` rows or terms, `k` elements a row.
struct KernelTable {
  // out[r] = sum_j rows[r][j] * x[j]
  void (*dot_rows)(const void* const* rows, std::size_t n, const float* x, std::size_t k, float* out);
  // the same over rows `stride` bytes apart
  void (*dot_matrix)(const void* data, std::size_t stride, std::size_t n, const float* x, std::size_t k,
                     float* out);
  // y[j] += sum_i scales[i] * rows[i][j], the terms added in the order of i; j in [begin, end)
  void (*add_scaled_rows)(const void* const* rows, const float* scales, std::size_t n, std::size_t begin,
                          std::size_t end, float* y);
  // Of `heads` queries [heads, k] over the same keys: scores[h][r] = sum_j rows[r][j] * q[h][j], by
  // dot_matrix's sums; and of values: out[h][j] += sum_i weights[h][i] * rows[i][j], by add_scaled_rows'.
  void (*score_keys)(const void* data, std::size_t stride, std::size_t n, const float* q, std::size_t heads,
                     std::size_t k, float* scores, std::size_t scores_row);
  void (*add_values)(const void* const* rows, std::size_t n, const float* weights, std::size_t weights_row,
                     std::size_t heads, std::size_t k, float* out, std::size_t out_row);
  void (*to_f32)(const void* from, std::size_t n, float* to);
  // The same of n rows of k elements, in panels for MultiplyAdd: `panel` columns of all rows, then the next.
  // The last panel has what is left, padded with zeros to a multiple of 16.
  void (*to_panels)(const void* rows, std::size_t n, std::size_t k, std::size_t panel, float* to);
  void (*from_f32)(const float* from, std::size_t n, void* to);  // rounds to nearest, ties to even
};
const KernelTable& kernel_table(SimdLevel level, Dtype dtype);

// c[m][n] += sum_s a[m * a.row + s * a.step] * b[s * b.row + n], the terms added in the order of s; m in [0,
// rows), n in [0, width), s in [0, terms). `width` is a multiple of 16; rows of c are c_row floats apart.
struct TileRows {
  const float* data;
  std::size_t row, step;
};
struct TileColumns {
  const float* data;
  std::size_t row;
};
using MultiplyAdd = void (*)(TileRows a, std::size_t rows, TileColumns b, std::size_t width,
                             std::size_t terms, float* c, std::size_t c_row);

// The same over pairs of bf16 terms, two to a word, the earlier one in its lower half: half as many steps,
// each c + low * low and + high * high, every sum rounded to fp32. Strides of a are in bytes, of b in words.
struct PairRows {
  const std::byte* data;
  std::size_t row, step;
};
struct PairColumns {
  const std::uint32_t* data;
  std::size_t row;
};
struct PairKernels {
  void (*multiply_add)(PairRows a, std::size_t rows, PairColumns b, std::size_t width, std::size_t pairs,
                       float* c, std::size_t c_row);
  // pairs[j] = {low[j], high[j]}
  void (*pair_rows)(const std::uint16_t* low, const std::uint16_t* high, std::size_t n, std::uint32_t* pairs);
  // The same of fp32, rounded to bf16; n is a multiple of 16.
  void (*pair_floats)(const float* low, const float* high, std::size_t n, std::uint32_t* pairs);
};

// Codes of weights and of inputs in 16 bits, multiplied exactly: the products of `unit` terms, 16 or 32, are
// summed in 32 bits. c[m][n] += b.scales[n] * p, where p is the sum of a.scales[m][u] * the unit's sum over
// units; in this order, rounded to fp32 after each addition, of whose product nothing is rounded. At most
// kCodeTerms terms, in rows of so many.
constexpr std::size_t kCodeTerms = 256;
struct CodeRows {
  const std::int16_t* codes;  // [rows, kCodeTerms]
  const float* scales;        // [rows, kCodeTerms / 16], of which those of a unit each are set
  std::size_t unit;
  bool is_wide;  // has_wide_codes
};
struct CodeColumns {
  const std::uint32_t* pairs;  // two terms to a word, the earlier one in its lower half; [terms / 2]
  std::size_t row;             // words from one row of these to the next
  const float* scales;
};
// `width` is a multiple of 8, or of 16 from avx512 on, `terms` of 32.
using MultiplyCodes = void (*)(const CodeRows& a, std::size_t rows, const CodeColumns& b, std::size_t width,
                               std::size_t terms, float* c, std::size_t c_row);

// The same of weights in few bits and of inputs in 8, 32 of which share a scale: c[m][n] += a.offsets[m][u] *
// (b.scales[u][n] * b.totals[u][n]), if there are offsets, then a.scales[m][u] * (b.scales[u][n] * the sum of
// the products of the unit's codes), for each unit u of 32 terms in its turn. What is in brackets is rounded,
// and each addition. Of two offsets a unit, the first is that of its first 16 terms, the other is added next.
constexpr std::uint8_t kLargestProduct = 45;  // so that the sums of four products fit 16 bits
constexpr std::uint8_t kLargestByte = 31;     // of eight
constexpr std::uint8_t kLargestNibble = 15;   // of sixteen
struct WeightBytes {
  const std::uint8_t* codes;  // [rows, kCodeTerms]; less `zero` what is multiplied
  const float* scales;        // [rows, kCodeTerms / 16], of which every first half is set
  const float* offsets;       // [rows, kCodeTerms / 16], of which those of a unit each are set
  std::size_t each;           // offsets of a unit: 0 to 2; where there are some, `zero` is 0
  int zero;
  std::uint8_t largest;  // one of these three; no code is above it

  WeightBytes from_row(std::size_t r) const {
    constexpr std::size_t kScales = kCodeTerms / 16;
    return {codes + r * kCodeTerms, scales + r * kScales, offsets + r * kScales, each, zero, largest};
  }
};
struct InputBytes {
  const std::uint32_t* words;           // four terms to a word: [terms / 4]
  const std::int32_t *totals, *firsts;  // of 32 codes each, and of their first 16: [terms / 32]
  const float* scales;                  // [terms / 32]
  std::size_t row;                      // from one row of these to the next
};
using MultiplyBytes = void (*)(const WeightBytes& a, std::size_t rows, const InputBytes& b, std::size_t width,
                               std::size_t terms, float* c, std::size_t c_row);

// MultiplyCodes and MultiplyBytes in tiles, and pairs of bf16, for a level that has them, between `open` and
// `close` of the thread. Rows come by sixteens, of which those from `rows` on may be anything. Codes are
// prepared, bytes made signed; of columns of codes every row of pairs is two, of the higher and of the lower
// halves of the codes.
struct TileKernels {
  static constexpr std::size_t kRows = 16;
  void (*open)();
  void (*close)();
  // Codes of rows, in their place, which has room for twice as many; n is a multiple of 32. Rows of prepared
  // codes are kCodeTerms, or twice as many where a unit is 16.
  void (*prepare)(std::int16_t* codes, std::size_t n, std::size_t unit);
  void (*split)(const std::int16_t* codes, std::size_t n, std::uint32_t* high, std::uint32_t* low);
  MultiplyCodes multiply_codes;
  // Takes `zero` away; n is a multiple of 64.
  void (*make_signed)(std::uint8_t* codes, std::size_t n, int zero);
  MultiplyBytes multiply_bytes;
  // As PairKernels::multiply_add of at most kPairs, a row's in one run of memory; but each kPairsOfTile pairs
  // from the first on are summed by themselves, lower and upper halves apart, before they are added to c.
  static constexpr std::size_t kPairs = 128, kPairsOfTile = 16;
  decltype(PairKernels::multiply_add) multiply_pairs;
};

// Products in 16 bits of weights that lie by their inputs, kCodeColumns outputs of them, where 32 terms of a
// token share a scale: c[m][n] += b.offsets[w][n] * a.sums[m][w], if there are offsets, then a.scales[m][w] *
// (b.scales[u][n] * the unit's sum), rounded there too, of the units of w; for each w of 32 terms in its
// turn.
constexpr std::size_t kCodeColumns = 32;
struct CodeTokens {
  const std::int16_t* codes;   // [tokens, kCodeTerms]
  const float *scales, *sums;  // [tokens, kCodeTerms / 32]; sums of the codes, times their scale
};
struct CodeWeights {
  static constexpr std::size_t kWindows = kCodeTerms / 32;
  alignas(
      64) std::uint32_t pairs[kCodeTerms / 2 * kCodeColumns];  // two terms to a word, as CodeColumns has them
  alignas(64) float scales[2 * kWindows * kCodeColumns];
  alignas(64) float offsets[kWindows * kCodeColumns];
  std::size_t unit;
  bool has_offsets;
};
using AddCodes = void (*)(const CodeTokens& a, std::size_t tokens, const CodeWeights& b, std::size_t terms,
                          float* c, std::size_t c_row);

// A token at a head of a recurrence: from the state S [keys, values] before it to the one behind it, which
// may lie in the same place. Of a state-space model, and of the gated delta rule, which also takes away what
// was there under the key:
//   S *= decay;  S += key (beta * value);            out = query S
//   S *= decay;  S += key (beta * (value - key S));  out = query S
// Every sum is over the keys, in their order. Of `delta_by_channel` each key's row has a decay of its own.
enum class Recurrence { space, delta, delta_by_channel };
struct StateHead {
  std::size_t keys, values;
  const float *query, *key, *value;
  float decay;
  const float* decays;  // [keys], in place of `decay`
  float beta;
};
using StateStep = void (*)(const StateHead& head, const float* before, float* state, float* out);

// scores = softmax(scores), in place
using Softmax = void (*)(float* scores, std::size_t n);

// values = 1 / (1 + e^-values), in place; n is a multiple of 16
using Sigmoids = void (*)(float* values, std::size_t n);

// One block of keys of many queries' attention (attention.h).
struct AttentionKernels {
  std::size_t panel;  // columns of MultiplyAdd's b that should lie together, a multiple of 16
  // Scores [keys, columns], rows `row` floats apart, become weights e^(score - m) of an online
  // softmax down each column (Milakov and Gimelshein 2018, algorithm 3), zero from e^-87 down. m:
  // largest[column], raised to this block's largest; factor[column] = e^(m before - m), by which the column's
  // earlier weights shrink; sum[column] = sum * factor + the weights in their order. `columns` is a multiple
  // of 16.
  void (*online_softmax)(float* scores, std::size_t keys, std::size_t columns, std::size_t row,
                         float* largest, float* sum, float* factor);
  void (*scale_floats)(float* values, std::size_t n, float factor);  // values *= factor
  bool (*all_finite)(const float* values, std::size_t n);            // n is a multiple of 16
};

// The sum of n floats, read as fast as the level can: for measuring, in no fixed order.
using SumFloats = float (*)(const float* from, std::size_t n);

// How fast this machine reads memory, the roof of everything that reads each weight once: bytes per second of
// single passes over `nbytes` of memory, at least one and for about `seconds`. All threads of the pool sum
// their parts of one huge-page buffer, which must be well beyond the caches. Allocating and first touching it
// are not counted. Throws CoreError (usage), std::bad_alloc.
std::vector<double> read_bandwidth(ThreadPool& pool, std::size_t nbytes, double seconds, SimdLevel level);

float sigmoid(float x);
float softplus(float x);
// values[i] = activation(values[i] + bias), the same of any n. A NaN stays one.
void activate(Activation activation, float bias, float* values, std::size_t n, SimdLevel level);

}  // namespace flashllm
