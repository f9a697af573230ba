// Products of coded weights with inputs in 8 or 16 bits, as row_codecs.h has them; included behind
// row_codecs_impl.h. Of `Eight` (eight floats) it wants zero, set, load, store, load_halves, load_i8,
// half_powers, set_halves (two floats, four lanes each), first, *, +, fma (which rounds once), sum, and
// dot_unit<bits>: the sums of a unit's products by fours, of int8 inputs and, where the weights have 8 bits,
// of int16 ones. Codes of 2, 4 and 5 bits begin at 0, those of 3 and 6 at -4 and -32. dot_fp4_unit: the
// same of kFp4FromZero; dot_table_unit: of another table's. unit_sums: of int8 inputs by fours. dot_pairs:
// dot_unit<2> of at most kScaled units, added before they are floats.

#if !defined(__AVX512VNNI__)
namespace {  // as Eight is

// The same of two units that follow each other.
struct Sixteen {
  Eight first, second;

  static Sixteen zero() { return {Eight::zero(), Eight::zero()}; }
  static Sixteen set_units(const float* p) { return {Eight::set(p[0]), Eight::set(p[1])}; }
  static Sixteen set_halves(const float* p) { return {Eight::set_halves(p), Eight::set_halves(p + 2)}; }
  Eight lower() const { return first; }
  Eight upper() const { return second; }
  void set_lower(Eight half) { first = half; }

  template <std::size_t kBits, typename Input>
  static Sixteen dot_unit(const std::uint8_t* codes, const Input* x) {
    return {Eight::template dot_unit<kBits>(codes, x),
            Eight::template dot_unit<kBits>(codes + kCodeUnit * kBits / 8, x + kCodeUnit)};
  }
  static Sixteen dot_fp4_unit(const std::uint8_t* codes, const std::int8_t* x) {
    return {Eight::dot_fp4_unit(codes, x), Eight::dot_fp4_unit(codes + kCodeUnit / 2, x + kCodeUnit)};
  }
  static Sixteen dot_table_unit(const std::int8_t* table, const std::uint8_t* codes, const std::int8_t* x) {
    return {Eight::dot_table_unit(table, codes, x),
            Eight::dot_table_unit(table, codes + kCodeUnit / 2, x + kCodeUnit)};
  }
  static Sixteen unit_sums(const std::int8_t* x) {
    return {Eight::unit_sums(x), Eight::unit_sums(x + kCodeUnit)};
  }
};
inline Sixteen fma(const Sixteen& a, const Sixteen& b, const Sixteen& c) {
  return {fma(a.first, b.first, c.first), fma(a.second, b.second, c.second)};
}
inline Sixteen operator*(const Sixteen& a, const Sixteen& b) {
  return {a.first * b.first, a.second * b.second};
}

}  // namespace
#endif

constexpr std::size_t kScaled = 8;  // units whose scales are multiplied together
template <std::size_t T>
constexpr std::size_t kRowsOf = T == 1   ? kRows
                                : T == 2 ? 2
                                         : 1;  // rows that T tokens take together

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
  template <typename Lanes, typename Input>
  static Lanes products(const std::uint8_t* codes, const Input* x) {
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
  template <typename Lanes>
  static Lanes products(const std::uint8_t* codes, const std::int8_t* x) {
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
  template <typename Lanes>
  static Lanes products(const std::uint8_t* codes, const std::int8_t* x) {
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
  template <typename Lanes>
  static Lanes products(const std::uint8_t* codes, const std::int8_t* x) {
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

template <typename Input, typename Units>
struct CodedDot {
  using G = Units;
  using Row = typename Units::Row;
  static constexpr std::size_t kUnitNbytes = kCodeUnit * Units::kBits / 8;
  static constexpr bool kPairs = Units::kScales == 2, kPairsOfMinimums = kPairs && Units::kMinimums;
  static constexpr std::size_t kOwn = Units::kScales * kScaled,
                               kScaleCount = (kPairsOfMinimums ? 2 : 1) * kOwn;
  static_assert(Units::kScales == 1 || (kPairs && !Units::kOffset), "a unit has one scale, or two alone");

  // The scales of kScaled units of a row for T tokens, times those of the inputs where a unit has one;
  // `left`: units that the row still has. Adds what their codes are offset by.
  template <std::size_t T>
  static void scale_units(const Row& row, const CodedInputs* x, std::size_t u, std::size_t left,
                          float (*scales)[kScaleCount], Eight* offset) {
    const Eight scale = Units::scales(row, u);
    if constexpr (kPairs) {
      scale.store(scales[0]);
      Units::later_scales(row, u).store(scales[0] + kScaled);
      if constexpr (kPairsOfMinimums) {
        Units::minimums(row, u).store(scales[0] + kOwn);
        Units::later_minimums(row, u).store(scales[0] + kOwn + kScaled);
      }
    } else {
      for (std::size_t t = 0; t < T; ++t) (scale * Eight::load(x[t].scales + u)).store(scales[t]);
      __asm__("" : : "r"(scales) : "memory");  // broadcast from there, not shuffled out of a register
      if constexpr (Units::kOffset) {
        const Eight all = Units::offsets(row, u, scale), by = left < kScaled ? all.first(left) : all;
        for (std::size_t t = 0; t < T; ++t) offset[t] = fma(by, Eight::load(x[t].sums + u), offset[t]);
      }
    }
  }

  // sum + the terms of unit u + i, or of that and the next one, of one token, whose scales are `scales`.
  template <typename Lanes>
  static Lanes added(const Row& row, const CodedInputs& x, const float* scales, std::size_t u, std::size_t i,
                     const Lanes& sum) {
    const Input* inputs = static_cast<const Input*>(x.codes) + (u + i) * kCodeUnit;
    const Lanes products = Units::template products<Lanes>(row.codes + (u + i) * kUnitNbytes, inputs);
    if constexpr (kPairs) {
      Lanes own = products * Lanes::set_halves(scales + 2 * i);
      if constexpr (kPairsOfMinimums)
        own = fma(Lanes::unit_sums(inputs), Lanes::set_halves(scales + kOwn + 2 * i), own);
      return fma(own, Lanes::set_units(x.scales + u + i), sum);
    } else
      return fma(products, Lanes::set_units(scales + i), sum);
  }
  // The terms of two units from u + i on, or of one, for T tokens, which use their codes while they are
  // unpacked.
  template <std::size_t T>
  static void add_two(const Row& row, const CodedInputs* x, const float (*scales)[kScaleCount], std::size_t u,
                      std::size_t i, bool both, Sixteen* sum) {
    for (std::size_t t = 0; t < T; ++t) {
      const float* of_token = scales[kPairs ? 0 : t];
      if (both)
        sum[t] = added<Sixteen>(row, x[t], of_token, u, i, sum[t]);
      else
        sum[t].set_lower(added<Eight>(row, x[t], of_token, u, i, sum[t].lower()));
    }
  }

  // The same of `count` units, which have one scale: their products are summed as integers.
  template <std::size_t T>
  static void add_units(const Row& row, const CodedInputs* x, const float (*scales)[kScaleCount],
                        std::size_t u, std::size_t count, Sixteen* sum) {
    for (std::size_t t = 0; t < T; ++t) {
      const Input* inputs = static_cast<const Input*>(x[t].codes) + u * kCodeUnit;
      const Eight sums = Eight::dot_pairs(row.codes + u * kUnitNbytes, inputs, count);
      sum[t].set_lower(fma(sums, Eight::set(scales[t][0]), sum[t].lower()));
    }
  }

  // out[t * out_stride + r] of R rows and T tokens, each sum in one order; next[r]: what to fetch while
  // row[r] is read.
  template <std::size_t R, std::size_t T>
  static void dot(const Row* row, const Row* next, const CodedInputs* x, std::size_t k, float* out,
                  std::size_t out_stride) {
    const std::size_t units = (k + kCodeUnit - 1) / kCodeUnit;
    Sixteen sum[R][T];
    Eight offset[R][T];
    float scales[R][kPairs ? 1 : T][kScaleCount];
    for (std::size_t r = 0; r < R; ++r)
      for (std::size_t t = 0; t < T; ++t) {
        sum[r][t] = Sixteen::zero();
        offset[r][t] = Eight::zero();
      }
    if (next != nullptr)
      for (std::size_t r = 0; r < R; ++r) G::prefetch_groups(next[r]);
    for (std::size_t u = 0; u < units; u += kScaled) {
      const std::size_t left = units - u < kScaled ? units - u : kScaled;
      for (std::size_t r = 0; r < R; ++r) {
        scale_units<T>(row[r], x, u, left, scales[r], offset[r]);
        if (next != nullptr)
          for (std::size_t line = 0; line < kScaled * kUnitNbytes; line += kCacheLine)
            __builtin_prefetch(next[r].codes + u * kUnitNbytes + line, 0, 2);
      }
      if constexpr (Units::kWhole) {
        for (std::size_t r = 0; r < R; ++r) add_units<T>(row[r], x, scales[r], u, left, sum[r]);
      } else {
#pragma GCC unroll 4
        for (std::size_t i = 0; i < kScaled; i += 2) {
          if (i >= left) break;
          for (std::size_t r = 0; r < R; ++r) add_two<T>(row[r], x, scales[r], u, i, i + 1 < left, sum[r]);
        }
      }
    }
    for (std::size_t r = 0; r < R; ++r)
      for (std::size_t t = 0; t < T; ++t)
        out[t * out_stride + r] = ((sum[r][t].lower() + sum[r][t].upper()) + offset[r][t]).sum();
  }
};

// Rows [0, n) of at(r) with T tokens; while some are read, those `ahead` on are fetched, up to row `fetched`.
template <typename D, std::size_t T, typename At>
void dot_each_row(const At& at, std::size_t n, std::size_t ahead, std::size_t fetched, const CodedInputs* x,
                  std::size_t k, float* out, std::size_t out_stride) {
  constexpr std::size_t R = kRowsOf<T>;
  typename D::Row row[R], next[R];
  std::size_t r = 0;
  for (; r + R <= n; r += R) {
    const bool more = r + ahead + R <= fetched;
    for (std::size_t i = 0; i < R; ++i) {
      row[i] = D::G::at(at(r + i), k);
      if (more) next[i] = D::G::at(at(r + ahead + i), k);
    }
    D::template dot<R, T>(row, more ? next : nullptr, x, k, out + r, out_stride);
  }
  for (; r < n; ++r) {
    row[0] = D::G::at(at(r), k);
    D::template dot<1, T>(row, nullptr, x, k, out + r, out_stride);
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
  for (std::size_t t = 0; t < tokens; t += 4) {
    const std::size_t left = tokens - t, fetched = t == 0 ? n + ahead : 0;
    const auto dot = left == 1   ? dot_each_row<D, 1, decltype(at)>
                     : left == 2 ? dot_each_row<D, 2, decltype(at)>
                     : left == 3 ? dot_each_row<D, 3, decltype(at)>
                                 : dot_each_row<D, 4, decltype(at)>;
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
