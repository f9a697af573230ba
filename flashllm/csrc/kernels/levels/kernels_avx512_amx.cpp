// Products in tiles (AMX: Sapphire Rapids and later): prompts of coded weights, and of bf16. Bytes are
// multiplied as they are.
//
// Codes of 16 bits are multiplied as bf16, which has all integers up to 256: a code of an input is 256 h + l,
// and the tile's fp32 sums of 256 h times a code and l times a code are whole numbers of magnitude at most
// 2^24, exact in any order. Where codes are wide (has_wide_codes) they are not, and sums of h and of l are
// apart, or, of units of 16, those of each half of a unit; added, they are rounded once, as an integer is
// that becomes a float. So bits are those of multiply_codes of the other levels.
#include "kernels/levels/levels.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)

#if defined(__GNUC__) && !defined(__clang__)
// As in kernels_avx512.cpp.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace flashllm::avx512_bf16 {
extern const PairKernels kPairs;
}

namespace flashllm::avx512_amx {

namespace {

constexpr std::size_t kRows = 16, kWidth = 16, kRowNbytes = 64;  // of a tile; fp32 sums in a row
constexpr std::size_t kTileSums = kRows * kWidth;
constexpr std::size_t kAhead = 2;  // units whose sums leave their tile while others are scaled
constexpr auto kEachRow = std::make_index_sequence<kRows>();

// What LDTILECFG reads: tiles as large as there are, but for 5 and 6, whose rows and columns have 32 bytes.
struct alignas(64) TileShapes {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_nbytes[16] = {64, 64, 64, 64, 64, 32, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 8, 16};
};
static_assert(sizeof(TileShapes) == 64, "the processor reads 64 bytes");
const TileShapes kShapes;  // not on the stack: GCC 12 thinks that only its first eight bytes are read

void open() { _tile_loadconfig(&kShapes); }
void close() { _tile_release(); }

// Sixteen codes of 16 bits as floats.
__m512 floats(__m256i codes) { return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(codes)); }
__m512i as_bf16(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
__m256i load_codes(const std::int16_t* codes) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
}

// From the end on, so that codes may become twice as many in their place: of units of 16 every pair is there
// twice, for h and for l, which are one tile of inputs.
void prepare(std::int16_t* codes, std::size_t n, std::size_t unit) {
  const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  for (std::size_t i = n; i != 0;) {
    i -= 32;
    const __m512i bf16 = as_bf16(floats(load_codes(codes + i)), floats(load_codes(codes + i + 16)));
    if (unit == 32) {
      _mm512_storeu_si512(codes + i, bf16);
    } else {
      _mm512_storeu_si512(codes + 2 * i + 32,
                          _mm512_permutexvar_epi32(_mm512_add_epi32(twice, _mm512_set1_epi32(8)), bf16));
      _mm512_storeu_si512(codes + 2 * i, _mm512_permutexvar_epi32(twice, bf16));
    }
  }
}

void split(const std::int16_t* codes, std::size_t n, std::uint32_t* high, std::uint32_t* low) {
  for (std::size_t i = 0; i < n; i += 32) {
    const __m512i all = _mm512_loadu_si512(codes + i);
    const __m512i l = _mm512_srai_epi16(_mm512_slli_epi16(all, 8), 8);  // the lower byte, with its sign
    const __m512i h = _mm512_sub_epi16(_mm512_srai_epi16(all, 8), _mm512_srai_epi16(l, 15));
    const auto times = [](__m512i words, float by) {
      const __m512 factor = _mm512_set1_ps(by);
      return as_bf16(_mm512_mul_ps(floats(_mm512_castsi512_si256(words)), factor),
                     _mm512_mul_ps(floats(_mm512_extracti64x4_epi64(words, 1)), factor));
    };
    _mm512_storeu_si512(high + i / 2, times(h, 256.0F));
    _mm512_storeu_si512(low + i / 2, times(l, 1.0F));
  }
}

// The sums of one unit: codes of sixteen rows by sixteen tokens; wide ones as two tiles.
template <std::size_t kUnit, bool kWide>
inline void unit_sums(const std::int16_t* codes, const std::uint32_t* pairs, std::size_t row, float* to) {
  constexpr std::size_t kCodeRow = kCodeTerms * sizeof(std::int16_t) * (32 / kUnit);
  const std::size_t row_nbytes = row * sizeof(std::uint32_t);
  _tile_zero(0);
  if constexpr (kUnit == 16 && kWide) {
    _tile_zero(1);
    _tile_loadd(5, codes, kCodeRow);
    _tile_loadd(6, pairs, row_nbytes);
    _tile_dpbf16ps(0, 5, 6);
    _tile_loadd(5, codes + 16, kCodeRow);
    _tile_loadd(6, pairs + 8 * row, row_nbytes);
    _tile_dpbf16ps(1, 5, 6);
    _tile_stored(1, to + kTileSums, kRowNbytes);
  } else if constexpr (kUnit == 16) {
    _tile_loadd(2, codes, kCodeRow);
    _tile_loadd(3, pairs, row_nbytes);
    _tile_dpbf16ps(0, 2, 3);
  } else {
    _tile_loadd(2, codes, kCodeRow);
    _tile_loadd(3, pairs, 2 * row_nbytes);
    _tile_loadd(4, pairs + row, 2 * row_nbytes);
    _tile_dpbf16ps(0, 2, 3);
    if constexpr (kWide) {
      _tile_zero(1);
      _tile_dpbf16ps(1, 2, 4);
      _tile_stored(1, to + kTileSums, kRowNbytes);
    } else {
      _tile_dpbf16ps(0, 2, 4);
    }
  }
  _tile_stored(0, to, kRowNbytes);
}

template <std::size_t kUnit, bool kWide, std::size_t... I>
__attribute__((noinline)) void multiply_tile(const CodeRows& a, std::size_t rows, const CodeColumns& b,
                                             std::size_t terms, float* c, std::size_t c_row,
                                             std::index_sequence<I...>) {
  constexpr std::size_t kScales = kCodeTerms / 16, kRing = 2 * kAhead;
  alignas(64) float sums[kRing][kWide ? 2 * kTileSums : kTileSums];
  __m512 total[kRows];
  ((total[I] = _mm512_setzero_ps()), ...);
  const std::size_t units = terms / kUnit;
  const auto multiply = [&](std::size_t u) {
    // A tile's row has 32 numbers, and so many rows of pairs: of 32 terms, or of 16 and the same again.
    unit_sums<kUnit, kWide>(a.codes + u * 32, b.pairs + u * kUnit * b.row, b.row, sums[u % kRing]);
  };
  for (std::size_t u = 0; u < std::min(kAhead, units); ++u) multiply(u);
  for (std::size_t u = 0; u < units; ++u) {
    if (u + kAhead < units) multiply(u + kAhead);
    const float *of = sums[u % kRing], *scales = a.scales + u;
    const auto sum = [&](std::size_t i) {
      const __m512 all = _mm512_load_ps(of + i * kWidth);
      return kWide ? _mm512_add_ps(all, _mm512_load_ps(of + kTileSums + i * kWidth)) : all;
    };
    ((total[I] = _mm512_fmadd_ps(sum(I), _mm512_set1_ps(scales[I * kScales]), total[I])), ...);
  }
  const __m512 scales = _mm512_loadu_ps(b.scales);
  const auto put = [&](std::size_t i, __m512 sum) {
    if (i < rows)
      _mm512_storeu_ps(c + i * c_row, _mm512_fmadd_ps(sum, scales, _mm512_loadu_ps(c + i * c_row)));
  };
  (put(I, total[I]), ...);
}

void multiply_codes(const CodeRows& a, std::size_t rows, const CodeColumns& b, std::size_t width,
                    std::size_t terms, float* c, std::size_t c_row) {
  const auto tile =
      a.unit == 16 && a.is_wide
          ? multiply_tile<16, true, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>
      : a.unit == 16 ? multiply_tile<16, false, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>
      : a.is_wide    ? multiply_tile<32, true, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>
                     : multiply_tile<32, false, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>;
  for (std::size_t n = 0; n < width; n += kWidth)
    tile(a, rows, {b.pairs + n, b.row, b.scales + n}, terms, c + n, c_row, kEachRow);
}

void make_signed(std::uint8_t* codes, std::size_t n, int zero) {
  if (zero == 0) return;
  const __m512i less = _mm512_set1_epi8(static_cast<char>(zero));
  for (std::size_t i = 0; i < n; i += 64)
    _mm512_storeu_si512(codes + i, _mm512_sub_epi8(_mm512_loadu_si512(codes + i), less));
}

// Of bytes: the sums of one unit.
inline void unit_sums(const WeightBytes& a, const InputBytes& b, std::size_t u, std::int32_t* to) {
  _tile_zero(0);
  _tile_loadd(5, a.codes + u * 32, kCodeTerms);
  _tile_loadd(6, b.words + u * 8 * b.row, b.row * sizeof(std::uint32_t));
  _tile_dpbssd(0, 5, 6);
  _tile_stored(0, to, kRowNbytes);
}

template <std::size_t kOffsets, std::size_t... I>
__attribute__((noinline)) void multiply_byte_tile(const WeightBytes& a, std::size_t rows, const InputBytes& b,
                                                  std::size_t terms, float* c, std::size_t c_row,
                                                  std::index_sequence<I...>) {
  constexpr std::size_t kScales = kCodeTerms / 16, kRing = 2 * kAhead;
  alignas(64) std::int32_t sums[kRing][kTileSums];
  __m512 total[kRows];
  ((total[I] = I < rows ? _mm512_loadu_ps(c + I * c_row) : _mm512_setzero_ps()), ...);
  const std::size_t units = terms / 32;
  const float *scales = a.scales, *offsets = a.offsets;
  for (std::size_t u = 0; u < std::min(kAhead, units); ++u) unit_sums(a, b, u, sums[u % kRing]);
  for (std::size_t u = 0; u < units; ++u) {
    if (u + kAhead < units) unit_sums(a, b, u + kAhead, sums[(u + kAhead) % kRing]);
    const std::int32_t* of = sums[u % kRing];
    const __m512 scale = _mm512_loadu_ps(b.scales + u * b.row);
    const __m512i totals = _mm512_loadu_si512(b.totals + u * b.row),
                  firsts = _mm512_loadu_si512(b.firsts + u * b.row);
    const auto scaled = [&](__m512i of_inputs) {
      return _mm512_mul_ps(_mm512_cvtepi32_ps(of_inputs), scale);
    };
    const __m512 sums_of[] = {scaled(kOffsets == 2 ? firsts : totals),
                              scaled(_mm512_sub_epi32(totals, firsts))};
    const auto add = [&](std::size_t i, __m512 to) {
      for (std::size_t h = 0; h < kOffsets; ++h)
        to = _mm512_fmadd_ps(sums_of[h], _mm512_set1_ps(offsets[i * kScales + kOffsets * u + h]), to);
      const __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(of + i * kWidth)), scale);
      return _mm512_fmadd_ps(sum, _mm512_set1_ps(scales[i * kScales + u]), to);
    };
    ((total[I] = add(I, total[I])), ...);
  }
  const auto put = [&](std::size_t i, __m512 sum) {
    if (i < rows) _mm512_storeu_ps(c + i * c_row, sum);
  };
  (put(I, total[I]), ...);
}

void multiply_bytes(const WeightBytes& a, std::size_t rows, const InputBytes& b, std::size_t width,
                    std::size_t terms, float* c, std::size_t c_row) {
  for (std::size_t n = 0; n < width; n += kWidth) {
    const InputBytes columns{b.words + n, b.totals + n, b.firsts + n, b.scales + n, b.row};
    for (std::size_t r = 0; r < rows; r += kRows) {
      const WeightBytes of = a.from_row(r);
      float* to = c + r * c_row + n;
      if (a.each == 0)
        multiply_byte_tile<0>(of, rows - r, columns, terms, to, c_row, kEachRow);
      else if (a.each == 1)
        multiply_byte_tile<1>(of, rows - r, columns, terms, to, c_row, kEachRow);
      else
        multiply_byte_tile<2>(of, rows - r, columns, terms, to, c_row, kEachRow);
    }
  }
}

// Of sixteen rows for each of `kTiles` tiles.
template <std::size_t kTiles>
inline void multiply_pair_rows(PairRows a, PairColumns b, std::size_t pairs, float* c, std::size_t c_row) {
  const std::size_t c_nbytes = c_row * sizeof(float), b_nbytes = b.row * sizeof(std::uint32_t);
  const auto rows = [&](std::size_t tile, std::size_t pair) {
    return a.data + tile * kRows * a.row + pair * a.step;
  };
  _tile_loadd(0, c, c_nbytes);
  if constexpr (kTiles == 3) {
    _tile_loadd(1, c + kRows * c_row, c_nbytes);
    _tile_loadd(2, c + 2 * kRows * c_row, c_nbytes);
  }
  for (std::size_t s = 0; s < pairs; s += TileKernels::kPairsOfTile) {
    _tile_loadd(7, b.data + s * b.row, b_nbytes);
    _tile_loadd(3, rows(0, s), a.row);
    _tile_dpbf16ps(0, 3, 7);
    if constexpr (kTiles == 3) {
      _tile_loadd(4, rows(1, s), a.row);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(3, rows(2, s), a.row);
      _tile_dpbf16ps(2, 3, 7);
    }
  }
  _tile_stored(0, c, c_nbytes);
  if constexpr (kTiles == 3) {
    _tile_stored(1, c + kRows * c_row, c_nbytes);
    _tile_stored(2, c + 2 * kRows * c_row, c_nbytes);
  }
}

// Rows that are no whole tile are copied into one. What is left of pairs goes without tiles.
void multiply_pairs(PairRows a, std::size_t rows, PairColumns b, std::size_t width, std::size_t pairs,
                    float* c, std::size_t c_row) {
  const std::size_t in_tiles = pairs / TileKernels::kPairsOfTile * TileKernels::kPairsOfTile;
  const std::size_t whole = rows / kRows * kRows, left = rows - whole;
  alignas(64) std::byte copied[kRows][TileKernels::kPairs * sizeof(std::uint32_t)];
  alignas(64) float sums[kRows][kWidth];
  for (std::size_t r = 0; r < left; ++r)
    std::memcpy(copied[r], a.data + (whole + r) * a.row, in_tiles * a.step);
  for (std::size_t n = 0; n < width; n += kWidth) {
    const PairColumns columns{b.data + n, b.row};
    std::size_t r = 0;
    const auto from = [&] { return PairRows{a.data + r * a.row, a.row, a.step}; };
    for (; r + 3 * kRows <= whole; r += 3 * kRows)
      multiply_pair_rows<3>(from(), columns, in_tiles, c + r * c_row + n, c_row);
    for (; r < whole; r += kRows) multiply_pair_rows<1>(from(), columns, in_tiles, c + r * c_row + n, c_row);
    if (left == 0) continue;
    for (std::size_t i = 0; i < left; ++i) std::copy_n(c + (whole + i) * c_row + n, kWidth, sums[i]);
    multiply_pair_rows<1>({copied[0], sizeof copied[0], a.step}, columns, in_tiles, sums[0], kWidth);
    for (std::size_t i = 0; i < left; ++i) std::copy_n(sums[i], kWidth, c + (whole + i) * c_row + n);
  }
  if (in_tiles == pairs) return;
  avx512_bf16::kPairs.multiply_add({a.data + in_tiles * a.step, a.row, a.step}, rows,
                                   {b.data + in_tiles * b.row, b.row}, width, pairs - in_tiles, c, c_row);
}

}  // namespace

bool permit() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  constexpr unsigned kBf16 = 1U << 22U, kTile = 1U << 24U, kInt8 = 1U << 25U;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kBf16) != 0 && (d & kTile) != 0 &&
         (d & kInt8) != 0 && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

extern const TileKernels kTiles;
const TileKernels kTiles = {open,           close,       prepare,        split,
                            multiply_codes, make_signed, multiply_bytes, multiply_pairs};

}  // namespace flashllm::avx512_amx

#else

namespace flashllm::avx512_amx {

bool permit() { return false; }
extern const TileKernels kTiles;
const TileKernels kTiles = {};

}  // namespace flashllm::avx512_amx

#endif
