// The loops of group_codec.h over a vector type. Each group_codec_<level>.cpp defines in its own namespace,
// compiled with that level's flags, `Vec`, then includes this file; nothing here may be shared between
// levels. Included several times on purpose, hence no include guard.
//
// Vec: kUnit floats; load of fp32/fp16, set, + - * /, min, max, where_positive(a, b): a where b > 0, else 0;
// store, store_rounded (as bytes, half to even), load_codes<bits> (a unit's).

// Eight codes of 4 bits, a byte each, to four bytes: each step pairs up neighbours.
inline std::uint64_t squeeze(std::uint64_t codes) {
  codes = (codes | codes >> 4) & 0x00FF00FF00FF00FFU;
  codes = (codes | codes >> 8) & 0x0000FFFF0000FFFFU;
  return (codes | codes >> 16) & 0x00000000FFFFFFFFU;
}

template <int bits>
inline void store_unit(const Vec& codes, std::uint8_t* to) {
  if constexpr (bits == 8) {
    codes.store_rounded(to);
  } else {
    alignas(16) std::uint8_t bytes[kUnit];
    codes.store_rounded(bytes);
    std::uint64_t low, high;
    __builtin_memcpy(&low, bytes, 8);
    __builtin_memcpy(&high, bytes + 8, 8);
    const std::uint64_t unit = squeeze(low) | squeeze(high) << 32;
    __builtin_memcpy(to, &unit, 8);
  }
}

template <int bits>
inline Vec codes_of(const Vec& x, const Vec& scale, const Vec& minimum) {
  const Vec code = min(max((x - minimum) / scale, Vec::set(0.0F)), Vec::set((1 << bits) - 1));
  return where_positive(code, scale);
}

inline std::uint16_t scale_of(float smallest, float largest, int steps) {
  return half_scale((largest - smallest) / static_cast<float>(steps));
}

template <int bits>
void encode_columns(const float* values, std::size_t stride, std::size_t rows, std::size_t columns,
                    const GroupedRows& to) {
  for (std::size_t j = 0; j < columns; j += kUnit) {
    const Vec scale = Vec::load_f16(to.scales + j), minimum = Vec::load_f16(to.minimums + j);
    std::uint8_t* codes = to.codes + j / kUnit * 2 * bits;
    for (std::size_t r = 0; r < rows; ++r, codes += to.code_stride)
      store_unit<bits>(codes_of<bits>(Vec::load_f32(values + r * stride + j), scale, minimum), codes);
  }
}

template <int bits>
void pack_columns(const float* values, std::size_t stride, std::size_t rows, std::size_t columns,
                  const GroupedRows& to) {
  for (std::size_t j = 0; j < columns; j += kUnit) {
    Vec smallest = Vec::load_f32(values + j), largest = smallest;
    for (std::size_t r = 1; r < rows; ++r) {
      const Vec x = Vec::load_f32(values + r * stride + j);
      smallest = min(smallest, x);
      largest = max(largest, x);
    }
    float low[kUnit], high[kUnit];
    smallest.store(low);
    largest.store(high);
    for (std::size_t i = 0; i < kUnit; ++i) {
      to.scales[j + i] = scale_of(low[i], high[i], (1 << bits) - 1);
      to.minimums[j + i] = half_minimum(low[i]);
    }
  }
  encode_columns<bits>(values, stride, rows, columns, to);
}

template <int bits>
void unpack_columns(const ConstGroupedRows& from, std::size_t rows, std::size_t columns, float* values,
                    std::size_t stride) {
  for (std::size_t j = 0; j < columns; j += kUnit) {
    const Vec scale = Vec::load_f16(from.scales + j), minimum = Vec::load_f16(from.minimums + j);
    const std::uint8_t* codes = from.codes + j / kUnit * 2 * bits;
    for (std::size_t r = 0; r < rows; ++r, codes += from.code_stride)
      (Vec::load_codes<bits>(codes) * scale + minimum).store(values + r * stride + j);
  }
}

template <int bits>
void encode_rows(const float* values, std::size_t stride, std::size_t rows, std::size_t columns,
                 const GroupedRows& to) {
  const std::size_t groups = groups_of(columns);
  for (std::size_t r = 0; r < rows; ++r) {
    const float* row = values + r * stride;
    std::uint8_t* codes = to.codes + r * to.code_stride;
    for (std::size_t g = 0; g < groups; ++g) {
      const std::size_t begin = g * kGroup, end = begin + kGroup < columns ? begin + kGroup : columns;
      const Vec scale = Vec::set(half_to_float(to.scales[r * groups + g]));
      const Vec minimum = Vec::set(half_to_float(to.minimums[r * groups + g]));
      for (std::size_t j = begin; j < end; j += kUnit)
        store_unit<bits>(codes_of<bits>(Vec::load_f32(row + j), scale, minimum),
                         codes + j / kUnit * 2 * bits);
    }
  }
}

template <int bits>
void pack_rows(const float* values, std::size_t stride, std::size_t rows, std::size_t columns,
               const GroupedRows& to) {
  const std::size_t groups = groups_of(columns);
  for (std::size_t r = 0; r < rows; ++r) {
    const float* row = values + r * stride;
    for (std::size_t g = 0; g < groups; ++g) {
      const std::size_t begin = g * kGroup, end = begin + kGroup < columns ? begin + kGroup : columns;
      Vec smallest = Vec::load_f32(row + begin), largest = smallest;
      for (std::size_t j = begin + kUnit; j < end; j += kUnit) {
        const Vec x = Vec::load_f32(row + j);
        smallest = min(smallest, x);
        largest = max(largest, x);
      }
      float low[kUnit], high[kUnit];
      smallest.store(low);
      largest.store(high);
      for (std::size_t i = 1; i < kUnit; ++i) {
        low[0] = low[i] < low[0] ? low[i] : low[0];
        high[0] = high[i] > high[0] ? high[i] : high[0];
      }
      to.scales[r * groups + g] = scale_of(low[0], high[0], (1 << bits) - 1);
      to.minimums[r * groups + g] = half_minimum(low[0]);
    }
  }
  encode_rows<bits>(values, stride, rows, columns, to);
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
      for (std::size_t j = begin; j < end; j += kUnit)
        (Vec::load_codes<bits>(codes + j / kUnit * 2 * bits) * scale + minimum)
            .store(values + r * stride + j);
    }
  }
}

// f(an integral constant): the width as a type.
template <typename F>
inline void with_bits(int bits, const F& f) {
  bits == 4 ? f(std::integral_constant<int, 4>{}) : f(std::integral_constant<int, 8>{});
}

const GroupKernels kLoops = {
    [](const float* values, std::size_t stride, std::size_t rows, std::size_t columns, int bits,
       const GroupedRows& to) {
      with_bits(bits, [&](auto width) { pack_columns<width>(values, stride, rows, columns, to); });
    },
    [](const ConstGroupedRows& from, std::size_t rows, std::size_t columns, int bits, float* values,
       std::size_t stride) {
      with_bits(bits, [&](auto width) { unpack_columns<width>(from, rows, columns, values, stride); });
    },
    [](const float* values, std::size_t stride, std::size_t rows, std::size_t columns, int bits,
       const GroupedRows& to) {
      with_bits(bits, [&](auto width) { pack_rows<width>(values, stride, rows, columns, to); });
    },
    [](const ConstGroupedRows& from, std::size_t rows, std::size_t columns, int bits, float* values,
       std::size_t stride) {
      with_bits(bits, [&](auto width) { unpack_rows<width>(from, rows, columns, values, stride); });
    },
};
