// Products of weights in groups with inputs in 8 or 16 bits, as row_codecs.h has them; included behind
// row_codecs_impl.h. Of `Eight` (eight floats) it wants zero, set, load, store, load_halves, first, *, +, fma
// (which rounds once), sum, and dot_unit<bits>: the sums of a unit's products by fours, of int8 inputs and,
// where the weights have 8 bits, of int16 ones.

constexpr std::size_t kScaled = 8;  // units whose scales are multiplied together

template <typename Input, std::size_t kBits, std::size_t kGroup, bool kMinimum>
struct CodedDot {
  using G = Grouped<kBits, kGroup, kMinimum>;
  using Row = typename G::Row;
  static constexpr std::size_t kRepeat = kGroup / kCodeUnit;  // units that share a scale
  static constexpr bool kOffset = kBits == 4;

  // The halves of kScaled units from unit u on. Behind the last ones lie codes, at least 16 bytes of them.
  static Eight of_units(const std::uint16_t* halves, std::size_t u) {
    return Eight::template load_halves<kRepeat>(halves + u / kRepeat);
  }

  // The scales of kScaled units of a row times those of the inputs; adds what their codes are offset by.
  static void scale_units(Eight scale, const Eight& minimum, const CodedInputs& x, std::size_t u,
                          float* scales, Eight& offset) {
    (scale * Eight::load(x.scales + u)).store(scales);
    if constexpr (kOffset) {
      const Eight by = kMinimum ? minimum : scale * Eight::set(-8.0F);
      offset = fma(by, Eight::load(x.sums + u), offset);
    }
  }

  // out[r] of R rows; next[r]: what to fetch while row[r] is read.
  template <std::size_t R>
  static void dot(const Row* row, const Row* next, const CodedInputs& x, std::size_t k, float* out) {
    const std::size_t units = (k + kCodeUnit - 1) / kCodeUnit;
    const auto* inputs = static_cast<const Input*>(x.codes);
    Eight sum[R][2], offset[R];
    float scales[R][kScaled];
    for (std::size_t r = 0; r < R; ++r) sum[r][0] = sum[r][1] = offset[r] = Eight::zero();
    if (next != nullptr)
      for (std::size_t r = 0; r < R; ++r) G::prefetch_groups(next[r]);
    std::size_t u = 0;
    for (; u + kScaled <= units; u += kScaled) {
      for (std::size_t r = 0; r < R; ++r) {
        const Eight scale = of_units(row[r].scales, u);
        scale_units(scale, kMinimum ? of_units(row[r].minimums, u) : scale, x, u, scales[r], offset[r]);
        if (next != nullptr)
          for (std::size_t j = 0; j < kScaled * kCodeUnit; j += G::kLineWeights)
            __builtin_prefetch(next[r].codes + (u * kCodeUnit + j) * kBits / 8, 0, 2);
      }
#pragma GCC unroll 8
      for (std::size_t i = 0; i < kScaled; ++i) {
        const std::size_t j = (u + i) * kCodeUnit;
        for (std::size_t r = 0; r < R; ++r) {
          const Eight products = Eight::template dot_unit<kBits>(row[r].codes + j * kBits / 8, inputs + j);
          sum[r][i % 2] = fma(products, Eight::set(scales[r][i]), sum[r][i % 2]);
        }
      }
    }
    if (u < units) {
      for (std::size_t r = 0; r < R; ++r) {
        const Eight scale = of_units(row[r].scales, u).first(units - u);
        scale_units(scale, kMinimum ? of_units(row[r].minimums, u).first(units - u) : scale, x, u, scales[r],
                    offset[r]);
        for (std::size_t i = 0; u + i < units; ++i) {
          const std::size_t j = (u + i) * kCodeUnit;
          const Eight products = Eight::template dot_unit<kBits>(row[r].codes + j * kBits / 8, inputs + j);
          Eight& to = i % 2 == 0 ? sum[r][0] : sum[r][1];
          to = fma(products, Eight::set(scales[r][i]), to);
        }
      }
    }
    for (std::size_t r = 0; r < R; ++r) out[r] = ((sum[r][0] + sum[r][1]) + offset[r]).sum();
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

template <typename Input, std::size_t kBits, std::size_t kGroup, bool kMinimum>
constexpr CodedInputKernels input_kernels_of() {
  using D = CodedDot<Input, kBits, kGroup, kMinimum>;
  return {dot_rows_coded_inputs<D>, dot_matrix_coded_inputs<D>};
}

// In the order of RowCodec.
const CodedInputKernels kInt8[kInt8Codecs] = {
    input_kernels_of<std::int8_t, 8, 32, false>(), input_kernels_of<std::int8_t, 8, 64, false>(),
    input_kernels_of<std::int8_t, 4, 32, false>(), input_kernels_of<std::int8_t, 4, 64, false>(),
    input_kernels_of<std::int8_t, 4, 32, true>(),  input_kernels_of<std::int8_t, 4, 64, true>(),
};
const CodedInputKernels kInt16[kInt16Codecs] = {
    input_kernels_of<std::int16_t, 8, 32, false>(),
    input_kernels_of<std::int16_t, 8, 64, false>(),
};
