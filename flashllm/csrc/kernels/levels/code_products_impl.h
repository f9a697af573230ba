// The products of codes of kernels.h over vector types, and at the end the UnpackCodes of row_codecs.h, which
// make weights such codes; included, as kernels_impl.h is, by the levels of x86 and of ARM, behind
// row_codecs_inputs_impl.h. `Vec`: of kernels_impl.h. `Ints` (row_codecs_inputs_impl.h) has zero and load
// besides. `Words` and `Bytes`: products of a word's codes, two or four; Code, kStep (codes a word),
// kTogether (words whose products are summed together; of nibbles kNibblesTogether, of codes times factors
// kProductsTogether), Column (a vector of words, with load and everywhere, of one word), first, add, and End,
// which adds such a sum to others. `Eight` has what makes bytes of a unit's codes (eight_x86.h).
//
// Every index of a tile's sums is a constant from the start: of loops a compiler stores the sums at every
// step. Totals are in memory, at constant places.

// Adds the sums of some rows by V vectors over some words of terms, one for each I.
template <typename Form, std::size_t V, std::size_t... I>
__attribute__((always_inline)) inline void sum_code_products(const typename Form::Code* codes,
                                                             const std::uint32_t* columns, std::size_t row,
                                                             std::size_t words, Ints* to,
                                                             std::index_sequence<I...>) {
  Ints sum[sizeof...(I)];
  typename Form::Column column[V];
  const auto code = [&](std::size_t i) { return Form::Column::everywhere(codes + i / V * kCodeTerms); };
  for (std::size_t v = 0; v < V; ++v) column[v] = Form::Column::load(columns + v * Vec::kWidth);
  ((sum[I] = Form::first(code(I), column[I % V], to[I])), ...);
  for (std::size_t s = 1; s < words; ++s) {
    codes += Form::kStep;
    columns += row;
    for (std::size_t v = 0; v < V; ++v) column[v] = Form::Column::load(columns + v * Vec::kWidth);
    ((sum[I] = Form::add(code(I), column[I % V], sum[I])), ...);
  }
  const typename Form::End end(sum[0]);
  ((to[I] = end(to[I], sum[I])), ...);
}

// The same of the codes of 16 bits that share a scale. Of a number of words that it knows, a compiler unrolls
// the loop; else it copies every sum at every step.
template <std::size_t V, std::size_t... I>
__attribute__((always_inline)) inline void sum_unit(const std::int16_t* codes, const std::uint32_t* columns,
                                                    std::size_t row, std::size_t unit, Ints* to,
                                                    std::index_sequence<I...> each) {
  if (unit == kCodeUnit)
    sum_code_products<Words, V>(codes, columns, row, kCodeUnit / 2, to, each);
  else
    sum_code_products<Words, V>(codes, columns, row, kCodeUnit / 4, to, each);
}

// A tile of rows by V vectors.
template <std::size_t V, std::size_t... I>
__attribute__((noinline)) void multiply_code_tile(const CodeRows& a, const CodeColumns& b, std::size_t terms,
                                                  float* c, std::size_t c_row,
                                                  std::index_sequence<I...> each) {
  constexpr std::size_t kScales = kCodeTerms / 16, kWidth = Vec::kWidth;
  alignas(64) float total[sizeof...(I) * kWidth] = {};
  const auto add = [&](std::size_t i, Vec of_tokens, const float* of_row) {
    float* at = total + i * kWidth;
    fma(of_tokens, Vec::set(*of_row), Vec::load_f32(at)).store(at);
  };
  for (std::size_t first = 0, u = 0; first < terms; first += a.unit, ++u) {
    Ints sum[sizeof...(I)];
    ((sum[I] = Ints::zero()), ...);
    sum_unit<V>(a.codes + first, b.pairs + first / 2 * b.row, b.row, a.unit, sum, each);
    (add(I, sum[I].floats(), a.scales + I / V * kScales + u), ...);
  }
  const auto put = [&](std::size_t i) {
    float* at = c + i / V * c_row + i % V * kWidth;
    fma(Vec::load_f32(total + i * kWidth), Vec::load_f32(b.scales + i % V * kWidth), Vec::load_f32(at))
        .store(at);
  };
  (put(I), ...);
}

namespace {  // as Ints are

template <std::size_t V, std::size_t kOffsets, std::size_t kTogether, std::size_t... I>
__attribute__((noinline)) void multiply_byte_tile(const WeightBytes& a, const InputBytes& b,
                                                  std::size_t terms, float* c, std::size_t c_row,
                                                  std::index_sequence<I...> each) {
  constexpr std::size_t kScales = kCodeTerms / 16, kWidth = Vec::kWidth;
  constexpr std::size_t kTerms = Bytes::kStep * kTogether;
  alignas(64) float total[sizeof...(I) * kWidth];
  (Vec::load_f32(c + I / V * c_row + I % V * kWidth).store(total + I * kWidth), ...);
  for (std::size_t u = 0; u < terms / 32; ++u) {
    Vec scale[V], sums[2][V];
    Ints less[V], sum[sizeof...(I)];
    for (std::size_t v = 0; v < V; ++v) {
      const auto at = [&](const std::int32_t* of) {
        return Ints::load(reinterpret_cast<const std::uint32_t*>(of) + u * b.row + v * kWidth);
      };
      const Ints totals = at(b.totals);
      scale[v] = Vec::load_f32(b.scales + u * b.row + v * kWidth);
      if constexpr (kOffsets == 2) {
        const Ints firsts = at(b.firsts);
        sums[0][v] = firsts.floats() * scale[v];
        sums[1][v] = (totals - firsts).floats() * scale[v];
      } else {
        sums[0][v] = totals.floats() * scale[v];
      }
      less[v] = kOffsets != 0 ? Ints::zero() : totals * Ints::set(-a.zero);
    }
    ((sum[I] = less[I % V]), ...);
    for (std::size_t part = 0, first = u * 32; part < 32 / kTerms; ++part, first += kTerms)
      sum_code_products<Bytes, V>(a.codes + first, b.words + first / Bytes::kStep * b.row, b.row, kTogether,
                                  sum, each);
    const auto add = [&](std::size_t i) {
      float* at = total + i * kWidth;
      Vec to = Vec::load_f32(at);
      for (std::size_t h = 0; h < kOffsets; ++h)
        to = fma(sums[h][i % V], Vec::set(a.offsets[i / V * kScales + kOffsets * u + h]), to);
      fma(sum[i].floats() * scale[i % V], Vec::set(a.scales[i / V * kScales + u]), to).store(at);
    };
    (add(I), ...);
  }
  (Vec::load_f32(total + I * kWidth).store(c + I / V * c_row + I % V * kWidth), ...);
}

}  // namespace

template <std::size_t R, std::size_t V>
inline void multiply_rows(const CodeRows& a, std::size_t r, const CodeColumns& b, std::size_t terms, float* c,
                          std::size_t c_row) {
  const CodeRows from{a.codes + r * kCodeTerms, a.scales + r * (kCodeTerms / 16), a.unit, a.is_wide};
  multiply_code_tile<V>(from, b, terms, c + r * c_row, c_row, std::make_index_sequence<R * V>());
}
template <std::size_t R, std::size_t V>
inline void multiply_rows(const WeightBytes& a, std::size_t r, const InputBytes& b, std::size_t terms,
                          float* c, std::size_t c_row) {
  constexpr auto kTile = std::make_index_sequence<R * V>();
  constexpr std::size_t kFew = Bytes::kTogether, kMany = Bytes::kNibblesTogether;
  const WeightBytes from = a.from_row(r);
  const bool in_nibbles = a.largest <= kLargestNibble;
  if (a.each == 2)
    multiply_byte_tile<V, 2, Bytes::kProductsTogether>(from, b, terms, c + r * c_row, c_row, kTile);
  else if (a.each == 1)
    in_nibbles ? multiply_byte_tile<V, 1, kMany>(from, b, terms, c + r * c_row, c_row, kTile)
               : multiply_byte_tile<V, 1, kFew>(from, b, terms, c + r * c_row, c_row, kTile);
  else
    in_nibbles ? multiply_byte_tile<V, 0, kMany>(from, b, terms, c + r * c_row, c_row, kTile)
               : multiply_byte_tile<V, 0, kFew>(from, b, terms, c + r * c_row, c_row, kTile);
}

template <std::size_t V, typename Rows, typename Columns>
inline void multiply_strip(const Rows& a, std::size_t rows, const Columns& b, std::size_t terms, float* c,
                           std::size_t c_row) {
  // A narrower tile is higher: with few sums the processor would wait for the end of each.
  constexpr std::size_t kTall = V == 1 ? 2 * kTileRows : kTileRows;
  std::size_t r = 0;
  for (; r + kTall <= rows; r += kTall) multiply_rows<kTall, V>(a, r, b, terms, c, c_row);
  for (; r < rows; ++r) multiply_rows<1, V>(a, r, b, terms, c, c_row);
}

inline CodeColumns from_column(const CodeColumns& b, std::size_t n) {
  return {b.pairs + n, b.row, b.scales + n};
}
inline InputBytes from_column(const InputBytes& b, std::size_t n) {
  return {b.words + n, b.totals + n, b.firsts + n, b.scales + n, b.row};
}

template <typename Rows, typename Columns>
void multiply_strips(const Rows& a, std::size_t rows, const Columns& b, std::size_t width, std::size_t terms,
                     float* c, std::size_t c_row) {
  std::size_t n = 0;
  for (; n + 2 * Vec::kWidth <= width; n += 2 * Vec::kWidth)
    multiply_strip<2>(a, rows, from_column(b, n), terms, c + n, c_row);
  for (; n < width; n += Vec::kWidth) multiply_strip<1>(a, rows, from_column(b, n), terms, c + n, c_row);
}
constexpr MultiplyCodes multiply_codes = multiply_strips<CodeRows, CodeColumns>;
constexpr MultiplyBytes multiply_bytes = multiply_strips<WeightBytes, InputBytes>;

// A tile of tokens by V vectors of outputs from n on.
template <std::size_t V, bool kOffsets, std::size_t... I>
__attribute__((noinline)) void add_code_tile(const CodeTokens& a, const CodeWeights& b, std::size_t n,
                                             std::size_t terms, float* c, std::size_t c_row,
                                             std::index_sequence<I...> each) {
  constexpr std::size_t kWindows = CodeWeights::kWindows, kWidth = Vec::kWidth;
  const std::size_t unit = b.unit;
  const float* scales = b.scales + n;
  alignas(64) float total[sizeof...(I) * kWidth];
  const auto add = [&](std::size_t i, Vec weights, const float* of_tokens, std::size_t w) {
    float* at = total + i * kWidth;
    fma(weights, Vec::set(of_tokens[i / V * kWindows + w]), Vec::load_f32(at)).store(at);
  };
  (Vec::load_f32(c + I / V * c_row + I % V * kWidth).store(total + I * kWidth), ...);
  for (std::size_t w = 0; w < terms / 32; ++w) {
    if constexpr (kOffsets)
      (add(I, Vec::load_f32(b.offsets + w * kCodeColumns + n + I % V * kWidth), a.sums, w), ...);
    for (std::size_t first = w * 32; first < w * 32 + 32; first += unit, scales += kCodeColumns) {
      Ints sum[sizeof...(I)];
      ((sum[I] = Ints::zero()), ...);
      sum_unit<V>(a.codes + first, b.pairs + first / 2 * kCodeColumns + n, kCodeColumns, unit, sum, each);
      (add(I, sum[I].floats() * Vec::load_f32(scales + I % V * kWidth), a.scales, w), ...);
    }
  }
  (Vec::load_f32(total + I * kWidth).store(c + I / V * c_row + I % V * kWidth), ...);
}

// Of R tokens from m on, all outputs.
template <std::size_t R>
inline void add_code_tokens(const CodeTokens& a, std::size_t m, const CodeWeights& b, std::size_t terms,
                            float* c, std::size_t c_row) {
  constexpr std::size_t V = 2;
  constexpr auto kTile = std::make_index_sequence<R * V>();
  const CodeTokens from{a.codes + m * kCodeTerms, a.scales + m * CodeWeights::kWindows,
                        a.sums + m * CodeWeights::kWindows};
  for (std::size_t n = 0; n < kCodeColumns; n += V * Vec::kWidth) {
    float* to = c + m * c_row + n;
    if (b.has_offsets)
      add_code_tile<V, true>(from, b, n, terms, to, c_row, kTile);
    else
      add_code_tile<V, false>(from, b, n, terms, to, c_row, kTile);
  }
}

void add_codes(const CodeTokens& a, std::size_t tokens, const CodeWeights& b, std::size_t terms, float* c,
               std::size_t c_row) {
  std::size_t m = 0;
  for (; m + kTileRows <= tokens; m += kTileRows) {
    for (std::size_t r = m + kTileRows; r < m + 2 * kTileRows && r < tokens; ++r)
      for (std::size_t n = 0; n < kCodeColumns; n += kCacheLine / sizeof(float))
        __builtin_prefetch(c + r * c_row + n, 1);
    add_code_tokens<kTileRows>(a, m, b, terms, c, c_row);
  }
  for (; m + 3 <= tokens; m += 3) add_code_tokens<3>(a, m, b, terms, c, c_row);
  for (; m < tokens; ++m) add_code_tokens<1>(a, m, b, terms, c, c_row);
}

// UnpackCodes. Codes of 16 bits are less what they begin at, unless the weights have minimums.

template <typename Units>
inline Eight::Codes signed_codes(const std::uint8_t* p) {
  if constexpr (Units::kOfTable) return Eight::looked_up<Units::kBits>(Units::kTable.values, p);
  const Eight::Codes codes = Eight::codes_of<Units::kBits>(p);
  return Units::kZero == 0 ? codes : Eight::less(codes, Units::kZero);
}

// Codes a byte each, from 0 on.
template <typename Units>
inline Eight::Codes byte_codes(const std::uint8_t* p) {
  if constexpr (Units::kOfTable) return Eight::looked_up<Units::kBits>(Units::kTable.from_zero, p);
  return Eight::codes_of<Units::kBits>(p);
}

template <typename Units, bool kBytes = false>
void unpack_codes(const void* vector, std::size_t k, std::size_t first, std::size_t units, void* codes,
                  float* scales, float* offsets) {
  static_assert(kBytes || !Units::kMinimums, "products of 16 bits take no minimums");
  static_assert(!kBytes || Units::kFactorsAlong || (Units::kScales == 1 && Units::kBits <= 5),
                "such bytes are too large");
  const auto row = Units::at(vector, k);
  const std::size_t u = first / kCodeUnit;
  if constexpr (kBytes && Units::kFactorsAlong) {
    Units::shared(row, u).store(scales);
  } else {
    Units::scales(row, u).store(scales);
    if constexpr (Units::kScales == 2) Units::later_scales(row, u).store(scales + kScaled);
  }
  if constexpr (Units::kMinimums) Units::minimums(row, u).store(offsets);
  if constexpr (Units::kMinimums && Units::kScales == 2)
    Units::later_minimums(row, u).store(offsets + kScaled);
  const std::uint8_t* from = row.codes + u * kCodeUnit * Units::kBits / 8;
  auto* bytes = static_cast<std::uint8_t*>(codes);
  auto* words = static_cast<std::int16_t*>(codes);
  // Of the terms that come next, behind those of other rows.
  for (std::size_t line = 0; line < kCodeTerms * Units::kBits / 8; line += kCacheLine)
    __builtin_prefetch(from + kCodeTerms * Units::kBits / 8 + line, 0, 3);
  for (std::size_t i = 0; i < units; ++i, from += kCodeUnit * Units::kBits / 8) {
    if constexpr (kBytes && Units::kFactorsAlong) {
      const std::int8_t* factors = row.factors + 2 * (u + i);
      Eight::put(Eight::times(byte_codes<Units>(from), factors[0], factors[1]), bytes + i * kCodeUnit);
    } else if constexpr (kBytes) {
      Eight::put(byte_codes<Units>(from), bytes + i * kCodeUnit);
    } else {
      Eight::put_wide(signed_codes<Units>(from), words + i * kCodeUnit);
    }
  }
}

template <std::size_t I>
constexpr UnpackCodes unpack_of() {
  constexpr bool kBytes = multiplied_as_bytes(kCodecAt<I>);
  if constexpr (is_bf12<I> || (!kBytes && shape_of(kCodecAt<I>).has_minimum))
    return nullptr;
  else
    return unpack_codes<Coded<I>, kBytes>;
}
