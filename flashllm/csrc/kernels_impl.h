// The loops of kernels.h over a vector type. Each kernels_<level>.cpp defines `Vec` in its own namespace,
// compiled with that level's flags, then includes this file; nothing here may be shared between levels.
//
// Vec: kWidth floats; zero, load of fp32/fp16/bf16, set, fma, add, sum (a fixed tree), store.
// Included several times on purpose, hence no include guard.

constexpr std::size_t kUnroll = 2;  // independent sums a row, so that additions overlap

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

// R rows at a time read R streams; each row's own order of additions is the same for every R.
template <typename W, std::size_t R>
void dot_block(const void* const* rows, const float* x, std::size_t k, float* out) {
  constexpr std::size_t kStep = kUnroll * Vec::kWidth;
  const typename W::T* row[R];
  Vec sum[R][kUnroll];
  for (std::size_t r = 0; r < R; ++r) {
    row[r] = static_cast<const typename W::T*>(rows[r]);
    for (std::size_t u = 0; u < kUnroll; ++u) sum[r][u] = Vec::zero();
  }
  std::size_t j = 0;
  for (; j + kStep <= k; j += kStep) {
    for (std::size_t u = 0; u < kUnroll; ++u) {
      const Vec xv = Vec::load_f32(x + j + u * Vec::kWidth);
      for (std::size_t r = 0; r < R; ++r)
        sum[r][u] = fma(W::load(row[r] + j + u * Vec::kWidth), xv, sum[r][u]);
    }
  }
  for (std::size_t r = 0; r < R; ++r) {
    float total = (sum[r][0] + sum[r][1]).sum();
    for (std::size_t t = j; t < k; ++t) total = __builtin_fmaf(W::scalar(row[r][t]), x[t], total);
    out[r] = total;
  }
}

template <typename W>
void dot_rows(const void* const* rows, std::size_t n, const float* x, std::size_t k, float* out) {
  constexpr std::size_t kRows = 4;
  std::size_t r = 0;
  for (; r + kRows <= n; r += kRows) dot_block<W, kRows>(rows + r, x, k, out + r);
  for (; r < n; ++r) dot_block<W, 1>(rows + r, x, k, out + r);
}

// y stays in registers for R terms; the additions of one y[j] are in the order of the terms whatever R is.
template <typename W, std::size_t R>
void add_block(const void* const* rows, const float* scales, std::size_t begin, std::size_t end, float* y) {
  const typename W::T* row[R];
  Vec scale[R];
  for (std::size_t r = 0; r < R; ++r) {
    row[r] = static_cast<const typename W::T*>(rows[r]);
    scale[r] = Vec::set(scales[r]);
  }
  std::size_t j = begin;
  for (; j + Vec::kWidth <= end; j += Vec::kWidth) {
    Vec sum = Vec::load_f32(y + j);
    for (std::size_t r = 0; r < R; ++r) sum = fma(W::load(row[r] + j), scale[r], sum);
    sum.store(y + j);
  }
  for (; j < end; ++j) {
    for (std::size_t r = 0; r < R; ++r) y[j] = __builtin_fmaf(W::scalar(row[r][j]), scales[r], y[j]);
  }
}

template <typename W>
void add_scaled_rows(const void* const* rows, const float* scales, std::size_t n, std::size_t begin,
                     std::size_t end, float* y) {
  constexpr std::size_t kRows = 8;
  std::size_t i = 0;
  for (; i + kRows <= n; i += kRows) add_block<W, kRows>(rows + i, scales + i, begin, end, y);
  for (; i < n; ++i) add_block<W, 1>(rows + i, scales + i, begin, end, y);
}

template <typename W>
void to_f32(const void* from, std::size_t n, float* to) {
  const auto* source = static_cast<const typename W::T*>(from);
  std::size_t j = 0;
  for (; j + Vec::kWidth <= n; j += Vec::kWidth) W::load(source + j).store(to + j);
  for (; j < n; ++j) to[j] = W::scalar(source[j]);
}

inline void from_f32_f32(const float* from, std::size_t n, void* to) {
  __builtin_memcpy(to, from, n * sizeof(float));
}
inline void from_f32_f16(const float* from, std::size_t n, void* to) {
  auto* target = static_cast<std::uint16_t*>(to);
  for (std::size_t j = 0; j < n; ++j) target[j] = float_to_half(from[j]);
}
inline void from_f32_bf16(const float* from, std::size_t n, void* to) {
  auto* target = static_cast<std::uint16_t*>(to);
  for (std::size_t j = 0; j < n; ++j) target[j] = float_to_bfloat(from[j]);
}

// Four streams and two sums each: what kept most cache lines under way (bench/LOG.md).
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

extern const KernelTable kTables[3];
const KernelTable kTables[3] = {
    {dot_rows<F32>, add_scaled_rows<F32>, to_f32<F32>, from_f32_f32},
    {dot_rows<F16>, add_scaled_rows<F16>, to_f32<F16>, from_f32_f16},
    {dot_rows<BF16>, add_scaled_rows<BF16>, to_f32<BF16>, from_f32_bf16},
};
