// Products of coded weights with inputs in 8 or 16 bits, as row_codecs.h has them; included behind
// row_codecs_impl.h. Of `Eight` (eight floats) it wants zero, set, load, store, load_halves, load_i8,
// half_powers, set_halves (two floats, four lanes each), first, *, +, fma (which rounds once), sum, and
// dot_unit<bits>: the sums of a unit's products by fours, of int8 inputs and, where the weights have 8 bits,
// of int16 ones. Codes of 4 and 5 bits begin at 0, those of 6 at -32. dot_fp4_unit: the same of kFp4FromZero.

constexpr std::size_t kScaled = 8;  // units whose scales are multiplied together

// What is peculiar to a codec: bits a code, scales a unit, what its codes are offset by, products of a unit.
// scales(row, u): those of kScaled units from unit u, a multiple of kScaled, on; behind a row's last ones lie
// codes, at least 16 bytes of them.
template <std::size_t kCodeBits, std::size_t kGroup, bool kMinimum>
struct GroupedUnits : Grouped<kCodeBits, kGroup, kMinimum> {
  using Row = typename Grouped<kCodeBits, kGroup, kMinimum>::Row;
  static constexpr std::size_t kBits = kCodeBits, kScales = 1;
  static constexpr bool kOffset = kBits == 4;

  static Eight scales(const Row& row, std::size_t u) { return of_units(row.scales, u); }
  static Eight offsets(const Row& row, std::size_t u, const Eight& scale) {
    return kMinimum ? of_units(row.minimums, u) : scale * Eight::set(-8.0F);
  }
  template <typename Input>
  static Eight products(const std::uint8_t* codes, const Input* x) {
    return Eight::template dot_unit<kBits>(codes, x);
  }

 private:
  static constexpr std::size_t kRepeat = kGroup / kCodeUnit;  // units that share a scale
  static Eight of_units(const std::uint16_t* halves, std::size_t u) {
    return Eight::template load_halves<kRepeat>(halves + u / kRepeat);
  }
};

template <std::size_t kCodeBits, std::size_t kGroup, bool kMinimum, bool kFactors>
struct CarriedUnits : Carried<kCodeBits, kGroup, kMinimum, kFactors> {
  using Row = typename Carried<kCodeBits, kGroup, kMinimum, kFactors>::Row;
  static constexpr std::size_t kBits = kCodeBits, kScales = kCodeUnit / kGroup;
  static constexpr bool kOffset = kBits < 6;
  static_assert(kSharedFactors == kScaled * kCodeUnit, "a shared scale is that of the units taken together");

  static Eight scales(const Row& row, std::size_t u) { return of_units(row.scales, row.factors, u); }
  // Of two scales a unit: those of its last kScaled / 2 units.
  static Eight later_scales(const Row& row, std::size_t u) {
    return of_units(row.scales, row.factors + kScaled, u);
  }
  static Eight offsets(const Row& row, std::size_t u, const Eight& scale) {
    return kMinimum ? of_units(row.minimums, row.minimum_factors, u)
                    : scale * Eight::set(-zero_code<kBits>());
  }
  static Eight products(const std::uint8_t* codes, const std::int8_t* x) {
    return Eight::template dot_unit<kBits>(codes, x);
  }

 private:
  static Eight of_units(const std::uint16_t* halves, const std::int8_t* factors, std::size_t u) {
    if constexpr (!kFactors) return Eight::template load_halves<1>(halves + u);
    return Eight::set(Vec::half(halves[u / kScaled])) * Eight::load_i8(factors + kScales * u);
  }
};

struct Mxfp4Units : Mxfp4 {
  static constexpr std::size_t kBits = 4, kScales = 1;
  static constexpr bool kOffset = true;

  static Eight scales(const Row& row, std::size_t u) { return Eight::half_powers(row.powers + u); }
  static Eight offsets(const Row&, std::size_t, const Eight& scale) {
    return scale * Eight::set(-static_cast<float>(kFp4Zero));
  }
  static Eight products(const std::uint8_t* codes, const std::int8_t* x) {
    return Eight::dot_fp4_unit(codes, x);
  }
};

template <typename Input, typename Units>
struct CodedDot {
  using G = Units;
  using Row = typename Units::Row;
  static constexpr std::size_t kUnitNbytes = kCodeUnit * Units::kBits / 8;
  static constexpr bool kPairs = Units::kScales == 2;
  static_assert(Units::kScales == 1 || (kPairs && !Units::kOffset), "a unit has one scale, or two alone");

  // The scales of kScaled units of a row, times those of the inputs where a unit has one; `left`: units that
  // the row still has. Adds what their codes are offset by.
  static void scale_units(const Row& row, const CodedInputs& x, std::size_t u, std::size_t left,
                          float* scales, Eight& offset) {
    if constexpr (kPairs) {
      Units::scales(row, u).store(scales);
      Units::later_scales(row, u).store(scales + kScaled);
    } else {
      const Eight scale = Units::scales(row, u);
      (scale * Eight::load(x.scales + u)).store(scales);
      if constexpr (Units::kOffset) {
        const Eight by = Units::offsets(row, u, scale);
        offset = fma(left < kScaled ? by.first(left) : by, Eight::load(x.sums + u), offset);
      }
    }
  }

  // The terms of unit u + i.
  static void add_unit(const Row& row, const Input* inputs, const CodedInputs& x, const float* scales,
                       std::size_t u, std::size_t i, Eight& to) {
    const Eight products = Units::products(row.codes + (u + i) * kUnitNbytes, inputs + (u + i) * kCodeUnit);
    if constexpr (kPairs)
      to = fma(products * Eight::set_halves(scales + 2 * i), Eight::set(x.scales[u + i]), to);
    else
      to = fma(products, Eight::set(scales[i]), to);
  }

  // out[r] of R rows; next[r]: what to fetch while row[r] is read.
  template <std::size_t R>
  static void dot(const Row* row, const Row* next, const CodedInputs& x, std::size_t k, float* out) {
    const std::size_t units = (k + kCodeUnit - 1) / kCodeUnit;
    const auto* inputs = static_cast<const Input*>(x.codes);
    Eight sum[R][2], offset[R];
    float scales[R][Units::kScales * kScaled];
    for (std::size_t r = 0; r < R; ++r) sum[r][0] = sum[r][1] = offset[r] = Eight::zero();
    if (next != nullptr)
      for (std::size_t r = 0; r < R; ++r) G::prefetch_groups(next[r]);
    std::size_t u = 0;
    for (; u + kScaled <= units; u += kScaled) {
      for (std::size_t r = 0; r < R; ++r) {
        scale_units(row[r], x, u, kScaled, scales[r], offset[r]);
        if (next != nullptr)
          for (std::size_t line = 0; line < kScaled * kUnitNbytes; line += kCacheLine)
            __builtin_prefetch(next[r].codes + u * kUnitNbytes + line, 0, 2);
      }
#pragma GCC unroll 8
      for (std::size_t i = 0; i < kScaled; ++i)
        for (std::size_t r = 0; r < R; ++r) add_unit(row[r], inputs, x, scales[r], u, i, sum[r][i % 2]);
    }
    if (u < units) {
      for (std::size_t r = 0; r < R; ++r) {
        scale_units(row[r], x, u, units - u, scales[r], offset[r]);
        for (std::size_t i = 0; u + i < units; ++i)
          add_unit(row[r], inputs, x, scales[r], u, i, i % 2 == 0 ? sum[r][0] : sum[r][1]);
      }
    }
    for (std::size_t r = 0; r < R; ++r) out[r] = ((sum[r][0] + sum[r][1]) + offset[r]).sum();
  }

  // out[t * out_stride] of one row and T tokens, which use its codes while they are unpacked; each sum is
  // that of `dot`.
  template <std::size_t T>
  static void dot_row(const Row& row, const CodedInputs* x, std::size_t k, float* out,
                      std::size_t out_stride) {
    const std::size_t units = (k + kCodeUnit - 1) / kCodeUnit;
    const Input* inputs[T];
    Eight sum[T][2], offset[T];
    float scales[T][Units::kScales * kScaled];
    for (std::size_t t = 0; t < T; ++t) {
      inputs[t] = static_cast<const Input*>(x[t].codes);
      sum[t][0] = sum[t][1] = offset[t] = Eight::zero();
    }
    std::size_t u = 0;
    for (; u + kScaled <= units; u += kScaled) {
      for (std::size_t t = 0; t < T; ++t) scale_units(row, x[t], u, kScaled, scales[t], offset[t]);
      for (std::size_t line = 0; line < kScaled * kUnitNbytes; line += kCacheLine)
        __builtin_prefetch(row.codes + u * kUnitNbytes + line + kCodedAhead, 0, 2);
#pragma GCC unroll 8
      for (std::size_t i = 0; i < kScaled; ++i)
        for (std::size_t t = 0; t < T; ++t) add_unit(row, inputs[t], x[t], scales[t], u, i, sum[t][i % 2]);
    }
    if (u < units) {
      for (std::size_t t = 0; t < T; ++t) {
        scale_units(row, x[t], u, units - u, scales[t], offset[t]);
        for (std::size_t i = 0; u + i < units; ++i)
          add_unit(row, inputs[t], x[t], scales[t], u, i, i % 2 == 0 ? sum[t][0] : sum[t][1]);
      }
    }
    for (std::size_t t = 0; t < T; ++t) out[t * out_stride] = ((sum[t][0] + sum[t][1]) + offset[t]).sum();
  }
};

// Rows [0, n) of at(r), kRows at a time; while they are read, those `ahead` on are fetched.
template <typename D, typename At>
void dot_each_row(const At& at, std::size_t n, std::size_t ahead, const CodedInputs& x, std::size_t k,
                  float* out) {
  typename D::Row row[kRows], next[kRows];
  std::size_t r = 0;
  for (; r + kRows <= n; r += kRows) {
    const bool more = r + ahead + kRows <= n;
    for (std::size_t i = 0; i < kRows; ++i) {
      row[i] = D::G::at(at(r + i), k);
      if (more) next[i] = D::G::at(at(r + ahead + i), k);
    }
    D::template dot<kRows>(row, more ? next : nullptr, x, k, out + r);
  }
  for (; r < n; ++r) {
    row[0] = D::G::at(at(r), k);
    D::template dot<1>(row, nullptr, x, k, out + r);
  }
}

template <typename D>
void dot_rows_coded_inputs(const void* const* rows, std::size_t n, const CodedInputs& x, std::size_t k,
                           float* out) {
  dot_each_row<D>([rows](std::size_t r) { return rows[r]; }, n, kRows, x, k, out);
}

template <typename D>
void dot_matrix_coded_inputs(const void* data, std::size_t stride, std::size_t n, const CodedInputs& x,
                             std::size_t k, float* out) {
  const auto* first = static_cast<const std::byte*>(data);
  const std::size_t ahead = (kCodedAhead / stride + kRows) / kRows * kRows;
  dot_each_row<D>([=](std::size_t r) { return first + r * stride; }, n, ahead, x, k, out);
}

template <typename D>
void dot_tokens_coded_inputs(const void* data, std::size_t stride, std::size_t n, const CodedInputs* x,
                             std::size_t tokens, std::size_t k, float* out, std::size_t out_stride) {
  const auto* first = static_cast<const std::byte*>(data);
  for (std::size_t t = 0; t < tokens;) {
    const std::size_t left = tokens - t;
    if (left == 1) return dot_matrix_coded_inputs<D>(data, stride, n, x[t], k, out + t * out_stride);
    const auto dot = left == 2   ? D::template dot_row<2>
                     : left == 3 ? D::template dot_row<3>
                                 : D::template dot_row<4>;
    for (std::size_t r = 0; r < n; ++r)
      dot(D::G::at(first + r * stride, k), x + t, k, out + t * out_stride + r, out_stride);
    t += left < 4 ? left : 4;
  }
}

template <typename Input, typename Units>
constexpr CodedInputKernels input_kernels_of() {
  using D = CodedDot<Input, Units>;
  return {dot_rows_coded_inputs<D>, dot_matrix_coded_inputs<D>, dot_tokens_coded_inputs<D>};
}

// In the order of RowCodec.
const CodedInputKernels kInt8[kCodedCodecs] = {
    input_kernels_of<std::int8_t, GroupedUnits<8, 32, false>>(),
    input_kernels_of<std::int8_t, GroupedUnits<8, 64, false>>(),
    input_kernels_of<std::int8_t, GroupedUnits<4, 32, false>>(),
    input_kernels_of<std::int8_t, GroupedUnits<4, 64, false>>(),
    input_kernels_of<std::int8_t, GroupedUnits<4, 32, true>>(),
    input_kernels_of<std::int8_t, GroupedUnits<4, 64, true>>(),
    {nullptr, nullptr, nullptr},  // bf12
    input_kernels_of<std::int8_t, CarriedUnits<5, 32, false, false>>(),
    input_kernels_of<std::int8_t, CarriedUnits<5, 32, true, false>>(),
    input_kernels_of<std::int8_t, CarriedUnits<4, 32, true, true>>(),
    input_kernels_of<std::int8_t, CarriedUnits<5, 32, true, true>>(),
    input_kernels_of<std::int8_t, CarriedUnits<6, 16, false, true>>(),
    input_kernels_of<std::int8_t, Mxfp4Units>(),
};
const CodedInputKernels kInt16[kInt16Codecs] = {
    input_kernels_of<std::int16_t, GroupedUnits<8, 32, false>>(),
    input_kernels_of<std::int16_t, GroupedUnits<8, 64, false>>(),
};
