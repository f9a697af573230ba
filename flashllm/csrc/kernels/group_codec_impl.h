// The loops of group_codec.h over a vector type; included by each kernels_<level>.cpp, through level_impl.h.
// Vec has besides /, min, store_rounded (kWidth numbers from 0 on as bytes, half to even) and
// load_codes<bits> (kWidth codes that follow each other).

constexpr float kLargestHalf = 65504.0F;

inline std::uint16_t half_scale(float smallest, float largest, int steps) {
  const float scale = (largest - smallest) / static_cast<float>(steps);
  return float_to_half(scale < kLargestHalf ? scale : kLargestHalf);
}
// A sum with zero has no minus zero: which of two zeros is the smallest does not show.
inline std::uint16_t half_minimum(float minimum) {
  const float above = minimum > -kLargestHalf ? minimum : -kLargestHalf;
  return float_to_half((above < kLargestHalf ? above : kLargestHalf) + 0.0F);
}

// What differences from a minimum are divided by: where the scale is 0, all codes are.
inline float divisor(std::uint16_t scale) {
  const float found = half_to_float(scale);
  return found > 0.0F ? found : __builtin_inff();
}

// Of `count` vectors, `stride` floats apart: the smallest and the largest number of each lane.
inline void find_ends(const float* values, std::size_t stride, std::size_t count, float* low, float* high) {
  Vec smallest = Vec::load_f32(values), largest = smallest;
  for (std::size_t i = 1; i < count; ++i) {
    const Vec x = Vec::load_f32(values + i * stride);
    smallest = min(smallest, x);
    largest = max(largest, x);
  }
  smallest.store(low);
  largest.store(high);
}

// Eight codes of 4 bits, a byte each, to four bytes: each step pairs up neighbours.
inline std::uint64_t squeeze(std::uint64_t codes) {
  codes = (codes | codes >> 4) & 0x00FF00FF00FF00FFU;
  codes = (codes | codes >> 8) & 0x0000FFFF0000FFFFU;
  return (codes | codes >> 16) & 0x00000000FFFFFFFFU;
}

template <int bits>
inline void store_codes(const Vec& codes, std::uint8_t* to) {
  if constexpr (bits == 8) return codes.store_rounded(to);
  std::uint8_t bytes[Vec::kWidth];
  codes.store_rounded(bytes);
  for (std::size_t i = 0; i < Vec::kWidth; i += 8) {
    std::uint64_t eight;
    __builtin_memcpy(&eight, bytes + i, 8);
    eight = squeeze(eight);
    __builtin_memcpy(to + i / 2, &eight, 4);
  }
}

template <int bits>
inline Vec codes_of(const Vec& x, const Vec& divisors, const Vec& minus_minimum) {
  return min(max((x + minus_minimum) / divisors, Vec::zero()), Vec::set((1 << bits) - 1));
}

template <int bits>
void pack_columns(const float* values, std::size_t stride, std::size_t rows, std::size_t columns,
                  const GroupedRows& to) {
  for (std::size_t j = 0; j < columns; j += Vec::kWidth) {
    float low[Vec::kWidth], high[Vec::kWidth], by[Vec::kWidth];
    find_ends(values + j, stride, rows, low, high);
    for (std::size_t i = 0; i < Vec::kWidth; ++i) {
      to.scales[j + i] = half_scale(low[i], high[i], (1 << bits) - 1);
      to.minimums[j + i] = half_minimum(low[i]);
      by[i] = divisor(to.scales[j + i]);
    }
    const Vec divisors = Vec::load_f32(by), minus = Vec::load_f16(to.minimums + j) * Vec::set(-1.0F);
    std::uint8_t* codes = to.codes + j * bits / 8;
    for (std::size_t r = 0; r < rows; ++r, codes += to.code_stride)
      store_codes<bits>(codes_of<bits>(Vec::load_f32(values + r * stride + j), divisors, minus), codes);
  }
}

template <int bits>
void unpack_columns(const ConstGroupedRows& from, std::size_t rows, std::size_t columns, float* values,
                    std::size_t stride) {
  for (std::size_t j = 0; j < columns; j += Vec::kWidth) {
    const Vec scale = Vec::load_f16(from.scales + j), minimum = Vec::load_f16(from.minimums + j);
    const std::uint8_t* codes = from.codes + j * bits / 8;
    for (std::size_t r = 0; r < rows; ++r, codes += from.code_stride)
      (Vec::load_codes<bits>(codes) * scale + minimum).store(values + r * stride + j);
  }
}

template <int bits>
void pack_rows(const float* values, std::size_t stride, std::size_t rows, std::size_t columns,
               const GroupedRows& to) {
  const std::size_t groups = groups_of(columns);
  for (std::size_t r = 0; r < rows; ++r) {
    const float* row = values + r * stride;
    std::uint8_t* codes = to.codes + r * to.code_stride;
    for (std::size_t g = 0; g < groups; ++g) {
      const std::size_t begin = g * kGroup, end = begin + kGroup < columns ? begin + kGroup : columns;
      float low[Vec::kWidth], high[Vec::kWidth];
      find_ends(row + begin, Vec::kWidth, (end - begin) / Vec::kWidth, low, high);
      for (std::size_t i = 1; i < Vec::kWidth; ++i) {
        low[0] = low[i] < low[0] ? low[i] : low[0];
        high[0] = high[i] > high[0] ? high[i] : high[0];
      }
      const std::uint16_t scale = half_scale(low[0], high[0], (1 << bits) - 1),
                          minimum = half_minimum(low[0]);
      to.scales[r * groups + g] = scale;
      to.minimums[r * groups + g] = minimum;
      const Vec divisors = Vec::set(divisor(scale)), minus = Vec::set(-half_to_float(minimum));
      for (std::size_t j = begin; j < end; j += Vec::kWidth)
        store_codes<bits>(codes_of<bits>(Vec::load_f32(row + j), divisors, minus), codes + j * bits / 8);
    }
  }
}

template <int bits>
void unpack_rows(const ConstGroupedRows& from, std::size_t rows, std::size_t columns, float* values,
                 std::size_t stride) {
  const std::size_t groups = groups_of(columns);
  for (std::size_t r = 0; r < rows; ++r) {
    const std::uint8_t* codes = from.codes + r * from.code_stride;
    for (std::size_t g = 0; g < groups; ++g) {
      const std::size_t begin = g * kGroup, end = begin + kGroup < columns ? begin + kGroup : columns;
      const Vec scale = Vec::set(half_to_float(from.scales[r * groups + g]));
      const Vec minimum = Vec::set(half_to_float(from.minimums[r * groups + g]));
      for (std::size_t j = begin; j < end; j += Vec::kWidth)
        (Vec::load_codes<bits>(codes + j * bits / 8) * scale + minimum).store(values + r * stride + j);
    }
  }
}

template <int bits>
constexpr GroupKernels kOfBits{pack_columns<bits>, unpack_columns<bits>, pack_rows<bits>, unpack_rows<bits>};
const GroupKernels kGroups[] = {kOfBits<4>, kOfBits<8>};
