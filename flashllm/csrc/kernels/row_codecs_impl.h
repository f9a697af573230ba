// The loops of row_codecs.h over a vector type; included after kernels_impl.h by each kernels_<level>.cpp, as
// that file is. Of `Vec` it wants besides: half (an fp16 as a float), load_i8, and unpack_nibbles: of kWidth
// bytes the lower and the upper halves as code * scale + offset.

constexpr std::size_t kUnitVectors = kGroupUnit / Vec::kWidth;
constexpr std::size_t kCodedAhead = 4096;  // bytes between a load and the prefetch beside it, as kAhead

template <std::size_t kBits, std::size_t kGroup, bool kMinimum>
struct Grouped {
  static constexpr std::size_t kLineWeights = kCacheLine * 8 / kBits;
  static_assert(kGroup % kGroupUnit == 0, "groups must be whole units");

  // Where the parts of a vector are.
  struct Row {
    const std::uint16_t *scales, *minimums;
    const std::uint8_t* codes;
  };
  static Row at(const void* vector, std::size_t k) {
    const std::size_t groups = (k + kGroup - 1) / kGroup;
    const auto* scales = static_cast<const std::uint16_t*>(vector);
    const std::uint16_t* minimums = scales + groups;
    return {scales, minimums, reinterpret_cast<const std::uint8_t*>(minimums + (kMinimum ? groups : 0))};
  }

  // The unit from weight j on.
  static void decode(const Row& row, std::size_t j, Vec* to) {
    const Vec scale = Vec::set(Vec::half(row.scales[j / kGroup]));
    if constexpr (kBits == 8) {
      const auto* codes = reinterpret_cast<const std::int8_t*>(row.codes) + j;
      for (std::size_t v = 0; v < kUnitVectors; ++v) to[v] = Vec::load_i8(codes + v * Vec::kWidth) * scale;
    } else {
      const Vec offset = kMinimum ? Vec::set(Vec::half(row.minimums[j / kGroup])) : scale * Vec::set(-8.0F);
      Vec::unpack_nibbles<kUnitVectors / 2>(row.codes + j / 2, scale, offset, to);
    }
  }

  // What lies as far on in another vector.
  static void prefetch_codes(const Row& row, std::size_t j) {
    if (j % kLineWeights == 0) __builtin_prefetch(row.codes + j * kBits / 8, 0, 2);
  }
  static void prefetch_groups(const Row& row) {
    const auto* first = reinterpret_cast<const std::uint8_t*>(row.scales);
    for (const std::uint8_t* line = first; line < row.codes; line += kCacheLine)
      __builtin_prefetch(line, 0, 2);
  }
};

// R vectors at a time, as dot_block: each one's order of additions is the one there. next[r]: what to fetch
// while row[r] is read.
template <typename G, std::size_t R>
inline void dot_grouped(const typename G::Row* row, const typename G::Row* next, const float* x,
                        std::size_t k, float* out) {
  constexpr std::size_t kStep = kUnroll * Vec::kWidth;
  constexpr std::size_t kTogether = kStep > kGroupUnit ? kStep : kGroupUnit;
  Vec sum[R][kUnroll];
  for (std::size_t r = 0; r < R; ++r)
    for (std::size_t u = 0; u < kUnroll; ++u) sum[r][u] = Vec::zero();
  if (next != nullptr)
    for (std::size_t r = 0; r < R; ++r) G::prefetch_groups(next[r]);
  std::size_t j = 0;
  for (; j + kTogether <= k; j += kTogether) {
    if (next != nullptr)
      for (std::size_t r = 0; r < R; ++r) G::prefetch_codes(next[r], j);
    for (std::size_t unit = 0; unit < kTogether / kGroupUnit; ++unit) {
      for (std::size_t r = 0; r < R; ++r) {
        Vec weights[kUnitVectors];
        G::decode(row[r], j + unit * kGroupUnit, weights);
        for (std::size_t v = 0; v < kUnitVectors; ++v) {
          const std::size_t at = unit * kUnitVectors + v;
          sum[r][at % kUnroll] =
              fma(weights[v], Vec::load_f32(x + j + at * Vec::kWidth), sum[r][at % kUnroll]);
        }
      }
    }
  }
  for (std::size_t r = 0; r < R; ++r) {
    float rest[kTogether];  // the weights from j on, widened
    for (std::size_t first = j; first < k; first += kGroupUnit) {
      Vec weights[kUnitVectors];
      G::decode(row[r], first, weights);
      for (std::size_t v = 0; v < kUnitVectors; ++v) weights[v].store(rest + first - j + v * Vec::kWidth);
    }
    std::size_t t = j;
    for (; t + kStep <= k; t += kStep)
      for (std::size_t u = 0; u < kUnroll; ++u) {
        const std::size_t at = t + u * Vec::kWidth;
        sum[r][u] = fma(Vec::load_f32(rest + at - j), Vec::load_f32(x + at), sum[r][u]);
      }
    for (; t + Vec::kWidth <= k; t += Vec::kWidth)
      sum[r][0] = fma(Vec::load_f32(rest + t - j), Vec::load_f32(x + t), sum[r][0]);
    for (std::size_t half = kUnroll / 2; half != 0; half /= 2)
      for (std::size_t u = 0; u < half; ++u) sum[r][u] = sum[r][u] + sum[r][u + half];
    float total = sum[r][0].sum();
    for (; t < k; ++t) total = __builtin_fmaf(rest[t - j], x[t], total);
    out[r] = total;
  }
}

// use(row, next or nullptr, first) for kRows vectors at a time, and R = 1 for what is left.
template <typename G>
void dot_rows_grouped(const void* const* rows, std::size_t n, const float* x, std::size_t k, float* out) {
  typename G::Row row[kRows], next[kRows];
  std::size_t r = 0;
  for (; r + kRows <= n; r += kRows) {
    const bool more = r + 2 * kRows <= n;
    for (std::size_t i = 0; i < kRows; ++i) {
      row[i] = G::at(rows[r + i], k);
      if (more) next[i] = G::at(rows[r + kRows + i], k);
    }
    dot_grouped<G, kRows>(row, more ? next : nullptr, x, k, out + r);
  }
  for (; r < n; ++r) {
    row[0] = G::at(rows[r], k);
    dot_grouped<G, 1>(row, nullptr, x, k, out + r);
  }
}

// Consecutive rows: what is fetched lies whole rows on.
template <typename G>
void dot_matrix_grouped(const void* data, std::size_t stride, std::size_t n, const float* x, std::size_t k,
                        float* out) {
  const auto* first = static_cast<const std::byte*>(data);
  const std::size_t ahead = (kCodedAhead / stride + kRows) / kRows * kRows;  // rows
  typename G::Row row[kRows], next[kRows];
  std::size_t r = 0;
  for (; r + kRows <= n; r += kRows) {
    const bool more = r + ahead + kRows <= n;
    for (std::size_t i = 0; i < kRows; ++i) {
      row[i] = G::at(first + (r + i) * stride, k);
      if (more) next[i] = G::at(first + (r + ahead + i) * stride, k);
    }
    dot_grouped<G, kRows>(row, more ? next : nullptr, x, k, out + r);
  }
  for (; r < n; ++r) {
    row[0] = G::at(first + r * stride, k);
    dot_grouped<G, 1>(row, nullptr, x, k, out + r);
  }
}

// y[j] += the terms of R vectors, in their order; j in [begin, end).
template <typename G, std::size_t R>
inline void add_grouped(const typename G::Row* row, const typename G::Row* next, const float* scales,
                        std::size_t begin, std::size_t end, float* y) {
  Vec scale[R];
  for (std::size_t r = 0; r < R; ++r) scale[r] = Vec::set(scales[r]);
  for (std::size_t j = begin; j < end; j += kGroupUnit) {
    if (next != nullptr)
      for (std::size_t r = 0; r < R; ++r) G::prefetch_codes(next[r], j);
    float padded[kGroupUnit] = {};
    const std::size_t count = end - j;
    float* at = count < kGroupUnit ? padded : y + j;
    if (at == padded) __builtin_memcpy(padded, y + j, count * sizeof(float));
    Vec sum[kUnitVectors];
    for (std::size_t v = 0; v < kUnitVectors; ++v) sum[v] = Vec::load_f32(at + v * Vec::kWidth);
    for (std::size_t r = 0; r < R; ++r) {
      Vec weights[kUnitVectors];
      G::decode(row[r], j, weights);
      for (std::size_t v = 0; v < kUnitVectors; ++v) sum[v] = fma(weights[v], scale[r], sum[v]);
    }
    for (std::size_t v = 0; v < kUnitVectors; ++v) sum[v].store(at + v * Vec::kWidth);
    if (at == padded) __builtin_memcpy(y + j, padded, count * sizeof(float));
  }
}

template <typename G>
void add_scaled_rows_grouped(const void* const* rows, const float* scales, std::size_t n, std::size_t k,
                             std::size_t begin, std::size_t end, float* y) {
  typename G::Row row[kRows], next[kRows];
  std::size_t i = 0;
  for (; i + kRows <= n; i += kRows) {
    const bool more = i + 2 * kRows <= n;
    for (std::size_t r = 0; r < kRows; ++r) {
      row[r] = G::at(rows[i + r], k);
      if (more) next[r] = G::at(rows[i + kRows + r], k);
    }
    add_grouped<G, kRows>(row, more ? next : nullptr, scales + i, begin, end, y);
  }
  for (; i < n; ++i) {
    row[0] = G::at(rows[i], k);
    add_grouped<G, 1>(row, nullptr, scales + i, begin, end, y);
  }
}

template <typename G>
void widen_grouped(const void* vector, std::size_t k, std::size_t first, std::size_t n, float* to) {
  const typename G::Row row = G::at(vector, k);
  for (std::size_t j = 0; j < n; j += kGroupUnit) {
    float padded[kGroupUnit];
    float* at = n - j < kGroupUnit ? padded : to + j;
    Vec weights[kUnitVectors];
    G::decode(row, first + j, weights);
    for (std::size_t v = 0; v < kUnitVectors; ++v) weights[v].store(at + v * Vec::kWidth);
    if (at == padded) __builtin_memcpy(to + j, padded, (n - j) * sizeof(float));
  }
}

template <typename G>
constexpr CodecKernels grouped() {
  return {dot_rows_grouped<G>, dot_matrix_grouped<G>, add_scaled_rows_grouped<G>, widen_grouped<G>};
}

extern const CodecKernels kCodecs[kGroupedCodecs];
const CodecKernels kCodecs[kGroupedCodecs] = {
    // in the order of RowCodec
    grouped<Grouped<8, 32, false>>(), grouped<Grouped<8, 64, false>>(), grouped<Grouped<4, 32, false>>(),
    grouped<Grouped<4, 64, false>>(), grouped<Grouped<4, 32, true>>(),  grouped<Grouped<4, 64, true>>(),
};
