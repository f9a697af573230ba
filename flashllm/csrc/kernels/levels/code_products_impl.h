// The product of codes of kernels.h over vector types; included, as kernels_impl.h is, by the levels of x86
// that have it. `Vec`: of kernels_impl.h. `Pairs`: as many words of two codes, or sums of 32 bits; zero,
// load, everywhere (one word), add_products (of both halves, to a sum) and floats.

// The sums of some rows by V vectors over some pairs of terms, one for each I, in registers until they are
// stored. Every index is a constant from the start: of loops a compiler stores these sums at every step.
template <std::size_t V, std::size_t... I>
__attribute__((noinline)) void sum_code_products(const std::int16_t* codes, const std::uint32_t* columns,
                                                 std::size_t row, std::size_t pairs, std::int32_t* to,
                                                 std::index_sequence<I...>) {
  Pairs sum[sizeof...(I)];
  ((sum[I] = Pairs::zero()), ...);
  for (std::size_t s = 0; s < pairs; ++s) {
    Pairs column[V];
    for (std::size_t v = 0; v < V; ++v) column[v] = Pairs::load(columns + s * row + v * Vec::kWidth);
    const std::int16_t* pair = codes + 2 * s;
    ((sum[I] = add_products(Pairs::everywhere(pair + I / V * kCodeTerms), column[I % V], sum[I])), ...);
  }
  (sum[I].store(to + I * Vec::kWidth), ...);
}

// A tile of R rows by V vectors.
template <std::size_t R, std::size_t V>
inline void multiply_code_tile(const CodeRows& a, const CodeColumns& b, std::size_t terms, float* c,
                               std::size_t c_row) {
  constexpr std::size_t kScales = kCodeTerms / 16, kOffsets = kCodeTerms / 32, kPart = V * Vec::kWidth;
  alignas(64) float part[R * kPart] = {};
  alignas(64) std::int32_t sums[R * kPart];
  for (std::size_t u = 0; a.offsets != nullptr && u < terms / 32; ++u)
    for (std::size_t r = 0; r < R; ++r)
      for (std::size_t v = 0; v < kPart; v += Vec::kWidth) {
        float* at = part + r * kPart + v;
        const Vec offset = Vec::set(a.offsets[r * kOffsets + u]);
        fma(Vec::load_f32(b.sums + u * b.row + v), offset, Vec::load_f32(at)).store(at);
      }
  for (std::size_t first = 0, u = 0; first < terms; first += a.unit, ++u) {
    sum_code_products<V>(a.codes + first, b.pairs + first / 2 * b.row, b.row, a.unit / 2, sums,
                         std::make_index_sequence<R * V>());
    for (std::size_t r = 0; r < R; ++r) {
      const Vec scale = Vec::set(a.scales[r * kScales + u]);
      for (std::size_t v = 0; v < kPart; v += Vec::kWidth) {
        float* at = part + r * kPart + v;
        fma(Pairs::floats(sums + r * kPart + v), scale, Vec::load_f32(at)).store(at);
      }
    }
  }
  for (std::size_t r = 0; r < R; ++r)
    for (std::size_t v = 0; v < kPart; v += Vec::kWidth) {
      float* at = c + r * c_row + v;
      fma(Vec::load_f32(part + r * kPart + v), Vec::load_f32(b.scales + v), Vec::load_f32(at)).store(at);
    }
}

template <std::size_t V>
inline void multiply_code_strip(const CodeRows& a, std::size_t rows, const CodeColumns& b, std::size_t terms,
                                float* c, std::size_t c_row) {
  // A narrower tile is higher: with few sums the processor would wait for the end of each.
  constexpr std::size_t kTall = V == 1 ? 2 * kTileRows : kTileRows;
  const auto from = [&](std::size_t r) {
    return CodeRows{a.codes + r * kCodeTerms, a.scales + r * (kCodeTerms / 16),
                    a.offsets == nullptr ? nullptr : a.offsets + r * (kCodeTerms / 32), a.unit};
  };
  std::size_t r = 0;
  for (; r + kTall <= rows; r += kTall) multiply_code_tile<kTall, V>(from(r), b, terms, c + r * c_row, c_row);
  for (; r < rows; ++r) multiply_code_tile<1, V>(from(r), b, terms, c + r * c_row, c_row);
}

void multiply_codes(const CodeRows& a, std::size_t rows, const CodeColumns& b, std::size_t width,
                    std::size_t terms, float* c, std::size_t c_row) {
  std::size_t n = 0;
  const auto from = [&](std::size_t column) {
    return CodeColumns{b.pairs + column, b.sums + column, b.row, b.scales + column};
  };
  for (; n + 2 * Vec::kWidth <= width; n += 2 * Vec::kWidth)
    multiply_code_strip<2>(a, rows, from(n), terms, c + n, c_row);
  for (; n < width; n += Vec::kWidth) multiply_code_strip<1>(a, rows, from(n), terms, c + n, c_row);
}

// A tile of tokens by V vectors of outputs from n on, one for each I: sums in registers as above, and totals
// in memory, at constant places.
template <std::size_t V, bool kOffsets, std::size_t... I>
__attribute__((noinline)) void add_code_tile(const CodeTokens& a, const CodeWeights& b, std::size_t n,
                                             std::size_t terms, float* c, std::size_t c_row,
                                             std::index_sequence<I...>) {
  constexpr std::size_t kWindows = CodeWeights::kWindows, kWidth = Vec::kWidth;
  const std::size_t unit = b.unit;
  const std::uint32_t* pairs = b.pairs + n;
  const std::int16_t* codes = a.codes;
  const float *scales = b.scales + n, *offsets = b.offsets + n;
  alignas(64) float total[sizeof...(I) * kWidth];
  const auto add = [&](std::size_t i, Vec weights, const float* of_tokens, std::size_t w) {
    float* at = total + i * kWidth;
    fma(weights, Vec::set(of_tokens[i / V * kWindows + w]), Vec::load_f32(at)).store(at);
  };
  (Vec::load_f32(c + I / V * c_row + I % V * kWidth).store(total + I * kWidth), ...);
  for (std::size_t w = 0; w < terms / 32; ++w, offsets += kCodeColumns) {
    if constexpr (kOffsets) (add(I, Vec::load_f32(offsets + I % V * kWidth), a.sums, w), ...);
    for (std::size_t first = 0; first < 32; first += unit, scales += kCodeColumns) {
      Pairs sum[sizeof...(I)];
      ((sum[I] = Pairs::zero()), ...);
      for (std::size_t s = 0; s < unit; s += 2, pairs += kCodeColumns, codes += 2) {
        Pairs column[V];
        for (std::size_t v = 0; v < V; ++v) column[v] = Pairs::load(pairs + v * kWidth);
        ((sum[I] = add_products(Pairs::everywhere(codes + I / V * kCodeTerms), column[I % V], sum[I])), ...);
      }
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
  constexpr std::size_t kTogether = Vec::kWidth == 16 ? kTileRows : 4;  // with sixteen registers fewer
  std::size_t m = 0;
  for (; m + kTogether <= tokens; m += kTogether) {
    for (std::size_t r = m + kTogether; r < m + 2 * kTogether && r < tokens; ++r)
      for (std::size_t n = 0; n < kCodeColumns; n += kCacheLine / sizeof(float))
        __builtin_prefetch(c + r * c_row + n, 1);
    add_code_tokens<kTogether>(a, m, b, terms, c, c_row);
  }
  for (; m + 3 <= tokens; m += 3) add_code_tokens<3>(a, m, b, terms, c, c_row);
  for (; m < tokens; ++m) add_code_tokens<1>(a, m, b, terms, c, c_row);
}
