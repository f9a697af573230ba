// Products of coded weights with inputs in 8 or 16 bits, as row_codecs.h has them, and how inputs become such
// codes; included behind row_codecs_impl.h. A tile is kTileOfDot rows, a window four units; with
// kPairsOfTiles several tokens are multiplied by two tiles at a time. `Ints`: a number, or a word of four
// codes, of each unit of a window of each row of a tile: set; pieces (16 bytes of each row) and transpose (of
// four of them word i of each row to word j of the i-th); fours and eights (four or eight bytes of each unit,
// one word after the other); part<kShift, kMask> (of every byte the bits from kShift on) and with<kShift,
// kMask, kPlace> (such bits of another from bit kPlace on); looked_up (of a table of sixteen) and to_words
// (of signed codes, kSignedZero more than what they are); sum_four<kMost> (of the products of four words of
// codes up to kMost, or signed ones, with the same of inputs) and sum_wide (of eight words of int8 with
// inputs of 16 bits); each_row (the same four for every row); +, -, * and floats. `Lanes`: as many floats:
// set, each_row, of_rows (of eight of each row the first and the last four), evens_and_odds (of two such),
// put_sums, *, and a fma that rounds once. `Eight`: eight scales of a row: set, store, load_halves, load_i8,
// half_powers, first and *.

constexpr std::size_t kUnitWords = 8;  // of four codes

namespace {  // as Ints are

// Word J of a unit's codes, of the unit's words as they lie.
template <std::size_t kBits, std::size_t J>
__attribute__((always_inline)) inline Ints codes_of_word(const Ints* from) {
  constexpr int kPair = J / 2 * 2, kNibble = J / 4 * 4, kBit = J;
  if constexpr (kBits == 8) return from[J];
  if constexpr (kBits == 2) return from[J % 2].template part<kPair, 3>();
  if constexpr (kBits == 3) return from[J % 2].template part<kPair, 3>().template with<kBit, 1, 2>(from[2]);
  if constexpr (kBits == 4) return from[J % 4].template part<kNibble, 15>();
  if constexpr (kBits == 5)
    return from[J % 4].template part<kNibble, 15>().template with<kBit, 1, 4>(from[4]);
  if constexpr (kBits == 6)
    return from[J % 4].template part<kNibble, 15>().template with<kPair, 3, 4>(from[4 + J % 2]);
}

template <typename Input, typename Units>
struct CodedDot {
  using G = Units;
  using Row = typename Units::Row;
  static constexpr std::size_t kScales = Units::kScales, kBits = Units::kBits;
  static constexpr std::size_t kUnitNbytes = kCodeUnit * kBits / 8;
  static constexpr std::size_t kWindow = 4, kWindows = kScaled / kWindow;  // units; of kScaled
  static constexpr bool kWide = sizeof(Input) == 2;
  static constexpr bool kOfTable = Units::kOfTable, kFromZero = kOfTable && Units::kZero != 0;
  static constexpr bool kSigned = !kWide && (kBits == 8 || (kOfTable && !kFromZero));
  static constexpr int kZero = kWide ? Ints::kWideZero : kSigned ? Ints::kSignedZero : Units::kZero;
  static constexpr int kMost = kSigned ? kSignedCodes : kFromZero ? 2 * Units::kZero : (1 << kBits) - 1;
  static_assert(kScales == 1 || kScales == 2, "a unit has one scale, or two");

  // Of kScaled units: window after window, of two scales a unit the first of four units, then the second.
  struct Scales {
    Lanes of[kWindows * kScales], minimums[Units::kMinimums ? kWindows * kScales : 1];

    // `left`: scales that the rows still have.
    template <typename Of>
    static void load(const Row* row, std::size_t left, const Of& of, Lanes* to) {
      Eight each[kTileOfDot];
      for (std::size_t r = 0; r < kTileOfDot; ++r) {
        each[r] = of(row[r]);
        if (left < kScaled) each[r] = each[r].first(left);
      }
      Lanes::of_rows(each, to);
      if constexpr (kScales == 2) Lanes::evens_and_odds(to);
    }
    Scales(const Row* row, std::size_t u, std::size_t units) {
      const std::size_t left = units * kScales, later = left < kScaled ? 0 : left - kScaled;
      load(row, left, [u](const Row& at) { return Units::scales(at, u); }, of);
      if constexpr (Units::kMinimums)
        load(row, left, [u](const Row& at) { return Units::minimums(at, u); }, minimums);
      if constexpr (kScales == 2) {
        load(row, later, [u](const Row& at) { return Units::later_scales(at, u); }, of + 2);
        if constexpr (Units::kMinimums)
          load(row, later, [u](const Row& at) { return Units::later_minimums(at, u); }, minimums + 2);
      }
    }
  };

  // The codes of a window, of which a row has kUnits units, the last one `last` bytes on; at[r]: row r's.
  template <std::size_t kUnits, std::size_t... J>
  __attribute__((always_inline)) static void load_codes(const std::uint8_t* const* at, std::size_t last,
                                                        Ints* to, std::index_sequence<J...>) {
    Ints words[kBits];
    const auto unit = [=](std::size_t i) { return i + 1 == kUnits ? last : i * kUnitNbytes; };
    constexpr std::size_t kPieces = kBits / 4;  // of 16 bytes, of a unit
    for (std::size_t piece = 0; piece < kPieces; ++piece) {
      for (std::size_t i = 0; i < kWindow; ++i)
        words[4 * piece + i] = i < kUnits
                                   ? Ints::pieces([=](std::size_t r) { return at[r] + unit(i) + 16 * piece; })
                                   : Ints::set(0);
      Ints::transpose(words + 4 * piece);
    }
    constexpr std::size_t kLeft = kBits - 4 * kPieces;  // words
    const auto rest = [=](std::size_t byte) {
      return [=](std::size_t r, std::size_t i) { return at[r] + unit(i % kUnits) + 16 * kPieces + byte; };
    };
    if constexpr (kLeft >= 2) Ints::eights(rest(0), words + 4 * kPieces);
    if constexpr (kLeft % 2 == 1) words[kBits - 1] = Ints::fours(rest(4 * (kLeft - 1)));
    ((to[J] = codes_of_word<kBits, J>(words)), ...);
    if constexpr (kOfTable)
      ((to[J] = to[J].looked_up(kFromZero ? Units::kTable.from_zero : Units::kTable.values)), ...);
    if constexpr (kSigned) ((to[J] = to[J].to_words()), ...);
  }

  // The products of a window's codes, or of those that share scale `part`, less what zero codes add.
  __attribute__((always_inline)) static Ints sum_of(const Ints* codes, const std::int8_t* inputs,
                                                    std::size_t part, const Ints& totals) {
    Ints sum;
    if constexpr (kWide) {
      sum = Ints::sum_wide(codes, inputs);
    } else {
      constexpr std::size_t kWords = kUnitWords / kScales;
      const auto four = [&](std::size_t j) {
        return Ints::template sum_four<kMost>(codes + j, inputs + 16 * j);
      };
      sum = four(part * kWords);
      if constexpr (kWords == 8) sum = sum + four(4);
    }
    if constexpr (kZero != 0) sum = sum - totals * Ints::set(kZero);
    return sum;
  }

  // The terms of a window from unit u on, for each token.
  template <std::size_t kUnits>
  __attribute__((always_inline)) static void add_window(const std::uint8_t* const* at, std::size_t last,
                                                        const CodedInputs* x, std::size_t tokens,
                                                        const Lanes* scales, const Lanes* minimums,
                                                        std::size_t u, Lanes* sum) {
    Ints codes[kUnitWords];
    load_codes<kUnits>(at, last, codes, std::make_index_sequence<kUnitWords>());
    for (std::size_t t = 0; t < tokens; ++t) {
      const auto* inputs = static_cast<const std::int8_t*>(x[t].codes) + u * kCodeUnit * sizeof(Input);
      const Lanes by = Lanes::each_row(x[t].scales + u);
      for (std::size_t part = 0; part < kScales; ++part) {
        const Ints totals = Ints::each_row((kScales == 1 ? x[t].totals : x[t].halves[part]) + u);
        const Ints products = sum_of(codes, inputs, part, totals);
        if constexpr (Units::kMinimums) sum[t] = fma(minimums[part], totals.floats() * by, sum[t]);
        sum[t] = fma(products.floats() * by, scales[part], sum[t]);
      }
    }
  }

  // out[t * out_stride + r] of a tile, the first `rows` of which count, and at most T tokens; next[r]: what
  // to fetch while row[r] is read.
  template <std::size_t T>
  static void dot(const Row* row, const Row* next, const CodedInputs* x, std::size_t tokens, std::size_t k,
                  std::size_t rows, float* out, std::size_t out_stride) {
    const std::size_t units = (k + kCodeUnit - 1) / kCodeUnit;
    if constexpr (T == 1) tokens = 1;
    Lanes sum[T];
    for (std::size_t t = 0; t < tokens; ++t) sum[t] = Lanes::set(0.0F);
    if (next != nullptr)
      for (std::size_t r = 0; r < kTileOfDot; ++r) G::prefetch_groups(next[r]);
    for (std::size_t u = 0; u < units; u += kScaled) {
      const std::size_t left = units - u < kScaled ? units - u : kScaled;
      if (next != nullptr)
        for (std::size_t r = 0; r < kTileOfDot; ++r)
          for (std::size_t line = 0; line < kScaled * kUnitNbytes; line += kCacheLine)
            __builtin_prefetch(next[r].codes + u * kUnitNbytes + line, 0, 2);
      const Scales scales(row, u, left);
      for (std::size_t w = 0; w * kWindow < left; ++w) {
        const std::size_t here = left - w * kWindow, first = (u + w * kWindow) * kUnitNbytes;
        const std::uint8_t* codes[kTileOfDot];
        for (std::size_t r = 0; r < kTileOfDot; ++r) codes[r] = row[r].codes + first;
        // Of a row's end, an even number of units is loaded: where one is missing, the last once more, whose
        // inputs are zeros then.
        const auto add = [&](auto units) {
          add_window<units>(codes, ((here < units ? here : units) - 1) * kUnitNbytes, x, tokens,
                            scales.of + w * kScales, scales.minimums + (Units::kMinimums ? w * kScales : 0),
                            u + w * kWindow, sum);
        };
        if (here > kWindow / 2)
          add(std::integral_constant<std::size_t, kWindow>());
        else
          add(std::integral_constant<std::size_t, kWindow / 2>());
      }
    }
    for (std::size_t t = 0; t < tokens; ++t) sum[t].put_sums(rows, out + t * out_stride);
  }

  // add_window of two tiles, which share what is loaded of the inputs. Row r of tile i is at[i * kTileOfDot +
  // r], its terms go to sum[2 * t + i].
  template <std::size_t kUnits>
  __attribute__((always_inline)) static void add_two(const std::uint8_t* const* at, const CodedInputs* x,
                                                     std::size_t tokens, const Scales* scales, std::size_t w,
                                                     std::size_t u, Lanes* sum) {
    Ints codes[2][kUnitWords];
    for (std::size_t i = 0; i < 2; ++i)
      load_codes<kUnits>(at + i * kTileOfDot, (kUnits - 1) * kUnitNbytes, codes[i],
                         std::make_index_sequence<kUnitWords>());
    for (std::size_t t = 0; t < tokens; ++t) {
      const auto* inputs = static_cast<const std::int8_t*>(x[t].codes) + u * kCodeUnit * sizeof(Input);
      const Lanes by = Lanes::each_row(x[t].scales + u);
      for (std::size_t part = 0; part < kScales; ++part) {
        const Ints totals = Ints::each_row((kScales == 1 ? x[t].totals : x[t].halves[part]) + u);
        Ints products[2];
        for (std::size_t i = 0; i < 2; ++i) products[i] = sum_of(codes[i], inputs, part, totals);
        for (std::size_t i = 0; i < 2; ++i) {
          const Scales& own = scales[i];
          Lanes& to = sum[2 * t + i];
          if constexpr (Units::kMinimums)
            to = fma(own.minimums[w * kScales + part], totals.floats() * by, to);
          to = fma(products[i].floats() * by, own.of[w * kScales + part], to);
        }
      }
    }
  }

  // dot of two tiles of whole rows, which have an even number of units.
  static void dot_two(const Row* row, const Row* next, const CodedInputs* x, std::size_t tokens,
                      std::size_t k, float* out, std::size_t out_stride) {
    constexpr std::size_t kRows = 2 * kTileOfDot;
    const std::size_t units = (k + kCodeUnit - 1) / kCodeUnit;
    Lanes sum[2 * kTokensOfDot];
    for (std::size_t i = 0; i < 2 * tokens; ++i) sum[i] = Lanes::set(0.0F);
    for (std::size_t r = 0; r < kRows; ++r) G::prefetch_groups(next[r]);
    for (std::size_t u = 0; u < units; u += kScaled) {
      const std::size_t left = units - u < kScaled ? units - u : kScaled;
      for (std::size_t r = 0; r < kRows; ++r)
        for (std::size_t line = 0; line < kScaled * kUnitNbytes; line += kCacheLine)
          __builtin_prefetch(next[r].codes + u * kUnitNbytes + line, 0, 2);
      const Scales scales[2] = {Scales(row, u, left), Scales(row + kTileOfDot, u, left)};
      for (std::size_t w = 0; w * kWindow < left; ++w) {
        const std::uint8_t* codes[kRows];
        for (std::size_t r = 0; r < kRows; ++r) codes[r] = row[r].codes + (u + w * kWindow) * kUnitNbytes;
        if (left - w * kWindow < kWindow)
          add_two<2>(codes, x, tokens, scales, w, u + w * kWindow, sum);
        else
          add_two<kWindow>(codes, x, tokens, scales, w, u + w * kWindow, sum);
      }
    }
    for (std::size_t t = 0; t < tokens; ++t)
      for (std::size_t i = 0; i < 2; ++i)
        sum[2 * t + i].put_sums(kTileOfDot, out + t * out_stride + i * kTileOfDot);
  }
};

}  // namespace

// Rows [0, n) of at(r) with some tokens; while some are read, those `ahead` on are fetched, up to row
// `fetched`.
template <typename D, std::size_t T, typename At>
void dot_each_tile(const At& at, std::size_t n, std::size_t ahead, std::size_t fetched, const CodedInputs* x,
                   std::size_t tokens, std::size_t k, float* out, std::size_t out_stride) {
  typename D::Row row[kTileOfDot], next[kTileOfDot];
  for (std::size_t r = 0; r < n; r += kTileOfDot) {
    const bool more = r + ahead + kTileOfDot <= fetched;
    for (std::size_t i = 0; i < kTileOfDot; ++i) {
      row[i] = D::G::at(at(r + i < n ? r + i : n - 1), k);
      if (more) next[i] = D::G::at(at(r + ahead + i), k);
    }
    D::template dot<T>(row, more ? next : nullptr, x, tokens, k, n - r < kTileOfDot ? n - r : kTileOfDot,
                       out + r, out_stride);
  }
}

// The same of n consecutive rows and one token. The rows of a tile lie far apart, so that the processor sees
// as many runs of memory as a tile has rows and fetches each ahead: in one run it does not.
template <typename D>
void dot_runs(const std::byte* first, std::size_t stride, std::size_t n, const CodedInputs& x, std::size_t k,
              float* out) {
  const std::size_t run = n / kTileOfDot, ahead = kCodedAhead / kTileOfDot / stride + 1;
  typename D::Row row[kTileOfDot], next[kTileOfDot];
  float sums[kTileOfDot];
  for (std::size_t r = 0; r < run; ++r) {
    for (std::size_t i = 0; i < kTileOfDot; ++i) {
      row[i] = D::G::at(first + (i * run + r) * stride, k);
      next[i] = D::G::at(first + (i * run + r + ahead) * stride, k);
    }
    D::template dot<1>(row, next, &x, 1, k, kTileOfDot, sums, 0);
    for (std::size_t i = 0; i < kTileOfDot; ++i) out[i * run + r] = sums[i];
  }
}

// The same of several tokens and whole pairs of tiles; where they end.
template <typename D>
std::size_t dot_pairs(const std::byte* first, std::size_t stride, std::size_t n, std::size_t ahead,
                      const CodedInputs* x, std::size_t tokens, std::size_t k, float* out,
                      std::size_t out_stride) {
  constexpr std::size_t kRows = 2 * kTileOfDot;
  typename D::Row row[kRows], next[kRows];
  std::size_t r = 0;
  for (; r + kRows <= n; r += kRows) {
    for (std::size_t i = 0; i < kRows; ++i) {
      row[i] = D::G::at(first + (r + i) * stride, k);
      next[i] = D::G::at(first + (r + ahead + i) * stride, k);
    }
    D::dot_two(row, next, x, tokens, k, out + r, out_stride);
  }
  return r;
}

constexpr std::size_t kRowsOfRuns = 32;  // fewer are no runs
constexpr std::size_t kRowsAhead = 4;
static_assert(kRowsAhead % kTileOfDot == 0, "what is fetched are rows that are multiplied together");
template <typename D>
void dot_rows_coded_inputs(const void* const* rows, std::size_t n, std::size_t fetched, const CodedInputs& x,
                           std::size_t k, float* out) {
  dot_each_tile<D, 1>([rows](std::size_t r) { return rows[r]; }, n, kRowsAhead, fetched, &x, 1, k, out, 0);
}

// What is fetched lies whole rows on, and may be what comes behind the last one.
template <typename D>
void dot_tokens_coded_inputs(const void* data, std::size_t stride, std::size_t n, const CodedInputs* x,
                             std::size_t tokens, std::size_t k, float* out, std::size_t out_stride) {
  const auto* first = static_cast<const std::byte*>(data);
  const std::size_t ahead = (kCodedAhead / stride + kRowsAhead) / kRowsAhead * kRowsAhead;
  if (tokens == 1 && n >= kRowsOfRuns) {
    const std::size_t whole = n / kTileOfDot * kTileOfDot;
    dot_runs<D>(first, stride, whole, *x, k, out);
    first += whole * stride, n -= whole, out += whole;
  }
  if constexpr (kPairsOfTiles) {
    if (tokens > 1 && (k + kCodeUnit - 1) / kCodeUnit % 2 == 0) {
      const std::size_t whole = dot_pairs<D>(first, stride, n, ahead, x, tokens, k, out, out_stride);
      first += whole * stride, n -= whole, out += whole;
    }
  }
  const auto at = [=](std::size_t r) { return first + r * stride; };
  const auto dot =
      tokens == 1 ? dot_each_tile<D, 1, decltype(at)> : dot_each_tile<D, kTokensOfDot, decltype(at)>;
  dot(at, n, ahead, n + ahead, x, tokens, k, out, out_stride);
}

template <typename Input, std::size_t I>
constexpr CodedInputKernels input_kernels_of() {
  if constexpr (is_bf12<I>) {
    return {nullptr, nullptr};
  } else {
    using D = CodedDot<Input, Coded<I>>;
    return {dot_rows_coded_inputs<D>, dot_tokens_coded_inputs<D>};
  }
}

const CodedInputKernels kInt16[kInt16Codecs] = {input_kernels_of<std::int16_t, 0>(),
                                                input_kernels_of<std::int16_t, 1>()};

// Inputs as codes, in loops that each level's compiler makes vectors of. The bits are those of every level.

namespace {

__attribute__((always_inline)) inline float largest_magnitude(const float* x, std::size_t n) {
  // Bits of floats without their signs are in the order of the floats, and integers' largest is found in any.
  std::int32_t most = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::int32_t bits = load_as<std::int32_t>(x + i) & std::numeric_limits<std::int32_t>::max();
    most = bits > most ? bits : most;
  }
  return load_as<float>(&most);
}
float largest_of(const float* x, std::size_t n) { return largest_magnitude(x, n); }

inline std::int32_t nearest(float value) {
  constexpr float kRounding = 12582912.0F;  // 1.5 * 2^23: adding it leaves no fraction
  return static_cast<std::int32_t>((value + kRounding) - kRounding);
}

// The codes of inputs of this largest magnitude, and their scale.
template <typename Code, typename To>
__attribute__((always_inline)) inline float to_codes(const float* x, std::size_t n, float largest,
                                                     To* codes) {
  constexpr float kMost = std::numeric_limits<Code>::max(),
                  kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kTiny = 1e-30F;  // below it a reciprocal may not be finite
  if (largest >= kTiny && largest < kInfinity) {
    const float by = kMost / largest;
    for (std::size_t i = 0; i < n; ++i) codes[i] = static_cast<To>(nearest(x[i] * by));
    return largest / kMost;
  }
  __builtin_memset(codes, 0, n * sizeof(To));
  return largest < kTiny ? 0.0F : std::numeric_limits<float>::quiet_NaN();
}

float to_int16(const float* x, std::size_t n, std::int16_t* codes) {
  return to_codes<std::int16_t>(x, n, largest_magnitude(x, n), codes);
}

float unit_to_int8(const float* x, const float* largest, std::int8_t* codes, std::int32_t* total) {
  std::int32_t wide[kCodeUnit], sum = 0;
  const float scale = to_codes<std::int8_t>(
      x, kCodeUnit, largest == nullptr ? largest_magnitude(x, kCodeUnit) : *largest, wide);
  for (std::size_t i = 0; i < kCodeUnit; ++i) codes[i] = static_cast<std::int8_t>(wide[i]);
  for (std::size_t i = 0; i < kCodeUnit; ++i) sum += wide[i];
  *total = sum;
  return scale;
}

// Writes a unit's codes to their places in its window, its scale and its totals.
template <typename Code>
__attribute__((always_inline)) inline void put_unit(const float* x, float largest, std::size_t unit,
                                                    const InputCodes& to) {
  constexpr std::size_t kWindow = 4, kWord = 4, kHalf = kCodeUnit / 2, kShift = 8 * (sizeof(Code) - 1);
  std::int32_t codes[kCodeUnit];
  to.scales[unit] = to_codes<Code>(x, kCodeUnit, largest, codes);
  std::int8_t* at = to.codes + unit / kWindow * kWindow * kCodeUnit * sizeof(Code) + unit % kWindow * kWord;
  for (std::size_t shift = 0; shift <= kShift; shift += 8, at += kWindow * kCodeUnit) {
    std::int8_t bytes[kCodeUnit];
    for (std::size_t i = 0; i < kCodeUnit; ++i) bytes[i] = static_cast<std::int8_t>(codes[i] >> shift);
    for (std::size_t word = 0; word < kCodeUnit; word += kWord)
      __builtin_memcpy(at + word * kWindow, bytes + word, kWord);
  }
  std::int32_t totals[2] = {0, 0};
  for (std::size_t i = 0; i < kHalf; ++i) totals[0] += codes[i] >> kShift;
  for (std::size_t i = kHalf; i < kCodeUnit; ++i) totals[1] += codes[i] >> kShift;
  for (std::size_t half = 0; half < 2; ++half) to.halves[half][unit] = totals[half];
  to.totals[unit] = totals[0] + totals[1];
}

template <typename Code>
void code_inputs(const float* x, std::size_t length, bool together, const InputCodes& to) {
  const float all = together ? largest_of(x, length) : 0.0F;
  const auto code = [&](const float* from, std::size_t unit) {
    put_unit<Code>(from, together ? all : largest_magnitude(from, kCodeUnit), unit, to);
  };
  const std::size_t whole = length / kCodeUnit;
  for (std::size_t unit = 0; unit < whole; ++unit) code(x + unit * kCodeUnit, unit);
  for (std::size_t unit = whole; unit < padded_units(length); ++unit) {
    float padded[kCodeUnit] = {};
    if (unit == whole && length % kCodeUnit != 0)
      __builtin_memcpy(padded, x + unit * kCodeUnit, length % kCodeUnit * sizeof *x);
    code(padded, unit);
  }
}

const InputKernels kInputs = {largest_of, to_int16, unit_to_int8, code_inputs<std::int8_t>,
                              code_inputs<std::int16_t>};

}  // namespace
