// The loops of row_codecs.h over a vector type; included after kernels_impl.h by each kernels_<level>.cpp, as
// that file is. Of `Vec` it wants besides: half (an fp16 as a float), load_i8, unpack_nibbles (of some bytes
// the lower and the upper halves as code * scale + offset), look_up_nibbles, half_powers, and unpack_bf12.
// Where kReordersBf12, it has unpack_bf12_reordered, of as many weights as kUnroll vectors hold, and values
// in the order of these weights.

constexpr std::size_t kUnitVectors = kCodeUnit / Vec::kWidth;
constexpr std::size_t kCodedAhead = 4096;  // bytes between a load and the prefetch beside it, as kAhead

// As row_codecs.h says of bf12.
struct Lossless12 {
  static constexpr bool kReorders = Vec::kReordersBf12;
  static constexpr std::size_t kScales = 0;
  static constexpr std::size_t kTable = 16, kNone = 0xFFFF;
  struct Row {
    const std::uint8_t *table, *low, *indexes;
    const std::uint16_t* positions;
    const std::uint8_t* escaped;
    std::size_t escapes;
  };
  static Row at(const void* vector, std::size_t k) {
    const std::size_t padded = (k + kCodeUnit - 1) / kCodeUnit * kCodeUnit;
    const auto* table = static_cast<const std::uint8_t*>(vector);
    const std::uint8_t* low = table + kTable;
    const auto* positions = reinterpret_cast<const std::uint16_t*>(low + padded + padded / 2);
    const std::size_t escapes = bf12_escapes(k);
    return {table,  low, low + padded, positions, reinterpret_cast<const std::uint8_t*>(positions + escapes),
            escapes};
  }

  static void decode(const Row& row, std::size_t j, Vec* to) {
    if (!Vec::unpack_bf12(row.low + j, row.indexes + j / 2, row.table, to)) return;
    Vec patched[kUnitVectors];  // what a call may see lies in memory, and `to` should not
    for (std::size_t v = 0; v < kUnitVectors; ++v) patched[v] = to[v];
    patch(row, j, patched);
    for (std::size_t v = 0; v < kUnitVectors; ++v) to[v] = patched[v];
  }
  // The first escape from weight j on, or a position beyond every vector.
  static std::size_t next_escape(const Row& row, std::size_t j) {
    std::size_t i = 0;
    while (i < row.escapes && row.positions[i] < j) ++i;
    return i < row.escapes ? row.positions[i] : kNone;
  }
  // The kUnroll vectors from weight j on, in an order of V's own; there is no escape among them. The same
  // where there may be. Other values into that order, and back.
  template <typename V>
  static void decode_reordered(const Row& row, std::size_t j, V* to) {
    V::unpack_bf12_reordered(row.low + j, row.indexes + j / 2, row.table, to);
  }
  template <typename V>
  static void decode_reordered_with_escapes(const Row& row, std::size_t j, V* to) {
    float weights[kUnroll * V::kWidth];
    decode_reordered(row, j, to);
    for (std::size_t u = 0; u < kUnroll; ++u) to[u].store(weights + u * V::kWidth);
    for (std::size_t i = 0; i < row.escapes && row.positions[i] < j + kUnroll * V::kWidth; ++i)
      if (row.positions[i] >= j) weights[V::place_of_bf12(row.positions[i] - j)] = escaped(row, i);
    for (std::size_t u = 0; u < kUnroll; ++u) to[u] = V::load_f32(weights + u * V::kWidth);
  }
  template <typename V>
  static void reorder(V* v) {
    V::reorder_as_bf12(v);
  }
  template <typename V>
  static void restore(V* v) {
    V::restore_from_bf12(v);
  }

  static void prefetch_codes(const Row& row, std::size_t j) {
    if (j % kCacheLine == 0) __builtin_prefetch(row.low + j, 0, 2);
    if (j % (2 * kCacheLine) == 0) __builtin_prefetch(row.indexes + j / 2, 0, 2);
  }
  static void prefetch_groups(const Row& row) { __builtin_prefetch(row.table, 0, 2); }

 private:
  static float escaped(const Row& row, std::size_t i) {
    return bfloat_to_float(static_cast<std::uint16_t>(row.escaped[i] << 8 | row.low[row.positions[i]]));
  }
  // The few units with escapes.
  __attribute__((noinline)) static void patch(const Row& row, std::size_t j, Vec* to) {
    float weights[kCodeUnit];
    for (std::size_t v = 0; v < kUnitVectors; ++v) to[v].store(weights + v * Vec::kWidth);
    for (std::size_t i = 0; i < row.escapes && row.positions[i] < j + kCodeUnit; ++i) {
      if (row.positions[i] < j) continue;
      weights[row.positions[i] - j] = escaped(row, i);
    }
    for (std::size_t v = 0; v < kUnitVectors; ++v) to[v] = Vec::load_f32(weights + v * Vec::kWidth);
  }
};

#include "kernels/levels/scaled_codecs_impl.h"

// A vector's units. `read` makes floats of the scales of the kScaled units that weight j is among, so that
// `decode` of each of them, from its first weight j on, loads a scale into all lanes at once.
template <typename G>
struct UnitsOf {
  typename G::Row row;
  float scales[2 * kScaled], offsets[2 * kScaled];

  void read(std::size_t j) {
    if constexpr (G::kScales != 0) {
      const std::size_t u = j / kSharedFactors * kScaled;
      G::scales(row, u).store(scales);
      if constexpr (G::kScales == 2) G::later_scales(row, u).store(scales + kScaled);
      if constexpr (G::kMinimums) {
        G::minimums(row, u).store(offsets);
        if constexpr (G::kScales == 2) G::later_minimums(row, u).store(offsets + kScaled);
      } else if constexpr (G::kOffsets) {
        (G::scales(row, u) * Eight::set(-static_cast<float>(G::kZero))).store(offsets);
      }
    }
  }
  void decode(std::size_t j, Vec* to) const {
    if constexpr (G::kScales == 0) {
      G::decode(row, j, to);
    } else {
      const std::size_t at = j % kSharedFactors / kCodeUnit * G::kScales;
      G::decode(row.codes + j / 8 * G::kBits, scales + at, offsets + at, to);
    }
  }
};

// A step of R vectors in the reordered form, escapes and all; apart, because a call would put the sums of the
// other steps into memory.
template <typename G, std::size_t R, typename V>
__attribute__((noinline)) void dot_step_with_escapes(const UnitsOf<G>* units, std::size_t j, const float* x,
                                                     V (*sum)[kUnroll]) {
  V inputs[kUnroll];
  for (std::size_t u = 0; u < kUnroll; ++u) inputs[u] = V::load_f32(x + j + u * V::kWidth);
  G::reorder(inputs);
  for (std::size_t r = 0; r < R; ++r) {
    V weights[kUnroll];
    const typename G::Row& row = units[r].row;
    if (G::next_escape(row, j) < j + kUnroll * V::kWidth)
      G::decode_reordered_with_escapes(row, j, weights);
    else
      G::decode_reordered(row, j, weights);
    for (std::size_t u = 0; u < kUnroll; ++u) sum[r][u] = fma(weights[u], inputs[u], sum[r][u]);
  }
}

// The whole steps of R vectors: their sums, and where the steps end. Between escapes the sums stay in
// registers, so no index of them may be anything but a constant.
template <typename G, std::size_t R>
inline std::size_t dot_steps_reordered(const UnitsOf<G>* units, const typename G::Row* next, const float* x,
                                       std::size_t k, Vec (*to)[kUnroll]) {
  constexpr std::size_t kStep = kUnroll * Vec::kWidth;
  static_assert(!G::kReorders || kStep % kCodeUnit == 0, "a step must be whole units");
  const std::size_t last = k / kStep * kStep;
  std::size_t j = 0;
  while (j < last) {
    std::size_t end = last;
    for (std::size_t r = 0; r < R; ++r) {
      const std::size_t escape = G::next_escape(units[r].row, j) / kStep * kStep;
      end = escape < end ? escape : end;
    }
    Vec sum[R][kUnroll];
    for (std::size_t r = 0; r < R; ++r)
      for (std::size_t u = 0; u < kUnroll; ++u) sum[r][u] = to[r][u];
    for (; j < end; j += kStep) {
      if (next != nullptr)
        for (std::size_t r = 0; r < R; ++r) G::prefetch_codes(next[r], j);
      Vec inputs[kUnroll];
      for (std::size_t u = 0; u < kUnroll; ++u) inputs[u] = Vec::load_f32(x + j + u * Vec::kWidth);
      G::reorder(inputs);
#pragma GCC unroll 4
      for (std::size_t r = 0; r < R; ++r) {
        Vec weights[kUnroll];
        G::decode_reordered(units[r].row, j, weights);
        for (std::size_t u = 0; u < kUnroll; ++u) sum[r][u] = fma(weights[u], inputs[u], sum[r][u]);
      }
    }
    for (std::size_t r = 0; r < R; ++r)
      for (std::size_t u = 0; u < kUnroll; ++u) to[r][u] = sum[r][u];
    if (j == last) break;
    dot_step_with_escapes<G, R>(units, j, x, to);
    j += kStep;
  }
  for (std::size_t r = 0; r < R; ++r) G::restore(to[r]);
  return j;
}

// The same of vectors whose weights stay in order.
template <typename G, std::size_t R>
inline std::size_t dot_steps(UnitsOf<G>* units, const typename G::Row* next, const float* x, std::size_t k,
                             Vec (*to)[kUnroll]) {
  constexpr std::size_t kStep = kUnroll * Vec::kWidth;
  constexpr std::size_t kUnits = kStep > kCodeUnit ? kStep / kCodeUnit : 1;
  std::size_t j = 0;
  for (; j + kUnits * kCodeUnit <= k; j += kUnits * kCodeUnit) {
    if (j % kSharedFactors == 0)
      for (std::size_t r = 0; r < R; ++r) units[r].read(j);
    if (next != nullptr)
      for (std::size_t r = 0; r < R; ++r) G::prefetch_codes(next[r], j);
    for (std::size_t unit = 0; unit < kUnits; ++unit) {
      for (std::size_t r = 0; r < R; ++r) {
        Vec weights[kUnitVectors];
        units[r].decode(j + unit * kCodeUnit, weights);
        for (std::size_t v = 0; v < kUnitVectors; ++v) {
          const std::size_t at = unit * kUnitVectors + v;
          to[r][at % kUnroll] = fma(weights[v], Vec::load_f32(x + j + at * Vec::kWidth), to[r][at % kUnroll]);
        }
      }
    }
  }
  return j;
}

// R vectors at a time, as dot_block: each one's order of additions is the one there. next[r]: what to fetch
// while row[r] is read.
template <typename G, std::size_t R>
inline void dot_coded(UnitsOf<G>* units, const typename G::Row* next, const float* x, std::size_t k,
                      float* out) {
  constexpr std::size_t kStep = kUnroll * Vec::kWidth;
  constexpr std::size_t kTogether = kStep > kCodeUnit ? kStep : kCodeUnit;
  Vec sum[R][kUnroll];
  for (std::size_t r = 0; r < R; ++r)
    for (std::size_t u = 0; u < kUnroll; ++u) sum[r][u] = Vec::zero();
  if (next != nullptr)
    for (std::size_t r = 0; r < R; ++r) G::prefetch_groups(next[r]);
  std::size_t j = 0;
  if constexpr (G::kReorders) {
    j = dot_steps_reordered<G, R>(units, next, x, k, sum);
  } else {
    j = dot_steps<G, R>(units, next, x, k, sum);
  }
  for (std::size_t r = 0; r < R; ++r) {
    float rest[kTogether];  // the weights from j on, widened
    for (std::size_t first = j; first < k; first += kCodeUnit) {
      Vec weights[kUnitVectors];
      if (first == j || first % kSharedFactors == 0) units[r].read(first);
      units[r].decode(first, weights);
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

// Rows r of n at at(r), kRows at a time; what is fetched meanwhile lies `ahead` rows on.
template <typename G, typename At>
inline void dot_each_coded(const At& at, std::size_t n, std::size_t ahead, const float* x, std::size_t k,
                           float* out) {
  UnitsOf<G> units[kRows];
  typename G::Row next[kRows];
  std::size_t r = 0;
  for (; r + kRows <= n; r += kRows) {
    const bool more = r + ahead + kRows <= n;
    for (std::size_t i = 0; i < kRows; ++i) {
      units[i].row = G::at(at(r + i), k);
      if (more) next[i] = G::at(at(r + ahead + i), k);
    }
    dot_coded<G, kRows>(units, more ? next : nullptr, x, k, out + r);
  }
  for (; r < n; ++r) {
    units[0].row = G::at(at(r), k);
    dot_coded<G, 1>(units, nullptr, x, k, out + r);
  }
}

template <typename G>
void dot_rows_coded(const void* const* rows, std::size_t n, const float* x, std::size_t k, float* out) {
  dot_each_coded<G>([=](std::size_t r) { return rows[r]; }, n, kRows, x, k, out);
}

// Consecutive rows: what is fetched lies whole rows on.
template <typename G>
void dot_matrix_coded(const void* data, std::size_t stride, std::size_t n, const float* x, std::size_t k,
                      float* out) {
  const auto* first = static_cast<const std::byte*>(data);
  const std::size_t ahead = (kCodedAhead / stride + kRows) / kRows * kRows;  // rows
  dot_each_coded<G>([=](std::size_t r) { return first + r * stride; }, n, ahead, x, k, out);
}

// What is left of y beyond the last whole unit: up to `whole` in vectors, then one by one, as
// add_scaled_rows.
template <typename G, std::size_t R>
inline void add_rest(const UnitsOf<G>* units, const float* scales, std::size_t begin, std::size_t end,
                     std::size_t whole, float* y) {
  for (std::size_t r = 0; r < R; ++r) {
    Vec unit[kUnitVectors];
    float weights[kCodeUnit];
    units[r].decode(begin, unit);
    for (std::size_t v = 0; v < kUnitVectors; ++v) unit[v].store(weights + v * Vec::kWidth);
    const Vec scale = Vec::set(scales[r]);
    std::size_t j = begin;
    for (; j + Vec::kWidth <= whole; j += Vec::kWidth)
      fma(Vec::load_f32(weights + j - begin), scale, Vec::load_f32(y + j)).store(y + j);
    for (; j < end; ++j) y[j] = __builtin_fmaf(weights[j - begin], scales[r], y[j]);
  }
}

// y[j] += the terms of R vectors, in their order, from j on up to an escape; where it ends.
template <typename G, std::size_t R>
inline std::size_t add_steps_reordered(const UnitsOf<G>* units, const typename G::Row* next, const Vec* scale,
                                       std::size_t j, std::size_t end, float* y) {
  constexpr std::size_t kStep = kUnroll * Vec::kWidth;
  for (std::size_t r = 0; r < R; ++r) {
    const std::size_t escape = G::next_escape(units[r].row, j);
    end = escape < end ? escape : end;
  }
  for (; j + kStep <= end; j += kStep) {
    if (next != nullptr)
      for (std::size_t r = 0; r < R; ++r) G::prefetch_codes(next[r], j);
    Vec sum[kUnroll];
    for (std::size_t u = 0; u < kUnroll; ++u) sum[u] = Vec::load_f32(y + j + u * Vec::kWidth);
    G::reorder(sum);
    for (std::size_t r = 0; r < R; ++r) {
      Vec weights[kUnroll];
      G::decode_reordered(units[r].row, j, weights);
      for (std::size_t u = 0; u < kUnroll; ++u) sum[u] = fma(weights[u], scale[r], sum[u]);
    }
    G::restore(sum);
    for (std::size_t u = 0; u < kUnroll; ++u) sum[u].store(y + j + u * Vec::kWidth);
  }
  return j;
}

// y[j] += the terms of R vectors, in their order; j in [begin, end).
template <typename G, std::size_t R>
inline void add_coded(UnitsOf<G>* units, const typename G::Row* next, const float* scales, std::size_t begin,
                      std::size_t end, float* y) {
  constexpr std::size_t kNarrow = 16 * Vec::kWidth;  // where add_scaled_rows takes single vectors
  const std::size_t step = end - begin <= kNarrow ? Vec::kWidth : 2 * Vec::kWidth;
  const std::size_t whole = begin + (end - begin) / step * step;
  Vec scale[R];
  for (std::size_t r = 0; r < R; ++r) scale[r] = Vec::set(scales[r]);
  for (std::size_t j = begin; j < end; j += kCodeUnit) {
    if constexpr (G::kReorders) {
      j = add_steps_reordered<G, R>(units, next, scale, j, end, y);
      if (j == end) return;
    }
    if (j == begin || j % kSharedFactors == 0)
      for (std::size_t r = 0; r < R; ++r) units[r].read(j);
    if (next != nullptr)
      for (std::size_t r = 0; r < R; ++r) G::prefetch_codes(next[r], j);
    if (end - j < kCodeUnit) return add_rest<G, R>(units, scales, j, end, whole, y);
    Vec sum[kUnitVectors];
    for (std::size_t v = 0; v < kUnitVectors; ++v) sum[v] = Vec::load_f32(y + j + v * Vec::kWidth);
    for (std::size_t r = 0; r < R; ++r) {
      Vec weights[kUnitVectors];
      units[r].decode(j, weights);
      for (std::size_t v = 0; v < kUnitVectors; ++v) sum[v] = fma(weights[v], scale[r], sum[v]);
    }
    for (std::size_t v = 0; v < kUnitVectors; ++v) sum[v].store(y + j + v * Vec::kWidth);
  }
}

template <typename G>
void add_scaled_rows_coded(const void* const* rows, const float* scales, std::size_t n, std::size_t k,
                           std::size_t begin, std::size_t end, float* y) {
  UnitsOf<G> units[kRows];
  typename G::Row next[kRows];
  std::size_t i = 0;
  for (; i + kRows <= n; i += kRows) {
    const bool more = i + 2 * kRows <= n;
    for (std::size_t r = 0; r < kRows; ++r) {
      units[r].row = G::at(rows[i + r], k);
      if (!more) continue;
      next[r] = G::at(rows[i + kRows + r], k);
      G::prefetch_groups(next[r]);
    }
    add_coded<G, kRows>(units, more ? next : nullptr, scales + i, begin, end, y);
  }
  for (; i < n; ++i) {
    units[0].row = G::at(rows[i], k);
    add_coded<G, 1>(units, nullptr, scales + i, begin, end, y);
  }
}

template <typename G>
void widen_coded(const void* vector, std::size_t k, std::size_t first, std::size_t n, float* to) {
  UnitsOf<G> units;
  units.row = G::at(vector, k);
  for (std::size_t j = 0; j < n; j += kCodeUnit) {
    float padded[kCodeUnit];
    float* at = n - j < kCodeUnit ? padded : to + j;
    Vec weights[kUnitVectors];
    if (j == 0 || (first + j) % kSharedFactors == 0) units.read(first + j);
    units.decode(first + j, weights);
    for (std::size_t v = 0; v < kUnitVectors; ++v) weights[v].store(at + v * Vec::kWidth);
    if (at == padded) __builtin_memcpy(to + j, padded, (n - j) * sizeof(float));
  }
}

// The coded codec number I.
template <std::size_t I>
constexpr auto kCodecAt = static_cast<RowCodec>(kFirstCoded + I);
template <std::size_t I>
constexpr bool is_bf12 = kCodecAt<I> == RowCodec::bf12;
template <std::size_t I>
constexpr auto coded() {
  constexpr RowCodec kCodec = kCodecAt<I>;
  constexpr Scales kScales = shape_of(kCodec).scales;
  if constexpr (kScales == Scales::none) return Lossless12();
  if constexpr (kScales == Scales::powers) return Mxfp4();
  if constexpr (kScales == Scales::quarters) return Nvfp4();
  if constexpr (kScales == Scales::floats) return Ternary();
  if constexpr (kCodec < RowCodec::bf12) return Grouped<kCodec>();
  if constexpr (kCodec > RowCodec::bf12 && (kScales == Scales::halves || kScales == Scales::factors))
    return Carried<kCodec>();
}
template <std::size_t I>
using Coded = decltype(coded<I>());

template <typename G>
constexpr CodecKernels kernels_of() {
  return {dot_rows_coded<G>, dot_matrix_coded<G>, add_scaled_rows_coded<G>, widen_coded<G>};
}
