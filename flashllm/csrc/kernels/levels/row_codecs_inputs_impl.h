// Products of coded weights with inputs in 8 or 16 bits, as row_codecs.h has them; included behind
// row_codecs_impl.h. Of `Eight` (eight floats) it wants zero, set, load, store, load_halves, load_i8,
// half_powers, set_halves (two floats, four lanes each), first, *, +, fma (which rounds once), sum, and
// dot_unit<bits>: the sums of a unit's products by fours, of int8 inputs and, where the weights have 8 bits,
// of int16 ones. Codes of 2, 4 and 5 bits begin at 0, those of 3 and 6 at -4 and -32. dot_fp4_unit: the
// same of kFp4FromZero; dot_table_unit: of another table's. unit_sums: of int8 inputs by fours. dot_pairs:
// dot_unit<2> of at most kScaled units, added before they are floats.

// `Lanes`: eight floats of each of kLaneRows rows. A level that has wider ones than `Eight` brings what is
// here.
#if !defined(__AVX512VNNI__)
constexpr std::size_t kLaneRows = 1;

namespace {  // as Eight is

using Lanes = Eight;

inline Lanes each_row(const float* p) { return Eight::load(p); }
template <typename Row, typename Of>
inline Lanes of_rows(const Row* row, const Of& of) {
  return of(*row);
}
template <typename Row>
inline const std::uint8_t* codes_of_rows(const Row* row, std::size_t at) {
  return row->codes + at;
}
// The sum of each of the first `rows` rows.
inline void put_sums(const Lanes& lanes, std::size_t, float* to) { *to = lanes.sum(); }

// Scales of eight units, times those of their inputs.
struct TokenScales {
  float each[8];
  TokenScales() = default;
  TokenScales(const Eight& of_rows, const float* of_inputs) {
    (of_rows * Eight::load(of_inputs)).store(each);
    __asm__("" : : "r"(each) : "memory");  // broadcast from there, not shuffled out of a register
  }
  template <std::size_t kUnit>
  Eight of() const {
    return Eight::set(each[kUnit]);
  }
};
// Two scales of each of eight units, those of the last four in `later`.
struct PairScales {
  float each[16];
  PairScales() = default;
  PairScales(const Eight& scales, const Eight& later) {
    scales.store(each);
    later.store(each + 8);
  }
  template <std::size_t kUnit>
  Eight of() const {
    return Eight::set_halves(each + 2 * kUnit);
  }
};

}  // namespace
#endif

constexpr std::size_t kScaled = 8;  // units whose scales are multiplied together
template <std::size_t T>
constexpr std::size_t kRowsOf = T == 1                     ? kRows
                                : T == 2 && kLaneRows == 1 ? 2
                                : T == 2                   ? kRows
                                                           : kLaneRows;  // rows that T tokens take together

// What is peculiar to a codec: bits a code, scales a unit, or one for kScaled (kWhole), what its codes are
// offset by, products of a unit, and what codes that are no integers stand for. scales(row, u): those of
// kScaled units from unit u, a multiple of kScaled, on; behind a row's last ones lie codes, at least 16 bytes
// of them.
template <std::size_t kCodeBits, std::size_t kGroup, bool kMinimum>
struct GroupedUnits : Grouped<kCodeBits, kGroup, kMinimum> {
  using Row = typename Grouped<kCodeBits, kGroup, kMinimum>::Row;
  static constexpr std::size_t kBits = kCodeBits, kScales = 1;
  static constexpr bool kWhole = false;
  static constexpr bool kMinimums = kMinimum, kOffset = kBits == 4;
  static constexpr const std::int8_t* kTable = nullptr;

  static Eight scales(const Row& row, std::size_t u) { return of_units(row.scales, u); }
  static Eight offsets(const Row& row, std::size_t u, const Eight& scale) {
    return kMinimum ? of_units(row.minimums, u) : scale * Eight::set(-8.0F);
  }
  template <typename Codes, typename Input>
  static Lanes products(const Codes& codes, const Input* x) {
    return Lanes::template dot_unit<kBits>(codes, x);
  }

 private:
  static constexpr std::size_t kRepeat = kGroup / kCodeUnit;  // units that share a scale
  static Eight of_units(const std::uint16_t* halves, std::size_t u) {
    return Eight::template load_halves<kRepeat>(halves + u / kRepeat);
  }
};

template <std::size_t kCodeBits, std::size_t kGroup, bool kMinimum, bool kFactors, bool kOfTable = false>
struct CarriedUnits : Carried<kCodeBits, kGroup, kMinimum, kFactors, kOfTable> {
  using Row = typename Carried<kCodeBits, kGroup, kMinimum, kFactors, kOfTable>::Row;
  static constexpr std::size_t kBits = kCodeBits, kScales = kCodeUnit / kGroup;
  static constexpr bool kWhole = false;
  static constexpr bool kMinimums = kMinimum, kOffset = kScales == 1 && !kOfTable;
  static constexpr const std::int8_t* kTable = kOfTable ? kIq4 : nullptr;
  static_assert(kSharedFactors == kScaled * kCodeUnit, "a shared scale is that of the units taken together");

  static Eight scales(const Row& row, std::size_t u) { return of_units(row.scales, row.factors, u); }
  // Of two scales a unit: those of its last kScaled / 2 units.
  static Eight later_scales(const Row& row, std::size_t u) {
    return of_units(row.scales, row.factors + kScaled, u);
  }
  // The same of minimums.
  static Eight minimums(const Row& row, std::size_t u) {
    return of_units(row.minimums, row.minimum_factors, u);
  }
  static Eight later_minimums(const Row& row, std::size_t u) {
    return of_units(row.minimums, row.minimum_factors + kScaled, u);
  }
  static Eight offsets(const Row& row, std::size_t u, const Eight& scale) {
    return kMinimum ? of_units(row.minimums, row.minimum_factors, u)
                    : scale * Eight::set(-zero_code<kBits>());
  }
  template <typename Codes>
  static Lanes products(const Codes& codes, const std::int8_t* x) {
    if constexpr (kOfTable) return Lanes::dot_table_unit(kIq4, codes, x);
    return Lanes::template dot_unit<kBits>(codes, x);
  }

 private:
  static Eight of_units(const std::uint16_t* halves, const std::int8_t* factors, std::size_t u) {
    if constexpr (!kFactors) return Eight::template load_halves<1>(halves + u);
    return Eight::set(Vec::half(halves[u / kScaled])) * Eight::load_i8(factors + kScales * u);
  }
};

struct Mxfp4Units : Mxfp4 {
  static constexpr std::size_t kBits = 4, kScales = 1;
  static constexpr bool kWhole = false;
  static constexpr bool kMinimums = false, kOffset = true;
  static constexpr const std::int8_t* kTable = kFp4;

  static Eight scales(const Row& row, std::size_t u) { return Eight::half_powers(row.powers + u); }
  static Eight offsets(const Row&, std::size_t, const Eight& scale) {
    return scale * Eight::set(-static_cast<float>(kFp4Zero));
  }
  template <typename Codes>
  static Lanes products(const Codes& codes, const std::int8_t* x) {
    return Lanes::dot_fp4_unit(codes, x);
  }
};

struct Nvfp4Units : Nvfp4 {
  static constexpr std::size_t kBits = 4, kScales = 2;
  static constexpr bool kWhole = false;
  static constexpr bool kMinimums = false, kOffset = false;
  static constexpr const std::int8_t* kTable = kFp4;

  static Eight scales(const Row& row, std::size_t u) { return of_groups(row, kScales * u); }
  static Eight later_scales(const Row& row, std::size_t u) { return of_groups(row, kScales * u + kScaled); }
  template <typename Codes>
  static Lanes products(const Codes& codes, const std::int8_t* x) {
    return Lanes::dot_table_unit(kFp4, codes, x);
  }

 private:
  static Eight of_groups(const Row& row, std::size_t group) {
    std::uint16_t halves[kScaled];
    for (std::size_t i = 0; i < kScaled; ++i) halves[i] = half_of_e4m3(row.factors[group + i]);
    return Eight::template load_halves<1>(halves) * Eight::set(row.scale());
  }
};

struct TernaryUnits : Ternary {
  static constexpr std::size_t kScales = 1;
  static constexpr bool kWhole = true, kMinimums = false, kOffset = true;
  static constexpr const std::int8_t* kTable = nullptr;
  static_assert(kSharedFactors == kScaled * kCodeUnit, "a scale is that of the units taken together");

  static Eight scales(const Row& row, std::size_t u) { return Eight::set(row.scale(u * kCodeUnit)); }
  static Eight offsets(const Row&, std::size_t, const Eight& scale) {
    return scale * Eight::set(-zero_code<kBits>());
  }
};

namespace {  // as Lanes are

template <typename Input, typename Units>
struct CodedDot {
  using G = Units;
  using Row = typename Units::Row;
  static constexpr std::size_t kUnitNbytes = kCodeUnit * Units::kBits / 8;
  static constexpr bool kPairs = Units::kScales == 2;
  static_assert(Units::kScales == 1 || (kPairs && !Units::kOffset), "a unit has one scale, or two alone");

  // The scales of kScaled units of some rows, times those of T tokens' inputs where a unit has one.
  template <std::size_t T>
  struct Scales {
    TokenScales of_tokens[kPairs ? 1 : T];
    PairScales own, minimums;

    // `left`: units that the rows still have. Adds what their codes are offset by.
    void set(const Row* row, const CodedInputs* x, std::size_t u, std::size_t left, Lanes* offset) {
      const auto scales = [u](const Row& of) { return Units::scales(of, u); };
      if constexpr (kPairs) {
        own = {of_rows(row, scales), of_rows(row, [u](const Row& of) { return Units::later_scales(of, u); })};
        if constexpr (Units::kMinimums)
          minimums = {of_rows(row, [u](const Row& of) { return Units::minimums(of, u); }),
                      of_rows(row, [u](const Row& of) { return Units::later_minimums(of, u); })};
      } else {
        const Lanes scale = of_rows(row, scales);
        for (std::size_t t = 0; t < T; ++t) of_tokens[t] = {scale, x[t].scales + u};
        if constexpr (Units::kOffset) {
          const Lanes by = of_rows(row, [&](const Row& of) {
            const Eight all = Units::offsets(of, u, Units::scales(of, u));
            return left < kScaled ? all.first(left) : all;
          });
          for (std::size_t t = 0; t < T; ++t) offset[t] = fma(by, each_row(x[t].sums + u), offset[t]);
        }
      }
    }
  };

  // sum + the terms of unit u + I, for T tokens, which use their codes while they are unpacked.
  template <std::size_t I, std::size_t T>
  __attribute__((always_inline)) static void add_unit(const Row* row, const CodedInputs* x,
                                                      const Scales<T>& scales, std::size_t u,
                                                      Lanes (*sum)[2]) {
    for (std::size_t t = 0; t < T; ++t) {
      const Input* inputs = static_cast<const Input*>(x[t].codes) + (u + I) * kCodeUnit;
      const Lanes products = Units::products(codes_of_rows(row, (u + I) * kUnitNbytes), inputs);
      Lanes& to = sum[t][I % 2];
      if constexpr (kPairs) {
        Lanes own = products * scales.own.template of<I>();
        if constexpr (Units::kMinimums)
          own = fma(Lanes::unit_sums(inputs), scales.minimums.template of<I>(), own);
        to = fma(own, Lanes::set(x[t].scales[u + I]), to);
      } else {
        to = fma(products, scales.of_tokens[t].template of<I>(), to);
      }
    }
  }
  template <std::size_t R, std::size_t T, std::size_t... I>
  __attribute__((always_inline)) static void add_units(const Row* row, const CodedInputs* x,
                                                       const Scales<T>* scales, std::size_t u,
                                                       std::size_t left, Lanes (*sum)[T][2],
                                                       std::index_sequence<I...>) {
    const auto add = [&](auto unit) __attribute__((always_inline)) {
      if (unit >= left) return;
      for (std::size_t r = 0; r < R; ++r) add_unit<unit, T>(row + r * kLaneRows, x, scales[r], u, sum[r]);
    };
    (add(std::integral_constant<std::size_t, I>()), ...);
  }

  // The same of `left` units at most kScaled, which have one scale: their products are summed as integers.
  template <std::size_t T>
  static void add_whole(const Row* row, const CodedInputs* x, const Scales<T>& scales, std::size_t u,
                        std::size_t left, Lanes (*sum)[2]) {
    for (std::size_t t = 0; t < T; ++t) {
      const Input* inputs = static_cast<const Input*>(x[t].codes) + u * kCodeUnit;
      const Lanes products = Lanes::dot_pairs(codes_of_rows(row, u * kUnitNbytes), inputs, left);
      sum[t][0] = fma(products, scales.of_tokens[t].template of<0>(), sum[t][0]);
    }
  }

  // out[t * out_stride + r] of R times kLaneRows rows, the first `rows` of which count, and T tokens, each
  // sum in one order; next[r]: what to fetch while row[r] is read.
  template <std::size_t R, std::size_t T>
  static void dot(const Row* row, const Row* next, const CodedInputs* x, std::size_t k, std::size_t rows,
                  float* out, std::size_t out_stride) {
    const std::size_t units = (k + kCodeUnit - 1) / kCodeUnit;
    Lanes sum[R][T][2], offset[R][T];
    for (std::size_t r = 0; r < R; ++r)
      for (std::size_t t = 0; t < T; ++t) sum[r][t][0] = sum[r][t][1] = offset[r][t] = Lanes::zero();
    if (next != nullptr)
      for (std::size_t r = 0; r < R * kLaneRows; ++r) G::prefetch_groups(next[r]);
    for (std::size_t u = 0; u < units; u += kScaled) {
      const std::size_t left = units - u < kScaled ? units - u : kScaled;
      Scales<T> scales[R];
      for (std::size_t r = 0; r < R; ++r) scales[r].set(row + r * kLaneRows, x, u, left, offset[r]);
      if (next != nullptr)
        for (std::size_t r = 0; r < R * kLaneRows; ++r)
          for (std::size_t line = 0; line < kScaled * kUnitNbytes; line += kCacheLine)
            __builtin_prefetch(next[r].codes + u * kUnitNbytes + line, 0, 2);
      if constexpr (Units::kWhole) {
        for (std::size_t r = 0; r < R; ++r) add_whole<T>(row + r * kLaneRows, x, scales[r], u, left, sum[r]);
      } else {
        add_units<R, T>(row, x, scales, u, left, sum, std::make_index_sequence<kScaled>());
      }
    }
    for (std::size_t r = 0; r < R; ++r)
      for (std::size_t t = 0; t < T; ++t) {
        const Lanes all = (sum[r][t][0] + sum[r][t][1]) + offset[r][t];
        put_sums(all, rows - r * kLaneRows, out + t * out_stride + r * kLaneRows);
      }
  }
};

}  // namespace

// Rows [0, n) of at(r) with T tokens; while some are read, those `ahead` on are fetched, up to row `fetched`.
template <typename D, std::size_t T, typename At>
void dot_each_row(const At& at, std::size_t n, std::size_t ahead, std::size_t fetched, const CodedInputs* x,
                  std::size_t k, float* out, std::size_t out_stride) {
  constexpr std::size_t kTogether = kRowsOf<T>;
  typename D::Row row[kTogether], next[kTogether];
  std::size_t r = 0;
  for (; r + kTogether <= n; r += kTogether) {
    const bool more = r + ahead + kTogether <= fetched;
    for (std::size_t i = 0; i < kTogether; ++i) {
      row[i] = D::G::at(at(r + i), k);
      if (more) next[i] = D::G::at(at(r + ahead + i), k);
    }
    D::template dot<kTogether / kLaneRows, T>(row, more ? next : nullptr, x, k, kTogether, out + r,
                                              out_stride);
  }
  for (; r < n; r += kLaneRows) {
    for (std::size_t i = 0; i < kLaneRows; ++i) row[i] = D::G::at(at(r + i < n ? r + i : r), k);
    D::template dot<1, T>(row, nullptr, x, k, n - r, out + r, out_stride);
  }
}

constexpr std::size_t kRowsAhead = 4;
static_assert(kRowsAhead % kRows == 0, "what is fetched are rows that are multiplied together");
template <typename D>
void dot_rows_coded_inputs(const void* const* rows, std::size_t n, std::size_t fetched, const CodedInputs& x,
                           std::size_t k, float* out) {
  dot_each_row<D, 1>([rows](std::size_t r) { return rows[r]; }, n, kRowsAhead, fetched, &x, k, out, 0);
}

// What is fetched lies whole rows on, and may be what comes behind the last one.
template <typename D>
void dot_tokens_coded_inputs(const void* data, std::size_t stride, std::size_t n, const CodedInputs* x,
                             std::size_t tokens, std::size_t k, float* out, std::size_t out_stride) {
  const auto* first = static_cast<const std::byte*>(data);
  const auto at = [=](std::size_t r) { return first + r * stride; };
  const std::size_t ahead = (kCodedAhead / stride + kRows) / kRows * kRows;
  constexpr std::size_t kTogether = kRows == 1 ? 1 : 4;  // who takes rows one by one takes tokens so, too
  for (std::size_t t = 0; t < tokens; t += kTogether) {
    const std::size_t left = tokens - t, fetched = t == 0 ? n + ahead : 0;
    auto dot = dot_each_row<D, 1, decltype(at)>;
    if constexpr (kTogether != 1) {
      if (left == 2) dot = dot_each_row<D, 2, decltype(at)>;
      if (left == 3) dot = dot_each_row<D, 3, decltype(at)>;
      if (left >= 4) dot = dot_each_row<D, 4, decltype(at)>;
    }
    dot(at, n, ahead, fetched, x + t, k, out + t * out_stride, out_stride);
  }
}

template <typename Input, typename Units>
constexpr CodedInputKernels input_kernels_of() {
  using D = CodedDot<Input, Units>;
  return {dot_rows_coded_inputs<D>, dot_tokens_coded_inputs<D>};
}

// In the order of RowCodec.
const CodedInputKernels kInt8[kCodedCodecs] = {
    input_kernels_of<std::int8_t, GroupedUnits<8, 32, false>>(),
    input_kernels_of<std::int8_t, GroupedUnits<8, 64, false>>(),
    input_kernels_of<std::int8_t, GroupedUnits<4, 32, false>>(),
    input_kernels_of<std::int8_t, GroupedUnits<4, 64, false>>(),
    input_kernels_of<std::int8_t, GroupedUnits<4, 32, true>>(),
    input_kernels_of<std::int8_t, GroupedUnits<4, 64, true>>(),
    {nullptr, nullptr},  // bf12
    input_kernels_of<std::int8_t, CarriedUnits<5, 32, false, false>>(),
    input_kernels_of<std::int8_t, CarriedUnits<5, 32, true, false>>(),
    input_kernels_of<std::int8_t, CarriedUnits<4, 32, true, true>>(),
    input_kernels_of<std::int8_t, CarriedUnits<5, 32, true, true>>(),
    input_kernels_of<std::int8_t, CarriedUnits<6, 16, false, true>>(),
    input_kernels_of<std::int8_t, Mxfp4Units>(),
    input_kernels_of<std::int8_t, CarriedUnits<2, 16, true, true>>(),
    input_kernels_of<std::int8_t, CarriedUnits<3, 16, false, true>>(),
    input_kernels_of<std::int8_t, CarriedUnits<4, 32, false, false, true>>(),
    input_kernels_of<std::int8_t, CarriedUnits<4, 32, false, true, true>>(),
    input_kernels_of<std::int8_t, TernaryUnits>(),
    input_kernels_of<std::int8_t, Nvfp4Units>(),
};
const CodedInputKernels kInt16[kInt16Codecs] = {
    input_kernels_of<std::int16_t, GroupedUnits<8, 32, false>>(),
    input_kernels_of<std::int16_t, GroupedUnits<8, 64, false>>(),
};
