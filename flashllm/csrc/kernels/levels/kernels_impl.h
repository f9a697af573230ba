// The loops of kernels.h over a vector type. Each kernels_<level>.cpp defines in its own namespace, compiled
// with that level's flags, `Vec` and the constants below, then includes this file; nothing here may be shared
// between levels. Included several times on purpose, hence no include guard.
//
// Vec: kWidth floats; zero, load of fp32/fp16/bf16, set, fma, add, multiply, max, times_two_to, sum (a fixed
// tree), store.
//
// kUnroll: independent sums a row, so that additions overlap; part of the order of a dot product. kRows: rows
// read together where that pays; kTileRows and kTileVectors: a tile of sums that fills the registers. No sum
// depends on these three.
//
// Prefetching: at two cores, loads alone keep too few cache lines under way to reach the memory's bandwidth,
// and the processor's own prefetchers start anew at each row (bench/log).

constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kAhead = 8192;  // bytes between a load and the prefetch beside it, in consecutive rows
constexpr std::size_t kShortRow = 1024;  // bytes: rows too short to be a stream of their own

struct F32 {
  using T = float;
  static Vec load(const T* p) { return Vec::load_f32(p); }
  static float scalar(T v) { return v; }
};
struct F16 {
  using T = std::uint16_t;
  static Vec load(const T* p) { return Vec::load_f16(p); }
  static float scalar(T v) { return half_to_float(v); }
};
struct BF16 {
  using T = std::uint16_t;
  static Vec load(const T* p) { return Vec::load_bf16(p); }
  static float scalar(T v) { return bfloat_to_float(v); }
};

// The cache lines of `n` elements at `p`, into the second level: it takes more lines under way than the
// first, from which the loads then miss only so far (bench/log).
template <typename T, std::size_t n>
inline void prefetch(const T* p) {
  constexpr std::size_t kStep = kCacheLine / sizeof(T);
  for (std::size_t j = 0; j < n; j += kStep) __builtin_prefetch(p + j, 0, 2);
}

// R rows at a time; each row's own order of additions is the same for every R. next[r]: what to fetch while
// row[r] is read, as far on; nullptr: nothing. Unrolled by name, or the compiler keeps the sums in memory.
template <typename W, std::size_t R>
inline void dot_block(const typename W::T* const* row, const typename W::T* const* next, const float* x,
                      std::size_t k, float* out) {
  static_assert(kUnroll == 2 || kUnroll == 4, "halved below");
  constexpr std::size_t kStep = kUnroll * Vec::kWidth;
  Vec sum[R][kUnroll];
#pragma GCC unroll 4
  for (std::size_t r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (std::size_t u = 0; u < kUnroll; ++u) sum[r][u] = Vec::zero();
  std::size_t j = 0;
  for (; j + kStep <= k; j += kStep) {
    if (next != nullptr)
      for (std::size_t r = 0; r < R; ++r) prefetch<typename W::T, kStep>(next[r] + j);
#pragma GCC unroll 4
    for (std::size_t u = 0; u < kUnroll; ++u) {
      const Vec xv = Vec::load_f32(x + j + u * Vec::kWidth);
#pragma GCC unroll 4
      for (std::size_t r = 0; r < R; ++r)
        sum[r][u] = fma(W::load(row[r] + j + u * Vec::kWidth), xv, sum[r][u]);
    }
  }
  for (; j + Vec::kWidth <= k; j += Vec::kWidth) {
    const Vec xv = Vec::load_f32(x + j);
#pragma GCC unroll 4
    for (std::size_t r = 0; r < R; ++r) sum[r][0] = fma(W::load(row[r] + j), xv, sum[r][0]);
  }
#pragma GCC unroll 4
  for (std::size_t r = 0; r < R; ++r) {
    if constexpr (kUnroll == 4) {
      sum[r][0] = sum[r][0] + sum[r][2];
      sum[r][1] = sum[r][1] + sum[r][3];
    }
    float total = (sum[r][0] + sum[r][1]).sum();
    for (std::size_t t = j; t < k; ++t) total = __builtin_fmaf(W::scalar(row[r][t]), x[t], total);
    out[r] = total;
  }
}

// Rows that lie anywhere: while kRows of them are read, the next kRows are fetched.
template <typename W>
void dot_rows(const void* const* rows, std::size_t n, const float* x, std::size_t k, float* out) {
  const auto* row = reinterpret_cast<const typename W::T* const*>(rows);
  std::size_t r = 0;
  for (; r + 2 * kRows <= n; r += kRows) dot_block<W, kRows>(row + r, row + r + kRows, x, k, out + r);
  for (; r + kRows <= n; r += kRows) dot_block<W, kRows>(row + r, nullptr, x, k, out + r);
  for (; r < n; ++r) dot_block<W, 1>(row + r, nullptr, x, k, out + r);
}

// Consecutive rows are one stream, fetched kAhead bytes before it is read, up to the end of the last row.
template <typename W>
void dot_matrix(const void* data, std::size_t stride, std::size_t n, const float* x, std::size_t k,
                float* out) {
  using T = typename W::T;
  const auto* first = static_cast<const std::byte*>(data);
  const auto row_at = [=](std::size_t r) { return reinterpret_cast<const T*>(first + r * stride); };
  const auto fetched = [=](std::size_t r, std::size_t together) {
    return (r + together) * stride + kAhead <= n * stride;
  };
  const T* row[kRows];
  const T* next[kRows];
  std::size_t r = 0;
  if (k * sizeof(T) <= kShortRow) {
    for (; r + kRows <= n; r += kRows) {
      for (std::size_t i = 0; i < kRows; ++i) {
        row[i] = row_at(r + i);
        next[i] = row[i] + kAhead / sizeof(T);
      }
      dot_block<W, kRows>(row, fetched(r, kRows) ? next : nullptr, x, k, out + r);
    }
  }
  for (; r < n; ++r) {
    row[0] = row_at(r);
    next[0] = row[0] + kAhead / sizeof(T);
    dot_block<W, 1>(row, fetched(r, 1) ? next : nullptr, x, k, out + r);
  }
}

// y[j] += the terms of R rows, in their order.
template <typename W, std::size_t R>
inline void add_block(const typename W::T* const* row, const typename W::T* const* next, const float* scales,
                      std::size_t begin, std::size_t end, float* y) {
  constexpr std::size_t kVectors = 2;
  constexpr std::size_t kStep = kVectors * Vec::kWidth;
  Vec scale[R];
  for (std::size_t r = 0; r < R; ++r) scale[r] = Vec::set(scales[r]);
  std::size_t j = begin;
  for (; j + kStep <= end; j += kStep) {
    if (next != nullptr)
      for (std::size_t r = 0; r < R; ++r) prefetch<typename W::T, kStep>(next[r] + j);
    Vec sum[kVectors];
    for (std::size_t v = 0; v < kVectors; ++v) sum[v] = Vec::load_f32(y + j + v * Vec::kWidth);
    for (std::size_t r = 0; r < R; ++r)
      for (std::size_t v = 0; v < kVectors; ++v)
        sum[v] = fma(W::load(row[r] + j + v * Vec::kWidth), scale[r], sum[v]);
    for (std::size_t v = 0; v < kVectors; ++v) sum[v].store(y + j + v * Vec::kWidth);
  }
  for (; j < end; ++j)
    for (std::size_t r = 0; r < R; ++r) y[j] = __builtin_fmaf(W::scalar(row[r][j]), scales[r], y[j]);
}

// H by V vectors of y stay in registers for all rows, each of which is widened once; rows of scales and y are
// of the H.
template <typename W, std::size_t H, std::size_t V>
inline void add_to_registers(const typename W::T* const* row, std::size_t n, const float* scales,
                             std::size_t scales_row, std::size_t begin, float* y, std::size_t y_row) {
  Vec sum[H][V];
#pragma GCC unroll 4
  for (std::size_t h = 0; h < H; ++h)
#pragma GCC unroll 8
    for (std::size_t v = 0; v < V; ++v) sum[h][v] = Vec::load_f32(y + h * y_row + begin + v * Vec::kWidth);
  for (std::size_t i = 0; i < n; ++i) {
    Vec value[V];
#pragma GCC unroll 8
    for (std::size_t v = 0; v < V; ++v) value[v] = W::load(row[i] + begin + v * Vec::kWidth);
#pragma GCC unroll 4
    for (std::size_t h = 0; h < H; ++h) {
      const Vec scale = Vec::set(scales[h * scales_row + i]);
#pragma GCC unroll 8
      for (std::size_t v = 0; v < V; ++v) sum[h][v] = fma(value[v], scale, sum[h][v]);
    }
  }
#pragma GCC unroll 4
  for (std::size_t h = 0; h < H; ++h)
#pragma GCC unroll 8
    for (std::size_t v = 0; v < V; ++v) sum[h][v].store(y + h * y_row + begin + v * Vec::kWidth);
}

// The same of any width.
template <typename W, std::size_t H>
void add_narrow_rows(const typename W::T* const* row, std::size_t n, const float* scales,
                     std::size_t scales_row, std::size_t begin, std::size_t end, float* y,
                     std::size_t y_row) {
  constexpr std::size_t kVectors = kTileVectors, kSingle = 8;
  if constexpr (H == 1)
    for (; begin + kSingle * Vec::kWidth <= end; begin += kSingle * Vec::kWidth)
      add_to_registers<W, H, kSingle>(row, n, scales, scales_row, begin, y, y_row);
  for (; begin + kVectors * Vec::kWidth <= end; begin += kVectors * Vec::kWidth)
    add_to_registers<W, H, kVectors>(row, n, scales, scales_row, begin, y, y_row);
  for (; begin + Vec::kWidth <= end; begin += Vec::kWidth)
    add_to_registers<W, H, 1>(row, n, scales, scales_row, begin, y, y_row);
  for (std::size_t h = 0; h < H; ++h)
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t j = begin; j < end; ++j)
        y[h * y_row + j] = __builtin_fmaf(W::scalar(row[i][j]), scales[h * scales_row + i], y[h * y_row + j]);
}

// The additions of one y[j] are in the order of the terms, whichever way is taken.
template <typename W>
void add_scaled_rows(const void* const* rows, const float* scales, std::size_t n, std::size_t begin,
                     std::size_t end, float* y) {
  const auto* row = reinterpret_cast<const typename W::T* const*>(rows);
  if (end - begin <= 16 * Vec::kWidth)  // an attention head
    return add_narrow_rows<W, 1>(row, n, scales, 0, begin, end, y, 0);
  std::size_t i = 0;
  for (; i + 2 * kRows <= n; i += kRows)
    add_block<W, kRows>(row + i, row + i + kRows, scales + i, begin, end, y);
  for (; i + kRows <= n; i += kRows) add_block<W, kRows>(row + i, nullptr, scales + i, begin, end, y);
  for (; i < n; ++i) add_block<W, 1>(row + i, nullptr, scales + i, begin, end, y);
}

// total[h][r]: the lanes of the dot products of kHeadsTogether queries and K rows, added as in dot_block,
// half of a row's sums at a time; each row is widened once. Rows of total are Vec::kWidth / kHeadsTogether.
template <typename W, std::size_t K>
inline void dot_tile(const typename W::T* const* row, const float* q, std::size_t k, Vec* total) {
  constexpr std::size_t kHalf = kUnroll / 2, kStep = kUnroll * Vec::kWidth,
                        kKeys = Vec::kWidth / kHeadsTogether;
#pragma GCC unroll 2
  for (std::size_t u = 0; u < kHalf; ++u) {
    Vec sum[2][kHeadsTogether][K];
#pragma GCC unroll 2
    for (std::size_t i = 0; i < 2; ++i)
#pragma GCC unroll 4
      for (std::size_t h = 0; h < kHeadsTogether; ++h)
#pragma GCC unroll 2
        for (std::size_t r = 0; r < K; ++r) sum[i][h][r] = Vec::zero();
    const auto add = [&](std::size_t i, std::size_t j) __attribute__((always_inline)) {
      Vec key[K];
#pragma GCC unroll 2
      for (std::size_t r = 0; r < K; ++r) key[r] = W::load(row[r] + j);
#pragma GCC unroll 4
      for (std::size_t h = 0; h < kHeadsTogether; ++h) {
        const Vec query = Vec::load_f32(q + h * k + j);
#pragma GCC unroll 2
        for (std::size_t r = 0; r < K; ++r) sum[i][h][r] = fma(key[r], query, sum[i][h][r]);
      }
    };
    std::size_t j = 0;
    for (; j + kStep <= k; j += kStep) {
      add(0, j + u * Vec::kWidth);
      add(1, j + (u + kHalf) * Vec::kWidth);
    }
    for (; u == 0 && j + Vec::kWidth <= k; j += Vec::kWidth) add(0, j);
#pragma GCC unroll 4
    for (std::size_t h = 0; h < kHeadsTogether; ++h)
#pragma GCC unroll 2
      for (std::size_t r = 0; r < K; ++r) {
        const Vec half = sum[0][h][r] + sum[1][h][r];
        total[h * kKeys + r] = u == 0 ? half : total[h * kKeys + r] + half;
      }
  }
}

template <typename W>
void score_keys(const void* data, std::size_t stride, std::size_t n, const float* q, std::size_t heads,
                std::size_t k, float* scores, std::size_t scores_row) {
  constexpr std::size_t kKeys = Vec::kWidth / kHeadsTogether, kTogether = (kTileVectors + 1) / 2;
  const auto* keys = static_cast<const std::byte*>(data);
  std::size_t h = 0;
  for (; h + kHeadsTogether <= heads;
       h += kHeadsTogether, q += kHeadsTogether * k, scores += kHeadsTogether * scores_row) {
    for (std::size_t first = 0; first < n; first += kKeys) {
      const typename W::T* row[kKeys];
      for (std::size_t r = 0; r < kKeys; ++r)  // beyond the last, it again
        row[r] = reinterpret_cast<const typename W::T*>(keys + (first + r < n ? first + r : n - 1) * stride);
      Vec total[Vec::kWidth];
#pragma GCC unroll 2
      for (std::size_t r = 0; r < kKeys; r += kTogether) dot_tile<W, kTogether>(row + r, q, k, total + r);
      float sums[Vec::kWidth];
      Vec::sums(total, sums);
      for (std::size_t i = 0; i < Vec::kWidth; ++i)
        for (std::size_t t = k / Vec::kWidth * Vec::kWidth; t < k; ++t)
          sums[i] = __builtin_fmaf(W::scalar(row[i % kKeys][t]), q[i / kKeys * k + t], sums[i]);
      for (std::size_t i = 0; i < kHeadsTogether; ++i) {
        float *to = scores + i * scores_row + first, *from = sums + i * kKeys;
        if (first + kKeys <= n)
          __builtin_memcpy(to, from, kKeys * sizeof(float));
        else
          for (std::size_t r = 0; first + r < n; ++r) to[r] = from[r];
      }
    }
  }
  for (; h < heads; ++h, q += k, scores += scores_row) dot_matrix<W>(data, stride, n, q, k, scores);
}

template <typename W>
void add_values(const void* const* rows, std::size_t n, const float* weights, std::size_t weights_row,
                std::size_t heads, std::size_t k, float* out, std::size_t out_row) {
  const auto* row = reinterpret_cast<const typename W::T* const*>(rows);
  std::size_t h = 0;
  for (; h + kHeadsTogether <= heads;
       h += kHeadsTogether, weights += kHeadsTogether * weights_row, out += kHeadsTogether * out_row)
    add_narrow_rows<W, kHeadsTogether>(row, n, weights, weights_row, 0, k, out, out_row);
  for (; h < heads; ++h, weights += weights_row, out += out_row)
    add_narrow_rows<W, 1>(row, n, weights, 0, 0, k, out, 0);
}

// e^x for x <= 88 to about 2 units in the last place; 1.6e-38 from -87 down. exp(x) = 2^n * e^r with n =
// round(x / ln 2) and |r| <= ln 2 / 2; e^r by its Taylor polynomial of degree 6 (remainder below 2^-23). NaN
// stays NaN.
inline Vec exp(Vec x) {
  x = max(Vec::set(-87.0F), x);
  const Vec shifted = fma(x, Vec::set(1.44269504F), Vec::set(12582912.0F));  // 1.5 * 2^23: n in the low bits
  const Vec n = shifted + Vec::set(-12582912.0F);
  Vec r = fma(n, Vec::set(-0.693359375F), x);  // ln 2 in two parts: the first product is exact
  r = fma(n, Vec::set(2.12194440e-4F), r);
  Vec p = Vec::set(1.0F / 720.0F);
  for (const float c : {1.0F / 120.0F, 1.0F / 24.0F, 1.0F / 6.0F, 0.5F, 1.0F, 1.0F})
    p = fma(p, r, Vec::set(c));
  return p.times_two_to(shifted);
}

// As Sigmoids says.
void sigmoids(float* values, std::size_t n) {
  const Vec one = Vec::set(1.0F), minus = Vec::set(-1.0F), most = Vec::set(88.0F);
  for (std::size_t i = 0; i < n; i += Vec::kWidth)
    (one / (one + exp(min(most, Vec::load_f32(values + i) * minus)))).store(values + i);
}

// scores[i] = e^(scores[i] - m) / (their sum), m the largest of the scores.
void softmax(float* scores, std::size_t n) {
  constexpr float kLowest = -__builtin_inff();
  const std::size_t whole = n / Vec::kWidth * Vec::kWidth;
  float
      last[Vec::kWidth];  // the scores beyond the last whole vector, padded with what weighs next to nothing
  for (std::size_t i = 0; i < Vec::kWidth; ++i) last[i] = whole + i < n ? scores[whole + i] : kLowest;
  Vec largest = Vec::load_f32(last);
  for (std::size_t i = 0; i < whole; i += Vec::kWidth) largest = max(largest, Vec::load_f32(scores + i));
  float lanes[Vec::kWidth];
  largest.store(lanes);
  float m = lanes[0];
  for (const float lane : lanes) m = lane > m ? lane : m;
  const Vec offset = Vec::set(-m);
  Vec sum = Vec::zero();
  for (std::size_t i = 0; i < whole; i += Vec::kWidth) {
    const Vec e = exp(Vec::load_f32(scores + i) + offset);
    e.store(scores + i);
    sum = sum + e;
  }
  exp(Vec::load_f32(last) + offset).store(last);
  float total = sum.sum();
  for (std::size_t i = whole; i < n; ++i) total += last[i - whole];
  const Vec inverse = Vec::set(1.0F / total);
  for (std::size_t i = 0; i < whole; i += Vec::kWidth)
    (Vec::load_f32(scores + i) * inverse).store(scores + i);
  for (std::size_t i = whole; i < n; ++i) scores[i] = last[i - whole] * (1.0F / total);
}

// As AttentionKernels says; a cache line of columns at a time.
void online_softmax(float* scores, std::size_t keys, std::size_t columns, std::size_t row, float* largest,
                    float* sum, float* factor) {
  constexpr std::size_t kTogether = 16 / Vec::kWidth;
  const Vec nothing = exp(Vec::set(-87.0F)) * Vec::set(-1.0F);
  for (std::size_t c = 0; c < columns; c += 16) {
    Vec before[kTogether], m[kTogether], total[kTogether];
    for (std::size_t v = 0; v < kTogether; ++v)
      m[v] = before[v] = Vec::load_f32(largest + c + v * Vec::kWidth);
    for (std::size_t k = 0; k < keys; ++k)
      for (std::size_t v = 0; v < kTogether; ++v)
        m[v] = max(m[v], Vec::load_f32(scores + k * row + c + v * Vec::kWidth));
    const Vec minus = Vec::set(-1.0F);
    for (std::size_t v = 0; v < kTogether; ++v) {
      const std::size_t at = c + v * Vec::kWidth;
      m[v].store(largest + at);
      m[v] = m[v] * minus;
      const Vec shrink = exp(before[v] + m[v]);
      shrink.store(factor + at);
      total[v] = Vec::load_f32(sum + at) * shrink;
    }
    for (std::size_t k = 0; k < keys; ++k) {
      for (std::size_t v = 0; v < kTogether; ++v) {
        float* at = scores + k * row + c + v * Vec::kWidth;
        const Vec e = exp(Vec::load_f32(at) + m[v]) + nothing;
        e.store(at);
        total[v] = total[v] + e;
      }
    }
    for (std::size_t v = 0; v < kTogether; ++v) total[v].store(sum + c + v * Vec::kWidth);
  }
}

// As StateStep says, of V vectors of columns from `at` on.
template <Recurrence kKind, std::size_t V>
inline void state_columns(const StateHead& head, std::size_t at, const float* before, float* state,
                          float* out) {
  constexpr bool kByChannel = kKind == Recurrence::delta_by_channel;
  const std::size_t keys = head.keys, row = head.values;
  const Vec beta = Vec::set(head.beta), minus = Vec::set(kByChannel ? -1.0F : -head.decay);
  Vec sum[V], added[V];
  for (std::size_t v = 0; v < V; ++v) {
    sum[v] = Vec::zero();
    added[v] = Vec::load_f32(head.value + at + v * Vec::kWidth);
  }
  if constexpr (kKind != Recurrence::space) {
    for (std::size_t i = 0; i < keys; ++i) {
      const Vec key = Vec::set(kByChannel ? head.decays[i] * head.key[i] : head.key[i]);
      for (std::size_t v = 0; v < V; ++v)
        sum[v] = fma(Vec::load_f32(before + i * row + at + v * Vec::kWidth), key, sum[v]);
    }
    for (std::size_t v = 0; v < V; ++v) added[v] = fma(sum[v], minus, added[v]);
  }
  for (std::size_t v = 0; v < V; ++v) {
    added[v] = added[v] * beta;
    sum[v] = Vec::zero();
  }
  for (std::size_t i = 0; i < keys; ++i) {
    const Vec key = Vec::set(head.key[i]), query = Vec::set(head.query[i]),
              decay = Vec::set(kByChannel ? head.decays[i] : head.decay);
    for (std::size_t v = 0; v < V; ++v) {
      const std::size_t place = i * row + at + v * Vec::kWidth;
      const Vec now = fma(added[v], key, Vec::load_f32(before + place) * decay);
      now.store(state + place);
      sum[v] = fma(now, query, sum[v]);
    }
  }
  for (std::size_t v = 0; v < V; ++v) sum[v].store(out + at + v * Vec::kWidth);
}

// A column's sums have one order, whichever way is taken.
template <Recurrence kKind>
void state_step(const StateHead& head, const float* before, float* state, float* out) {
  constexpr bool kByChannel = kKind == Recurrence::delta_by_channel;
  constexpr std::size_t kTogether = 4;
  std::size_t at = 0;
  for (; at + kTogether * Vec::kWidth <= head.values; at += kTogether * Vec::kWidth)
    state_columns<kKind, kTogether>(head, at, before, state, out);
  for (; at + Vec::kWidth <= head.values; at += Vec::kWidth)
    state_columns<kKind, 1>(head, at, before, state, out);
  for (; at < head.values; ++at) {
    float added = head.value[at];
    if constexpr (kKind != Recurrence::space) {
      float found = 0.0F;
      for (std::size_t i = 0; i < head.keys; ++i) {
        const float key = kByChannel ? head.decays[i] * head.key[i] : head.key[i];
        found = __builtin_fmaf(before[i * head.values + at], key, found);
      }
      added = __builtin_fmaf(found, kByChannel ? -1.0F : -head.decay, added);
    }
    added *= head.beta;
    float sum = 0.0F;
    for (std::size_t i = 0; i < head.keys; ++i) {
      const std::size_t place = i * head.values + at;
      const float decay = kByChannel ? head.decays[i] : head.decay;
      state[place] = __builtin_fmaf(added, head.key[i], before[place] * decay);
      sum = __builtin_fmaf(state[place], head.query[i], sum);
    }
    out[at] = sum;
  }
}

constexpr StateStep kStateSteps[] = {state_step<Recurrence::space>, state_step<Recurrence::delta>,
                                     state_step<Recurrence::delta_by_channel>};

// values[i] *= factor
void scale_floats(float* values, std::size_t n, float factor) {
  const Vec factors = Vec::set(factor);
  std::size_t i = 0;
  for (; i + Vec::kWidth <= n; i += Vec::kWidth) (Vec::load_f32(values + i) * factors).store(values + i);
  for (; i < n; ++i) values[i] *= factor;
}

// n is a multiple of 16. A product with zero is zero or NaN.
bool all_finite(const float* values, std::size_t n) {
  constexpr std::size_t kTogether = 16 / Vec::kWidth;
  Vec sum[kTogether];
  for (Vec& part : sum) part = Vec::zero();
  for (std::size_t i = 0; i < n; i += 16)
    for (std::size_t v = 0; v < kTogether; ++v)
      sum[v] = fma(Vec::load_f32(values + i + v * Vec::kWidth), Vec::zero(), sum[v]);
  for (std::size_t v = 1; v < kTogether; ++v) sum[0] = sum[0] + sum[v];
  return sum[0].sum() == 0.0F;
}

// A tile of R rows by V vectors of c stays in registers for all terms.
template <std::size_t R, std::size_t V>
inline void multiply_tile(TileRows a, TileColumns b, std::size_t terms, float* c, std::size_t c_row) {
  Vec sum[R][V];
  for (std::size_t r = 0; r < R; ++r)
    for (std::size_t v = 0; v < V; ++v) sum[r][v] = Vec::load_f32(c + r * c_row + v * Vec::kWidth);
  for (std::size_t s = 0; s < terms; ++s) {
    Vec column[V];
    for (std::size_t v = 0; v < V; ++v) column[v] = Vec::load_f32(b.data + s * b.row + v * Vec::kWidth);
    for (std::size_t r = 0; r < R; ++r) {
      const Vec factor = Vec::set(a.data[r * a.row + s * a.step]);
      for (std::size_t v = 0; v < V; ++v) sum[r][v] = fma(factor, column[v], sum[r][v]);
    }
  }
  for (std::size_t r = 0; r < R; ++r)
    for (std::size_t v = 0; v < V; ++v) sum[r][v].store(c + r * c_row + v * Vec::kWidth);
}

template <std::size_t V>
inline void multiply_strip(TileRows a, std::size_t rows, TileColumns b, std::size_t terms, float* c,
                           std::size_t c_row) {
  std::size_t r = 0;
  const auto from = [&](std::size_t row) { return TileRows{a.data + row * a.row, a.row, a.step}; };
  // A narrower tile is higher: with few sums the processor would wait for the end of each.
  if constexpr (V < kTileVectors)
    for (; r + 2 * kTileRows <= rows; r += 2 * kTileRows)
      multiply_tile<2 * kTileRows, V>(from(r), b, terms, c + r * c_row, c_row);
  for (; r + kTileRows <= rows && rows - r != kTileRows + 2; r += kTileRows)
    multiply_tile<kTileRows, V>(from(r), b, terms, c + r * c_row, c_row);
  for (; r + 4 <= rows; r += 4) multiply_tile<4, V>(from(r), b, terms, c + r * c_row, c_row);
  for (; r + 2 <= rows; r += 2) multiply_tile<2, V>(from(r), b, terms, c + r * c_row, c_row);
  for (; r < rows; ++r) multiply_tile<1, V>(from(r), b, terms, c + r * c_row, c_row);
}

void multiply_add(TileRows a, std::size_t rows, TileColumns b, std::size_t width, std::size_t terms, float* c,
                  std::size_t c_row) {
  std::size_t n = 0;
  const auto from = [&](std::size_t column) { return TileColumns{b.data + column, b.row}; };
  for (; n + kTileVectors * Vec::kWidth <= width; n += kTileVectors * Vec::kWidth)
    multiply_strip<kTileVectors>(a, rows, from(n), terms, c + n, c_row);
  for (; n + Vec::kWidth <= width; n += Vec::kWidth) multiply_strip<1>(a, rows, from(n), terms, c + n, c_row);
}

template <typename W>
void to_f32(const void* from, std::size_t n, float* to) {
  const auto* source = static_cast<const typename W::T*>(from);
  std::size_t j = 0;
  for (; j + Vec::kWidth <= n; j += Vec::kWidth) W::load(source + j).store(to + j);
  for (; j < n; ++j) to[j] = W::scalar(source[j]);
}

template <typename W>
void to_panels(const void* rows, std::size_t n, std::size_t k, std::size_t panel, float* to) {
  const auto* row = static_cast<const typename W::T*>(rows);
  for (std::size_t i = 0; i < n; ++i, row += k) {
    for (std::size_t first = 0; first < k; first += panel) {
      const std::size_t columns = k - first < panel ? k - first : panel;
      const std::size_t width = (columns + 15) / 16 * 16;
      float* at = to + first * n + i * width;
      std::size_t j = 0;
      for (; j + Vec::kWidth <= columns; j += Vec::kWidth) W::load(row + first + j).store(at + j);
      for (; j < columns; ++j) at[j] = W::scalar(row[first + j]);
      for (; j < width; ++j) at[j] = 0.0F;
    }
  }
}

inline void from_f32_f32(const float* from, std::size_t n, void* to) {
  __builtin_memcpy(to, from, n * sizeof(float));
}
inline void from_f32_f16(const float* from, std::size_t n, void* to) {
  auto* target = static_cast<std::uint16_t*>(to);
  std::size_t j = 0;
#if defined(__F16C__)
  for (; j + 8 <= n; j += 8) {  // of what is not a number only the sign stays, as in float_to_half
    const __m256 values = _mm256_loadu_ps(from + j);
    const __m256i unordered = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    const __m128i payload = _mm_and_si128(
        _mm_packs_epi32(_mm256_castsi256_si128(unordered), _mm256_extracti128_si256(unordered, 1)),
        _mm_set1_epi16(0x01FF));
    const __m128i halves = _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + j), _mm_andnot_si128(payload, halves));
  }
#endif
  for (; j < n; ++j) target[j] = float_to_half(from[j]);
}
inline void from_f32_bf16(const float* from, std::size_t n, void* to) {
  auto* target = static_cast<std::uint16_t*>(to);
  for (std::size_t j = 0; j < n; ++j) target[j] = float_to_bfloat(from[j]);
}

// Four streams and two sums each: what kept most cache lines under way (bench/log).
float sum_floats(const float* from, std::size_t n) {
  constexpr std::size_t kStreams = 4, kStep = 2 * Vec::kWidth;
  const std::size_t part = n / kStreams / kStep * kStep;
  Vec sum[kStreams][2];
  for (auto& stream : sum) stream[0] = stream[1] = Vec::zero();
  for (std::size_t j = 0; j < part; j += kStep) {
    for (std::size_t s = 0; s < kStreams; ++s) {
      const float* at = from + s * part + j;
      sum[s][0] = sum[s][0] + Vec::load_f32(at);
      sum[s][1] = sum[s][1] + Vec::load_f32(at + Vec::kWidth);
    }
  }
  float total = 0.0F;
  for (const auto& stream : sum) total += (stream[0] + stream[1]).sum();
  for (std::size_t j = kStreams * part; j < n; ++j) total += from[j];
  return total;
}

const KernelTable kTables[3] = {
    {dot_rows<F32>, dot_matrix<F32>, add_scaled_rows<F32>, score_keys<F32>, add_values<F32>, to_f32<F32>,
     to_panels<F32>, from_f32_f32},
    {dot_rows<F16>, dot_matrix<F16>, add_scaled_rows<F16>, score_keys<F16>, add_values<F16>, to_f32<F16>,
     to_panels<F16>, from_f32_f16},
    {dot_rows<BF16>, dot_matrix<BF16>, add_scaled_rows<BF16>, score_keys<BF16>, add_values<BF16>,
     to_f32<BF16>, to_panels<BF16>, from_f32_bf16},
};

const AttentionKernels kAttention = {kTileVectors * Vec::kWidth < 16 ? 16 : kTileVectors * Vec::kWidth,
                                     online_softmax, scale_floats, all_finite};
